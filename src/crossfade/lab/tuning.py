"""Fair tuning: every method gets the same rates on the same seeds, which no figure is taken from."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .experiment import Experiment, read
from .inputs import InputError
from .worker import cell_path, write_record

__all__ = ["apply", "choose", "grid", "tuned"]


def grid(experiment: Experiment, rates: Sequence[float]) -> Experiment:
    """One variant of every method per rate, labelled `METHOD@RATE`.

    The rate is that of the stage which the method tunes (`Method.tunes`): the joint one, or the alignment's.

    Raises:
        InputError: A rate is not positive.
    """
    if not rates or min(rates) <= 0.0:
        raise InputError("rates are positive numbers.", got=list(rates))
    methods = {}
    for label, settings in experiment.methods.items():
        method = experiment.method(label)
        if not method.resolved(experiment.training.steps, experiment.training.lr):
            continue  # Nothing to tune in what is not trained.
        for rate in rates:
            methods[f"{label}@{rate:g}"] = {"method": label, **settings, method.tunes: rate}
    data = experiment.model_dump(mode="json") | {"methods": methods, "reference": None}
    # Only the final validation score counts here.
    data["evaluation"] |= {"points": 1, "interface": 0, "costs": False, "variance": []}
    return Experiment.model_validate(data)


def choose(folder: Path) -> dict[str, dict[str, Any]]:
    """The best rate of each method, by the mean final validation score over the seeds that all its rates have.

    Returns:
        Label -> `field`, `value`, `score`, and `tried`: every rate with its mean score.

    Raises:
        InputError: A result file cannot be read.
    """
    experiment = read(folder / "experiment.yaml")
    tried: dict[str, dict[float, float]] = {}
    fields: dict[str, str] = {}
    higher = True
    for variant in experiment.methods:
        label, _, rate = variant.rpartition("@")
        scores = []
        for seed in experiment.seeds:
            path = cell_path(folder, variant, seed)
            try:
                record = json.loads(path.read_text(encoding="utf-8"))
                scores.append(float(record["final"]["validation"]))
                higher = bool(record["higher_is_better"])
            except FileNotFoundError:
                break  # A rate with a failed run is out: it may have diverged.
            except (OSError, ValueError, KeyError, TypeError):
                raise InputError("a result file cannot be read.", where=path, do="delete it and tune again") from None
        if len(scores) == len(experiment.seeds):
            tried.setdefault(label, {})[float(rate)] = statistics.fmean(scores)
            fields[label] = experiment.method(variant).tunes
    pick = max if higher else min
    result = {}
    for label, rows in tried.items():
        best = pick(rows, key=rows.__getitem__)
        result[label] = {
            "field": fields[label],
            "value": best,
            "score": rows[best],
            "tried": {f"{rate:g}": score for rate, score in rows.items()},
            "seeds": list(experiment.seeds),
        }
    return result


def tuned(chosen: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """Write what `choose` found."""
    write_record({label: dict(row) for label, row in chosen.items()}, path)


def apply(experiment: Experiment, path: Path) -> Experiment:
    """The experiment with the rates of a file that `tuned` wrote, for the methods that it holds.

    Raises:
        InputError: The file cannot be read, or its tuning seeds are seeds of the experiment.
    """
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
        found = {str(label): (str(row["field"]), float(row["value"]), set(row["seeds"])) for label, row in rows.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError("a file of tuned rates cannot be read.", where=path, got=error) from None
    methods = {}
    for label, settings in experiment.methods.items():
        methods[label] = dict(settings)
        base = label if label in found else settings.get("method", label)
        if base in found:
            field, value, seeds = found[base]
            if common := seeds & set(experiment.seeds):
                raise InputError(
                    "these seeds were used for tuning; figures need fresh ones.", where=label, got=sorted(common)
                )
            methods[label].setdefault(field, value)
    data = experiment.model_dump(mode="json") | {"methods": methods}
    data["notes"] = data["notes"] | {"methods": f"rates from {path.name}"}
    return Experiment.model_validate(data)
