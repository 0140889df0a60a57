"""One place of replacement while a plan is installed: its blend, and what drives it from step to step."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .blend import Blend
from .errors import StateError
from .gates import Controller, alpha_of_site, check_alpha, draw_key, uniform
from .guidance import DEAD, Power, lambda_at
from .ledger import Term
from .plan import Swap
from .runs import PassThrough
from .schedules import InSteps, Schedule, value_at
from .targets import Run

__all__ = ["Phase", "Site"]

Phase = Literal["align", "blend", "guide", "student"]


@dataclass(eq=False)
class Site:
    """The state of one site.

    Attributes:
        path: First module path; the key in logs and checkpoints.
        paths: Every path at which the blend stands.
        index: Number of the site in its swap, of `n`.
        swap: The part of the plan that it belongs to.
        blend: The wrapper in the model.
        run: The run it replaces, or None for a single module.
        fillers: The pass-through modules of a run.
        parameters: The teacher's parameter count.
    """

    path: str
    paths: tuple[str, ...]
    index: int
    n: int
    swap: Swap
    blend: Blend
    run: Run | None = None
    fillers: tuple[PassThrough, ...] = ()
    parameters: int = 0
    teacher_class: str = ""
    teacher_hash: str = ""
    teacher_flags: list[tuple[nn.Parameter, bool]] = field(default_factory=list)
    teacher_modes: list[tuple[nn.Module, bool]] = field(default_factory=list)
    carried: dict[str, Any] = field(default_factory=dict)
    encoders: list[nn.TransformerEncoder] = field(default_factory=list)
    power: Power = field(default_factory=Power)
    alpha: float = 1.0
    weight: float = 1.0
    lam: float = 0.0
    driver: Schedule | Controller = field(init=False)

    def __post_init__(self) -> None:
        self.drive(self.swap)

    def drive(self, swap: Swap) -> None:
        """Take gate and guidance from `swap`; teacher and student stay."""
        self.swap = swap
        self.driver = alpha_of_site(swap.gate, self.path, self.index, self.n)
        guidance = swap.guidance
        self.blend.guidance_error = None if guidance is None else guidance.error
        self.blend.detach_input = guidance is not None and guidance.detach_input
        self.blend.use_mask = guidance is None or guidance.mask
        self.blend.teacher_gradient = swap.teacher_gradient

    def restore(self, swap: Swap, driver: Schedule | Controller, values: tuple[float, float, float]) -> None:
        """Take back a `drive`: also the controller's state and the values of the step."""
        self.drive(swap)
        self.driver = driver
        self.alpha, self.weight, self.lam = values
        self.apply()

    @property
    def phase(self) -> Phase:
        """align, blend, guide or student."""
        if self.alpha == 1.0:
            return "align"
        if self.alpha > 0.0:
            return "blend"
        return "guide" if self.lam > 0.0 else "student"

    @property
    def adaptive(self) -> bool:
        """Whether a controller drives alpha."""
        return isinstance(self.driver, Controller)

    def seek(self, step: int, total: int | None, seed: int) -> None:
        """Set alpha, gate and lambda of optimizer step `step`."""
        gate = self.swap.gate
        if isinstance(self.driver, Controller):
            self.alpha = self.driver.alpha(step, total)
        else:
            self.alpha = check_alpha(value_at(self.driver, step, total), f"{self.path}, step {step}")
        self.weight = gate.weight(self.alpha, uniform(seed, draw_key(gate, self.path), step))
        guidance = self.swap.guidance
        if guidance is None:
            self.lam = 0.0
        else:
            self.lam = lambda_at(guidance, self.path, self.index, self.n, alpha=self.alpha, step=step, total=total)
        self.apply()

    def apply(self) -> None:
        """Write the current values into the blend."""
        gate = self.swap.gate
        self.blend.set_gate(alpha=self.alpha, weight=self.weight, hard=gate.hard, skip=gate.execution == "skip")
        self.blend.guided = self.lam > 0.0 and self.blend.teacher is not None
        guidance = self.swap.guidance
        self.blend.calibrating = guidance is not None and guidance.needs_power and not self.power.fixed

    def over_at(self, step: int, total: int | None) -> bool:
        """Whether from `step` on the teacher is never needed again (alpha and lambda stay 0)."""
        if self.alpha > 0.0 or self.lam > 0.0:
            return False
        guidance = self.swap.guidance
        horizon = max([total or 0, *(s.total for s in self._schedules() if isinstance(s, InSteps))])
        for k in range(step, horizon + 1):
            # A controller is monotone: at 0 it stays there.
            alpha = 0.0 if isinstance(self.driver, Controller) else value_at(self.driver, k, total)
            if alpha > 0.0:
                return False
            if guidance is not None:
                lam = lambda_at(guidance, self.path, self.index, self.n, alpha=alpha, step=k, total=total)
                if lam > 0.0:
                    return False
        return True

    def _schedules(self) -> list[Any]:
        return [self.driver, getattr(self.swap.guidance, "schedule", None)]

    def guidance_value(self, terms: list[Term], items: Tensor | None) -> Tensor:
        """Lambda times the mean over calls of the guidance error, 0-dim float32 with its gradient."""
        guidance = self.swap.guidance
        if guidance is None:
            raise StateError("this site has no guidance.", where=self.path, do="give its swap guidance=")
        power: Tensor | float | None = None
        if guidance.needs_power:
            power = self.power.value if self.power.fixed else self._running_power(terms)
        values = [guidance.reduce(term, term.positions if items is None else items, power) for term in terms]
        if isinstance(power, Tensor):  # Of a teacher that answers 0 nothing is relative: the step's check stops there.
            values = [torch.where((power <= DEAD) & (value > 0), math.inf, value) for value in values]
        elif power is not None and power <= DEAD:
            raise StateError(
                "the teacher answers 0 everywhere here, so no error is relative to it.",
                where=self.path,
                do='guidance with reduction="mean", or leave this site out',
            )
        return self.lam * (values[0] if len(values) == 1 else torch.stack(values).mean())

    def _running_power(self, terms: list[Term]) -> Tensor:
        """Teacher power from the calls of the first step so far, without a device synchronisation."""
        total = torch.stack([term.power for term in terms if term.power is not None]).sum() + self.power.total
        positions = torch.stack([term.positions for term in terms]).sum() + self.power.positions
        return (total / positions.clamp_min(1.0)).clamp_min(DEAD)
