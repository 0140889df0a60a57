"""Several processes under torchrun: the figures of one process on the same batches, up to the order of sums."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from crossfade.lab.inputs import InputError
from crossfade.lab.loop import run
from crossfade.lab.sweep import prepare, sweep
from crossfade.lab.tasks import Loaded
from tests.lab.conftest import experiment


@pytest.mark.dist
@pytest.mark.slow
def test_two_processes_equal_one(loaded: Loaded, tmp_path: Path) -> None:
    methods = {"dcr+dfg-kept": {}, "bern": {}, "kd+features": {}, "align+fade": {"align_steps": 4, "samples": 32}}
    wanted = experiment(methods=methods, seeds=(0,), evaluation={"costs": False})
    alone, both = tmp_path / "alone", tmp_path / "both"
    sweep(prepare(wanted, alone), alone, jobs=1)
    prepare(wanted, both)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*launcher, "-m", "crossfade.cli", "run", str(both / "experiment.yaml"), "--out", str(both)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    for label in methods:
        one, two = (json.loads((folder / "cells" / f"{label}-s0.json").read_text()) for folder in (alone, both))
        assert [point["step"] for point in one["curve"]] == [point["step"] for point in two["curve"]]
        for left, right in zip(one["interface"], two["interface"], strict=True):
            for path, row in left["sites"].items():
                assert row["cosine"] == pytest.approx(right["sites"][path]["cosine"], abs=2e-2), (label, path)
    assert (both / "report.html").exists()


def test_a_tracker_that_is_not_there_is_named(loaded: Loaded, tmp_path: Path) -> None:
    wanted = experiment("dcr", evaluation={"trackers": ["nonsense"]})
    with pytest.raises(InputError, match=r"evaluation\.trackers"):
        run(wanted, "dcr", 0, loaded=loaded, folder=tmp_path / "a" / "b")
