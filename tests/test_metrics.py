"""Metrics against plain loops in float64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from crossfade import metrics
from crossfade.errors import PlanError

SHAPES = [(3,), (1, 1), (5, 7), (2, 3, 5), (2, 3, 4, 3), (4, 1, 9)]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
masked = pytest.mark.parametrize("with_mask", [False, True])


def rows(x: Tensor, mask: Tensor | None) -> list[list[float]]:
    """The vectors at valid positions, as lists of Python floats."""
    if mask is None:
        return x.double().reshape(-1, x.shape[-1]).tolist()
    keep = mask.reshape(*mask.shape, *(1,) * (x.dim() - 1 - mask.dim())).expand(x.shape[:-1])
    return x.double()[keep].tolist()


def pair(shape: tuple[int, ...], dtype: torch.dtype, with_mask: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    s, t = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    mask = (torch.rand(shape[:-1]) < 0.6) if with_mask and len(shape) > 1 else None
    return s, t, mask


def dot(a: list[float], b: list[float]) -> float:
    return math.fsum(x * y for x, y in zip(a, b, strict=True))


def naive_cosine(s: list[list[float]], t: list[list[float]]) -> float:
    return math.fsum(dot(a, b) / math.sqrt(dot(a, a) * dot(b, b)) for a, b in zip(s, t, strict=True)) / max(1, len(s))


@shapes
@dtypes
@masked
def test_the_sums(shape, dtype, with_mask):
    s, t, mask = pair(shape, dtype, with_mask)
    a, b = rows(s, mask), rows(t, mask)
    error = math.fsum((x - y) ** 2 for u, v in zip(a, b, strict=True) for x, y in zip(u, v, strict=True))
    power = math.fsum(x * x for u in b for x in u)
    assert metrics.squared_error_sum(s, t, mask).item() == pytest.approx(error, rel=1e-5)
    assert metrics.power_sum(t, mask).item() == pytest.approx(power, rel=1e-5)
    assert metrics.count(t, mask).item() == len(a)
    assert metrics.count(t, mask).dtype == torch.float32
    if power > 0:
        assert metrics.relative_error(s, t, mask).item() == pytest.approx(error / power, rel=1e-5)
        assert metrics.cosine(s, t, mask).item() == pytest.approx(naive_cosine(a, b), abs=1e-5)


@dtypes
def test_that_half_precision_is_summed_in_float32(dtype):
    x = torch.full((64, 64), 300.0).to(dtype)
    power = metrics.power_sum(x)
    assert power.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert power.item() == pytest.approx(300.0**2 * 4096, rel=1e-2)


@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (2, 3, 2, 2, 3)], ids=str)
def test_that_a_mask_over_leading_dimensions_counts_all_beneath(shape):
    s, t = torch.randn(shape), torch.randn(shape)
    mask = torch.tensor([[True, False, True], [False, False, True]])
    full = mask.reshape(2, 3, *(1,) * (len(shape) - 3)).expand(shape[:-1])
    for metric in (metrics.squared_error_sum, metrics.cosine_sum, metrics.cosine, metrics.relative_error, metrics.cka):
        assert metric(s, t, mask).item() == pytest.approx(metric(s, t, full).item(), rel=1e-5), metric.__name__
    assert metrics.count(t, mask).item() == full.sum().item()


@masked
def test_that_padding_may_hold_anything(with_mask):
    s, t, mask = pair((3, 5, 4), torch.float32, True)
    dirty_s = torch.where(mask[..., None], s, torch.nan)
    dirty_t = torch.where(mask[..., None], t, torch.inf)
    for metric in (metrics.squared_error_sum, metrics.cosine_sum, metrics.cosine, metrics.relative_error, metrics.cka):
        assert torch.equal(metric(dirty_s, dirty_t, mask), metric(s * 1.0, t * 1.0, mask)), metric.__name__


def test_that_the_gradient_at_padding_is_zero_even_behind_nan():
    s = torch.tensor([[[1.0, 2.0], [math.nan, 1.0]]], requires_grad=True)
    t, mask = torch.ones(1, 2, 2), torch.tensor([[True, False]])
    for metric in (metrics.squared_error_sum, metrics.cosine_sum):
        (gradient,) = torch.autograd.grad(metric(s, t, mask), s)
        assert torch.equal(gradient[0, 1], torch.zeros(2)), metric.__name__
        assert bool(torch.isfinite(gradient).all())


def test_that_a_zero_student_has_a_finite_gradient():
    s, t = torch.zeros(1, 3, 4, requires_grad=True), torch.randn(1, 3, 4)
    (gradient,) = torch.autograd.grad(metrics.cosine_sum(s, t), s)
    assert bool(torch.isfinite(gradient).all())


def test_that_dead_positions_agree_and_half_dead_ones_do_not():
    zero, one = torch.zeros(1, 1, 3), torch.ones(1, 1, 3)
    assert metrics.cosine(zero, zero).item() == 1.0
    assert metrics.cosine(zero, one).item() == 0.0


def test_that_no_valid_position_gives_zero():
    s, t, mask = torch.randn(2, 3, 4), torch.randn(2, 3, 4), torch.zeros(2, 3, dtype=torch.bool)
    assert metrics.cosine(s, t, mask).item() == 0.0
    assert metrics.relative_error(s, t, mask).item() == 0.0
    assert metrics.count(t, mask).item() == 0.0


@pytest.mark.parametrize("scale", [1e-14, 1e-6, 1e6, 1e12])
def test_that_the_cosine_does_not_depend_on_the_scale(scale):
    s, t = torch.randn(4, 8), torch.randn(4, 8)
    assert metrics.cosine(s * scale, t * scale).item() == pytest.approx(metrics.cosine(s, t).item(), abs=1e-4)


def test_the_ends_of_the_relative_error():
    t = torch.randn(3, 4)
    assert metrics.relative_error(t, t).item() == 0.0
    assert metrics.relative_error(torch.zeros_like(t), t).item() == pytest.approx(1.0)
    assert metrics.relative_error(2 * t, t).item() == pytest.approx(1.0)


# ---- CKA -------------------------------------------------------------------------------------------------------------


def naive_cka(s: Tensor, t: Tensor) -> float:
    """By the Gram matrices, as in the paper's Eq. 4."""
    n = s.shape[0]
    h = torch.eye(n, dtype=torch.float64) - 1.0 / n
    k, m = h @ (s.double() @ s.double().T) @ h, h @ (t.double() @ t.double().T) @ h
    return float((k * m).sum() / (k.norm() * m.norm()))


@pytest.mark.parametrize(("n", "d1", "d2"), [(7, 3, 5), (12, 4, 4), (5, 9, 2)])
@masked
def test_cka_is_the_papers(n, d1, d2, with_mask):
    s, t = torch.randn(1, n, d1), torch.randn(1, n, d2)
    mask = torch.arange(n)[None] < n - 2 if with_mask else None
    a, b = (s[0], t[0]) if mask is None else (s[mask], t[mask])
    assert metrics.cka(s, t, mask).item() == pytest.approx(naive_cka(a, b), abs=1e-4)


def test_what_cka_does_not_see():
    s = torch.randn(30, 5, dtype=torch.float64)
    q, _ = torch.linalg.qr(torch.randn(5, 5, dtype=torch.float64))
    for other in (s, 3.0 * s, s @ q, s + 7.0):
        assert metrics.cka(other, s).item() == pytest.approx(1.0, abs=1e-6)
    assert metrics.cka(torch.ones(30, 5), s.float()).item() == 0.0


# ---- variance of gates -----------------------------------------------------------------------------------------------


@given(st.floats(0.0, 1.0))
def test_bernoulli_variance_is_that_of_one_gate(p):
    a = torch.tensor([[1.0, -2.0], [0.5, 3.0]], dtype=torch.float64)
    exact = metrics.gate_gradient_variance(lambda w: a.flatten() * w[0], [p])
    assert metrics.bernoulli_variance(p, a).item() == pytest.approx(exact.item(), rel=1e-9, abs=1e-12)


@given(st.floats(0.0, 1.0), st.floats(0.1, 5.0))
def test_that_the_curvature_bound_is_met_by_a_quadratic(p, curvature):
    t, s = torch.tensor([1.0, -1.0, 0.5]).double(), torch.tensor([0.0, 2.0, 0.5]).double()

    def psi(y: Tensor) -> Tensor:
        return 0.5 * curvature * y.square().sum()

    gap = (p * psi(t) + (1 - p) * psi(s)) - psi(p * t + (1 - p) * s)
    bound = metrics.curvature_bound(curvature, p, t - s)
    assert abs(gap.item()) == pytest.approx(bound.item(), abs=1e-9)


def _interacting(w: object) -> Tensor:
    a, b, c = w
    return torch.tensor([a + 2 * b * c, b - a * c, 3.0 * a * b])


def test_that_enumeration_is_exact_for_gates_that_interact():
    alphas = [0.2, 0.5, 0.9]
    outcomes = []
    for code in range(8):
        w = [float(code >> i & 1) for i in range(3)]
        p = math.prod(a if x else 1 - a for x, a in zip(w, alphas, strict=True))
        outcomes.append((p, _interacting(w).double()))
    mean = sum(p * g for p, g in outcomes)
    exact = sum(p * float((g - mean).square().sum()) for p, g in outcomes)
    assert metrics.gate_gradient_variance(_interacting, alphas).item() == pytest.approx(exact, rel=1e-9)
    sampled = metrics.gate_gradient_variance(_interacting, alphas, draws=4000, seed=3).item()
    assert sampled == pytest.approx(exact, rel=0.1)


def test_that_certain_gates_have_no_variance():
    assert metrics.gate_gradient_variance(_interacting, [1.0, 0.0, 1.0]).item() == 0.0
    assert metrics.gate_gradient_variance(_interacting, [1.0, 0.0, 1.0], draws=5).item() == 0.0


def test_that_sampling_repeats_and_leaves_the_global_state():
    torch_state = torch.get_rng_state()
    one, two, three = (
        metrics.gate_gradient_variance(_interacting, [0.5] * 3, draws=9, seed=seed).item() for seed in (1, 1, 2)
    )
    assert one == two != three
    assert torch.equal(torch_state, torch.get_rng_state())


def test_that_too_much_or_too_little_is_refused():
    with pytest.raises(PlanError, match="draws="):
        metrics.gate_gradient_variance(lambda w: torch.ones(1), [0.5] * 13)
    with pytest.raises(PlanError, match="2"):
        metrics.gate_gradient_variance(_interacting, [0.5] * 3, draws=1)
