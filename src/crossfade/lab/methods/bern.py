"""Hard and relaxed random gates: BERN and BERT-of-Theseus, GUM; each with and without DFG."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from ...gates import Bernoulli, Gumbel
from .base import ScheduleText, method, schedule
from .dcr import DCR, PAPER

__all__ = ["Bern", "BernGuided", "Gum", "GumGuided", "Theseus", "TheseusLinear"]

THESEUS = "BERT-of-Theseus, arXiv 2002.02925"


@method("bern", title="BERN", source=f"{THESEUS}; at {PAPER}'s aggr20 rates")
class Bern(DCR):
    """A Bernoulli gate per site and step; both branches run, one is selected."""

    execution: Literal["both", "skip"] = "both"
    granularity: Literal["site", "shared"] = "site"

    def gate(self) -> Any:
        """The gate of all sites."""
        return Bernoulli(schedule(self.alpha), self.execution, self.granularity)


@method("bern+dfg", title="BERN + DFG", source=f"{THESEUS} and {PAPER}")
class BernGuided(Bern):
    """BERN with lambda following alpha."""

    weight: float = Field(default=1.0, gt=0.0)


@method("theseus", title="Theseus, constant", source=f"{THESEUS}, section 3: rate 0.5, then students alone")
class Theseus(Bern):
    """Replacing rate 0.5 for the first half, then fine-tuning of the successor; only the chosen branch runs."""

    alpha: ScheduleText = Field(
        default_factory=lambda: {
            "kind": "schedule:Join",
            "parts": [
                [0.5, {"kind": "schedule:Piecewise", "points": [[0.0, 0.5]]}],
                [1.0, {"kind": "schedule:Piecewise", "points": [[0.0, 0.0]]}],
            ],
        }
    )
    execution: Literal["both", "skip"] = "skip"


@method("theseus-linear", title="Theseus, linear", source=f"{THESEUS}, section 3.4: linear curriculum")
class TheseusLinear(Bern):
    """The replacing rate grows on a line from 0.3 to 1 over the first half; the slope is our choice."""

    alpha: ScheduleText = Field(
        default_factory=lambda: {"kind": "schedule:Piecewise", "points": [[0.0, 0.7], [0.5, 0.0]]}
    )
    execution: Literal["both", "skip"] = "skip"


@method("gum", title="GUM", source=f"Gumbel gate of {PAPER}; Concrete distribution, arXiv 1611.00712")
class Gum(DCR):
    """A relaxed Bernoulli gate per site and step."""

    temperature: float = Field(default=1.0, gt=0.0)
    granularity: Literal["site", "shared"] = "site"

    def gate(self) -> Any:
        """The gate of all sites."""
        return Gumbel(schedule(self.alpha), self.temperature, self.granularity)


@method("gum+dfg", title="GUM + DFG", source=f"{PAPER}; arXiv 1611.00712")
class GumGuided(Gum):
    """GUM with lambda following alpha."""

    weight: float = Field(default=1.0, gt=0.0)
