"""The report as data: one row per cell for a spreadsheet, and all aggregates as JSON."""

from __future__ import annotations

import csv
import io
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..inputs import InputError
from .cells import Cell
from .stats import Crossing, mean
from .summary import Difference, MethodSummary, Spread, Summary

__all__ = ["csv_text", "json_text", "write"]


def write(path: Path, content: str | bytes) -> None:
    """Write a file whole or not at all: under a temporary name beside it, then renamed.

    Raises:
        InputError: The place cannot be written to.
    """
    data = content.encode("utf-8") if isinstance(content, str) else content
    temporary: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
        temporary = Path(name)
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        # A temporary file is private to its owner; a report is as readable as other files beside the run.
        temporary.chmod(0o644)
        temporary.replace(path)
    except OSError as error:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
        raise InputError(
            "the report cannot be written.", where=path, got=error.strerror or error, do="make the folder writable"
        ) from None


def csv_text(summary: Summary) -> str:
    """One row per cell; an empty field where a cell has no such value."""
    rows = [_row(summary, method, place) for method in summary.methods for place in range(len(method.cells))]
    columns = list(dict.fromkeys(key for row in rows for key in row))
    target = io.StringIO()
    writer = csv.DictWriter(target, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return target.getvalue()


def _row(summary: Summary, method: MethodSummary, place: int) -> dict[str, Any]:
    cell = method.cells[place]
    sign = 1.0 if cell.higher_is_better else -1.0
    row: dict[str, Any] = {
        "method": cell.method,
        "base": cell.base,
        "title": cell.title,
        "seed": cell.seed,
        "key": cell.key,
        "metric": cell.metric,
        "higher_is_better": str(cell.higher_is_better).lower(),
    }
    for name in ("validation", "test", "validation_curve"):
        row[f"original_{name}"] = getattr(cell.original, name)
        row[f"final_{name}"] = getattr(cell.final, name)
    row["behind_original"] = sign * (cell.original.test - cell.final.test)
    if summary.run.experiment.reference is not None:
        row["better_than_reference"] = method.against.per_seed.get(cell.seed, "") if method.against else ""
    for target in method.targets:
        crossing = target.per_seed[cell.seed]
        row[f"steps_to_within_{target.distance:g}"] = "" if crossing is None else crossing.steps
        row[f"seconds_to_within_{target.distance:g}"] = "" if crossing is None else crossing.seconds
    row["clock"] = cell.clock
    return row | {f"seconds_{name}": value for name, value in cell.seconds.items()}


def json_text(summary: Summary) -> str:
    """Strict JSON with everything that the page shows.

    Raises:
        ValueError: A value is not finite.
    """
    experiment, first = summary.run.experiment, summary.first
    data = {
        "schema": 1,
        "experiment": experiment.model_dump(mode="json"),
        "environment": summary.run.environment,
        "facts": first.facts,
        "metric": first.metric,
        "higher_is_better": first.higher_is_better,
        "clock": sorted({cell.clock for cell in summary.run.cells}),
        "original": {"test": _spread(summary.original)},
        "floor": {"validation_curve": _spread(summary.floor)},
        "best": summary.best,
        "verdict": summary.verdict,
        "notes": list(summary.notes),
        "methods": {method.label: _method(method) for method in summary.methods},
        "pairs": [_difference(pair) for pair in summary.pairs],
    }
    return json.dumps(data, indent=2, allow_nan=False, ensure_ascii=False) + "\n"


def _method(method: MethodSummary) -> dict[str, Any]:
    cell = method.cells[0]
    return {
        "title": method.title,
        "base": cell.base,
        "source": cell.source,
        "is_floor": method.is_floor,
        "test": _spread(method.test),
        "behind_original": _spread(method.behind),
        "seconds": _spread(method.seconds),
        "targets": [
            {
                "distance": target.distance,
                "reached": target.reached,
                "of": len(target.per_seed),
                "steps": _spread(target.steps),
                "seconds": _spread(target.seconds),
                "per_seed": {str(seed): _crossing(crossing) for seed, crossing in target.per_seed.items()},
            }
            for target in method.targets
        ],
        "against_reference": _difference(method.against) if method.against else None,
        "curve": {
            "step": method.curve.step,
            "seconds": method.curve.seconds,
            "mean": method.curve.mean,
            "lowest": method.curve.low,
            "highest": method.curve.high,
        },
        "interface": _interface(method.cells),
        "variance": [{"seed": cell.seed, **row.model_dump()} for cell in method.cells for row in cell.variance],
        "curvature": [{"seed": cell.seed, **row.model_dump()} for cell in method.cells for row in cell.curvature],
        "per_seed": {
            str(cell.seed): {
                "key": cell.key,
                "final": cell.final.model_dump(),
                "original": cell.original.model_dump(),
                "seconds": dict(cell.seconds),
                "stages": cell.stages,
                "settings": cell.settings,
                "costs": [cost.model_dump() for cost in cell.costs],
            }
            for cell in method.cells
        },
    }


def _interface(cells: Sequence[Cell]) -> Mapping[str, Any]:
    """Mean over seeds of cosine, error and CKA, per site, at each step that was measured."""
    found: dict[str, dict[str, dict[int, list[float]]]] = {}
    for row in (row for cell in cells for row in cell.interface):
        for site, scores in row.sites.items():
            for name, value in scores.model_dump().items():
                if value is not None:
                    found.setdefault(site, {}).setdefault(name, {}).setdefault(row.step, []).append(value)
    return {
        site: {name: [[step, mean(values)] for step, values in sorted(steps.items())] for name, steps in names.items()}
        for site, names in found.items()
    }


def _spread(spread: Spread | None) -> Mapping[str, Any] | None:
    return None if spread is None else {"mean": spread.mean, "std": spread.std, "n": spread.n}


def _crossing(crossing: Crossing | None) -> Mapping[str, float] | None:
    return None if crossing is None else {"steps": crossing.steps, "seconds": crossing.seconds}


def _difference(pair: Difference) -> Mapping[str, Any]:
    """Positive where `method` is better, whatever the direction of the metric."""
    return {
        "method": pair.method,
        "other": pair.other,
        "n": len(pair.per_seed),
        "mean": pair.mean,
        "interval_95": pair.interval,
        "separated": pair.separated,
        "per_seed": {str(seed): value for seed, value in pair.per_seed.items()},
    }
