"""Schedules stay inside their values, are exact at their ends, and compose."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import crossfade
from crossfade.schedules import (
    Piecewise,
    Schedule,
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
spans = st.tuples(unit, unit).filter(lambda pair: pair[0] < pair[1])


@st.composite
def simple(draw: st.DrawFn) -> Schedule:
    kind = draw(st.sampled_from(["constant", "linear", "cosine", "piecewise", "aggr20"]))
    if kind == "constant":
        return constant(draw(unit))
    if kind == "aggr20":
        return aggr20()
    if kind == "piecewise":
        times = sorted(draw(st.lists(unit, min_size=1, max_size=5)))
        return piecewise(*[(t, draw(unit)) for t in times])
    begin, until = draw(spans)
    make = linear if kind == "linear" else cosine
    return make(draw(unit), draw(unit), begin=begin, until=until)


schedules = st.recursive(
    simple(),
    lambda inner: st.one_of(
        st.builds(hold, unit, st.floats(0.01, 0.99), inner),
        st.builds(lambda u, a, b: join((u, a), (1.0, b)), st.floats(0.01, 0.99), inner, inner),
        st.builds(
            lambda s, order, overlap, until, i: staggered(s, order=order, overlap=overlap, until=until).resolve(
                "", i, 4
            ),
            inner,
            st.sampled_from(["front_to_back", "back_to_front"]),
            unit,
            st.floats(0.01, 1.0),
            st.integers(0, 3),
        ),
    ),
    max_leaves=4,
)


@given(schedule=schedules, t=unit)
def test_every_schedule_stays_inside_0_and_1(schedule: Schedule, t: float) -> None:
    assert 0.0 <= schedule(t) <= 1.0


@given(schedule=schedules, step=st.integers(-5, 50), total=st.integers(1, 40))
def test_value_at_clamps_beyond_both_ends(schedule: Schedule, step: int, total: int) -> None:
    assert value_at(schedule, step, total) == schedule(min(1.0, max(0.0, step / total)))
    assert value_at(schedule, total + 10, total) == value_at(schedule, total, total) == schedule(1.0)
    assert value_at(schedule, -1, total) == value_at(schedule, 0, total) == schedule(0.0)


@given(start=unit, end=unit, span=spans, t=unit)
def test_linear_and_cosine_are_exact_at_their_ends_and_monotone(
    start: float, end: float, span: tuple[float, float], t: float
) -> None:
    begin, until = span
    for make in (linear, cosine):
        schedule = make(start, end, begin=begin, until=until)
        if begin < until:
            assert schedule(until) == schedule(1.0) == end
        assert schedule(begin) == schedule(0.0) == start
        assert min(start, end) - 1e-15 <= schedule(t) <= max(start, end) + 1e-15
    middle = begin + (until - begin) / 2
    assume(begin < middle < until)
    share = (middle - begin) / (until - begin)
    assert linear(1.0, 0.0, begin=begin, until=until)(middle) == pytest.approx(1.0 - share, abs=1e-12)
    expected = 0.5 + 0.5 * math.cos(math.pi * share)
    assert cosine(1.0, 0.0, begin=begin, until=until)(middle) == pytest.approx(expected, abs=1e-12)


@given(points=st.lists(st.tuples(unit, unit), min_size=1, max_size=6).map(lambda p: sorted(p, key=lambda x: x[0])))
def test_piecewise_takes_exactly_the_value_of_each_point(points: list[tuple[float, float]]) -> None:
    schedule = Piecewise(tuple(points))
    for t in {t for t, _ in points}:
        assert schedule(t) == [v for at, v in points if at == t][-1]  # At a jump, the new value.
    assert schedule(points[0][0] - 1.0) == points[0][1]
    assert schedule(points[-1][0] + 1.0) == points[-1][1]


def test_aggr20_has_the_values_of_the_paper() -> None:
    table = {0.0: 1.0, 0.05: 0.65, 0.1: 0.3, 0.15: 0.15, 0.2: 0.0, 0.5: 0.0, 1.0: 0.0}
    for t, value in table.items():
        assert aggr20()(t) == pytest.approx(value, abs=1e-15)
    for exact in (0.0, 0.1, 0.2, 1.0):
        assert aggr20()(exact) == table[exact]
    assert aggr20()(0.2 - 1e-9) > 0.0
    # Step k of N sees t = k / N.
    assert [round(value_at(aggr20(), k, 20), 12) for k in range(6)] == [1.0, 0.65, 0.3, 0.15, 0.0, 0.0]


@given(value=unit, until=st.floats(0.01, 0.99), then=simple(), t=unit)
def test_hold_keeps_its_value_and_then_plays_the_rest(value: float, until: float, then: Schedule, t: float) -> None:
    schedule = hold(value, until, then)
    if t < until:
        assert schedule(t) == value
    assert schedule(until) == then(0.0)  # At the border the later part speaks.
    assert schedule(1.0) == then(1.0)


@given(border=st.floats(0.01, 0.99), first=simple(), second=simple(), t=unit)
def test_join_plays_each_part_over_its_own_0_to_1(border: float, first: Schedule, second: Schedule, t: float) -> None:
    schedule = join((border, first), (1.0, second))
    assert schedule(0.0) == first(0.0)
    assert schedule(1.0) == second(1.0)
    expected = first(t / border) if t < border else second((t - border) / (1.0 - border))
    assert schedule(t) == expected


@given(
    n=st.integers(1, 12),
    overlap=unit,
    until=st.floats(0.01, 1.0),
    order=st.sampled_from(["front_to_back", "back_to_front"]),
    t=unit,
)
def test_staggered_windows_are_ordered_and_exact(n: int, overlap: float, until: float, order: Any, t: float) -> None:
    resolver = staggered("linear", order=order, overlap=overlap, until=until)
    sites = [resolver.resolve(f"site {i}", i, n) for i in range(n)]
    assert all(site(0.0) == 1.0 and site(1.0) == 0.0 for site in sites)
    # Over at `until`, the last one exactly there.
    assert all(site(until) == 0.0 for site in sites)
    values = [site(t) for site in (sites if order == "front_to_back" else sites[::-1])]
    assert all(a <= b + 1e-12 for a, b in itertools.pairwise(values))
    if overlap == 1.0:
        assert max(values) - min(values) <= 1e-9


@given(steps=st.integers(0, 60), own=st.integers(1, 30), total=st.one_of(st.none(), st.integers(1, 100)))
def test_in_steps_counts_its_own_steps_whatever_the_run(steps: int, own: int, total: int | None) -> None:
    schedule = in_steps("linear", own)
    assert value_at(schedule, steps, total) == linear()(min(1.0, steps / own))


def test_a_schedule_of_progress_needs_the_length_of_the_run() -> None:
    with pytest.raises(crossfade.CrossfadeError, match="total_steps"):
        value_at(linear(), 0, None)
    with pytest.raises(crossfade.CrossfadeError):
        in_steps("linear", 3)(0.5)


@given(value=st.floats(0.0, 1.0))
def test_a_number_is_a_constant_and_a_resolver_is_asked_per_site(value: float) -> None:
    assert as_schedule(value)(0.3) == value
    per_site = crossfade.schedules.PerSite([0.0, value, "aggr20"])
    assert resolve(per_site, "x", 1, 3)(0.7) == value
    assert resolve(per_site, "x", 2, 3)(0.1) == 0.3
    assert resolve("aggr20", "x", 2, 3)(0.1) == 0.3


@pytest.mark.parametrize("bad", [2.0, -0.1, float("nan"), lambda t: 1.0 + t, lambda t: float("inf"), "no such", True])
def test_a_gate_refuses_an_alpha_outside_0_and_1(bad: Any) -> None:
    for gate in (crossfade.Deterministic, crossfade.Bernoulli, crossfade.Gumbel):
        with pytest.raises(crossfade.CrossfadeError):
            gate(bad)
