"""A site: from the step to alpha, weight, lambda and phase."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from crossfade import Adaptive, Bernoulli, DeepFeatureGuidance, Deterministic, Gumbel, Swap, schedules
from crossfade.blend import Blend, Route
from crossfade.errors import PlanError, StateError
from crossfade.gates import uniform
from crossfade.ledger import Ledger, Term
from crossfade.site import Site


def site(gate=None, guidance=None, index: int = 0, n: int = 2, path: str = "a") -> Site:
    blend = Blend(nn.Linear(2, 2), nn.Linear(2, 2), path=path, ledger=Ledger())
    swap = Swap(targets=path, gate=gate or Deterministic("linear"), guidance=guidance)
    return Site(path=path, paths=(path,), index=index, n=n, swap=swap, blend=blend)


def test_that_alpha_is_the_schedule_of_the_step():
    one = site()
    for step in range(12):
        one.seek(step, 10, 0)
        assert one.alpha == schedules.value_at(schedules.linear(), step, 10)
        assert one.weight == one.alpha
        assert one.blend.gate_alpha.item() == pytest.approx(one.alpha)


def test_that_seeking_is_a_function_of_the_step_alone():
    one, two = site(Bernoulli("linear")), site(Bernoulli("linear"))
    forward = []
    for step in range(20):
        one.seek(step, 20, 7)
        forward.append((one.alpha, one.weight, one.lam))
    for step in reversed(range(20)):
        two.seek(step, 20, 7)
        assert (two.alpha, two.weight, two.lam) == forward[step]
    assert {w for _, w, _ in forward} == {0.0, 1.0}


@pytest.mark.parametrize("gate", [Bernoulli("linear"), Gumbel("linear")], ids=["bernoulli", "gumbel"])
def test_that_the_draw_is_that_of_seed_path_and_step(gate):
    one = site(gate)
    for step in range(10):
        one.seek(step, 10, 3)
        assert one.weight == gate.weight(one.alpha, uniform(3, "a", step))


def test_that_a_shared_draw_is_the_same_at_every_site():
    gate = Bernoulli("linear", granularity="shared")
    sites = [site(gate, index=i, path=path) for i, path in enumerate("ab")]
    for step in range(20):
        for one in sites:
            one.seek(step, 20, 0)
        assert sites[0].weight == sites[1].weight


def test_the_phases():
    fade = schedules.piecewise((0.0, 1.0), (0.25, 1.0), (0.5, 0.0))
    one = site(Deterministic(fade), DeepFeatureGuidance(schedule=schedules.linear(until=0.75)))
    phases = []
    for step in range(9):
        one.seek(step, 8, 0)
        phases.append(one.phase)
    assert phases == ["align"] * 3 + ["blend"] + ["guide"] * 2 + ["student"] * 3


def test_that_lambda_switches_guidance_on_and_off():
    one = site(guidance=DeepFeatureGuidance(2.0, schedules.piecewise((0.0, 1.0), (0.5, 0.0))))
    one.seek(0, 10, 0)
    assert one.lam == 2.0
    assert one.blend.guided
    one.seek(6, 10, 0)
    assert one.lam == 0.0
    assert not one.blend.guided


@pytest.mark.parametrize("alpha", [schedules.linear(), schedules.in_steps("linear", 6)], ids=["progress", "steps"])
@pytest.mark.parametrize(
    "guidance",
    [
        None,
        DeepFeatureGuidance(),
        DeepFeatureGuidance(schedule="alpha"),
        DeepFeatureGuidance(schedule=schedules.piecewise((0.0, 1.0), (0.5, 0.0))),
    ],
    ids=["none", "kept", "alpha", "half"],
)
def test_that_over_means_never_needed_again(alpha, guidance):
    one = site(Deterministic(alpha), guidance)
    total = 10
    needed = []
    for step in range(total + 1):
        one.seek(step, total, 0)
        needed.append(one.alpha > 0.0 or one.lam > 0.0)
    for step in range(total + 1):
        one.seek(step, total, 0)
        assert one.over_at(step, total) is not any(needed[step:])


def test_that_a_schedule_which_comes_back_is_not_over():
    back = schedules.piecewise((0.0, 1.0), (0.2, 0.0), (0.6, 0.0), (0.8, 0.5), (0.9, 0.0))
    one = site(Deterministic(back))
    one.seek(4, 10, 0)
    assert one.alpha == 0.0
    assert not one.over_at(4, 10)
    one.seek(9, 10, 0)
    assert one.over_at(9, 10)


def test_that_an_alpha_which_leaves_its_range_late_names_site_and_step():
    def late(t: float) -> float:
        return 2.0 if 0.501 < t < 0.509 else 1.0

    one = site(Deterministic(late))
    with pytest.raises(PlanError, match="a, step 505"):
        one.seek(505, 1000, 0)


def test_that_an_adaptive_gate_has_a_controller_of_its_own():
    a, b = (site(Deterministic(Adaptive(low=0.0, high=1.0, smoothing=0.0)), path=p) for p in "ab")
    a.driver.observe(0.5)
    for one in (a, b):
        one.seek(1, 10, 0)
    assert a.adaptive
    assert (a.alpha, b.alpha) == (0.5, 1.0)
    a.driver.observe(1.0)
    a.seek(2, 10, 0)
    assert a.alpha == 0.0
    assert a.over_at(2, 10)


def test_that_drive_takes_a_new_swap_and_keeps_the_modules():
    one = site(guidance=DeepFeatureGuidance(detach_input=True, mask=False))
    teacher, student = one.blend.teacher, one.blend.student
    assert one.blend.detach_input
    assert not one.blend.use_mask
    one.drive(Swap(targets="a", gate=Deterministic(0.5), teacher_gradient=False))
    assert one.blend.guidance_error is None
    assert not one.blend.detach_input
    assert one.blend.use_mask
    assert not one.blend.teacher_gradient
    one.seek(0, 10, 0)
    assert one.alpha == 0.5
    assert (one.blend.teacher, one.blend.student) == (teacher, student)


def test_that_a_hard_gate_selects():
    one = site(Bernoulli("linear"))
    one.seek(5, 10, 0)
    assert one.blend.train_route is Route.SELECT
    skipping = site(Bernoulli("linear", "skip"))
    skipping.seek(5, 10, 0)
    assert skipping.blend.train_route in (Route.TEACHER, Route.STUDENT)


def term(error: float, positions: float, power: float | None = None) -> Term:
    values = [None if v is None else torch.tensor(v) for v in (error, positions, power)]
    return Term(*values)


def test_that_guidance_is_lambda_times_the_mean_over_calls():
    one = site(guidance=DeepFeatureGuidance(3.0, reduction="mean"))
    one.seek(0, 10, 0)
    value = one.guidance_value([term(6.0, 3.0), term(2.0, 2.0)], None)
    assert value.item() == pytest.approx(3.0 * (2.0 + 1.0) / 2)
    by_items = one.guidance_value([term(6.0, 3.0)], torch.tensor(12.0))
    assert by_items.item() == pytest.approx(3.0 * 0.5)


def test_that_the_running_power_is_used_until_it_is_fixed():
    one = site(guidance=DeepFeatureGuidance(1.0))
    one.seek(0, 10, 0)
    assert one.blend.calibrating
    value = one.guidance_value([term(6.0, 3.0, 12.0), term(2.0, 1.0, 4.0)], None)
    assert value.item() == pytest.approx((2.0 + 2.0) / 2 / 4.0)
    one.power.observe(10.0, 1.0)
    one.power.fixed = True
    one.apply()
    assert not one.blend.calibrating
    assert one.guidance_value([term(6.0, 3.0)], None).item() == pytest.approx(0.2)


def test_that_a_site_without_guidance_has_no_value():
    with pytest.raises(StateError, match="a"):
        site().guidance_value([term(1.0, 1.0)], None)
