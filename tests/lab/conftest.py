"""A task that loads in a second: the digits, with a model trained for one epoch, in a cache of its own."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from crossfade.lab.experiment import Experiment, task_of
from crossfade.lab.tasks import Loaded

TASK = {"kind": "digits", "epochs": 1}
COLD = {"kind": "student:Reinit", "init": {"kind": "initializer:Normal", "std": 0.02}}


def experiment(*labels: str, **fields) -> Experiment:
    """A short experiment on it; nested fields are given as dicts."""
    training = {"steps": 10, "batch_size": 16, "lr": 5e-3, "device": "cpu"} | fields.pop("training", {})
    evaluation = {"points": 2, "samples": 50, "interface": 8, "clock": "cpu"} | fields.pop("evaluation", {})
    methods = fields.pop("methods", {}) | {label: {} for label in labels}
    return Experiment(
        name="short", task=TASK, student=COLD, methods=methods, training=training, evaluation=evaluation, **fields
    )


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    before = os.environ.get("XDG_CACHE_HOME")
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))
    yield
    if before is None:
        del os.environ["XDG_CACHE_HOME"]
    else:
        os.environ["XDG_CACHE_HOME"] = before


@pytest.fixture(scope="session")
def loaded(cache: None) -> Loaded:
    return task_of(TASK).load()
