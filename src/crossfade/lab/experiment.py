"""`Experiment`: everything that a comparison depends on, as frozen data that is written beside its results."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, field_validator, model_validator

from ..registry import decode, lookup, nearest
from .base import Settings, checked
from .cache import content_hash
from .inputs import InputError
from .methods import Method, build
from .tasks import TASKS, Task

__all__ = ["Evaluation", "Experiment", "Training", "override", "read", "write"]


class Training(Settings):
    """How every method is trained, unless its own settings say otherwise.

    Attributes:
        steps: Optimizer steps of the joint stage.
        batch_size: Samples per step.
        accumulate: Micro-batches that a step is made of; `batch_size` is the whole.
        lr: Peak rate of the students.
        backbone_lr: Rate of what trains beside the students; None: the students'.
        betas: Of AdamW.
        weight_decay: On matrices.
        clip: Gradient norm; None: no clipping.
        warmup: Steps of linear warm-up.
        rate: Shape of the rate after it.
        trains: `"students"`, `"all"`, or globs on what trains beside the students.
        precision: Of Accelerate: `"no"` is float32.
        device: `"auto"` takes what Accelerate finds.
        threads: Of torch, in every process; results depend on it, so it is part of the experiment.
        checkpoint_every: Steps between two checkpoints within a run; 0: none, an interrupted run starts again.
    """

    steps: int = Field(default=300, ge=1)
    batch_size: int = Field(default=64, ge=1)
    accumulate: int = Field(default=1, ge=1)
    lr: float = Field(default=3e-3, gt=0.0)
    backbone_lr: float | None = Field(default=None, gt=0.0)
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = Field(default=0.05, ge=0.0)
    clip: float | None = Field(default=1.0, gt=0.0)
    warmup: int = Field(default=5, ge=0)
    rate: Literal["cosine", "linear", "constant"] = "cosine"
    trains: Literal["students", "all"] | tuple[str, ...] = "students"
    precision: Literal["no", "bf16", "fp16"] = "no"
    device: Literal["auto", "cpu"] = "auto"
    threads: int = Field(default=1, ge=1)
    checkpoint_every: int = Field(default=0, ge=0)


class Evaluation(Settings):
    """What is measured. Everything is measured off the clock.

    Attributes:
        points: Measurements of the curve per stage, besides its start.
        samples: Of the validation part, for a point of the curve; None: all.
        interface: Samples for interface cosine, error and CKA; 0: not measured.
        costs: Measure seconds and saved bytes by phase.
        variance: Optimizer steps before which the variance of the gate's gradient is measured.
        draws: Of the gate, per such measurement.
        batches: For the variance of the data, beside it.
        targets: Distances to the original's score; steps and seconds to them are reported.
        clock: Seconds of the process on the CPU, or of the wall; `cpu` is for runs on the CPU that share a machine.
        trackers: Names that Accelerate knows (`tensorboard`, `trackio`, `wandb`, `mlflow`, ...).
    """

    points: int = Field(default=20, ge=1)
    samples: int | None = Field(default=2000, ge=1)
    interface: int = Field(default=128, ge=0)
    costs: bool = True
    variance: tuple[int, ...] = ()
    draws: int = Field(default=16, ge=2)
    batches: int = Field(default=4, ge=2)
    targets: tuple[float, ...] = (2.0, 1.0)
    clock: Literal["wall", "cpu"] = "wall"
    trackers: tuple[str, ...] = ()


class Experiment(Settings):
    """A comparison of methods on one task.

    Attributes:
        name: For titles and folders.
        task: `{"kind": NAME, ...}`: model and data, and their settings.
        student: What comes to the sites, in the registry's plain form.
        targets: The sites, as `crossfade.select` takes them; None: the task's own.
        methods: Label -> settings of the method; `{"method": BASE, ...}` gives a variant a label of its own.
        reference: The label that differences are taken to; None: the first.
        seeds: Of initialisation, data order and gates.
        training: See `Training`.
        evaluation: See `Evaluation`.
        notes: Where each value comes from, by key path.
    """

    schema_version: Literal[1] = 1
    name: str = Field(pattern=r"^[\w.+-]+$")
    task: dict[str, Any]
    student: Any = Field(default_factory=lambda: {"kind": "student:Reinit"})
    targets: str | None = None
    methods: dict[str, dict[str, Any]]
    reference: str | None = None
    seeds: tuple[int, ...] = (0, 1, 2)
    training: Training = Training()
    evaluation: Evaluation = Evaluation()
    notes: dict[str, str] = Field(default_factory=dict)

    @field_validator("task")
    @classmethod
    def _task(cls, value: dict[str, Any]) -> dict[str, Any]:
        task_of(value)
        return value

    @field_validator("student")
    @classmethod
    def _student(cls, value: Any) -> Any:
        found = decode(value, "student")
        if isinstance(found, str):
            found = lookup("student", found)
        if not callable(found):
            raise ValueError('a student is a registered name or {"kind": "student:NAME", ...}')
        return value

    @field_validator("methods")
    @classmethod
    def _methods(cls, value: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        if not value:
            raise ValueError("no method is given")
        for label, settings in value.items():
            if not re.fullmatch(r"[\w.+@=-]+", label):
                raise ValueError(f"a label is made of letters, digits and + - . _ @ =, not {label!r}")
            build(label, settings or {})
        return {label: dict(settings or {}) for label, settings in value.items()}

    @field_validator("seeds")
    @classmethod
    def _seeds(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if not value or len(set(value)) != len(value) or min(value) < 0:
            raise ValueError("seeds are different whole numbers >= 0")
        return value

    @model_validator(mode="after")
    def _reference(self) -> Experiment:
        if self.reference is not None and self.reference not in self.methods:
            hint = nearest(self.reference, list(self.methods))
            names = ", ".join(self.methods)
            raise ValueError(f"the reference {self.reference!r} is none of {names}" + (f"; {hint}" if hint else ""))
        if self.training.batch_size % self.training.accumulate:
            raise ValueError("training.batch_size is a multiple of training.accumulate")
        return self

    def method(self, label: str) -> Method:
        """The method behind a label."""
        return build(label, self.methods[label])

    def key(self, label: str, seed: int) -> str:
        """Hash of all that the figures of one run depend on, machine and versions aside."""
        common = self.model_dump(mode="json", exclude={"methods", "seeds", "reference", "notes", "name"})
        common["evaluation"].pop("targets")
        common["evaluation"].pop("trackers")
        base = self.methods[label].get("method", label)
        return content_hash(common, base, self.method(label).model_dump(mode="json"), seed)


def task_of(data: Mapping[str, Any]) -> Task:
    """The task of `{"kind": NAME, ...}`.

    Raises:
        InputError: Unknown kind, or bad settings.
    """
    fields = dict(data)
    kind = fields.pop("kind", None)
    if not isinstance(kind, str):
        raise InputError(f"task.kind: missing; allowed: {', '.join(TASKS.names())}")
    return checked(TASKS[kind], fields, "task")


def read(source: Path) -> Experiment:
    """An experiment from a YAML file, as `write` makes it.

    Raises:
        InputError: The file cannot be read, or is not a valid experiment.
    """
    try:
        data = yaml.safe_load(source.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        raise InputError("an experiment file cannot be read.", where=source, got=str(error).splitlines()[0]) from None
    if not isinstance(data, dict):
        raise InputError("an experiment is a mapping.", where=source, got=type(data).__name__)
    return checked(Experiment, data, "")


def write(experiment: Experiment, path: Path) -> None:
    """Write the whole experiment, defaults included, as YAML."""
    text = yaml.safe_dump(experiment.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=110)
    path.write_text(text, encoding="utf-8")


def override(experiment: Experiment, changes: Iterable[str]) -> Experiment:
    """The experiment with dotted values replaced: `training.lr=1e-3`, `methods.dcr.alpha=linear:0.5`.

    Values are YAML. A label may hold dots; the longest known one is taken.

    Raises:
        InputError: Not `KEY=VALUE`, an unknown key, or a value that is not allowed there.
    """
    data = experiment.model_dump(mode="json")
    for change in changes:
        path, equals, text = change.partition("=")
        if path.startswith("methods."):  # A label may hold an equals sign.
            labels = [name for name in data["methods"] if change.startswith(f"methods.{name}.")]
            label = max(labels, key=len, default="")
            if label:
                field, equals, text = change[len(f"methods.{label}.") :].partition("=")
                _put(data["methods"][label], [field], _value(text, change), change)
                continue
        if not equals or not path:
            raise InputError(f"--set {change}: this is not KEY=VALUE", expected="such as training.lr=1e-3")
        _put(data, path.split("."), _value(text, change), change)
    return checked(Experiment, data, "")


def _value(text: str, change: str) -> Any:
    try:
        value = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as error:
        raise InputError(f"--set {change}: the value is not YAML", got=str(error).splitlines()[0]) from None
    if isinstance(value, str):  # YAML 1.1 takes 1e-3 for a word.
        try:
            return float(value)
        except ValueError:
            return value
    return value


def _put(data: dict[str, Any], path: list[str], value: Any, change: str) -> None:
    *above, last = path
    for depth, part in enumerate(above):
        inner = data.get(part)
        if not isinstance(inner, dict):
            hint = nearest(part, list(data))
            where = ".".join(path[: depth + 1])
            known = ", ".join(data)
            raise InputError(f"--set {change}: unknown key {where!r}; allowed: {known}" + (f"; {hint}" if hint else ""))
        data = inner
    data[last] = value
