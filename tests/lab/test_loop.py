"""One run: the same data for all methods, measured without a trace, resumed to the same bits."""

from __future__ import annotations

import copy
import json
import math

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from crossfade.lab import loop
from crossfade.lab.inputs import InputError
from crossfade.lab.loop import run
from crossfade.lab.methods import METHODS
from crossfade.lab.tasks import Loaded
from tests.lab.conftest import experiment

TIMES = ("seconds", "costs", "facts")


def figures(record: dict) -> dict:
    """The record without what the clock says."""
    kept = {key: value for key, value in copy.deepcopy(record).items() if key not in TIMES}
    for row in (*kept["curve"], *kept["interface"]):
        del row["seconds"]
    return kept


@pytest.mark.parametrize("label", METHODS.names())
def test_every_method_runs_from_the_pretrained_model_to_a_score(label: str, loaded: Loaded) -> None:
    settings = {"align_steps": 4, "samples": 32} if "align" in label else {}
    before = {key: value.clone() for key, value in loaded.model.state_dict().items()}
    record = run(experiment(methods={label: settings}), label, 0, loaded=loaded)
    json.dumps(record, allow_nan=False)
    assert record["curve"][0]["step"] == 0
    assert len(record["curve"]) == len(record["interface"])
    assert set(record["final"]) == set(record["original"]) == {"validation", "test", "validation_curve"}
    if label != "floor":
        assert record["curve"][-1]["score"] == record["final"]["validation_curve"]
        assert record["curve"][-1]["step"] >= 4
    assert all(torch.equal(value, before[key]) for key, value in loaded.model.state_dict().items())


def test_a_run_repeats_itself_to_the_bit(loaded: Loaded) -> None:
    wanted = experiment("bern+dfg", evaluation={"variance": (1,), "draws": 2, "batches": 2})
    first, second = (figures(run(wanted, "bern+dfg", 3, loaded=loaded)) for _ in range(2))
    assert first == second
    assert first != figures(run(wanted, "bern+dfg", 4, loaded=loaded))


@pytest.mark.parametrize("label", ["dcr+dfg", "bern", "gum", "adaptive+dfg"])
def test_measuring_leaves_no_trace_in_the_run(label: str, loaded: Loaded) -> None:
    plain = experiment(label, evaluation={"interface": 0, "costs": False, "points": 1})
    measured = experiment(label, evaluation={"interface": 16, "variance": (0, 1, 2), "draws": 2, "batches": 2})
    one, other = (run(e, label, 0, loaded=loaded) for e in (plain, measured))
    assert one["final"] == other["final"]
    assert one["curve"][-1]["score"] == other["curve"][-1]["score"]


def test_all_methods_see_the_same_data_in_the_same_order(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, list[list[int]]] = {}
    original = loop.indices
    label = ""

    def noting(*args: int) -> torch.Tensor:
        found = original(*args)
        seen.setdefault(label, []).append(found.tolist())
        return found

    monkeypatch.setattr(loop, "indices", noting)
    labels = ["dcr", "bern", "theseus", "kd+features", "student+dfg-kept", "local"]
    for label in labels:
        run(experiment(*labels), label, 0, loaded=loaded)
    assert len(seen) == len(labels)
    assert len(seen["dcr"]) == 10
    assert all(seen[name] == seen["dcr"] for name in labels)


def test_all_methods_start_from_the_same_student(loaded: Loaded) -> None:
    labels = ["dcr", "bern", "kd", "student-only", "floor"]
    starts = [run(experiment(*labels), label, 0, loaded=loaded)["interface"][0]["sites"] for label in labels]
    assert len(starts[0]) == 6
    assert max(row["cosine"] for row in starts[0].values()) < 0.9  # Of the cold student, not of the blend.
    assert all(start == starts[0] for start in starts)


@pytest.mark.parametrize("label", ["dcr+dfg-kept", "bern", "adaptive+dfg", "kd+features", "align+fade"])
@pytest.mark.parametrize("at", [1, 5, 8])
def test_stop_and_resume_equals_never_stopped(
    label: str, at: int, loaded: Loaded, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"align_steps": 3, "samples": 32} if "align" in label else {}
    wanted = experiment(methods={label: settings}, training={"checkpoint_every": at})
    whole = run(wanted, label, 0, loaded=loaded, folder=tmp_path / "whole")

    class StoppedError(Exception):
        pass

    original = loop._Run._save

    def save_and_stop(self, *args: int) -> None:
        original(self, *args)
        raise StoppedError

    monkeypatch.setattr(loop._Run, "_save", save_and_stop)
    with pytest.raises(StoppedError):
        run(wanted, label, 0, loaded=loaded, folder=tmp_path / "part")
    monkeypatch.setattr(loop._Run, "_save", original)
    resumed = run(wanted, label, 0, loaded=loaded, folder=tmp_path / "part")
    assert figures(resumed) == figures(whole)
    assert resumed["seconds"]["total"] > 0


def test_a_checkpoint_of_other_settings_is_not_used(loaded: Loaded, tmp_path) -> None:
    first = experiment("dcr", training={"checkpoint_every": 4})
    run(first, "dcr", 0, loaded=loaded, folder=tmp_path / "c")
    assert (tmp_path / "c" / "model.safetensors").exists()
    other = experiment("dcr", training={"checkpoint_every": 4, "lr": 1e-4})
    fresh = run(other, "dcr", 0, loaded=loaded)
    assert figures(run(other, "dcr", 0, loaded=loaded, folder=tmp_path / "c")) == figures(fresh)


def test_a_broken_checkpoint_is_named(loaded: Loaded, tmp_path) -> None:
    wanted = experiment("dcr", training={"checkpoint_every": 4})
    run(wanted, "dcr", 0, loaded=loaded, folder=tmp_path / "c")
    (tmp_path / "c" / "run.json").write_text("{")
    with pytest.raises(InputError, match="delete the folder"):
        run(wanted, "dcr", 0, loaded=loaded, folder=tmp_path / "c")


def test_accumulation_gives_the_gradient_of_the_whole_batch(loaded: Loaded) -> None:
    # The gradients themselves: what Adam makes of them does not depend on their scale.
    found: dict[int, list[torch.Tensor]] = {}
    for k in (1, 4):
        seen = found[k] = []

        def note(optimizer: torch.optim.Optimizer, *_: object, seen: list[torch.Tensor] = seen) -> None:
            seen += [p.grad.clone() for g in optimizer.param_groups for p in g["params"] if p.grad is not None]

        handle = register_optimizer_step_pre_hook(note)
        wanted = experiment("student-only", training={"accumulate": k, "steps": 1, "clip": None})
        run(wanted, "student-only", 0, loaded=loaded)
        handle.remove()
    assert len(found[1]) == len(found[4]) == 24
    for whole, summed in zip(found[1], found[4], strict=True):
        torch.testing.assert_close(summed, whole, rtol=1e-4, atol=1e-7)  # float32, another order of sums


def test_the_paper_s_gate_has_no_variance_and_the_rivals_have(loaded: Loaded) -> None:
    found = {}
    for label in ("dcr", "bern", "gum"):
        wanted = experiment(label, evaluation={"variance": (1,), "draws": 4, "batches": 3})
        record = run(wanted, label, 0, loaded=loaded)
        (found[label],) = record["variance"]
        assert found[label]["data"] > 0
        assert len(record["curvature"]) == 6
        for row in record["curvature"]:
            assert 0 < row["bias"] <= row["bound"] * (1 + 1e-6)
    assert found["dcr"]["gate"] == 0.0
    assert found["bern"]["gate"] > 0.0 < found["gum"]["gate"]
    assert found["dcr"]["data"] == pytest.approx(found["bern"]["data"])


def test_costs_tell_the_phases_apart(loaded: Loaded) -> None:
    record = run(experiment("dcr+dfg-kept", training={"steps": 20}), "dcr+dfg-kept", 0, loaded=loaded)
    phases = {row["phase"]: row for row in record["costs"]}
    assert set(phases) == {"blend", "guide"}
    assert phases["blend"]["saved_bytes"] > phases["guide"]["saved_bytes"] > 0
    assert all(math.isfinite(row["seconds_per_step"]) and row["seconds_per_step"] > 0 for row in phases.values())


def test_the_whole_model_may_train(loaded: Loaded) -> None:
    frozen, free = (
        run(experiment("student-only", training={"trains": trains}), "student-only", 0, loaded=loaded)
        for trains in ("students", "all")
    )
    assert frozen["final"] != free["final"] or frozen["interface"][-1] != free["interface"][-1]


def test_cached_outputs_of_the_original_change_nothing_but_time(loaded: Loaded) -> None:
    methods = {"kd": {}, "cached": {"method": "kd", "cache": True}}
    wanted = experiment(methods=methods, training={"steps": 90}, evaluation={"interface": 0})
    calls = dict.fromkeys(methods, 0)
    scores = {}
    for label in methods:

        def count(*_: object, label: str = label) -> None:
            calls[label] += 1

        hook = loaded.model.register_forward_hook(count)
        scores[label] = [point["score"] for point in run(wanted, label, 0, loaded=loaded)["curve"]]
        hook.remove()
    # An epoch is 74 steps; after it nearly every batch stands in the cache. An output computed in another batch may
    # differ in its last bit, which may turn one of the 50 images of a point: 2 per cent.
    assert calls["cached"] < calls["kd"]
    assert scores["cached"] == pytest.approx(scores["kd"], abs=2.0)
