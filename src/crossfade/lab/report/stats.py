"""The arithmetic of the report: spread, crossings of a target, paired differences, the bootstrap."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random

from .cells import Point

__all__ = [
    "Crossing",
    "Curve",
    "bootstrap_interval",
    "first_crossing",
    "mean",
    "mean_curve",
    "paired_differences",
    "sample_std",
]

DRAWS = 10_000
FEWEST = 3


def mean(values: Sequence[float]) -> float:
    """The arithmetic mean.

    Raises:
        ValueError: There is no value.
    """
    if not values:
        raise ValueError("the mean of no value is not defined")
    return math.fsum(values) / len(values)


def sample_std(values: Sequence[float]) -> float | None:
    """The standard deviation with n - 1 below the line; None for fewer than two values."""
    if len(values) < 2:
        return None
    centre = mean(values)
    return math.sqrt(math.fsum((value - centre) ** 2 for value in values) / (len(values) - 1))


@dataclass(frozen=True)
class Crossing:
    """Where a curve first reaches a target; both numbers lie between two measurements."""

    steps: float
    seconds: float


def first_crossing(curve: Sequence[Point], target: float, *, higher_is_better: bool) -> Crossing | None:
    """The first place where the curve, drawn with straight lines, is at the target or beyond it.

    Args:
        curve: Points in the order of time.
        target: The score to reach.
        higher_is_better: False where a lower score is better.

    Returns:
        The first point itself where it is good enough, and None where no point is.
    """
    sign = 1.0 if higher_is_better else -1.0
    good = [sign * (point.score - target) >= 0 for point in curve]
    if True not in good:
        return None
    place = good.index(True)
    after = curve[place]
    if place == 0:
        return Crossing(float(after.step), after.seconds)
    before = curve[place - 1]
    part = (target - before.score) / (after.score - before.score)
    return Crossing(
        before.step + part * (after.step - before.step),
        before.seconds + part * (after.seconds - before.seconds),
    )


def paired_differences(
    values: Mapping[int, float], others: Mapping[int, float], *, higher_is_better: bool
) -> dict[int, float]:
    """By how much `values` are better than `others`, for each seed that both have; positive is better."""
    sign = 1.0 if higher_is_better else -1.0
    return {seed: sign * (values[seed] - others[seed]) for seed in sorted(values.keys() & others.keys())}


def bootstrap_interval(
    values: Sequence[float], *, draws: int = DRAWS, seed: int = 0, level: float = 0.95
) -> tuple[float, float] | None:
    """The percentile bootstrap interval of the mean; None for fewer than three values.

    The generator belongs to the call, so the same values give the same interval always. With three values the 95 %
    interval is their range, because one draw in 27 repeats the smallest three times: a weak statement, and the report
    says so.

    Args:
        values: One number per seed.
        draws: How many times the values are drawn again.
        seed: Seed of the draws.
        level: The share of the draws inside the interval.
    """
    if len(values) < FEWEST:
        return None
    generator = Random(seed)  # noqa: S311 - statistics, not secrets
    means = sorted(mean(generator.choices(values, k=len(values))) for _ in range(draws))
    tail = (1.0 - level) / 2.0
    return _quantile(means, tail), _quantile(means, 1.0 - tail)


def _quantile(ordered: Sequence[float], share: float) -> float:
    """Linear between the two nearest of the sorted values."""
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    if ordered[low] == ordered[high]:
        return ordered[low]  # Interpolation would round, and a bound of exactly zero must stay zero.
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


@dataclass(frozen=True)
class Curve:
    """The mean of some seeds' curves and its spread, over the steps that all of them cover.

    Args:
        step: The steps of any seed.
        seconds: The mean time at which the seeds were at that step.
        mean: The mean score.
        low: The lowest score of any seed.
        high: The highest score of any seed.
    """

    step: tuple[float, ...]
    seconds: tuple[float, ...]
    mean: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]


def mean_curve(curves: Sequence[Sequence[Point]]) -> Curve:
    """The mean over seeds at each step; a seed without a point at that step is interpolated.

    Curves without a point are left out; steps that some seed has not reached are left out too, because a mean over
    fewer seeds would jump there.
    """
    curves = [curve for curve in curves if curve]
    if not curves:
        return Curve((), (), (), (), ())
    begin, end = max(curve[0].step for curve in curves), min(curve[-1].step for curve in curves)
    grid = sorted({float(point.step) for curve in curves for point in curve if begin <= point.step <= end})
    scores = [[_at(curve, step, lambda point: point.score) for curve in curves] for step in grid]
    seconds = [mean([_at(curve, step, lambda point: point.seconds) for curve in curves]) for step in grid]
    return Curve(
        tuple(grid),
        tuple(seconds),
        tuple(mean(row) for row in scores),
        tuple(min(row) for row in scores),
        tuple(max(row) for row in scores),
    )


def _at(curve: Sequence[Point], step: float, value: Callable[[Point], float]) -> float:
    """The value at a step inside the curve; where two points share the step, the later one's."""
    place = bisect_right([point.step for point in curve], step)
    before = curve[place - 1]
    if before.step == step or place == len(curve):
        return value(before)
    after = curve[place]
    part = (step - before.step) / (after.step - before.step)
    return value(before) + part * (value(after) - value(before))
