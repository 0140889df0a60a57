"""What a run folder holds, read and checked: the experiment, its surroundings, one cell per method and seed."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from ..inputs import InputError, need

need("pydantic", "cli")

from pydantic import BaseModel, ConfigDict, Field, ValidationError  # noqa: E402 - the check above comes first

__all__ = ["Cell", "Cost", "Experiment", "Interface", "Point", "Run", "Scores", "Variance", "load_run"]

SCHEMA = 1
AGAIN = "delete the file and run the experiment again; cells that are whole are kept"

T = TypeVar("T", bound="_Data")
Count = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(ge=0)]


class _Data(BaseModel):
    """Frozen data; a key that this version does not know is no fault, a number that is not finite is one."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


class Scores(_Data):
    """The score on the validation part, the test part, and the subset of the validation part that curves use."""

    validation: float
    test: float
    validation_curve: float


class Point(_Data):
    """One measurement of the curve, taken with the students alone."""

    step: Count
    seconds: Seconds
    score: float
    epoch: float = 0.0
    stage: str = ""
    alpha: float | None = None


class SiteScores(_Data):
    """How close a student is to its teacher at one site; None where the measure has no value."""

    cosine: float | None = None
    error: float | None = None
    cka: float | None = None


class Interface(_Data):
    """The closeness at every site at one step."""

    step: Count
    seconds: Seconds
    sites: dict[str, SiteScores]


class Cost(_Data):
    """What one step of a phase costs; `saved_bytes` is what autograd keeps, None where it was not measured."""

    phase: str
    steps: Count
    seconds_per_step: Seconds
    saved_bytes: Count | None = None


class Variance(_Data):
    """The variance of the gradient at one step, split into what the gates and what the data cause."""

    step: Count
    gate: Seconds
    data: Seconds
    share: float
    alpha: float | None = None
    squared_mean: float | None = None


class Curvature(_Data):
    """How far a random gate at one site bends the mean at the next nonlinearity, and the bound on it."""

    step: Count
    site: str
    p: float
    bias: Seconds
    bound: Seconds


class Cell(_Data):
    """One finished run: a method with one seed."""

    method: str
    base: str
    title: str
    source: str = ""
    seed: int
    key: str = ""
    metric: str
    higher_is_better: bool
    clock: Literal["cpu", "wall"]
    original: Scores
    final: Scores
    curve: list[Point]
    seconds: dict[str, Seconds]
    facts: dict[str, Any] = {}
    settings: dict[str, Any] = {}
    stages: list[dict[str, Any]] = []
    interface: list[Interface] = []
    costs: list[Cost] = []
    variance: list[Variance] = []
    curvature: list[Curvature] = []


class Evaluation(_Data):
    """How the experiment measures: distances to the original that count as targets."""

    targets: list[Annotated[float, Field(ge=0)]] = []


class Experiment(_Data):
    """The part of the resolved experiment that the report needs; the reference is the first method if none is named."""

    name: str
    methods: dict[str, Any]
    reference: str | None = None
    seeds: list[int] = []
    evaluation: Evaluation = Evaluation()
    training: dict[str, Any] = {}


@dataclass(frozen=True)
class Run:
    """A run folder.

    Args:
        experiment: What was asked for.
        environment: Versions, machine and command as plain data; empty where the file is missing.
        cells: Every finished cell, by the order of the methods in the experiment and then by seed.
    """

    experiment: Experiment
    environment: dict[str, Any]
    cells: tuple[Cell, ...]


def load_run(folder: Path) -> Run:
    """Read a run folder.

    Raises:
        InputError: A file is missing, broken or of another schema, the cells do not belong together, or none is there.
    """
    path = folder / "experiment.yaml"
    if not path.is_file():
        raise InputError(
            "this is not the folder of a run.", where=folder, expected="experiment.yaml in it", do="name another folder"
        )
    experiment = _checked(Experiment, _yaml(path), path, do="run the experiment again")
    if experiment.reference is None:
        experiment = experiment.model_copy(update={"reference": next(iter(experiment.methods), None)})
    environment = folder / "environment.json"
    surroundings = (
        _json(environment, do="delete the file; the report then leaves it out") if environment.exists() else {}
    )
    # A name that begins with a dot is a file that was being written when the run was stopped.
    files = sorted(f for f in (folder / "cells").glob("*.json") if not f.name.startswith("."))
    if not files:
        raise InputError(
            "this run has no finished cell yet.",
            where=folder / "cells",
            expected="at least one file <method>-s<seed>.json",
            do="run the experiment first",
        )
    cells = _together({file: _cell(file) for file in files})
    order = {label: place for place, label in enumerate(experiment.methods)}
    cells.sort(key=lambda cell: (order.get(cell.method, len(order)), cell.method, cell.seed))
    return Run(experiment, surroundings, tuple(cells))


def _cell(path: Path) -> Cell:
    data = _json(path, do=AGAIN)
    if data.get("schema") != SCHEMA:
        raise InputError(
            "this cell has another schema.", where=path, expected=SCHEMA, got=repr(data.get("schema")), do=AGAIN
        )
    cell = _checked(Cell, data, path, do=AGAIN)
    for earlier, later in pairwise(cell.curve):
        if later.step < earlier.step or later.seconds < earlier.seconds:
            raise InputError(
                "the curve of this cell goes back in time.",
                where=path,
                got=f"step {later.step} at {later.seconds} s after step {earlier.step} at {earlier.seconds} s",
                do=AGAIN,
            )
    if "total" not in cell.seconds:
        raise InputError("this cell is not complete.", where=f"{path}: seconds", expected="the key 'total'", do=AGAIN)
    return cell


def _together(cells: dict[Path, Cell]) -> list[Cell]:
    """The cells, if one table can hold them all."""
    seen: dict[tuple[str, int], Path] = {}
    first_path, first = next(iter(cells.items()))
    for path, cell in cells.items():
        other = seen.setdefault((cell.method, cell.seed), path)
        if other != path:
            raise InputError(
                "two cells hold the same method and seed.",
                where=f"{other} and {path}",
                got=f"{cell.method}, seed {cell.seed}",
                do="delete one of them",
            )
        if (cell.metric, cell.higher_is_better) != (first.metric, first.higher_is_better):
            raise InputError(
                "the cells of this run measure different things.",
                where=f"{first_path} and {path}",
                got=f"{_metric(first)} and {_metric(cell)}",
                do="keep the cells of one experiment in the folder",
            )
    return list(cells.values())


def _metric(cell: Cell) -> str:
    return f"{cell.metric} ({'higher' if cell.higher_is_better else 'lower'} is better)"


def _json(path: Path, *, do: str) -> dict[str, Any]:
    """The object in a JSON file; NaN and infinity are no JSON."""

    def finite(number: str) -> float:
        if not math.isfinite(float(number)):
            raise ValueError(f"{number} is not a finite number")
        return float(number)

    try:
        data = json.loads(path.read_text(encoding="utf-8"), parse_constant=finite, parse_float=finite)
    except (OSError, ValueError, RecursionError) as error:  # JSON and UTF-8 errors are ValueErrors.
        raise InputError("this file cannot be read.", where=path, got=error, do=do) from None
    if not isinstance(data, dict):
        raise InputError("this file does not hold a JSON object.", where=path, got=type(data).__name__, do=do)
    return data


def _yaml(path: Path) -> Any:
    yaml = need("yaml", "cli")
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
        json.dumps(data, allow_nan=False, default=str)  # YAML knows infinity, results.json does not.
        return data
    except (OSError, ValueError, yaml.YAMLError) as error:
        got = " ".join(str(error).split())
        raise InputError("this file cannot be read.", where=path, got=got, do="run the experiment again") from None


def _checked(cls: type[T], data: Any, path: Path, *, do: str) -> T:
    """Data as `cls`; the message names the first fault and counts the others."""
    try:
        return cls.model_validate(data)
    except ValidationError as error:
        faults = error.errors()
        key = ".".join(str(part) for part in faults[0]["loc"])
        more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
        raise InputError(
            "this file does not hold what it should.",
            where=f"{path}: {key}" if key else path,
            got=f"{faults[0]['msg'].lower()}{more}",
            do=do,
        ) from None
