"""Guidance against naive references in float64, values and gradients."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from crossfade import schedules
from crossfade.errors import PlanError
from crossfade.guidance import DeepFeatureGuidance, Power, lambda_at
from crossfade.ledger import Term
from crossfade.metrics import count

REDUCTIONS = ("relative", "mean", "sum", "cosine")
SHAPES = [(1, 1, 1), (2, 3, 5), (3, 4, 2, 3), (4, 7)]


def naive(s: Tensor, t: Tensor, mask: Tensor | None, reduction: str, power: float) -> Tensor:
    """Written from the docstring, position by position, in float64."""
    s, t = s.double(), t.double().detach()
    keep = torch.ones(s.shape[:-1], dtype=torch.bool)
    if mask is not None:
        keep = mask.reshape(*mask.shape, *(1,) * (s.dim() - 1 - mask.dim())).expand(s.shape[:-1])
    rows_s, rows_t = s[keep], t[keep]
    if reduction == "sum":
        return ((rows_s - rows_t) ** 2).sum()
    if reduction == "cosine":
        return (1.0 - (rows_s * rows_t).sum(-1) / (rows_s.norm(dim=-1) * rows_t.norm(dim=-1))).mean()
    value = ((rows_s - rows_t) ** 2).mean(-1).mean()
    return value / power if reduction == "relative" else value


def ours(s: Tensor, t: Tensor, mask: Tensor | None, reduction: str, power: float) -> Tensor:
    loss = DeepFeatureGuidance(reduction=reduction)
    term = Term(loss.error(s, t, mask), count(t, mask))
    return loss.reduce(term, term.positions, power if loss.needs_power else None)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("with_mask", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_that_value_and_gradient_are_the_formulas(reduction, shape, with_mask, dtype):
    s = torch.randn(shape).to(dtype).requires_grad_()
    t = torch.randn(shape).to(dtype)
    mask = None
    if with_mask:
        mask = torch.rand(shape[: min(2, len(shape) - 1)]) < 0.7
        mask.view(-1)[0] = True
    value = ours(s, t, mask, reduction, 0.37)
    assert value.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert value.dim() == 0
    reference = naive(s, t, mask, reduction, 0.37)
    assert value.item() == pytest.approx(reference.item(), rel=1e-4, abs=1e-5)
    (mine,) = torch.autograd.grad(value, s)
    (theirs,) = torch.autograd.grad(reference, s)
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-4
    torch.testing.assert_close(mine.double(), theirs.double(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_that_padding_adds_neither_value_nor_gradient(reduction):
    s, t = torch.randn(2, 4, 3), torch.randn(2, 4, 3)
    mask = torch.tensor([[True, True, False, False], [True, False, False, False]])
    clean = ours(s, t, mask, reduction, 1.0)
    dirty = torch.where(mask[..., None], s, torch.nan).requires_grad_()
    value = ours(dirty, torch.where(mask[..., None], t, torch.inf), mask, reduction, 1.0)
    assert torch.equal(value, clean)
    (gradient,) = torch.autograd.grad(value, dirty)
    assert torch.equal(gradient[~mask], torch.zeros_like(gradient[~mask]))
    assert bool(torch.isfinite(gradient).all())


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_that_a_batch_of_padding_alone_is_zero(reduction):
    s, t = torch.randn(2, 4, 3, requires_grad=True), torch.randn(2, 4, 3)
    value = ours(s, t, torch.zeros(2, 4, dtype=torch.bool), reduction, 1.0)
    assert value.item() == 0.0
    (gradient,) = torch.autograd.grad(value, s)
    assert torch.equal(gradient, torch.zeros_like(s))


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_the_zero_of_each_reduction(reduction):
    t = torch.randn(2, 3, 4)
    assert ours(t.clone(), t, None, reduction, 1.0).item() == pytest.approx(0.0, abs=1e-5)


def test_that_relative_is_one_for_a_student_of_zeros():
    t = torch.randn(2, 3, 4) * 5
    power = Power()
    power.observe(float(t.square().sum()) / 4, 6)
    assert ours(torch.zeros_like(t), t, None, "relative", power.value).item() == pytest.approx(1.0, rel=1e-5)


@pytest.mark.parametrize("reduction", ["relative", "mean", "cosine"])
def test_that_micro_batches_add_up_when_divided_by_the_whole(reduction):
    s, t = torch.randn(6, 5, 3), torch.randn(6, 5, 3)
    mask = torch.arange(5)[None] < torch.tensor([5, 1, 2, 5, 3, 4])[:, None]
    loss = DeepFeatureGuidance(reduction=reduction)
    power = 0.5 if loss.needs_power else None
    items = mask.sum().float()
    parts = []
    for rows in (slice(0, 1), slice(1, 3), slice(3, 6)):
        term = Term(loss.error(s[rows], t[rows], mask[rows]), count(t[rows], mask[rows]))
        parts.append(loss.reduce(term, items, power))
    assert sum(parts).item() == pytest.approx(ours(s, t, mask, reduction, 0.5).item(), rel=1e-5)


# ---- power -----------------------------------------------------------------------------------------------------------


def test_that_the_power_is_the_mean_square_and_then_fixed():
    power = Power()
    power.observe(6.0, 2.0)
    power.observe(2.0, 2.0)
    assert power.value == 2.0
    power.fixed = True
    power.observe(100.0, 1.0)
    assert power.value == 2.0


def test_that_a_dead_teacher_has_a_tiny_power():
    assert 0.0 < Power().value < 1e-30
    dead = Power()
    dead.observe(0.0, 10.0)
    assert 0.0 < dead.value < 1e-30
    assert math.isfinite(1.0 / dead.value)


# ---- lambda ----------------------------------------------------------------------------------------------------------


def lam(
    guidance: DeepFeatureGuidance, step: int, *, site: str = "a", alpha: float = 0.5, total: int | None = 10
) -> float:
    return lambda_at(guidance, site, 1, 3, alpha=alpha, step=step, total=total)


def test_the_shapes_of_lambda():
    assert lam(DeepFeatureGuidance(2.0), 9) == 2.0
    assert lam(DeepFeatureGuidance(2.0, "alpha"), 3) == 1.0
    assert lam(DeepFeatureGuidance(2.0, "linear"), 5) == 1.0
    assert lam(DeepFeatureGuidance(2.0, schedules.PerSite([0.0, 0.25, 1.0])), 5) == 0.5
    assert lam(DeepFeatureGuidance(2.0, site_weights={"a": 0.25}), 5) == 0.5
    assert lam(DeepFeatureGuidance(2.0, site_weights={"a": 0.25}), 5, site="b") == 2.0
    assert lam(DeepFeatureGuidance(2.0, schedules.in_steps("linear", 4)), 1, total=None) == 1.5


def test_that_guidance_is_over_when_the_run_is():
    for schedule in (1.0, "alpha", schedules.constant(1.0), schedules.in_steps(1.0, 100)):
        assert lam(DeepFeatureGuidance(2.0, schedule), 10) == 0.0
        assert lam(DeepFeatureGuidance(2.0, schedule), 11) == 0.0
    assert lam(DeepFeatureGuidance(2.0, schedules.in_steps(1.0, 4)), 10, total=None) == 2.0


# ---- refused ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda: DeepFeatureGuidance(-1.0),
        lambda: DeepFeatureGuidance(math.nan),
        lambda: DeepFeatureGuidance(math.inf),
        lambda: DeepFeatureGuidance("1"),
        lambda: DeepFeatureGuidance(True),
        lambda: DeepFeatureGuidance(reduction="max"),
        lambda: DeepFeatureGuidance(schedule=-1.0),
        lambda: DeepFeatureGuidance(schedule=schedules.linear(1.0, -0.5)),
        lambda: DeepFeatureGuidance(schedule="beta"),
        lambda: DeepFeatureGuidance(site_weights={"a": -1.0}),
        lambda: DeepFeatureGuidance(site_weights={"a": "x"}),
        lambda: DeepFeatureGuidance(schedule=schedules.in_steps(schedules.linear(1.0, -1.0), 1000)),
        lambda: DeepFeatureGuidance(schedule=schedules.staggered(schedules.linear(1.0, -1.0))),
        lambda: DeepFeatureGuidance(-1.0, site_weights={"weight": 1.0}),
    ],
    ids=[
        "negative",
        "nan",
        "inf",
        "text",
        "bool",
        "reduction",
        "schedule",
        "line below 0",
        "name",
        "site negative",
        "site text",
        "late in steps",
        "resolver below 0",
        "negative behind a site called weight",
    ],
)
def test_that_nonsense_is_a_plan_error(make):
    with pytest.raises(PlanError):
        make()


def test_that_guidance_is_a_value():
    assert DeepFeatureGuidance(schedule="linear") == DeepFeatureGuidance(schedule=schedules.linear())
    assert DeepFeatureGuidance().needs_power
    assert not DeepFeatureGuidance(reduction="mean").needs_power
