"""`crossfade run`, `list`, `report`, `tune`: bad input gives one message and exit code 2, and nothing is written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from crossfade.lab.methods import METHODS
from crossfade.lab.recipes import RECIPES

from .conftest import Outcome

Run = Callable[..., Outcome]


def test_list_names_everything(run: Run) -> None:
    outcome = run("list")
    assert outcome.code == 0
    for name in (*RECIPES.names(), *METHODS.names()):
        assert f"  {name} " in outcome.out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run", "digit"], "did you mean 'digits'"),
        (["run", "none.yaml"], "cannot be read"),
        (["run", "digits", "--methods", "drc"], "did you mean 'dcr'"),
        (["run", "digits", "--seeds", "3-1"], "these are not seeds"),
        (["run", "digits", "--seeds", "0,0"], "different whole numbers"),
        (["run", "digits", "--seeds", "x"], "these are not seeds"),
        (["run", "digits", "--set", "training.lrr=1"], "did you mean 'lr'"),
        (["run", "digits", "--set", "student={nope: 1}"], "student"),
        (["run", "digits", "--tuned", "none.json"], "none.json"),
        (["run", "digits", "--equal-seconds", "none"], "not measured"),
        (["run", "digits", "--out", "taken"], "is a file"),
        (["tune", "digits", "--rates", "fast"], "these are not rates"),
        (["report", "none"], "none"),
    ],
)
def test_bad_input_is_one_message_and_nothing_is_written(
    words: list[str], said: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").touch()
    outcome = run(*words)
    assert outcome.code == 2, outcome
    assert outcome.err.count("crossfade:") == 1
    assert said in outcome.err
    assert "Traceback" not in outcome.err
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


@pytest.mark.processes
def test_targets_that_match_nothing_leave_no_folder(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    changes = ["--set", "task.epochs=1", "--set", "targets=nope"]
    outcome = run("run", "digits", "--methods", "dcr", *changes, "--out", str(tmp_path / "out"))
    assert outcome.code == 2
    assert "nope" in outcome.err
    assert outcome.err.count("crossfade:") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.processes
def test_a_run_and_its_report(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    out = tmp_path / "out"
    short = ["--set", "task.epochs=1", "--set", "training.steps=4", "--seeds", "0", "--methods", "dcr,floor"]
    outcome = run("run", "digits", *short, "--out", str(out))
    assert outcome.code == 0, outcome
    assert "2 methods x 1 seeds" in outcome.out
    assert "[2/2]" in outcome.out
    assert {"report.html", "results.csv", "results.json", "experiment.yaml", "environment.json"} <= {
        path.name for path in out.iterdir()
    }
    assert yaml.safe_load((out / "experiment.yaml").read_text())["training"]["steps"] == 4
    again = run("run", str(out / "experiment.yaml"), "--out", str(out))
    assert again.code == 0
    assert "2 of 2 runs are there already" in again.out
    assert run("report", str(out)).code == 0
