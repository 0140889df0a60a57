"""DCR: the deterministic, annealed blend, and its combination with DFG."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from ...gates import Adaptive, Deterministic
from ...guidance import DeepFeatureGuidance
from .base import Joint, Method, ScheduleText, Stage, method, schedule

__all__ = ["DCR", "AdaptiveDCR", "AdaptiveDCRGuided", "DCRGuided", "DCRGuidedKept"]

PAPER = "arXiv 2511.18670"


@method("dcr", title="DCR", source=f"{PAPER}, Eq. 1, aggr20")
class DCR(Method):
    """x + alpha T(h) + (1 - alpha) S(h), alpha deterministic; no guidance unless `weight` says so."""

    alpha: ScheduleText = "aggr20"
    weight: float = Field(default=0.0, ge=0.0)
    guidance: ScheduleText = "alpha"
    reduction: Literal["relative", "mean", "sum", "cosine"] = "relative"
    teacher_gradient: bool = True

    @model_validator(mode="after")
    def _ends(self) -> DCR:
        if schedule(self.alpha)(1.0) != 0.0:
            raise ValueError(f"alpha {self.alpha!r} does not end at 0")
        return self

    def gate(self) -> Any:
        """The gate of all sites."""
        return Deterministic(schedule(self.alpha))

    def stages(self, steps: int, lr: float) -> tuple[Stage, ...]:
        """One stage."""
        dfg = DeepFeatureGuidance(self.weight, schedule(self.guidance), self.reduction) if self.weight > 0.0 else None
        return (Joint(steps, lr, self.gate(), dfg, teacher_gradient=self.teacher_gradient, name="fade"),)


@method("dcr+dfg", title="DCR + DFG", source=f"{PAPER}, Eq. 1 and DFG; lambda follows alpha")
class DCRGuided(DCR):
    """As in the paper: lambda follows alpha, so both end together."""

    weight: float = Field(default=1.0, gt=0.0)


@method("dcr+dfg-kept", title="DCR + DFG, kept", source=f"{PAPER}; lambda kept to the end is ours")
class DCRGuidedKept(DCR):
    """Lambda stays to the end of the run."""

    weight: float = Field(default=1.0, gt=0.0)
    guidance: ScheduleText = 1.0


@method("adaptive", title="DCR, adaptive", source="ours: alpha of each site follows its own interface cosine")
class AdaptiveDCR(DCR):
    """Each site fades as its own student comes to agree with its teacher; `alpha` is the upper bound."""

    alpha: ScheduleText = "linear:0.8"
    low: float = 0.5
    high: float = 0.95

    def gate(self) -> Any:
        """The gate of all sites."""
        return Deterministic(Adaptive(low=self.low, high=self.high, at_most=schedule(self.alpha)))


@method("adaptive+dfg", title="DCR, adaptive, + DFG, kept", source="ours")
class AdaptiveDCRGuided(AdaptiveDCR):
    """The adaptive rule with lambda kept: without guidance little moves the cosine."""

    weight: float = Field(default=1.0, gt=0.0)
    guidance: ScheduleText = 1.0
