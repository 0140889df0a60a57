"""Plans: what to replace, by what, how the hand-over goes, and what trains. Data only; `install` interprets it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from .errors import PlanError
from .gates import Deterministic, Gate
from .guidance import Guidance
from .outputs import Where
from .registry import decode, encode, nearest, register
from .students import Reinit, StudentLike
from .targets import Run, Target, Targets

__all__ = ["Plan", "Swap", "Trains"]

Trains = Literal["students", "all"] | tuple[str, ...]

PLAN_VERSION = 1

register("target", "Run")(Run)
register("target", "Targets")(Targets)


@register("plan", "Swap")
@dataclass(frozen=True, kw_only=True)
class Swap:
    """One kind of replacement at one or many sites.

    Attributes:
        targets: What `crossfade.select` accepts.
        student: A registered name, a factory `(teacher, site) -> module`, a module, or modules by path.
        gate: `Deterministic` (DCR), `Bernoulli`, `Gumbel`, or yours.
        guidance: A local loss at the interface, or None.
        output: Place of the main tensor in the site's output; `"auto"` finds it.
        residual: True when the site contains its residual connection (a whole block): agreement is then measured on
            output - input. None: true for runs, false else.
        teacher_gradient: Whether gradients reach earlier students through this teacher. False saves the teacher's
            backward pass and biases the gradient upstream.
        drop: Keyword arguments of the call that the student does not take and may lose.
        carry: Names of attributes that other code reads; `finalize` copies them from teacher to student, unless the
            student defines them itself.
    """

    targets: Target
    student: StudentLike = field(default_factory=Reinit)
    gate: Gate = field(default_factory=Deterministic)
    guidance: Guidance | None = None
    output: Where | Literal["auto"] = "auto"
    residual: bool | None = None
    teacher_gradient: bool = True
    drop: tuple[str, ...] = ()
    carry: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("drop", "carry"):
            value = getattr(self, name)
            if isinstance(value, str):
                raise PlanError(f"{name} is a sequence of names, not one string.", got=repr(value), do=f"[{value!r}]")
            object.__setattr__(self, name, tuple(value))
        if isinstance(self.targets, list):
            object.__setattr__(self, "targets", tuple(self.targets))
        for name in ("gate", "guidance"):
            if isinstance(getattr(self, name), type):
                cls = getattr(self, name).__name__
                raise PlanError(f"{name} is a class, not an instance.", got=cls, do=f"{name}={cls}()")
        if not callable(getattr(self.gate, "weight", None)):
            raise PlanError(
                "this is not a gate.", expected="Deterministic, Bernoulli, Gumbel, or yours", got=repr(self.gate)
            )
        if self.guidance is not None and not callable(getattr(self.guidance, "error", None)):
            raise PlanError("this is not a guidance.", expected="DeepFeatureGuidance or yours", got=repr(self.guidance))


_SWAP_FIELDS = tuple(Swap.__dataclass_fields__)


@register("plan", "Plan")
@dataclass(frozen=True, init=False)
class Plan:
    """A tuple of swaps, what trains, and the seed.

    `Plan(targets=..., student=..., gate=..., guidance=...)` is short for a plan of one swap.

    Args:
        swaps: The swaps; leave out when giving the fields of a single one.
        trains: `"students"` (default: the backbone is frozen), `"all"` (everything but the teachers), or globs on
            parameter or module paths that train beside the students (norms, head).
        seed: Of the students' initialisation and of the gates' draws.
        version: Of the plan's format.
        swap: The fields of a single `Swap`.

    Raises:
        PlanError: No swap, an unknown field, an unknown version.

    Example:
        >>> plan = Plan(targets="blocks.*.attn", gate=Deterministic("linear"))
        >>> Plan.from_dict(plan.to_dict()) == plan
        True
    """

    swaps: tuple[Swap, ...]
    trains: Trains
    seed: int
    version: int

    def __init__(
        self,
        swaps: Iterable[Swap] = (),
        *,
        trains: Literal["students", "all"] | Iterable[str] = "students",
        seed: int = 0,
        version: int = PLAN_VERSION,
        **swap: Any,
    ) -> None:
        for name in swap:
            if name not in _SWAP_FIELDS:
                raise PlanError(
                    f"a plan has no field {name!r}.",
                    expected=", ".join(("swaps", "trains", "seed", *_SWAP_FIELDS)),
                    do=nearest(name, ["swaps", "trains", "seed", *_SWAP_FIELDS]),
                )
        given = (swaps,) if isinstance(swaps, Swap) else tuple(swaps)
        if bool(given) == bool(swap):
            raise PlanError(
                "a plan needs either swaps or the fields of a single one.", expected="targets=...", got=swap or given
            )
        for swap_given in given:
            if not isinstance(swap_given, Swap):
                raise PlanError(
                    "a plan holds swaps.",
                    expected="Swap(...), or Plan(targets=...)",
                    got=repr(swap_given),
                    where="swaps",
                )
        if version != PLAN_VERSION:
            raise PlanError("this plan has another format.", expected=f"version {PLAN_VERSION}", got=version)
        if type(seed) is not int:
            raise PlanError("the seed is a whole number.", got=repr(seed))
        if not isinstance(trains, str):
            trains = tuple(trains)
        elif trains not in ("students", "all"):
            raise PlanError(
                "unknown value of trains.",
                expected='"students", "all", or a list of globs',
                got=repr(trains),
                do=f"[{trains!r}]",
            )
        if "targets" not in swap and not given:
            raise PlanError("a plan needs targets.", expected='targets="blocks.*.attn"', got=swap)
        object.__setattr__(self, "swaps", given or (Swap(**swap),))
        object.__setattr__(self, "trains", trains)
        object.__setattr__(self, "seed", seed)
        object.__setattr__(self, "version", version)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON or YAML.

        Raises:
            PlanError: The plan holds something without a registered name; the message says where.
        """
        result: dict[str, Any] = encode(self)
        return result

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Plan:
        """The inverse of `to_dict`; names resolve only through the registry.

        Raises:
            PlanError: An unknown kind, name, key or version.
        """
        plan = decode(data)
        if not isinstance(plan, cls):
            raise PlanError("this is not a plan.", expected='{"kind": "plan:Plan", ...}', got=type(plan).__name__)
        return plan

    def fingerprint(self) -> str:
        """A short hash that changes when the plan does. Unregistered parts enter by their class."""
        try:
            text = json.dumps(self.to_dict(), sort_keys=True)
        except PlanError:
            text = _named(self)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def _named(value: Any) -> str:
    """A text for anything in a plan that is the same in every process: no addresses."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = ", ".join(f"{f.name}={_named(getattr(value, f.name))}" for f in dataclasses.fields(value))
        return f"{type(value).__qualname__}({fields})"
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(_named(item) for item in value)}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {_named(item)}' for key, item in value.items())}}}"
    if value is None or isinstance(value, (bool, int, float, str, re.Pattern)):
        return repr(value)
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}.{named.__qualname__}"
