"""The aggregates of the synthetic run, worked out by hand, and when a method may be called best."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from crossfade.lab.report.cells import load_run
from crossfade.lab.report.summary import MethodSummary, Summary, summarise
from tests.lab.report import runs


def summary_of(folder: Path, rows: list[dict[str, Any]] | None = None, **asked: Any) -> Summary:
    return summarise(load_run(runs.write_run(folder, rows, asked=runs.experiment(**asked))))


def method(summary: Summary, label: str) -> MethodSummary:
    return next(found for found in summary.methods if found.label == label)


def flipped(row: dict[str, Any]) -> dict[str, Any]:
    """The same cell in a metric where lower is better: 100 minus each score."""
    return row | {
        "metric": "error (%)",
        "higher_is_better": False,
        "original": {name: 100 - value for name, value in row["original"].items()},
        "final": {name: 100 - value for name, value in row["final"].items()},
        "curve": [point | {"score": 100 - point["score"]} for point in row["curve"]],
    }


def test_scores_and_distances(tmp_path: Path) -> None:
    kd = method(summary_of(tmp_path), "kd")
    assert (kd.test.mean, kd.test.std, kd.test.n) == (86.0, 1.0, 3)
    assert (kd.behind.mean, kd.behind.std) == (4.0, 1.0)
    assert kd.seconds.mean == pytest.approx(20.0)


@pytest.mark.parametrize("lower", [False, True])
def test_targets(tmp_path: Path, lower: bool) -> None:
    rows = [flipped(row) if lower else row for row in runs.cells()]
    summary = summary_of(tmp_path, rows)
    far, near = method(summary, "kd").targets
    # The target is 90.5 - 4 = 86.5. The curves end at 85.5, 86.5 and 87.5 after 60 at step 100.
    assert (far.distance, far.reached, far.per_seed[0]) == (4.0, 2, None)
    last = 100 + 100 * 26.5 / 27.5
    assert far.steps is not None
    assert far.seconds is not None
    assert far.steps.mean == pytest.approx((200 + last) / 2)
    assert far.seconds.mean == pytest.approx((200 + last) / 2 * 0.1)
    assert (near.reached, near.steps, near.seconds) == (0, None, None)
    # From 88 at step 100 to 89.5, 90 and 90.5 at step 200; the target is 89.5.
    aligned = method(summary, "align").targets[1]
    assert aligned.steps is not None
    assert (aligned.reached, aligned.steps.mean) == (3, pytest.approx((200 + 175 + 160) / 3))


@pytest.mark.parametrize("lower", [False, True])
def test_differences_and_the_verdict_do_not_depend_on_the_direction(tmp_path: Path, lower: bool) -> None:
    summary = summary_of(tmp_path, [flipped(row) if lower else row for row in runs.cells()])
    against = method(summary, "dcr").against
    assert against is not None
    assert against.per_seed == {0: 1.0, 1: 2.0, 2: 0.0}
    assert (against.mean, against.interval, against.separated) == (1.0, (0.0, 2.0), False)
    assert method(summary, "kd").against is None
    assert method(summary, "kd").behind.mean == 4.0
    assert summary.best == "align"
    assert "Best on the test part: Alignment." in summary.verdict
    assert len(summary.pairs) == 6


def test_a_method_that_is_not_separated_from_all_others_is_not_called_best(tmp_path: Path) -> None:
    rows = [row for row in runs.cells() if row["method"] != "align"]
    summary = summary_of(tmp_path, rows)
    assert summary.best is None
    assert "No method is called best" in summary.verdict
    assert "not separated from Distillation" in summary.verdict


def test_with_two_seeds_there_is_no_interval(tmp_path: Path) -> None:
    summary = summary_of(tmp_path, [row for row in runs.cells() if row["seed"] < 2], seeds=[0, 1])
    against = method(summary, "align").against
    assert against is not None
    assert against.interval is None
    assert summary.best is None
    assert "needs at least 3 common seeds" in summary.verdict
    assert any("at least 3 seeds" in note for note in summary.notes)


def test_curves_with_few_points_are_said_to_be_coarse(tmp_path: Path) -> None:
    full = runs.cell("dcr", 0)
    full["curve"].append(full["curve"][-1] | {"step": 300})
    assert any("fewer than 4 points: kd." in note for note in summary_of(tmp_path, [runs.cell("kd", 0), full]).notes)


def test_three_seeds_are_said_to_be_few(tmp_path: Path) -> None:
    assert any("one time in four" in note for note in summary_of(tmp_path).notes)


def test_the_floor_is_a_row_and_no_competitor(tmp_path: Path) -> None:
    floor = runs.cell("kd", 0, method="floor", base="floor", title="Untrained", curve=runs.cell("kd", 0)["curve"][:1])
    summary = summary_of(tmp_path, [*runs.cells(), floor])
    assert method(summary, "floor").is_floor
    assert method(summary, "floor").against is None
    assert [found.label for found in summary.trained] == ["kd", "dcr", "align"]
    assert not any("floor" in (pair.method, pair.other) for pair in summary.pairs)
    assert summary.floor is not None
    assert (summary.floor.mean, summary.floor.n) == (10.0, 3)


def test_missing_cells_strangers_clocks_and_a_missing_reference_are_noted(tmp_path: Path) -> None:
    rows = [row for row in runs.cells() if row["method"] != "kd"][1:]
    rows.append(runs.cell("align", 0, method="other", clock="wall"))
    notes = " ".join(summary_of(tmp_path, rows).notes)
    assert "kd (seed 0, 1, 2); dcr (seed 0)" in notes
    assert "does not name: other" in notes
    assert "different clocks" in notes
    assert "reference kd has no cell" in notes


def test_one_method_has_nothing_to_be_compared_with(tmp_path: Path) -> None:
    summary = summary_of(tmp_path, [runs.cell("kd", 0)])
    assert (summary.best, summary.methods[0].test.std) == (None, None)
    assert "nothing to compare" in summary.verdict
