"""The arithmetic of the report, against numbers worked out by hand."""

from __future__ import annotations

import math
import random

import pytest

from crossfade.lab.report.cells import Point
from crossfade.lab.report.stats import (
    Crossing,
    bootstrap_interval,
    first_crossing,
    mean,
    mean_curve,
    paired_differences,
    sample_std,
)


def points(*rows: tuple[int, float, float]) -> list[Point]:
    return [Point(step=step, seconds=seconds, score=score) for step, seconds, score in rows]


def test_mean_and_std() -> None:
    assert mean([1.0, 2.0, 6.0]) == 3.0
    assert sample_std([1.0, 2.0, 6.0]) == pytest.approx(7**0.5)  # (4 + 1 + 9) / 2
    assert sample_std([5.0]) is None
    with pytest.raises(ValueError, match="no value"):
        mean([])


def test_crossing_lies_on_the_straight_line_in_steps_and_in_seconds() -> None:
    curve = points((0, 0.0, 10.0), (10, 1.0, 20.0), (20, 5.0, 40.0))
    assert first_crossing(curve, 25.0, higher_is_better=True) == Crossing(12.5, 2.0)
    assert first_crossing(curve, 20.0, higher_is_better=True) == Crossing(10.0, 1.0)


def test_crossing_at_the_first_point_at_the_last_and_never() -> None:
    curve = points((0, 0.5, 10.0), (10, 1.0, 20.0))
    assert first_crossing(curve, 9.0, higher_is_better=True) == Crossing(0.0, 0.5)
    assert first_crossing(curve, 20.0, higher_is_better=True) == Crossing(10.0, 1.0)
    assert first_crossing(curve, 20.1, higher_is_better=True) is None
    assert first_crossing([], 0.0, higher_is_better=True) is None


def test_the_first_crossing_counts_even_if_the_curve_falls_again() -> None:
    curve = points((0, 0.0, 0.0), (10, 1.0, 10.0), (20, 2.0, 0.0), (30, 3.0, 10.0))
    assert first_crossing(curve, 5.0, higher_is_better=True) == Crossing(5.0, 0.5)


def test_crossing_where_lower_is_better() -> None:
    curve = points((0, 0.0, 9.0), (10, 2.0, 5.0), (20, 4.0, 3.0))
    assert first_crossing(curve, 4.0, higher_is_better=False) == Crossing(15.0, 3.0)
    assert first_crossing(curve, 2.0, higher_is_better=False) is None


def test_differences_pair_common_seeds_and_are_positive_where_better() -> None:
    ours, theirs = {0: 5.0, 1: 7.0, 2: 9.0}, {1: 6.0, 2: 10.0, 3: 0.0}
    assert paired_differences(ours, theirs, higher_is_better=True) == {1: 1.0, 2: -1.0}
    assert paired_differences(ours, theirs, higher_is_better=False) == {1: -1.0, 2: 1.0}


def test_bootstrap_of_three_values_is_their_range_and_of_two_does_not_exist() -> None:
    assert bootstrap_interval([0.0, 1.0, 2.0]) == (0.0, 2.0)
    assert bootstrap_interval([0.1, 0.1, 0.1]) == pytest.approx((0.1, 0.1))
    assert bootstrap_interval([0.0, 1.0]) is None
    assert bootstrap_interval([]) is None


def test_bootstrap_is_the_same_always_and_leaves_the_global_state_alone() -> None:
    values = [0.3, 1.9, -0.4, 2.2, 0.8]
    state = random.getstate()
    first = bootstrap_interval(values)
    assert random.getstate() == state
    random.seed(99)
    assert bootstrap_interval(values) == first
    many = [math.sqrt(i) for i in range(12)]
    assert bootstrap_interval(many, seed=1) != bootstrap_interval(many)


def test_bootstrap_covers_the_true_mean_about_as_often_as_it_says() -> None:
    generator = random.Random(5)
    hits = 0
    for _ in range(200):
        interval = bootstrap_interval([generator.gauss(1.0, 2.0) for _ in range(12)], draws=400)
        assert interval is not None
        hits += interval[0] <= 1.0 <= interval[1]
    # The percentile interval is a little narrow for few values: about 92 % here.
    assert 0.86 <= hits / 200 <= 0.98


def test_mean_curve_interpolates_and_stops_where_a_seed_stops() -> None:
    curve = mean_curve([points((0, 0.0, 0.0), (10, 1.0, 10.0), (20, 2.0, 20.0)), points((0, 0.0, 4.0), (10, 3.0, 4.0))])
    assert curve.step == (0.0, 10.0)
    assert curve.mean == (2.0, 7.0)
    assert curve.seconds == (0.0, 2.0)
    assert (curve.low, curve.high) == ((0.0, 4.0), (4.0, 10.0))
    uneven = mean_curve([points((0, 0.0, 0.0), (10, 1.0, 10.0)), points((0, 0.0, 0.0), (5, 1.0, 9.0), (10, 2.0, 9.0))])
    assert uneven.step == (0.0, 5.0, 10.0)
    assert uneven.mean == (0.0, 7.0, 9.5)
    assert uneven.seconds == (0.0, 0.75, 1.5)
    assert mean_curve([[]]).step == ()


def test_where_two_points_share_a_step_the_later_one_counts() -> None:
    curve = mean_curve([points((0, 0.0, 1.0), (10, 1.0, 2.0), (10, 1.5, 8.0), (20, 2.0, 9.0))])
    assert curve.step == (0.0, 10.0, 20.0)
    assert curve.mean == (1.0, 8.0, 9.0)
