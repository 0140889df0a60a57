"""What a method is: settings from which the stages of a run follow. One file per family; a file registers itself.

A method says nothing of data, budget or student: those are the experiment's, and the same for all methods.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import AfterValidator, Field

from ...errors import PlanError
from ...gates import Deterministic, Gate
from ...guidance import Guidance
from ...registry import decode
from ...schedules import Schedule, as_schedule, cosine, hold, linear
from ..base import Registry, Settings, checked

__all__ = ["METHODS", "Align", "Distill", "Joint", "Method", "ScheduleText", "Stage", "build", "method", "schedule"]


@dataclass(frozen=True)
class Distill:
    """Distillation from a full forward of the original model.

    Attributes:
        logits: Weight of the loss between the two models' outputs.
        temperature: Of the softmax, for tasks with classes.
        features: Weight of the relative squared error between the outputs of the sites in the two models, each on its
            own stream (rigid feature matching).
        cache: Keep the original's outputs per sample, where the task's data does not change from epoch to epoch and no
            features are asked for.
    """

    logits: float = 1.0
    temperature: float = 2.0
    features: float = 0.0
    cache: bool = False


@dataclass(frozen=True)
class Align:
    """A stage of `fade.align`: capture once, then train every student by itself."""

    steps: int
    lr: float
    batch_size: int
    samples: int
    betas: tuple[float, float] = (0.9, 0.95)
    name: str = "align"


@dataclass(frozen=True)
class Joint:
    """A stage of optimizer steps through the whole network.

    Attributes:
        steps: Optimizer steps.
        gate: Of all sites.
        guidance: Of all sites.
        task: Weight of the task loss.
        distill: Distillation from a full forward of the original.
        lr: Peak rate of the students.
        name: In curves and tables.
    """

    steps: int
    lr: float
    gate: Gate = field(default_factory=lambda: Deterministic(0.0))
    guidance: Guidance | None = None
    task: float = 1.0
    distill: Distill | None = None
    teacher_gradient: bool = True
    name: str = "joint"


Stage = Align | Joint


class Method(Settings):
    """The base of all methods.

    Attributes:
        lr: Peak learning rate of the joint stage; None: the experiment's.
        steps: Optimizer steps of the joint stage; None: the experiment's.
        student: Another student than the experiment's, in the registry's plain form.
    """

    source: ClassVar[str] = ""
    title: ClassVar[str] = ""
    tunes: ClassVar[str] = "lr"  # the setting that `crossfade tune` tries values of
    lr: float | None = Field(default=None, gt=0.0)
    steps: int | None = Field(default=None, ge=0)
    student: Any = None

    def stages(self, steps: int, lr: float) -> tuple[Stage, ...]:
        """The stages of a run of the experiment's `steps` at its rate `lr`, unless the method has its own."""
        raise NotImplementedError

    def resolved(self, steps: int, lr: float) -> tuple[Stage, ...]:
        """The stages with the method's own steps and rate filled in."""
        return self.stages(self.steps if self.steps is not None else steps, self.lr if self.lr is not None else lr)


METHODS: Registry[type[Method]] = Registry("method")
M = TypeVar("M", bound=type[Method])


def method(name: str, *, title: str, source: str) -> Callable[[M], M]:
    """Register a method under the name that the command line uses.

    Args:
        name: Such as `dcr+dfg`.
        title: A few words for tables.
        source: Paper, section or report that it comes from.
    """

    def add(cls: M) -> M:
        cls.title, cls.source = title, source
        METHODS.add(name)(cls)
        return cls

    return add


def build(label: str, settings: Mapping[str, Any]) -> Method:
    """The method of a label. `settings` may name another base: `{"method": "dcr", "lr": 1e-2}`.

    Raises:
        InputError: An unknown method or setting.
    """
    fields = dict(settings)
    base = fields.pop("method", label)
    return checked(METHODS[base], fields, f"methods.{label}")


def schedule(value: Any) -> Any:
    """A schedule from plain data: a registered name or number, the registry's form, or `shape:until`.

    `linear:0.5` and `cosine:0.5` fall from 1 to 0 over the first half; `hold:0.2` stays at 1 for a fifth, then is 0.

    Raises:
        PlanError: None of these.
    """
    if isinstance(value, str) and ":" in value:
        shape, _, until = value.partition(":")
        try:
            end = float(until)
            return _SHAPES[shape](end)
        except (ValueError, KeyError):
            raise PlanError(
                "this is not a schedule.", expected="linear:0.5, cosine:0.5 or hold:0.2", got=repr(value)
            ) from None
    decoded = decode(value)
    return decoded if decoded == "alpha" else as_schedule(decoded)


_SHAPES: dict[str, Callable[[float], Schedule]] = {
    "linear": lambda end: linear(until=end),
    "cosine": lambda end: cosine(until=end),
    "hold": lambda end: hold(1.0, end, 0.0),
}


def _written(value: Any) -> Any:
    schedule(value)
    return value


# A schedule as it stands in settings: plain data that has been checked. `schedule` makes the function of it.
ScheduleText = Annotated[Any, AfterValidator(_written)]
