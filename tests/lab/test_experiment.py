"""Experiments: frozen, checked with one line per fault, written and read, overridden."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from crossfade.lab.base import checked
from crossfade.lab.experiment import Experiment, override, read, write
from crossfade.lab.inputs import InputError
from crossfade.lab.methods import METHODS
from crossfade.lab.recipes import CORE, RECIPES
from tests.lab.conftest import experiment


def test_an_experiment_is_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        experiment("dcr").name = "other"


@pytest.mark.parametrize("name", RECIPES.names())
def test_every_recipe_survives_its_file(name: str, tmp_path) -> None:
    recipe = RECIPES[name]()
    assert recipe.name == name
    assert (RECIPES[name].__doc__ or "").strip()
    write(recipe, tmp_path / "experiment.yaml")
    assert read(tmp_path / "experiment.yaml") == recipe


def test_the_core_methods_are_those_of_the_standing_benchmark() -> None:
    assert set(CORE) <= set(METHODS.names())
    assert set(CORE) <= set(RECIPES["fashion-mnist"]().methods)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"task": {"kind": "digitz"}}, ["unknown task 'digitz'", "'digits'"]),
        ({"task": {"kind": "digits", "epoch": 3}}, ["task.epoch: unknown key", "'epochs'"]),
        ({"task": {}}, ["task.kind: missing", "digits"]),
        ({"traning": {}}, ["traning: unknown key", "'training'"]),
        ({"training": {"step": 3}}, ["training.step: unknown key", "'steps'"]),
        ({"training": {"steps": 0}}, ["training.steps = 0", "greater than or equal to 1"]),
        ({"training": {"lr": "fast"}}, ["training.lr = 'fast'", "number"]),
        ({"training": {"rate": "cosin"}}, ["training.rate", "'cosine', 'linear' or 'constant'"]),
        ({"training": {"batch_size": 10, "accumulate": 3}}, ["multiple of training.accumulate"]),
        ({"methods": {"dcrr": {}}}, ["unknown method 'dcrr'", "'dcr'"]),
        ({"methods": {"dcr": {"alhpa": 1}}}, ["methods.dcr.alhpa: unknown key", "'alpha'"]),
        ({"methods": {"dcr": {"alpha": "linaer"}}}, ["methods.dcr.alpha", "'linear'"]),
        ({"methods": {"dcr": {"alpha": 0.5}}}, ["does not end at 0"]),
        ({"methods": {}}, ["no method"]),
        ({"methods": {"a/b": {"method": "dcr"}}}, ["a label is made of"]),
        ({"seeds": []}, ["seeds are different whole numbers"]),
        ({"seeds": [1, 1]}, ["seeds are different whole numbers"]),
        ({"reference": "ber", "methods": {"bern": {}}}, ["the reference 'ber'", "'bern'"]),
        ({"student": {"kind": "student:Reinitt"}}, ["no student is registered as 'Reinitt'"]),
        ({"name": "../up"}, ["name = '../up'"]),
    ],
)
def test_a_fault_is_one_line_with_path_value_and_nearest_name(data: dict, said: list[str]) -> None:
    whole = {"name": "x", "task": {"kind": "digits"}, "methods": {"dcr": {}}} | data
    with pytest.raises(InputError) as caught:
        checked(Experiment, whole, "")
    text = str(caught.value)
    assert len(text.splitlines()) == 1, text
    for words in said:
        assert words in text


def test_overrides_replace_values_at_dotted_keys() -> None:
    base = experiment("dcr", "bern")
    changed = override(
        base, ["training.lr=1e-4", "methods.dcr.alpha=linear:0.5", "seeds=[4, 5]", "evaluation.samples=null"]
    )
    assert changed.training.lr == 1e-4
    assert changed.methods["dcr"] == {"alpha": "linear:0.5"}
    assert changed.seeds == (4, 5)
    assert changed.evaluation.samples is None
    assert base.training.lr == 5e-3


@pytest.mark.parametrize("change", ["training.lr", "=3", "training.lrr=3", "trainin.lr=3", "training.lr=[", "name.x=1"])
def test_a_bad_override_is_refused(change: str) -> None:
    with pytest.raises(InputError):
        override(experiment("dcr"), [change])


@pytest.mark.parametrize("text", ["", "- a", "name: [", "!!python/object:os.system {}", "name: x"])
def test_a_file_that_is_no_experiment_is_refused(text: str, tmp_path) -> None:
    (tmp_path / "x.yaml").write_text(text)
    with pytest.raises(InputError):
        read(tmp_path / "x.yaml")


def test_a_missing_file_is_refused(tmp_path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        read(tmp_path / "none.yaml")


def test_the_key_of_a_run_changes_with_what_its_figures_depend_on_alone() -> None:
    base = experiment("dcr", "bern")
    key = base.key("dcr", 0)
    assert key == override(base, ["seeds=[0, 7]", "evaluation.targets=[3]", "methods.bern.lr=1"]).key("dcr", 0)
    assert key == experiment("bern", "dcr").key("dcr", 0)
    changes = ["training.lr=1", "methods.dcr.lr=1", "evaluation.samples=49", "task.smoothing=0.2"]
    assert (
        len({key, base.key("dcr", 1), base.key("bern", 0), *(override(base, [c]).key("dcr", 0) for c in changes)}) == 7
    )


@pytest.mark.parametrize("name", METHODS.names())
def test_every_method_cites_its_source_and_has_a_title(name: str) -> None:
    assert METHODS[name].source
    assert METHODS[name].title
    assert (METHODS[name].__doc__ or "").strip()
