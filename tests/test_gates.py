"""Gates: from alpha and one number to the weight of the teacher; controllers."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossfade import schedules
from crossfade.errors import PlanError
from crossfade.gates import (
    Adaptive,
    Bernoulli,
    Controller,
    Deterministic,
    Gumbel,
    alpha_of_site,
    as_alpha,
    check_alpha,
    draw_key,
    uniform,
)

unit = st.floats(0.0, 1.0)
open_unit = st.floats(1e-12, 1.0 - 1e-12)


# ---- draws -----------------------------------------------------------------------------------------------------------


@given(st.integers(), st.text(max_size=20), st.integers(0, 10**9))
def test_that_a_draw_is_pure_and_strictly_inside(seed, site, step):
    draw = uniform(seed, site, step)
    assert 0.0 < draw < 1.0
    assert draw == uniform(seed, site, step)
    assert math.isfinite(math.log(draw) - math.log1p(-draw))


def test_that_draws_are_uniform_and_independent_of_each_other():
    n = 4000
    for other in ((0, "a", 1), (0, "b", 0), (1, "a", 0)):
        xs = [uniform(0, "a", k) for k in range(n)]
        ys = [uniform(other[0], other[1], k + other[2]) for k in range(n)]
        mean = sum(xs) / n
        assert abs(mean - 0.5) < 0.02
        assert abs(sum((x - mean) ** 2 for x in xs) / n - 1 / 12) < 0.005
        assert abs(sum((x - 0.5) * (y - 0.5) for x, y in zip(xs, ys, strict=True)) / n) < 0.005


def test_that_a_draw_is_the_same_on_every_machine():
    # Written down once: changing the generator would change every run that is resumed.
    draws = [round(uniform(3, "encoder.layer.1", k), 9) for k in range(3)]
    assert draws == [0.125753197, 0.367193069, 0.334464658]


def test_that_the_parts_of_the_key_cannot_run_into_each_other():
    assert uniform(1, "1", 1) != uniform(11, "", 1)
    assert uniform(1, "a1", 1) != uniform(1, "a", 11)


# ---- the gates -------------------------------------------------------------------------------------------------------


@given(unit, open_unit)
def test_that_deterministic_is_alpha(alpha, draw):
    assert Deterministic().weight(alpha, draw) == alpha


@given(unit, open_unit)
def test_that_bernoulli_is_zero_or_one_and_exact_at_the_ends(alpha, draw):
    gate = Bernoulli()
    assert gate.weight(alpha, draw) == float(draw < alpha)
    assert gate.weight(0.0, draw) == 0.0
    assert gate.weight(1.0, draw) == 1.0


@given(open_unit, open_unit, st.floats(0.05, 5.0))
def test_that_gumbel_is_the_sigmoid_of_the_formula(alpha, draw, temperature):
    weight = Gumbel(temperature=temperature).weight(alpha, draw)
    logit = math.log(alpha / (1.0 - alpha)) + math.log(draw / (1.0 - draw))
    naive = 0.5 * (1.0 + math.tanh(logit / temperature / 2.0))
    assert weight == pytest.approx(naive, abs=1e-7)
    assert 0.0 <= weight <= 1.0


@given(open_unit, st.sampled_from([1e-300, 1e-9, 1e9]), unit)
def test_that_gumbel_never_overflows(draw, temperature, alpha):
    gate = Gumbel(temperature=temperature)
    assert 0.0 <= gate.weight(alpha, draw) <= 1.0
    assert gate.weight(0.0, draw) == 0.0
    assert gate.weight(1.0, draw) == 1.0
    assert 0.0 <= gate.weight(5e-324, draw) <= 1.0


def test_that_alpha_is_the_probability_that_gumbel_favours_the_teacher():
    n, gumbel, bernoulli = 4000, Gumbel(temperature=0.5), Bernoulli()
    for alpha in (0.1, 0.3, 0.7):
        weights = [gumbel.weight(alpha, uniform(0, "x", k)) for k in range(n)]
        assert sum(w > 0.5 for w in weights) / n == pytest.approx(alpha, abs=0.03)
        hard = [bernoulli.weight(alpha, uniform(1, "x", k)) for k in range(n)]
        assert sum(hard) / n == pytest.approx(alpha, abs=0.03)


def test_the_mean_of_gumbel_that_its_docstring_names():
    n, gate = 20000, Gumbel()
    mean = sum(gate.weight(0.3, (k + 0.5) / n) for k in range(n)) / n
    assert mean == pytest.approx(0.362, abs=0.001)


def test_hard_and_execution():
    assert (Deterministic().hard, Bernoulli().hard, Gumbel().hard) == (False, True, False)
    assert (Deterministic().execution, Bernoulli().execution, Gumbel().execution) == ("both",) * 3
    assert Bernoulli(execution="skip").execution == "skip"


def test_draw_key():
    assert draw_key(Bernoulli(), "a") == "a"
    assert draw_key(Bernoulli(granularity="shared"), "a") == ""
    assert draw_key(Gumbel(granularity="shared"), "a") == ""
    assert draw_key(Deterministic(), "a") == "a"


def test_that_gates_are_values():
    assert Deterministic("linear") == Deterministic(schedules.linear())
    assert hash(Bernoulli("aggr20")) == hash(Bernoulli())
    assert Bernoulli("aggr20") != Bernoulli("aggr20", "skip")


# ---- alpha -----------------------------------------------------------------------------------------------------------


def test_as_alpha_takes_names_numbers_functions_resolvers_and_adaptive():
    assert as_alpha("linear") == schedules.linear()
    assert as_alpha(0.5)(0.3) == 0.5
    resolver = schedules.staggered()
    assert as_alpha(resolver) is resolver
    settings = Adaptive()
    assert as_alpha(settings) is settings


@pytest.mark.parametrize(
    "alpha",
    [
        1.5,
        -0.1,
        schedules.linear(2.0, 0.0),
        lambda t: t - 0.5,
        schedules.PerSite(lambda site, index, n: 2.0),
        schedules.staggered(schedules.linear(1.2, 0.0)),
        None,
        True,
        math.nan,
        lambda t: math.nan,
        schedules.join((0.5, schedules.in_steps("linear", 3)), (1.0, 0.0)),
    ],
)
@pytest.mark.parametrize("gate", [Deterministic, Bernoulli, Gumbel])
def test_that_an_alpha_outside_the_range_is_refused_by_every_gate(gate, alpha):
    with pytest.raises(PlanError):
        gate(alpha)


def test_that_a_schedule_in_steps_is_checked_to_its_end():
    with pytest.raises(PlanError):
        Deterministic(schedules.in_steps(schedules.linear(1.0, -1.0), 1000))


@given(st.floats(allow_nan=True))
def test_check_alpha(value):
    if 0.0 <= value <= 1.0:
        assert check_alpha(value, "x") == value
    else:
        with pytest.raises(PlanError, match="here"):
            check_alpha(value, "here")


def test_that_each_site_gets_its_own():
    resolver = schedules.PerSite([0.25, 0.75])
    assert [alpha_of_site(Deterministic(resolver), "x", i, 2)(0.0) for i in range(2)] == [0.25, 0.75]
    a, b = (alpha_of_site(Deterministic(Adaptive()), "x", i, 2) for i in range(2))
    assert isinstance(a, Controller)
    assert a is not b


# ---- adaptive --------------------------------------------------------------------------------------------------------


@given(st.lists(st.floats(-1.0, 1.0), max_size=20))
def test_that_a_controller_never_rises_and_ends(similarities):
    controller = Controller(Adaptive(low=0.2, high=0.8))
    last, n = 1.0, len(similarities) + 1
    for k, similarity in enumerate(similarities):
        controller.observe(similarity)
        alpha = controller.alpha(k, n)
        assert 0.0 <= alpha <= last
        assert alpha <= schedules.value_at(controller.settings.at_most, k, n)
        last = alpha
    assert controller.alpha(n, n) == 0.0


def test_the_formula_and_the_smoothing_of_a_controller():
    controller = Controller(Adaptive(low=0.0, high=1.0, smoothing=0.5, at_most=schedules.hold(1.0, 0.99, 0.0)))
    controller.observe(0.2)
    assert controller.alpha(0, 10) == pytest.approx(0.8)
    controller.observe(0.6)
    assert controller.alpha(1, 10) == pytest.approx(0.6)  # 0.5 * 0.2 + 0.5 * 0.6 = 0.4
    controller.observe(-1.0)
    assert controller.alpha(2, 10) == pytest.approx(0.6)


def test_that_a_similarity_which_is_not_finite_changes_nothing():
    controller = Controller(Adaptive())
    controller.observe(0.7)
    before = controller.state_dict()
    for bad in (math.nan, math.inf, -math.inf):
        controller.observe(bad)
    assert controller.state_dict() == before


def test_that_a_controller_resumes():
    one, two = Controller(Adaptive(low=0.0)), Controller(Adaptive(low=0.0))
    for k in range(5):
        one.observe(0.1 * k)
        one.alpha(k, 20)
    two.load_state_dict(one.state_dict())
    for k in range(5, 10):
        one.observe(0.1 * k)
        two.observe(0.1 * k)
        assert one.alpha(k, 20) == two.alpha(k, 20)


@pytest.mark.parametrize(
    "settings",
    [
        {"low": 0.9, "high": 0.5},
        {"low": 0.5, "high": 0.5},
        {"high": 1.5},
        {"low": -2.0},
        {"smoothing": 1.0},
        {"smoothing": -0.1},
        {"low": math.nan},
    ],
)
def test_that_adaptive_refuses_nonsense(settings):
    with pytest.raises(PlanError):
        Adaptive(**settings)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Bernoulli(execution="sometimes"),
        lambda: Bernoulli(granularity="layer"),
        lambda: Gumbel(temperature=0.0),
        lambda: Gumbel(temperature=-1.0),
        lambda: Gumbel(temperature=math.nan),
        lambda: Gumbel(temperature=math.inf),
        lambda: Gumbel(granularity="layer"),
    ],
)
def test_that_gates_refuse_nonsense(make):
    with pytest.raises(PlanError):
        make()
