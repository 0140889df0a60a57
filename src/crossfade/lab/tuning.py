"""Fair tuning: every method gets the same rates on the same seeds, which no figure is taken from."""

from __future__ import annotations

import glob
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .experiment import Experiment, read
from .inputs import InputError
from .methods import Joint
from .worker import cell_path, write_record

__all__ = ["apply", "choose", "equal_seconds", "grid", "tuned"]


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


def equal_seconds(experiment: Experiment, folder: Path) -> Experiment:
    """The experiment with each method's joint steps scaled, so that all take the seconds of the reference.

    The cost of each method is measured in an earlier sweep of the same experiment, so the number of steps is fixed
    before the run and the figures stay a function of the seed. Alignment keeps its steps; a method of alignment alone
    stays as it is.

    Args:
        experiment: With a reference.
        folder: A sweep that holds every method, at the steps that the experiment has.

    Raises:
        InputError: A method, or the reference, is not in the sweep.
    """
    reference = experiment.reference or next(iter(experiment.methods))
    spent = {label: _seconds(folder, label) for label in {*experiment.methods, reference}}
    budget = sum(spent[reference].values())
    methods = {}
    for label, settings in experiment.methods.items():
        methods[label] = dict(settings)
        stages = experiment.method(label).resolved(experiment.training.steps, experiment.training.lr)
        joint = [stage for stage in stages if isinstance(stage, Joint)]
        if joint and spent[label].get(joint[0].name):
            others = sum(spent[label].values()) - spent[label][joint[0].name]
            share = max(0.0, budget - others) / spent[label][joint[0].name]
            methods[label] = {"method": label, **settings, "steps": max(1, round(joint[0].steps * share))}
    data = experiment.model_dump(mode="json") | {"methods": methods}
    data["notes"] = data["notes"] | {"methods.*.steps": f"as many as fit into the seconds of {reference}"}
    return Experiment.model_validate(data)


def _seconds(folder: Path, label: str) -> dict[str, float]:
    """Mean seconds of each stage of a method, over the runs that are there."""
    found: dict[str, list[float]] = {}
    for path in sorted((folder / "cells").glob(f"{glob.escape(label)}-s*.json")):
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            if record["method"] != label:
                continue
            for name, value in record["seconds"].items():
                if name not in ("total", "wall"):
                    found.setdefault(name, []).append(float(value))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            raise InputError("a result file cannot be read.", where=path, do="delete it and run it again") from None
    if not found and not list((folder / "cells").glob(f"{glob.escape(label)}-s*.json")):
        raise InputError("the cost of a method was not measured there.", where=folder, got=label)
    return {name: statistics.fmean(values) for name, values in found.items()}
