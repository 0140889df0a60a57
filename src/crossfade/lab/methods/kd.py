"""Knowledge distillation from a full forward of the original model: logits, and rigid feature matching."""

from __future__ import annotations

from pydantic import Field

from ...gates import Deterministic
from .base import Distill, Joint, Method, Stage, method

__all__ = ["KD", "KDFeatures"]


@method("kd", title="KD, logits", source="Hinton et al., arXiv 1503.02531")
class KD(Method):
    """Cross-entropy with the labels and with the original's softened outputs."""

    task: float = Field(default=0.5, ge=0.0)
    logits: float = Field(default=0.5, ge=0.0)
    temperature: float = Field(default=2.0, gt=0.0)
    features: float = Field(default=0.0, ge=0.0)
    cache: bool = False

    def stages(self, steps: int, lr: float) -> tuple[Stage, ...]:
        """One stage."""
        distill = Distill(self.logits, self.temperature, self.features, self.cache)
        return (Joint(steps, lr, Deterministic(0.0), task=self.task, distill=distill, name="distil"),)


@method("kd+features", title="KD, logits + features", source="arXiv 1503.02531; features: FitNets, 1412.6550")
class KDFeatures(KD):
    """Also the outputs of the replaced sites, each model on its own stream."""

    features: float = Field(default=1.0, gt=0.0)
