"""Sweeps: whole files or none, resumable, the same figures whatever the number of processes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from crossfade.lab.experiment import override, read
from crossfade.lab.inputs import InputError
from crossfade.lab.sweep import missing, prepare, sweep
from crossfade.lab.tasks import Loaded
from crossfade.lab.worker import cell_path
from tests.lab.conftest import experiment
from tests.lab.test_loop import figures


def records(folder: Path) -> dict[str, dict]:
    return {path.name: figures(json.loads(path.read_text())) for path in sorted((folder / "cells").glob("*.json"))}


@pytest.mark.processes
def test_the_figures_do_not_depend_on_the_number_of_processes(loaded: Loaded, tmp_path: Path) -> None:
    wanted = experiment("dcr+dfg", "bern", seeds=(0, 1))
    for jobs in (1, 2):
        ready = prepare(wanted, tmp_path / str(jobs))
        outcome = sweep(ready, tmp_path / str(jobs), jobs=jobs)
        assert outcome.done == 4
        assert not outcome.failed
    found = records(tmp_path / "1")
    assert len(found) == 4
    assert found == records(tmp_path / "2")
    # A finished folder is left as it is.
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "1" / "cells").iterdir()}
    assert sweep(ready, tmp_path / "1", jobs=2).done == 0
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "1" / "cells").iterdir()}


def test_more_methods_and_seeds_join_a_folder(tmp_path: Path) -> None:
    prepare(experiment("dcr", seeds=(0,)), tmp_path / "out")
    merged = prepare(experiment("bern", seeds=(1,)), tmp_path / "out")
    assert set(merged.methods) == {"dcr", "bern"}
    assert merged.seeds == (0, 1)
    assert read(tmp_path / "out" / "experiment.yaml") == merged
    assert missing(merged, tmp_path / "out") == [("dcr", 0), ("bern", 0), ("dcr", 1), ("bern", 1)]


def test_another_experiment_does_not_get_into_the_folder(tmp_path: Path) -> None:
    base = experiment("dcr")
    prepare(base, tmp_path / "out")
    with pytest.raises(InputError, match="training differs"):
        prepare(override(base, ["training.lr=1"]), tmp_path / "out")
    with pytest.raises(InputError, match="'dcr' with other settings"):
        prepare(override(base, ["methods.dcr.lr=1"]), tmp_path / "out")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "x").touch()
    with pytest.raises(InputError, match="something else"):
        prepare(base, tmp_path / "taken")


@pytest.mark.parametrize("content", ["", "{", "[]", '{"key": "other"}'])
def test_a_result_that_cannot_be_used_is_named(content: str, tmp_path: Path) -> None:
    wanted = prepare(experiment("dcr", seeds=(0,)), tmp_path / "out")
    cell_path(tmp_path / "out", "dcr", 0).write_text(content)
    with pytest.raises(InputError, match=r"dcr-s0\.json"):
        missing(wanted, tmp_path / "out")


@pytest.mark.processes
def test_a_missing_data_folder_is_said_before_any_run(tmp_path: Path) -> None:
    task = {"kind": "fashion-mnist", "folder": str(tmp_path)}
    wanted = prepare(experiment("dcr").model_copy(update={"task": task}), tmp_path / "out")
    with pytest.raises(InputError, match="Fashion-MNIST is missing"):
        sweep(wanted, tmp_path / "out", jobs=1)
    assert not list((tmp_path / "out" / "cells").iterdir())


def start(folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "crossfade.cli", "run", str(folder / "experiment.yaml"), "--out", str(folder)]
    before = signal.signal(
        signal.SIGINT, signal.SIG_DFL
    )  # In a background job Ctrl-C is ignored, and so it would stay.
    try:
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    finally:
        signal.signal(signal.SIGINT, before)


def wait_for_cells(folder: Path, n: int) -> None:
    end = time.monotonic() + 120
    while len(list((folder / "cells").glob("*.json"))) < n:
        assert time.monotonic() < end, "no run was finished"
        time.sleep(0.02)


@pytest.mark.parametrize("how", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow), signal.SIGKILL])
def test_a_killed_sweep_goes_on_to_the_same_figures(how: signal.Signals, loaded: Loaded, tmp_path: Path) -> None:
    wanted = experiment("dcr+dfg", "bern", seeds=(0, 1), training={"checkpoint_every": 2})
    whole = prepare(wanted, tmp_path / "whole")
    assert sweep(whole, tmp_path / "whole", jobs=1).done == 4
    prepare(wanted, tmp_path / "killed")
    process = start(tmp_path / "killed")
    wait_for_cells(tmp_path / "killed", 1)
    begin = time.monotonic()
    process.send_signal(how)
    out, _ = process.communicate(timeout=60)
    if how is not signal.SIGKILL:
        assert process.returncode == 130
        assert time.monotonic() - begin < 20
        assert "To go on: crossfade run" in out
    for path in (tmp_path / "killed" / "cells").glob("*.json"):
        json.loads(path.read_text())  # Whole, or not there.
    time.sleep(0.5)  # Workers of a killed sweep see their input end.
    again = read(tmp_path / "killed" / "experiment.yaml")
    assert missing(again, tmp_path / "killed")
    outcome = sweep(again, tmp_path / "killed", jobs=1)
    assert outcome.done < 4
    assert records(tmp_path / "killed") == records(tmp_path / "whole")


def test_two_sweeps_do_not_share_a_folder(tmp_path: Path) -> None:
    fcntl = pytest.importorskip("fcntl")
    wanted = prepare(experiment("dcr", seeds=(0,)), tmp_path / "out")
    with (tmp_path / "out" / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(InputError, match="another sweep"):
            sweep(wanted, tmp_path / "out", jobs=1)


@pytest.mark.processes
def test_a_run_that_fails_does_not_stop_the_others(loaded: Loaded, tmp_path: Path) -> None:
    methods = {
        "bad": {"method": "align", "samples": 2, "align_batch": 1, "align_lr": 1e38, "align_steps": 40},
        "floor": {},
    }
    wanted = prepare(experiment(methods=methods, seeds=(0,)), tmp_path / "out")
    outcome = sweep(wanted, tmp_path / "out", jobs=1)
    assert outcome.done == 1
    ((label, seed, message),) = outcome.failed
    assert (label, seed) == ("bad", 0)
    assert "finite" in message
    assert [path.name for path in (tmp_path / "out" / "cells").iterdir()] == ["floor-s0.json"]
