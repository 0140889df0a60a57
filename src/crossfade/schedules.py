"""Schedules: pure functions of progress `t` in [0, 1]. No torch, no state, no counter.

Optimizer step k of N sees `t = k / N`, so the first forward sees the value at 0 and the value at 1 is that of the
finished run. The caller owns the step. Schedules drive `alpha` (the weight of the *teacher*: 1 = all teacher) and,
independently, `lambda` (the weight of the guidance loss).

Example:
    >>> aggr20()(0.05), aggr20()(0.1), aggr20()(0.2), aggr20()(1.0)
    (0.65, 0.3, 0.0, 0.0)
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from .errors import PlanError
from .registry import lookup, register

__all__ = [
    "Cosine",
    "InSteps",
    "Join",
    "PerSite",
    "Piecewise",
    "Resolver",
    "Schedule",
    "ScheduleLike",
    "Staggered",
    "aggr20",
    "as_schedule",
    "constant",
    "cosine",
    "hold",
    "in_steps",
    "join",
    "linear",
    "piecewise",
    "resolve",
    "staggered",
    "value_at",
]

Schedule = Callable[[float], float]
"""Any pure `t -> value`. Registered ones (`crossfade.register("schedule", name)`) can be saved."""

ScheduleLike = Schedule | str | float | int


@register("schedule", "Piecewise")
@dataclass(frozen=True)
class Piecewise:
    """Straight lines between `points` = ((t, value), ...), constant before the first and after the last.

    The value *at* a point is exactly the given one. Two points at one `t` make a jump, which takes its new value at t.

    Raises:
        PlanError: No points, a non-finite number, or a decreasing `t`.
    """

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        points = tuple((float(t), float(v)) for t, v in self.points)
        object.__setattr__(self, "points", points)
        if not points or not all(math.isfinite(x) for point in points for x in point):
            raise PlanError("a piecewise schedule needs finite points.", expected="((t, value), ...)", got=self.points)
        if any(a[0] > b[0] for a, b in itertools.pairwise(points)):
            raise PlanError("the points of a schedule must be in order of t.", got=points)

    def __call__(self, t: float) -> float:
        """The value at progress `t`."""
        after = next((i for i, (at, _) in enumerate(self.points) if t < at), len(self.points))
        if after == 0:
            return self.points[0][1]
        t0, v0 = self.points[after - 1]
        if after == len(self.points) or t == t0:
            return v0
        t1, v1 = self.points[after]
        share = (t - t0) / (t1 - t0)
        return v0 * (1.0 - share) + v1 * share


@register("schedule", "Cosine")
@dataclass(frozen=True)
class Cosine:
    """Half a cosine from `start` to `end` while t goes from `begin` to `until`; constant outside."""

    start: float = 1.0
    end: float = 0.0
    begin: float = 0.0
    until: float = 1.0

    def __post_init__(self) -> None:
        _check_span(self.begin, self.until)

    def __call__(self, t: float) -> float:
        """The value at progress `t`."""
        if t <= self.begin:
            return self.start
        if t >= self.until:
            return self.end
        share = 0.5 - 0.5 * math.cos(math.pi * (t - self.begin) / (self.until - self.begin))
        return self.start * (1.0 - share) + self.end * share


@register("schedule", "Join")
@dataclass(frozen=True)
class Join:
    """Play schedules one after another: `parts` = ((until, schedule), ...), each over its own 0..1.

    At a border the later part speaks (its value at 0); the last part must end at 1.
    """

    parts: tuple[tuple[float, Schedule], ...]

    def __post_init__(self) -> None:
        parts = tuple((float(until), as_schedule(part)) for until, part in self.parts)
        object.__setattr__(self, "parts", parts)
        ends = [until for until, _ in parts]
        if not ends or ends[-1] != 1.0 or ends[0] <= 0 or any(a >= b for a, b in itertools.pairwise(ends)):
            raise PlanError("joined schedules must end at increasing t, the last at 1.", got=ends)

    def __call__(self, t: float) -> float:
        """The value at progress `t`."""
        begin = 0.0
        for until, part in self.parts:
            if t < until:
                return part(max(0.0, (t - begin) / (until - begin)))
            begin = until
        return self.parts[-1][1](1.0)


@register("schedule", "InSteps")
@dataclass(frozen=True)
class InSteps:
    """A schedule that counts its own `total` optimizer steps instead of following the run's progress.

    For runs of unknown length: `install(..., total_steps=None)` accepts only these. It cannot be called with `t`.
    """

    schedule: Schedule
    total: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "schedule", as_schedule(self.schedule))
        if type(self.total) is not int or self.total < 1:
            raise PlanError("a schedule in steps needs a whole number of steps.", expected=">= 1", got=self.total)

    def __call__(self, t: float) -> float:
        """The value at progress `t`."""
        raise PlanError(
            "a schedule in steps has no value at a progress.", got=t, do="use value_at(schedule, step, total)"
        )


def _check_span(begin: float, until: float) -> None:
    if not 0.0 <= begin < until <= 1.0:
        raise PlanError("a schedule moves within [0, 1].", expected="0 <= begin < until <= 1", got=(begin, until))


def constant(value: float) -> Piecewise:
    """The same `value` at every t."""
    return Piecewise(((0.0, value),))


def linear(start: float = 1.0, end: float = 0.0, *, begin: float = 0.0, until: float = 1.0) -> Piecewise:
    """A straight line from `start` to `end` while t goes from `begin` to `until`.

    Example:
        >>> linear(until=0.5)(0.25)
        0.5
    """
    _check_span(begin, until)
    return Piecewise(((begin, start), (until, end)))


def cosine(start: float = 1.0, end: float = 0.0, *, begin: float = 0.0, until: float = 1.0) -> Cosine:
    """Half a cosine from `start` to `end` while t goes from `begin` to `until`."""
    return Cosine(start, end, begin, until)


def piecewise(*points: tuple[float, float]) -> Piecewise:
    """Straight lines between `(t, value)` points."""
    return Piecewise(points)


def aggr20() -> Piecewise:
    """The paper's schedule: 1 -> 0.3 over the first tenth, 0.3 -> 0 over the next, then 0 (arXiv 2511.18670)."""
    return Piecewise(((0.0, 1.0), (0.1, 0.3), (0.2, 0.0)))


def join(*parts: tuple[float, ScheduleLike]) -> Join:
    """Schedules one after another: `join((0.2, 1.0), (1.0, linear()))` holds 1 for a fifth, then fades."""
    return Join(tuple((until, as_schedule(part)) for until, part in parts))


def hold(value: float, until: float, then: ScheduleLike) -> Join:
    """Hold `value` up to progress `until`, then play `then` over what is left.

    Example:
        >>> fade = hold(1.0, 0.5, linear())
        >>> fade(0.4), fade(0.75), fade(1.0)
        (1.0, 0.5, 0.0)
    """
    return join((until, constant(value)), (1.0, then))


def in_steps(schedule: ScheduleLike, total: int) -> InSteps:
    """Let `schedule` run over its own `total` optimizer steps, whatever the length of the run."""
    return InSteps(as_schedule(schedule), total)


for _name, _preset in {"aggr20": aggr20(), "linear": linear(), "cosine": cosine()}.items():
    register("schedule", _name)(_preset)


def as_schedule(value: ScheduleLike) -> Schedule:
    """A schedule from a registered name, a number (constant), or a callable.

    Raises:
        PlanError: An unknown name, or something that is none of these.
    """
    if isinstance(value, str):
        return as_schedule(lookup("schedule", value))
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return constant(float(value))
    if callable(value) and not isinstance(value, type):
        return value
    raise PlanError("this is not a schedule.", expected="a name, a number, or a function of t", got=repr(value))


def value_at(schedule: Schedule, step: int, total: int | None) -> float:
    """The value that optimizer step `step` (0 = first) of a run of `total` steps sees; clamped beyond the end.

    Raises:
        PlanError: The schedule follows progress but the run's length is unknown, or its value is not finite.
    """
    if isinstance(schedule, InSteps):
        own = schedule
        schedule, total = own.schedule, own.total
    if total is None:
        raise PlanError(
            "this schedule follows the run's progress, but the run's length is unknown.",
            got=repr(schedule),
            do="pass total_steps to install, or count in steps: crossfade.schedules.in_steps(schedule, total)",
        )
    value = float(schedule(min(1.0, max(0.0, step / total))))
    if not math.isfinite(value):
        raise PlanError(
            "a schedule must give a finite value.",
            where=f"step {step} of {total}",
            expected="a finite number",
            got=value,
        )
    return value


@runtime_checkable
class Resolver(Protocol):
    """Gives each site its own schedule."""

    def resolve(self, site: str, index: int, n: int) -> Schedule:
        """The schedule of the site with path `site`, number `index` of `n`."""
        ...


@register("resolver", "Staggered")
@dataclass(frozen=True, kw_only=True)
class Staggered:
    """Site after site: each plays `schedule` in its own window of the run.

    Attributes:
        schedule: What every site plays.
        order: `"front_to_back"` starts with the first site, `"back_to_front"` with the last.
        overlap: 0 = one after another, 1 = all together.
        until: Progress at which the last site has played its schedule.
    """

    schedule: Schedule
    order: Literal["front_to_back", "back_to_front"] = "front_to_back"
    overlap: float = 0.5
    until: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "schedule", as_schedule(self.schedule))
        if self.order not in ("front_to_back", "back_to_front"):
            raise PlanError("unknown order.", expected='"front_to_back" or "back_to_front"', got=repr(self.order))
        if not 0.0 <= self.overlap <= 1.0 or not 0.0 < self.until <= 1.0:
            raise PlanError("overlap is within [0, 1], until within (0, 1].", got=(self.overlap, self.until))

    def resolve(self, site: str, index: int, n: int) -> Schedule:
        """The window of site `index` of `n`: 1/n of the run when overlap is 0, all of it when overlap is 1."""
        place = index if self.order == "front_to_back" else n - 1 - index
        width = self.until * (1.0 / n + self.overlap * (1.0 - 1.0 / n))
        begin = 0.0 if n == 1 else (self.until - width) * place / (n - 1)
        end = self.until if place == n - 1 else begin + width
        return _Window(self.schedule, begin, end)


@dataclass(frozen=True)
class _Window:
    schedule: Schedule
    begin: float
    end: float

    def __call__(self, t: float) -> float:
        """The value at progress `t`."""
        if t >= self.end:  # Not left to the division, whose rounding could miss the exact end.
            return self.schedule(1.0)
        return self.schedule(max(0.0, (t - self.begin) / (self.end - self.begin)))


def staggered(
    schedule: ScheduleLike = "linear",
    *,
    order: Literal["front_to_back", "back_to_front"] = "front_to_back",
    overlap: float = 0.5,
    until: float = 1.0,
) -> Staggered:
    """One schedule, site after site. See `Staggered`."""
    return Staggered(schedule=as_schedule(schedule), order=order, overlap=overlap, until=until)


@register("resolver", "PerSite")
@dataclass(frozen=True)
class PerSite:
    """A resolver from a function `(site, index, n) -> schedule`, or from one schedule per site in order."""

    choose: Callable[[str, int, int], ScheduleLike] | Sequence[ScheduleLike]

    def resolve(self, site: str, index: int, n: int) -> Schedule:
        """What the function says, or the schedule number `index`."""
        if callable(self.choose):
            return as_schedule(self.choose(site, index, n))
        if len(self.choose) != n:
            raise PlanError(
                "one schedule per site is needed.", expected=f"{n} schedules", got=len(self.choose), where=site
            )
        return as_schedule(self.choose[index])


def resolve(value: ScheduleLike | Resolver, site: str, index: int, n: int) -> Schedule:
    """The schedule of one site: from a resolver if `value` is one, else `value` itself for every site."""
    if hasattr(value, "resolve"):  # Not isinstance: a protocol's check is slow, and this runs in every step.
        return as_schedule(value.resolve(site, index, n))
    return as_schedule(value)
