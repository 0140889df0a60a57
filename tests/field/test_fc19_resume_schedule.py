"""FC-19: after a resume the schedule was rescaled, or began again.

The step was restored but the total was recomputed from the new configuration, so the curve jumped and ran backwards;
or the schedule restarted because its state was not saved. In crossfade the saved length wins, with a warning;
stretching to the new one needs `rescale=True`. Steps beyond the end stay at the end.
"""

from __future__ import annotations

import itertools
import json
import warnings
from typing import Any

import pytest
import torch

import crossfade
from crossfade.errors import CrossfadeWarning

from .models import Net, data, net, plan

SCHEDULES = {
    "linear": "linear",
    "cosine": "cosine",
    "aggr20": "aggr20",
    "hold": crossfade.schedules.hold(1.0, 0.3, "linear"),
    "staggered": crossfade.schedules.staggered("linear", overlap=0.3),
}


def faded(total: int | None, alpha: Any, **more: Any) -> tuple[Net, crossfade.Fade]:
    model = net()
    settings = {"gate": crossfade.Deterministic(alpha)} | more
    return model, crossfade.install(model, plan(**settings), total_steps=total, release="finalize")


def alphas(fade: crossfade.Fade, steps: range) -> list[tuple[float, ...]]:
    seen = []
    for _ in steps:
        seen.append(tuple(site.alpha for site in fade.sites))
        fade.step()
    return seen


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_saved_length_wins_with_a_warning_and_the_curve_goes_on(name: str) -> None:
    _, unbroken = faded(100, SCHEDULES[name])
    curve = alphas(unbroken, range(120))
    _, first = faded(100, SCHEDULES[name])
    alphas(first, range(40))
    saved = json.loads(json.dumps(first.state_dict()))  # Plain data: any file format will do.
    _, second = faded(200, SCHEDULES[name])
    with pytest.warns(CrossfadeWarning, match=r"(?s)total_steps=100.*200.*rescale=True"):
        second.load_state_dict(saved)
    assert second.total_steps == 100
    assert curve[:40] + alphas(second, range(80)) == curve
    assert all(a >= b for now, later in itertools.pairwise(curve) for a, b in zip(now, later, strict=True))
    assert curve[100:] == [(0.0, 0.0)] * 20


def test_rescaling_has_to_be_asked_for() -> None:
    _, first = faded(100, "linear")
    alphas(first, range(40))
    _, second = faded(200, "linear")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second.load_state_dict(first.state_dict(), rescale=True)
    assert (second.step_count, second.total_steps) == (40, 200)
    assert second.sites[0].alpha == pytest.approx(0.8)


def test_the_same_length_resumes_without_a_word() -> None:
    _, first = faded(100, "linear")
    alphas(first, range(40))
    _, second = faded(100, "linear")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second.load_state_dict(first.state_dict())
    for step, row in zip((40, 41), alphas(second, range(2)), strict=True):
        assert row == pytest.approx((1 - step / 100,) * 2)


@pytest.mark.parametrize("step", [100, 101, 10_000])
def test_steps_beyond_the_end_are_clamped_across_a_resume(step: int) -> None:
    _, first = faded(100, "linear")
    first.seek(step)
    _, second = faded(100, "linear")
    second.load_state_dict(first.state_dict())
    assert second.step_count == step
    assert second.progress == 1.0
    assert [site.alpha for site in second.sites] == [0.0, 0.0]
    assert [site.phase for site in second.sites] == ["student", "student"]


def test_an_unknown_length_resumes_by_its_own_count() -> None:
    schedule = crossfade.schedules.in_steps("linear", 50)
    _, first = faded(None, schedule)
    alphas(first, range(20))
    _, second = faded(None, schedule)
    second.load_state_dict(first.state_dict())
    assert second.sites[0].alpha == pytest.approx(0.6)


def test_an_adaptive_alpha_never_rises_across_a_resume() -> None:
    # Its memory is part of the state: without it the controller would begin at 1 again.
    gate = crossfade.Adaptive(low=-0.5, high=0.9, smoothing=0.5)

    def run(model: Net, fade: crossfade.Fade, steps: range) -> list[float]:
        optimizer = torch.optim.AdamW(fade.parameter_groups(), lr=1e-2)
        fade.attach(optimizer)
        seen = []
        for step in steps:
            seen.append(fade.sites[0].alpha)
            x, _ = data(step)
            (model(x).square().mean() + fade.guidance()).backward()
            optimizer.step()
            optimizer.zero_grad()
        return seen

    guidance = crossfade.DeepFeatureGuidance()
    model, fade = faded(40, gate, guidance=guidance)
    before = run(model, fade, range(10))
    twin, resumed = faded(40, gate, guidance=guidance)
    twin.load_state_dict({k: v.clone() for k, v in model.state_dict().items()})
    resumed.load_state_dict(json.loads(json.dumps(fade.state_dict())))
    after = run(twin, resumed, range(10, 20))
    assert resumed.sites[0].alpha <= after[0] <= before[-1] < 1.0
    assert all(a >= b for a, b in itertools.pairwise(before + after))


@pytest.mark.parametrize("gate", [crossfade.Bernoulli("linear"), crossfade.Gumbel("linear")])
def test_random_gates_go_on_where_they_stopped(gate: Any) -> None:
    def weights(fade: crossfade.Fade, steps: range) -> list[list[float]]:
        seen = []
        for _ in steps:
            seen.append([site.weight for site in fade.sites])
            fade.step()
        return seen

    _, unbroken = faded(100, "linear", gate=gate)
    whole = weights(unbroken, range(60))
    _, first = faded(100, "linear", gate=gate)
    weights(first, range(40))
    _, second = faded(100, "linear", gate=gate)
    second.load_state_dict(first.state_dict())
    assert weights(second, range(20)) == whole[40:]
