"""Hard swaps: the student at once, with and without guidance; the floor; and a function-preserving start."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from ...gates import Deterministic
from ...guidance import DeepFeatureGuidance
from .base import Joint, Method, ScheduleText, Stage, method, schedule

__all__ = ["Floor", "Net2Net", "StudentOnly", "StudentOnlyGuided", "StudentOnlyGuidedKept"]


@method("student-only", title="student-only", source="the usual hard swap")
class StudentOnly(Method):
    """alpha = 0 from the first step; the task loss alone unless `weight` says otherwise."""

    weight: float = Field(default=0.0, ge=0.0)
    guidance: ScheduleText = 1.0
    reduction: Literal["relative", "mean", "sum", "cosine"] = "relative"

    def stages(self, steps: int, lr: float) -> tuple[Stage, ...]:
        """One stage."""
        dfg = DeepFeatureGuidance(self.weight, schedule(self.guidance), self.reduction) if self.weight > 0.0 else None
        return (Joint(steps, lr, Deterministic(0.0), dfg, name="student"),)


@method("student+dfg", title="student-only + DFG, annealed", source="arXiv 2511.18670's DFG without the blend; aggr20")
class StudentOnlyGuided(StudentOnly):
    """Lambda falls as alpha would."""

    weight: float = Field(default=1.0, gt=0.0)
    guidance: ScheduleText = "aggr20"


@method("student+dfg-kept", title="student-only + DFG, kept", source="ours: DFG without the blend, kept")
class StudentOnlyGuidedKept(StudentOnly):
    """Lambda stays to the end of the run."""

    weight: float = Field(default=1.0, gt=0.0)


@method("floor", title="floor (cold, untrained)", source="hard swap without training")
class Floor(Method):
    """What the untrained students score."""

    def stages(self, steps: int, lr: float) -> tuple[Stage, ...]:
        """None."""
        return ()


@method("net2net", title="function-preserving start", source="Net2Net, arXiv 1511.05641, section 2")
class Net2Net(StudentOnly):
    """Students that compute the teacher's function at the start, then the task loss.

    Only for students whose class can hold the teacher's weights; for self-replacement that is a copy.
    """

    student: Any = Field(default_factory=lambda: {"kind": "student:Copy"})
