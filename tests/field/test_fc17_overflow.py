"""FC-17: the L2 term overflowed or drowned the task loss.

Block outputs reach 1e5 in some pretrained models; squared in half precision they are infinite, and one alignment
started at 1e13 and looked hopeless. crossfade computes guidance in float32 or wider, is relative to the teacher's
power unless told otherwise (a student of zeros costs 1), and reports every site by itself, so that one loud site
cannot hide the others.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import crossfade

from .models import Holder

HALF = [torch.float16, torch.bfloat16]


class Constant(nn.Module):
    """Gives one vector for every position, through a parameter."""

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.value = nn.Parameter(value)

    def forward(self, x: Tensor) -> Tensor:
        return x * 0 + self.value


class Pair(nn.Module):
    def __init__(self, values: list[Tensor]) -> None:
        super().__init__()
        self.sites = nn.ModuleList(Constant(v) for v in values)

    def forward(self, x: Tensor) -> Tensor:
        for site in self.sites:
            x = x + site(x) * 0
        return x


def faded(model: nn.Module, targets: str, dtype: torch.dtype, **guidance: Any) -> crossfade.Fade:
    plan = crossfade.Plan(
        targets=targets,
        student=lambda teacher, site: Constant(torch.zeros_like(teacher.value)),
        gate=crossfade.Deterministic(1.0),
        guidance=crossfade.DeepFeatureGuidance(**guidance),
    )
    return crossfade.install(model.to(dtype), plan, total_steps=10)


@pytest.mark.parametrize("dtype", [*HALF, torch.float32, torch.float64])
@pytest.mark.parametrize(("reduction", "expected"), [("mean", 90000.0), ("relative", 1.0), ("sum", 90000.0 * 8 * 6)])
def test_a_teacher_at_300_gives_the_value_of_float32(reduction: str, expected: float, dtype: torch.dtype) -> None:
    model = Holder(Constant(torch.full((8,), 300.0)))
    fade = faded(model, "fc", dtype, reduction=reduction)
    model(torch.zeros(2, 3, 8, dtype=dtype))
    loss = fade.guidance()
    assert loss.dtype in {torch.float32, torch.float64}
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-3)
    loss.backward()
    assert bool(model.fc.student.value.grad.isfinite().all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_teacher_at_1e5_costs_1_and_has_a_finite_gradient(dtype: torch.dtype) -> None:
    model = Holder(Constant(torch.full((8,), 1e5)))
    fade = faded(model, "fc", dtype)
    model(torch.zeros(2, 3, 8, dtype=dtype))
    loss = fade.guidance()
    assert float(loss.detach()) == pytest.approx(1.0, rel=1e-3)
    loss.backward()
    gradient = model.fc.student.value.grad
    assert bool(gradient.isfinite().all())
    assert float(gradient.abs().sum()) > 0.0


@pytest.mark.parametrize("dtype", HALF)
def test_a_sum_over_many_positions_does_not_overflow(dtype: torch.dtype) -> None:
    model = Holder(Constant(torch.full((64,), 200.0)))
    fade = faded(model, "fc", dtype, reduction="sum")
    model(torch.zeros(8, 64, 64, dtype=dtype))
    assert float(fade.guidance().detach()) == pytest.approx(8 * 64 * 64 * 200.0**2, rel=1e-3)


def test_the_default_is_relative_and_does_not_grow_with_batch_or_length() -> None:
    assert crossfade.DeepFeatureGuidance().reduction == "relative"
    found = []
    for shape in ((1, 2, 8), (16, 64, 8)):
        model = Holder(Constant(torch.full((8,), 1e3)))
        fade = faded(model, "fc", torch.float32)
        model(torch.zeros(*shape))
        found.append(float(fade.guidance().detach()))
    assert found == pytest.approx([1.0, 1.0])


def test_a_loud_site_does_not_hide_a_quiet_one() -> None:
    model = Pair([torch.full((8,), 1e5), torch.full((8,), 1e-2)])
    fade = faded(model, "sites.*", torch.float32)
    model(torch.zeros(2, 3, 8))
    assert float(fade.guidance().detach()) == pytest.approx(2.0)  # One each, whatever their scale.
    log = fade.log()
    assert [log["guidance/sites.0"], log["guidance/sites.1"]] == pytest.approx([1.0, 1.0])


def test_one_outlier_channel_can_be_taken_out_of_the_way() -> None:
    # Relative to the power of all channels the rest is nothing; the cosine of the rest tells, and the mean is per site.
    value = torch.full((8,), 1.0)
    value[3] = 1e5
    model = Pair([value, torch.full((8,), 1.0)])
    fade = faded(model, "sites.*", torch.float32, reduction="mean")
    model(torch.zeros(2, 3, 8))
    fade.guidance()
    log = fade.log()
    assert log["guidance/sites.0"] == pytest.approx(1e10 / 8, rel=1e-3)
    assert log["guidance/sites.1"] == pytest.approx(1.0)


@pytest.mark.parametrize("reduction", ["relative", "mean", "sum", "cosine"])
def test_a_dead_teacher_gives_no_nan(reduction: str) -> None:
    model = Holder(Constant(torch.zeros(8)))
    fade = faded(model, "fc", torch.float32, reduction=reduction)
    model(torch.zeros(2, 3, 8))
    loss = fade.guidance()
    loss.backward()
    assert float(loss.detach()) == pytest.approx(0.0, abs=1e-6)
    assert bool(model.fc.student.value.grad.isfinite().all())


@pytest.mark.parametrize("dtype", HALF)
def test_under_autocast_guidance_is_computed_wide(dtype: torch.dtype) -> None:
    model = Holder(nn.Linear(8, 8))
    nn.init.constant_(model.fc.weight, 40.0)
    plan = crossfade.Plan(
        targets="fc",
        student=lambda teacher, site: nn.Linear(8, 8),
        gate=crossfade.Deterministic(1.0),
        guidance=crossfade.DeepFeatureGuidance(reduction="mean"),
    )
    fade = crossfade.install(model, plan, total_steps=10)
    with torch.autocast("cpu", dtype):
        model(torch.ones(2, 3, 8))
        loss = fade.guidance()
    assert loss.dtype == torch.float32
    assert float(loss.detach()) == pytest.approx(320.0**2, rel=0.05)


def test_alignment_of_a_loud_teacher_starts_near_1() -> None:
    model = Holder(nn.Linear(8, 8))
    nn.init.normal_(model.fc.weight, std=1e4)
    plan = crossfade.Plan(targets="fc", student=lambda t, s: nn.Linear(8, 8), gate=crossfade.Deterministic(1.0))
    report = crossfade.install(model, plan, total_steps=10).align([torch.randn(64, 8)], steps=2)
    assert report.sites[0].error_before == pytest.approx(1.0, rel=0.7)
