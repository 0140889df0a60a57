"""Guidance: a local loss that pulls each student's output to its teacher's at the interface.

    L = L_task + sum_l lambda_l(t) ||S_l(h_l) - sg[T_l(h_l)]||^2

DFG (Deep Feature Guidance, arXiv 2511.18670) is the squared form, nearly free since both outputs are there. `lambda`
has its own schedule: following alpha as in the paper (`schedule="alpha"`), staying to the end (the default: it won in
our trials), or any other. The teacher's output is always a constant target; everything is computed in float32, never
over padding. At the end of the run (t = 1) guidance is over by definition.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
from torch import Tensor

from .errors import PlanError
from .ledger import Term
from .metrics import cosine_sum, count, squared_error_sum
from .registry import register
from .schedules import InSteps, Resolver, Schedule, ScheduleLike, as_schedule, resolve, value_at

__all__ = ["DeepFeatureGuidance", "Guidance", "Power", "lambda_at"]

Reduction = Literal["relative", "mean", "sum", "cosine"]


class Guidance(Protocol):
    """What crossfade asks of a guidance loss. Yours is any frozen dataclass with these members."""

    @property
    def weight(self) -> float:
        """lambda_0."""
        ...

    @property
    def schedule(self) -> ScheduleLike | Resolver:
        """Shape of lambda over the run."""
        ...

    @property
    def site_weights(self) -> Mapping[str, float]:
        """Factors by site path."""
        ...

    @property
    def detach_input(self) -> bool:
        """Whether guidance stays local to the site."""
        ...

    @property
    def mask(self) -> bool:
        """Whether padding is left out."""
        ...

    @property
    def needs_power(self) -> bool:
        """Whether the loss is relative to the teacher's calibrated power."""
        ...

    def error(self, student: Tensor, teacher: Tensor, mask: Tensor | None) -> Tensor:
        """Sum of the error over valid positions, 0-dim float32."""
        ...

    def reduce(self, term: Term, items: Tensor, power: Tensor | float | None) -> Tensor:
        """The value of one call from its error sum."""
        ...


@register("guidance", "DeepFeatureGuidance")
@dataclass(frozen=True)
class DeepFeatureGuidance:
    """DFG and its kin.

    Attributes:
        weight: lambda_0, >= 0.
        schedule: Shape of lambda over the run: a schedule (default 1: kept to the end), or `"alpha"` to follow the
            site's alpha as in the paper.
        reduction: `"relative"`: mean squared error over the teacher's mean square, which is fixed per site by
            calibration, so that the loss is 1 for a student of zeros and additive over micro-batches; `"mean"`: mean
            squared error; `"sum"`: the bare sum (it grows with batch and length); `"cosine"`: mean of 1 - cos.
        site_weights: Factors by site path, 1 where not given.
        detach_input: Let no guidance gradient reach what comes before the site. Costs a second student forward where
            the student is on the main path.
        mask: Leave out padded positions (True), or count every position (False).

    Raises:
        PlanError: A negative or non-finite weight, an unknown reduction.

    Example:
        >>> loss = DeepFeatureGuidance(weight=0.5, reduction="mean")
        >>> loss.error(torch.zeros(1, 3, 2), torch.ones(1, 3, 2), None).item()  # 3 positions, mean square 1 each
        3.0
    """

    weight: float = 1.0
    schedule: ScheduleLike | Resolver = 1.0
    reduction: Reduction = "relative"
    site_weights: Mapping[str, float] = field(default_factory=dict)
    detach_input: bool = False
    mask: bool = True

    def __post_init__(self) -> None:
        for name, value in [("weight", self.weight), *self.site_weights.items()]:
            if type(value) not in (int, float) or not math.isfinite(value) or value < 0.0:
                raise PlanError("a guidance weight must be a number >= 0.", where=name, got=repr(value))
        if self.reduction not in ("relative", "mean", "sum", "cosine"):
            raise PlanError("unknown reduction.", expected="relative | mean | sum | cosine", got=repr(self.reduction))
        if isinstance(self.schedule, Resolver) and not isinstance(
            getattr(self.schedule, "choose", None), (list, tuple)
        ):
            for index in range(3):  # The number of sites is not known yet.
                if any(value_at(resolve(self.schedule, "", index, 3), k, 100) < 0.0 for k in range(101)):
                    raise PlanError("lambda must not be negative.", got=repr(self.schedule))
        if self.schedule != "alpha" and not isinstance(self.schedule, Resolver):
            schedule = as_schedule(self.schedule)
            object.__setattr__(self, "schedule", schedule)
            steps = schedule.total if isinstance(schedule, InSteps) else 100
            if any(value_at(schedule, round(k * steps / 100), steps) < 0.0 for k in range(101)):
                raise PlanError("lambda must not be negative.", got=repr(self.schedule))

    @property
    def needs_power(self) -> bool:
        """Whether the loss is measured against the teacher's calibrated power."""
        return self.reduction == "relative"

    def error(self, student: Tensor, teacher: Tensor, mask: Tensor | None) -> Tensor:
        """Sum over valid positions of this call's error, 0-dim float32.

        Shapes: student, teacher [..., D], mask [...] (True = valid).
        """
        if self.reduction == "cosine":
            return count(teacher, mask) - cosine_sum(student, teacher, mask)
        total = squared_error_sum(student, teacher, mask)
        return total if self.reduction == "sum" else total / teacher.shape[-1]

    def reduce(self, term: Term, items: Tensor, power: Tensor | float | None) -> Tensor:
        """Error sum -> loss: divided by the number of positions, and by the teacher's power if relative."""
        if self.reduction == "sum":
            return term.error
        value = term.error / items.clamp_min(1.0)
        return value if power is None else value / power


# The power of a teacher that answers 0 everywhere: tiny, so that a student of zeros has no error.
DEAD = torch.finfo(torch.float32).tiny * 1e6


class Power:
    """Mean square of one teacher's output, measured in the first step (or by `calibrate`), then fixed.

    Until it is fixed, the running mean including the current call is used.
    """

    def __init__(self) -> None:
        self.total = 0.0
        self.positions = 0.0
        self.fixed = False

    def observe(self, total: float, positions: float) -> None:
        """Add sums over positions, already reduced over ranks."""
        if not self.fixed:
            self.total += total
            self.positions += positions

    @property
    def value(self) -> float:
        """Mean square per position and channel; tiny rather than 0 for a dead teacher."""
        return max(self.total / max(self.positions, 1.0), DEAD)


def lambda_at(
    guidance: Guidance, site: str, index: int, n: int, *, alpha: float, step: int, total: int | None
) -> float:
    """The lambda of one site at one step: weight x site weight x schedule; 0 once the run is over."""
    if total is not None and step >= total:
        return 0.0
    factor = guidance.weight * guidance.site_weights.get(site, 1.0)
    if guidance.schedule == "alpha":
        return factor * alpha
    schedule: Schedule = resolve(guidance.schedule, site, index, n)
    value = value_at(schedule, step, total)
    if value < 0.0:
        raise PlanError("lambda must not be negative.", where=f"{site}, step {step}", expected=">= 0", got=value)
    return factor * value
