"""Label-free alignment on captured interface inputs: alone, and before a fade or a distillation."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from ...gates import Deterministic
from ...guidance import DeepFeatureGuidance
from .base import Align, Distill, Joint, Method, ScheduleText, Stage, method, schedule

__all__ = ["AlignFade", "AlignKD", "Aligned", "Local"]


@method("local", title="local transfer, then hard switch", source="LoLCATs' attention transfer, arXiv 2410.10254")
class Local(Method):
    """alpha = 1 with guidance on fresh batches (the teacher drives every input), then the student and the task loss."""

    share: float = Field(default=0.2, gt=0.0, le=1.0)
    weight: float = Field(default=1.0, gt=0.0)

    def stages(self, steps: int, lr: float) -> tuple[Stage, ...]:
        """Two phases of one stage, so that rate and budget are those of the rivals."""
        hard = schedule(f"hold:{self.share}") if self.share < 1.0 else schedule(1.0)
        return (Joint(steps, lr, Deterministic(hard), DeepFeatureGuidance(self.weight, "alpha"), name="local"),)


class _Cached(Method):
    align_steps: int = Field(default=400, ge=1)
    align_lr: float = Field(default=1e-2, gt=0.0)
    align_batch: int = Field(default=16, ge=1)
    samples: int = Field(default=1024, ge=2)

    def aligned(self) -> Align:
        """The first stage."""
        return Align(self.align_steps, self.align_lr, self.align_batch, self.samples)


@method("align", title="cached alignment", source="ours: Fade.align; attention transfer of arXiv 2410.10254 on a cache")
class Aligned(_Cached):
    """Alignment alone: no labels, no backward through the backbone. `steps` of the experiment is not used."""

    tunes: ClassVar[str] = "align_lr"

    def stages(self, steps: int, lr: float) -> tuple[Stage, ...]:
        """One stage."""
        return (self.aligned(),)


@method("align+fade", title="alignment, then fade", source="ours; the fade is arXiv 2511.18670's with lambda kept")
class AlignFade(_Cached):
    """Alignment, then DCR with guidance kept."""

    alpha: ScheduleText = "aggr20"
    weight: float = Field(default=1.0, ge=0.0)
    guidance: ScheduleText = 1.0

    def stages(self, steps: int, lr: float) -> tuple[Stage, ...]:
        """Two stages."""
        dfg = DeepFeatureGuidance(self.weight, schedule(self.guidance)) if self.weight > 0.0 else None
        return (self.aligned(), Joint(steps, lr, Deterministic(schedule(self.alpha)), dfg, name="fade"))


@method("align+kd", title="alignment, then KD, logits + features", source="ours; arXiv 1503.02531")
class AlignKD(_Cached):
    """Alignment, then distillation: for students that cannot represent their teacher."""

    task: float = Field(default=0.5, ge=0.0)
    logits: float = Field(default=0.5, ge=0.0)
    temperature: float = Field(default=2.0, gt=0.0)
    features: float = Field(default=1.0, ge=0.0)

    def stages(self, steps: int, lr: float) -> tuple[Stage, ...]:
        """Two stages."""
        distill = Distill(self.logits, self.temperature, self.features)
        return (self.aligned(), Joint(steps, lr, Deterministic(0.0), task=self.task, distill=distill, name="distil"))
