"""CKA as the guidance: agreement up to rotation and scale, instead of squared error."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pydantic import Field
from torch import Tensor

from ... import metrics
from ...ledger import Term
from ...registry import register
from ...schedules import Resolver, ScheduleLike, as_schedule
from .base import Joint, ScheduleText, Stage, method, schedule
from .dcr import DCR

__all__ = ["DCRCKA", "CKAGuidance"]


@register("guidance", "CKA")
@dataclass(frozen=True)
class CKAGuidance:
    """1 - linear CKA of the batch (Kornblith et al., arXiv 1905.00414), over valid positions.

    Attributes:
        weight: lambda_0.
        schedule: Shape of lambda, or `"alpha"`.
        site_weights: Factors by site path.
        mask: Leave out padded positions.
    """

    weight: float = 1.0
    schedule: ScheduleLike | Resolver = 1.0
    site_weights: Mapping[str, float] = field(default_factory=dict)
    mask: bool = True
    detach_input: bool = field(default=False, init=False)
    needs_power: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        if self.schedule != "alpha" and not isinstance(self.schedule, Resolver):
            object.__setattr__(self, "schedule", as_schedule(self.schedule))

    def error(self, student: Tensor, teacher: Tensor, mask: Tensor | None) -> Tensor:
        """(1 - CKA) times the number of positions, 0-dim float32."""
        return (1.0 - metrics.cka(student, teacher, mask)) * metrics.count(teacher, mask)

    def reduce(self, term: Term, items: Tensor, power: Tensor | float | None) -> Tensor:
        """Per position."""
        return term.error / items.clamp_min(1.0)


@method("dcr+cka", title="DCR + CKA, kept", source="arXiv 2511.18670 with CKA (1905.00414) as its guidance")
class DCRCKA(DCR):
    """The blend with CKA in the place of the squared error."""

    weight: float = Field(default=1.0, gt=0.0)
    guidance: ScheduleText = 1.0

    def stages(self, steps: int, lr: float) -> tuple[Stage, ...]:
        """One stage."""
        loss = CKAGuidance(self.weight, schedule(self.guidance))
        return (Joint(steps, lr, self.gate(), loss, teacher_gradient=self.teacher_gradient, name="fade"),)
