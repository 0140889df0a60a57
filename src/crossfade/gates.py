"""Gates: how a site's alpha becomes the weight `w` of its teacher in one optimizer step.

    y = w T(h) + (1 - w) S(h)

A gate is frozen data; it holds its alpha (a schedule, a resolver, or the settings of an adaptive controller). It has no
generator: a draw is a function of (seed, site, step) alone, so resuming needs only the step, all ranks agree, and the
data order never depends on the method. In evaluation `w = alpha` for every gate.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from .errors import PlanError
from .registry import register
from .schedules import InSteps, Resolver, Schedule, ScheduleLike, as_schedule, hold, linear, resolve, value_at

__all__ = [
    "Adaptive",
    "AlphaLike",
    "Bernoulli",
    "Controller",
    "Deterministic",
    "Gate",
    "Gumbel",
    "as_alpha",
    "check_alpha",
    "uniform",
]


def uniform(seed: int, site: str, step: int) -> float:
    """One number in (0, 1), a function of its arguments alone, equal on every machine.

    Args:
        seed: The plan's seed.
        site: The site's path; another site draws independently (BERT-of-Theseus draws per module).
        step: The optimizer step.

    Example:
        >>> uniform(0, "blocks.0.attn", 7) == uniform(0, "blocks.0.attn", 7) != uniform(0, "blocks.1.attn", 7)
        True
    """
    digest = hashlib.blake2b(f"{seed}\0{site}\0{step}".encode(), digest_size=8).digest()
    # 52 bits and a half: never 0 or 1, so that the logit below is finite.
    return ((int.from_bytes(digest, "big") >> 12) + 0.5) / 2.0**52


def check_alpha(value: float, where: str) -> float:
    """`value` if it lies in [0, 1].

    Raises:
        PlanError: It does not; alpha is the weight of the teacher.
    """
    if not 0.0 <= value <= 1.0:
        raise PlanError("alpha left its range.", where=where, expected="a number in [0, 1]", got=value)
    return value


@register("controller", "Adaptive")
@dataclass(frozen=True, kw_only=True)
class Adaptive:
    """Alpha of each site driven by how well its own student agrees with its teacher.

    With interface similarity c (cosine of S(h) and T(h) over valid positions, smoothed over steps):
    `alpha = 1 - clip((c - low) / (high - low), 0, 1)`, never rising again, and never above `at_most(t)`, so that the
    fade ends whatever the students do.

    Attributes:
        low: Similarity at which the fade begins.
        high: Similarity at which the student has taken over.
        smoothing: Weight of the past in the exponential moving average of the similarity, in [0, 1).
        at_most: Upper bound of alpha over the run. One that does not end at 0 leaves it to the students whether
            the fade ends; `finalize` refuses if they did not.
    """

    low: float = 0.5
    high: float = 0.95
    smoothing: float = 0.8
    at_most: ScheduleLike = field(default_factory=lambda: hold(1.0, 0.5, linear(until=0.8)))

    def __post_init__(self) -> None:
        object.__setattr__(self, "at_most", as_schedule(self.at_most))
        if not -1.0 <= self.low < self.high <= 1.0:
            raise PlanError(
                "the similarities are out of order.", expected="-1 <= low < high <= 1", got=(self.low, self.high)
            )
        if not 0.0 <= self.smoothing < 1.0:
            raise PlanError("smoothing is out of range.", expected="0 <= smoothing < 1", got=self.smoothing)


class Controller:
    """The state of `Adaptive` for one site: smoothed similarity and the lowest alpha so far.

    Example:
        >>> controller = Controller(Adaptive(low=0.0, high=1.0, smoothing=0.0))
        >>> controller.observe(0.25)
        >>> controller.alpha(step=0, total=10), controller.alpha(step=10, total=10)
        (0.75, 0.0)
    """

    def __init__(self, settings: Adaptive) -> None:
        self.settings = settings
        self.similarity: float | None = None
        self.lowest = 1.0

    def observe(self, similarity: float) -> None:
        """Take in one step's similarity, already averaged over micro-batches and ranks."""
        if not math.isfinite(similarity):
            return  # The step's own check names the site; alpha must not move on such a value.
        s = self.settings.smoothing
        self.similarity = similarity if self.similarity is None else s * self.similarity + (1.0 - s) * similarity

    def alpha(self, step: int, total: int | None) -> float:
        """Alpha at `step`; never higher than before."""
        low, high = self.settings.low, self.settings.high
        if self.similarity is not None:
            share = min(1.0, max(0.0, (self.similarity - low) / (high - low)))
            self.lowest = min(self.lowest, 1.0 - share)
        self.lowest = min(self.lowest, value_at(as_schedule(self.settings.at_most), step, total))
        return self.lowest

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers."""
        return {"similarity": self.similarity, "lowest": self.lowest}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        self.similarity, self.lowest = state["similarity"], float(state["lowest"])


AlphaLike = ScheduleLike | Resolver | Adaptive


def as_alpha(value: AlphaLike) -> Schedule | Resolver | Adaptive:
    """A checked alpha: its values lie in [0, 1] at every hundredth of the run.

    Raises:
        PlanError: Not a schedule, or it leaves [0, 1].
    """
    if isinstance(value, Adaptive):
        as_alpha(value.at_most)
        return value
    if isinstance(value, Resolver):
        # One schedule per site cannot be asked before the number of sites is known; install checks each site again.
        if not isinstance(getattr(value, "choose", None), (list, tuple)):
            for index in range(3):
                as_alpha(value.resolve("", index, 3))
        return value
    schedule = as_schedule(value)
    steps = schedule.total if isinstance(schedule, InSteps) else 100
    for k in range(101):
        check_alpha(value_at(schedule, round(k * steps / 100), steps), f"t = {k / 100}")
    return schedule


class Gate(Protocol):
    """What crossfade asks of a gate. Yours is any frozen dataclass with these members."""

    @property
    def alpha(self) -> AlphaLike:
        """Schedule, resolver or adaptive settings."""
        ...

    @property
    def hard(self) -> bool:
        """True when `w` is only ever 0 or 1: the blend then selects instead of mixing."""
        ...

    @property
    def execution(self) -> Literal["both", "skip"]:
        """Whether the branch of weight 0 runs while training."""
        ...

    def weight(self, alpha: float, draw: float) -> float:
        """The weight of the teacher, from its alpha and one uniform number in (0, 1)."""
        ...


@register("gate", "Deterministic")
@dataclass(frozen=True)
class Deterministic:
    """DCR: `w = alpha` (arXiv 2511.18670, Eq. 1). No variance from the gate.

    Example:
        >>> Deterministic("aggr20").weight(0.3, draw=0.9)
        0.3
    """

    alpha: AlphaLike = "aggr20"
    hard: bool = field(default=False, init=False, repr=False)
    execution: Literal["both", "skip"] = field(default="both", init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "alpha", as_alpha(self.alpha))

    def weight(self, alpha: float, draw: float) -> float:
        """Alpha itself."""
        return alpha


@register("gate", "Bernoulli")
@dataclass(frozen=True)
class Bernoulli:
    """BERN: `w` is 1 with probability alpha, else 0, drawn per site and optimizer step.

    BERT-of-Theseus (arXiv 2002.02925) replaces a module with probability p; here P(student) = 1 - alpha = p.

    Attributes:
        alpha: P(w = 1), the probability of the teacher.
        execution: `"both"` runs teacher and student and selects (one graph under compilation, all parameters used
            under DDP); `"skip"` runs only the chosen one, as Theseus does (eager, one process).
        granularity: `"site"` draws for every site by itself, `"shared"` once for all sites of a step.
    """

    alpha: AlphaLike = "aggr20"
    execution: Literal["both", "skip"] = "both"
    granularity: Literal["site", "shared"] = "site"
    hard: bool = field(default=True, init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "alpha", as_alpha(self.alpha))
        if self.execution not in ("both", "skip"):
            raise PlanError("unknown execution.", expected='"both" or "skip"', got=repr(self.execution))
        if self.granularity not in ("site", "shared"):
            raise PlanError("unknown granularity.", expected='"site" or "shared"', got=repr(self.granularity))

    def weight(self, alpha: float, draw: float) -> float:
        """1 when the draw falls below alpha; exact at alpha 0 and 1."""
        return 1.0 if draw < alpha else 0.0


@register("gate", "Gumbel")
@dataclass(frozen=True)
class Gumbel:
    """GUM: `w = sigmoid((logit(alpha) + logistic noise) / temperature)`, a relaxed Bernoulli gate.

    (Concrete distribution, arXiv 1611.00712, binary case.) Its mean is not alpha: 0.362 at alpha 0.3, temperature 1.

    Attributes:
        alpha: Probability that w > 1/2.
        temperature: > 0; towards 0 the gate hardens.
        granularity: `"site"` or `"shared"`, as for `Bernoulli`.
    """

    alpha: AlphaLike = "aggr20"
    temperature: float = 1.0
    granularity: Literal["site", "shared"] = "site"
    hard: bool = field(default=False, init=False, repr=False)
    execution: Literal["both", "skip"] = field(default="both", init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "alpha", as_alpha(self.alpha))
        if not (math.isfinite(self.temperature) and self.temperature > 0.0):
            raise PlanError("the temperature must be positive.", expected="> 0", got=self.temperature)
        if self.granularity not in ("site", "shared"):
            raise PlanError("unknown granularity.", expected='"site" or "shared"', got=repr(self.granularity))

    def weight(self, alpha: float, draw: float) -> float:
        """The relaxed gate, in double precision; exactly 0 and 1 at alpha 0 and 1."""
        if alpha in (0.0, 1.0):
            return alpha
        z = (math.log(alpha) - math.log1p(-alpha) + math.log(draw) - math.log1p(-draw)) / self.temperature
        return 1.0 / (1.0 + math.exp(-z)) if z >= 0 else 1.0 - 1.0 / (1.0 + math.exp(min(z, 700.0)))


def alpha_of_site(gate: Gate, site: str, index: int, n: int) -> Schedule | Controller:
    """The schedule, or a fresh controller, that drives one site."""
    if isinstance(gate.alpha, Adaptive):
        return Controller(gate.alpha)
    schedule = resolve(gate.alpha, site, index, n)
    as_alpha(schedule)
    return schedule


def draw_key(gate: Gate, site: str) -> str:
    """Whose draw a site uses: its own path, or one for all sites."""
    return "" if getattr(gate, "granularity", "site") == "shared" else site
