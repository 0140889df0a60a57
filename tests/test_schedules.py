"""Schedules: exact at their points, pure, and refused when they make no sense."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossfade import schedules
from crossfade.errors import PlanError
from crossfade.schedules import (
    InSteps,
    Join,
    PerSite,
    Piecewise,
    Resolver,
    Staggered,
    aggr20,
    as_schedule,
    constant,
    cosine,
    hold,
    in_steps,
    join,
    linear,
    piecewise,
    resolve,
    staggered,
    value_at,
)

unit = st.floats(0.0, 1.0)
values = st.floats(-1e3, 1e3)


# ---- the shapes ------------------------------------------------------------------------------------------------------


@given(
    st.lists(
        st.tuples(st.integers(0, 100).map(lambda k: k / 100), values), min_size=1, max_size=6, unique_by=lambda p: p[0]
    )
)
def test_that_piecewise_is_exact_at_its_points_and_stays_between_neighbours(points):
    points.sort()
    schedule = Piecewise(tuple(points))
    for t, value in points:
        assert schedule(t) == value
    for (t0, v0), (t1, v1) in pairwise(points):
        slack = 1e-9 * max(1.0, abs(v0), abs(v1))
        assert min(v0, v1) - slack <= schedule((t0 + t1) / 2) <= max(v0, v1) + slack
    assert schedule(points[0][0] - 1.0) == points[0][1]
    assert schedule(points[-1][0] + 1.0) == points[-1][1]


def test_that_a_jump_takes_its_new_value_at_its_t():
    jump = piecewise((0.0, 1.0), (0.5, 1.0), (0.5, 0.25), (1.0, 0.25))
    assert jump(math.nextafter(0.5, 0.0)) == pytest.approx(1.0)
    assert jump(0.5) == 0.25


def test_aggr20_of_the_paper():
    fade = aggr20()
    assert [fade(t) for t in (0.0, 0.05, 0.1, 0.15, 0.2, 0.5, 1.0)] == [
        1.0,
        0.65,
        0.3,
        pytest.approx(0.15),
        0.0,
        0.0,
        0.0,
    ]


@pytest.mark.parametrize("make", [linear, cosine])
def test_that_linear_and_cosine_are_exact_at_their_ends(make):
    fade = make(0.9, 0.1, begin=0.25, until=0.75)
    assert [fade(t) for t in (0.0, 0.25, 0.75, 1.0)] == [0.9, 0.9, 0.1, 0.1]
    assert fade(0.5) == pytest.approx(0.5)
    full = make()
    assert full(0.0) == 1.0
    assert full(1.0) == 0.0
    assert all(full(a / 100) >= full((a + 1) / 100) for a in range(100))


def test_that_cosine_is_half_a_cosine():
    for k in range(11):
        assert cosine()(k / 10) == pytest.approx(0.5 + 0.5 * math.cos(math.pi * k / 10), abs=1e-12)


@given(unit, values)
def test_that_a_constant_is_one(t, value):
    assert constant(value)(t) == value


def test_join_and_hold():
    fade = hold(1.0, 0.25, linear())
    assert [fade(t) for t in (0.0, 0.2, 0.25, 0.625, 1.0)] == [1.0, 1.0, 1.0, 0.5, 0.0]
    three = join((0.25, 1.0), (0.5, linear(1.0, 0.5)), (1.0, 0.0))
    assert three(0.0) == 1.0
    assert three(0.375) == 0.75
    assert three(0.5) == 0.0  # At a border the later part speaks.
    assert join((1.0, "aggr20"))(0.05) == aggr20()(0.05)


@given(unit)
def test_that_join_never_asks_a_part_outside_its_own_range(t):
    asked: list[float] = []

    def spy(x: float) -> float:
        asked.append(x)
        return x

    join((0.1, spy), (0.3, spy), (1.0, spy))(t)
    assert len(asked) == 1
    assert 0.0 <= asked[0] <= 1.0


# ---- steps -----------------------------------------------------------------------------------------------------------


@given(st.integers(0, 400), st.integers(1, 200))
def test_that_step_k_of_n_sees_k_over_n_and_clamps(step, total):
    assert value_at(linear(), step, total) == linear()(min(1.0, step / total))


def test_that_the_first_forward_sees_zero_and_the_end_sees_one():
    assert value_at(aggr20(), 0, 7) == 1.0
    assert value_at(linear(0.8, 0.2), 7, 7) == 0.2
    assert value_at(linear(0.8, 0.2), -3, 7) == 0.8


def test_in_steps_ignores_the_runs_length():
    own = in_steps("linear", 4)
    for total in (None, 1, 1000):
        assert [value_at(own, k, total) for k in range(6)] == [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    with pytest.raises(PlanError, match="value_at"):
        own(0.5)


def test_that_an_unknown_length_needs_a_schedule_in_steps():
    with pytest.raises(PlanError, match="total_steps"):
        value_at(linear(), 3, None)


def test_that_a_value_which_is_not_finite_is_refused():
    for bad in (math.nan, math.inf):
        with pytest.raises(PlanError, match="step 2 of 5"):
            value_at(lambda t, bad=bad: bad, 2, 5)


# ---- one per site ----------------------------------------------------------------------------------------------------


@given(st.integers(1, 9), unit, st.floats(0.1, 1.0), st.sampled_from(["front_to_back", "back_to_front"]))
def test_that_staggered_windows_are_ordered_and_end_on_time(n, overlap, until, order):
    resolver = staggered("linear", order=order, overlap=overlap, until=until)
    alphas = [resolver.resolve("", i, n) for i in range(n)]
    for k in range(21):
        row = [a(k / 20) for a in alphas]
        assert all(0.0 <= v <= 1.0 for v in row)
        ordered = row if order == "front_to_back" else row[::-1]
        assert all(a <= b + 1e-9 for a, b in pairwise(ordered))
    assert all(a(0.0) == 1.0 for a in alphas)
    assert all(a(until) == 0.0 for a in alphas)
    assert all(a(1.0) == 0.0 for a in alphas)


def test_that_no_overlap_is_one_after_another_and_full_overlap_is_together():
    one_by_one = [staggered(overlap=0.0).resolve("", i, 4) for i in range(4)]
    assert [a(0.25) for a in one_by_one] == pytest.approx([0.0, 1.0, 1.0, 1.0])
    together = [staggered(overlap=1.0).resolve("", i, 4) for i in range(4)]
    assert [a(0.25) for a in together] == pytest.approx([0.75] * 4)


def test_per_site_takes_a_function_or_one_schedule_each():
    by_function = PerSite(lambda site, index, n: index / n)
    assert by_function.resolve("x", 1, 4)(0.3) == 0.25
    by_list = PerSite(["linear", 0.5])
    assert by_list.resolve("x", 0, 2)(0.5) == 0.5
    assert by_list.resolve("y", 1, 2)(0.9) == 0.5
    with pytest.raises(PlanError, match="3 schedules"):
        by_list.resolve("x", 0, 3)


def test_resolve_takes_schedules_names_numbers_and_resolvers():
    assert resolve("linear", "x", 0, 1)(0.5) == 0.5
    assert resolve(0.25, "x", 0, 1)(0.5) == 0.25
    assert resolve(staggered(), "x", 0, 1)(1.0) == 0.0
    assert isinstance(staggered(), Resolver)
    assert not isinstance(linear(), Resolver)


# ---- refused ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        piecewise,
        lambda: piecewise((0.0, math.nan)),
        lambda: piecewise((math.inf, 1.0)),
        lambda: piecewise((0.5, 1.0), (0.2, 0.0)),
        lambda: linear(begin=0.5, until=0.5),
        lambda: linear(until=1.5),
        lambda: cosine(begin=-0.1),
        join,
        lambda: join((0.5, 1.0)),
        lambda: join((0.5, 1.0), (0.5, 0.0), (1.0, 0.0)),
        lambda: join((0.0, 1.0), (1.0, 0.0)),
        lambda: hold(1.0, 1.0, "linear"),
        lambda: in_steps("linear", 0),
        lambda: in_steps("linear", 2.5),
        lambda: in_steps("linear", True),
        lambda: staggered(order="sideways"),
        lambda: staggered(overlap=1.5),
        lambda: staggered(until=0.0),
        lambda: as_schedule("nothing"),
        lambda: as_schedule(None),
        lambda: as_schedule(True),
        lambda: as_schedule(Piecewise),
        lambda: as_schedule([0.0, 1.0]),
        lambda: as_schedule(math.nan),
    ],
)
def test_that_nonsense_is_a_plan_error(make):
    with pytest.raises(PlanError):
        make()


def test_that_schedules_are_values():
    assert linear() == linear(1.0, 0.0)
    assert hash(aggr20()) == hash(aggr20())
    assert Join(((1.0, 0.5),)) == join((1.0, 0.5))
    assert InSteps(linear(), 3) == in_steps("linear", 3)
    assert isinstance(staggered(), Staggered)
    with pytest.raises(AttributeError):
        linear().points = ()


def test_that_the_module_imports_no_torch():
    assert "torch" not in vars(schedules)
