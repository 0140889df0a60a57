"""Fair tuning: the same rates and seeds for all, chosen on validation, never on the seeds of the figures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from crossfade.lab.experiment import Experiment
from crossfade.lab.inputs import InputError
from crossfade.lab.sweep import prepare
from crossfade.lab.tuning import apply, choose, equal_seconds, grid, tuned
from crossfade.lab.worker import cell_path, write_record
from tests.lab.conftest import experiment


def put(folder: Path, label: str, seed: int, score: float, *, higher: bool = True, **seconds: float) -> None:
    record = {"method": label, "final": {"validation": score}, "higher_is_better": higher, "seconds": seconds}
    write_record(record, cell_path(folder, label, seed))


def test_every_method_gets_every_rate_of_what_it_tunes() -> None:
    base = experiment("dcr", "align", "floor", methods={"long": {"method": "dcr", "alpha": "linear"}})
    found = grid(base, [1e-3, 1e-2])
    assert set(found.methods) == {f"{name}@{rate}" for name in ("dcr", "align", "long") for rate in ("0.001", "0.01")}
    assert found.method("dcr@0.01").lr == 0.01
    assert found.method("align@0.01").align_lr == 0.01
    assert found.method("align@0.01").lr is None
    assert found.method("long@0.001").alpha == "linear"
    for rates in ([], [0.0], [-1.0, 1.0]):
        with pytest.raises(InputError, match="positive"):
            grid(base, rates)


@pytest.mark.parametrize("higher", [True, False])
def test_the_best_mean_over_all_seeds_is_chosen(higher: bool, tmp_path: Path) -> None:
    wanted = grid(experiment("dcr", "bern", seeds=(7, 8)), [1e-3, 1e-2])
    prepare(wanted, tmp_path / "t")
    sign = 1 if higher else -1
    scores = {"dcr@0.001": (3, 3), "dcr@0.01": (5, 2), "bern@0.001": (1, 2), "bern@0.01": (1, 3)}
    for label, (one, two) in scores.items():
        put(tmp_path / "t", label, 7, sign * one, higher=higher)
        put(tmp_path / "t", label, 8, sign * two, higher=higher)
    chosen = choose(tmp_path / "t")
    assert {label: row["value"] for label, row in chosen.items()} == {"dcr": 0.01, "bern": 0.01}
    cell_path(tmp_path / "t", "dcr@0.01", 8).unlink()  # That run failed, so the rate is out.
    assert choose(tmp_path / "t")["dcr"]["value"] == 0.001
    cell_path(tmp_path / "t", "dcr@0.01", 7).write_text("{")
    with pytest.raises(InputError, match=r"dcr@0\.01-s7\.json"):
        choose(tmp_path / "t")


def written(tmp_path: Path, seeds: list[int]) -> Path:
    row = {"field": "lr", "value": 0.5, "score": 1.0, "tried": {}, "seeds": seeds}
    tuned({"dcr": row}, tmp_path / "tuned.json")
    return tmp_path / "tuned.json"


def test_tuned_rates_reach_the_method_and_its_variants_but_not_what_has_its_own(tmp_path: Path) -> None:
    variants = {"long": {"method": "dcr", "alpha": "linear"}, "own": {"method": "dcr", "lr": 0.25}}
    found = apply(experiment("dcr", "bern", methods=variants, seeds=(0,)), written(tmp_path, [1000]))
    assert [found.method(label).lr for label in ("dcr", "long", "own", "bern")] == [0.5, 0.5, 0.25, None]


def test_seeds_that_were_tuned_on_give_no_figures(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="fresh"):
        apply(experiment("dcr", seeds=(0, 1000)), written(tmp_path, [1000]))


@pytest.mark.parametrize("text", ["", "[]", '{"dcr": 3}', '{"dcr": {"field": "lr"}}'])
def test_a_broken_file_of_rates_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(InputError, match=r"x\.json"):
        apply(experiment("dcr"), tmp_path / "x.json")


def test_steps_are_scaled_to_the_reference_s_seconds(tmp_path: Path) -> None:
    methods = {"align+fade": {"align_steps": 4}}
    base = experiment("dcr", "bern", "align", "floor", methods=methods, reference="dcr", training={"steps": 100})
    prepare(base, tmp_path / "t")
    put(tmp_path / "t", "dcr", 0, 0, fade=10.0, total=10.0, wall=99.0)
    put(tmp_path / "t", "bern", 0, 0, fade=4.0, total=4.0)
    put(tmp_path / "t", "bern", 1, 0, fade=6.0, total=6.0)
    put(tmp_path / "t", "align", 0, 0, align=2.0, total=2.0)
    put(tmp_path / "t", "align+fade", 0, 0, align=2.0, fade=16.0, total=18.0)
    with pytest.raises(InputError, match="floor"):
        equal_seconds(base, tmp_path / "t")
    put(tmp_path / "t", "floor", 0, 0, total=0.0)
    found: Experiment = equal_seconds(base, tmp_path / "t")
    steps = {label: found.method(label).steps for label in found.methods}
    assert steps == {"dcr": 100, "bern": 200, "align": None, "align+fade": 50, "floor": None}
    assert found.method("align+fade").align_steps == 4
    json.dumps(found.model_dump(mode="json"))
