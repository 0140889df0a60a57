"""What is wrong with a run folder is said with the file and with what to do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from crossfade.lab.inputs import InputError
from crossfade.lab.report import write_report
from crossfade.lab.report.cells import load_run
from tests.lab.report import runs


def test_cells_come_in_the_order_of_the_experiment_and_by_seed(tmp_path: Path) -> None:
    run = load_run(runs.write_run(tmp_path, list(reversed(runs.cells()))))
    assert [(cell.method, cell.seed) for cell in run.cells] == [
        (m, s) for m in ("kd", "dcr", "align") for s in range(3)
    ]
    assert run.experiment.evaluation.targets == [4.0, 1.0]


def test_a_file_in_the_making_and_an_unknown_key_are_no_fault(tmp_path: Path) -> None:
    runs.write_run(tmp_path, [runs.cell("kd", 0, novelty=[1])])
    (tmp_path / "cells" / ".half.json").write_text("{", encoding="utf-8")
    assert len(load_run(tmp_path).cells) == 1


def test_a_folder_that_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"not the folder of a run(.|\n)*experiment\.yaml"):
        write_report(tmp_path)


def test_a_run_without_a_finished_cell(tmp_path: Path) -> None:
    runs.write_run(tmp_path, [])
    with pytest.raises(InputError, match=r"no finished cell(.|\n)*run the experiment first"):
        write_report(tmp_path)


def without(key: str) -> str:
    return json.dumps({name: value for name, value in runs.cell("kd", 0).items() if name != key})


def changed(**changes: Any) -> str:
    return json.dumps(runs.cell("kd", 0, **changes))


POINT = {"step": 0, "seconds": 0.0, "score": 1.0}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (changed()[:400], "cannot be read"),
        ("", "cannot be read"),
        ("\x00\xff", "cannot be read"),
        ("[1]", "does not hold a JSON object"),
        ("{}", "another schema"),
        (changed(schema=2), r"another schema(.|\n)*got: 2"),
        (without("final"), r": final\n.*field required"),
        (without("curve"), ": curve\n"),
        (changed(curve=[POINT | {"score": "high"}]), r": curve\.0\.score"),
        (changed(curve=[POINT | {"score": float("nan")}]), "NaN is not a finite number"),
        (changed(curve=[POINT | {"score": None}]), r": curve\.0\.score"),
        (changed(settings={"lr": 7.5}).replace("7.5", "1e999"), "not a finite number"),
        (changed(curve=[POINT | {"step": 5}, POINT]), "goes back in time"),
        (changed(seconds={"fade": 1.0}), "the key 'total'"),
        (changed(clock="sun"), ": clock\n"),
    ],
)
def test_a_broken_cell_is_named_with_what_to_do(tmp_path: Path, text: str, message: str) -> None:
    runs.write_run(tmp_path)
    (tmp_path / "cells" / "broken-s7.json").write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=message) as caught:
        write_report(tmp_path)
    assert "broken-s7.json" in str(caught.value)
    assert "delete the file and run the experiment again" in str(caught.value)
    assert not (tmp_path / "report.html").exists()


def test_cells_that_do_not_belong_together(tmp_path: Path) -> None:
    runs.write_run(tmp_path / "twice", [runs.cell("kd", 0), runs.cell("kd", 0)])
    with pytest.raises(InputError, match=r"same method and seed(.|\n)*00-s0.json and(.|\n)*delete one of them"):
        load_run(tmp_path / "twice")
    runs.write_run(tmp_path / "mixed", [runs.cell("kd", 0), runs.cell("dcr", 0, metric="loss", higher_is_better=False)])
    with pytest.raises(InputError, match=r"different things(.|\n)*lower is better"):
        load_run(tmp_path / "mixed")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: [", "cannot be read"),
        ("- 1", "does not hold what it should"),
        ("name: x", ": methods\n"),
        ("name: x\nmethods: {}\nevaluation: {targets: [-1]}", r": evaluation\.targets\.0"),
        ("name: x\nmethods: {}\ntraining: {lr: .inf}", "cannot be read"),
    ],
)
def test_a_broken_experiment(tmp_path: Path, text: str, message: str) -> None:
    runs.write_run(tmp_path)
    (tmp_path / "experiment.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=message) as caught:
        load_run(tmp_path)
    assert "experiment.yaml" in str(caught.value)


def test_a_broken_environment_can_be_left_out(tmp_path: Path) -> None:
    runs.write_run(tmp_path)
    (tmp_path / "environment.json").write_text("{", encoding="utf-8")
    with pytest.raises(InputError, match=r"environment\.json(.|\n)*the report then leaves it out"):
        load_run(tmp_path)
