"""The benchmark scripts run, on a tiny size, and write what the docs are made from. No time is asserted."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.repo import project

PHASES = {"hand", "blend", "blend_guidance", "align", "guide", "student"}


@pytest.fixture(scope="module")
def blend_cost() -> ModuleType:
    # Benchmarks are scripts and no package, so they are loaded from their file.
    spec = importlib.util.spec_from_file_location("blend_cost", project.ROOT / "benchmarks" / "blend_cost.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["blend_cost"] = module  # Its dataclasses look their own module up.
    spec.loader.exec_module(module)
    return module


def tiny_vit(module: ModuleType) -> Any:
    return module.vit(batch=2, width=8, depth=2, heads=2, patch=4, side=8)


def tiny_minilm(module: ModuleType) -> Any:
    pytest.importorskip("transformers")
    config = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    return module.minilm(batch=2, length=8, vocab_size=11, **config)


@pytest.mark.parametrize("make", [tiny_vit, tiny_minilm])
def test_a_case_gives_every_figure(blend_cost: ModuleType, make: Callable[[ModuleType], Any]) -> None:
    result = blend_cost.measure(make(blend_cost), repeats=2)
    assert set(result) == {"about", "repeats", "ratios", "milliseconds", "saved_bytes", "released"}
    assert set(result["ratios"]) == {row[0] for row in blend_cost.RATIOS}
    for row in result["ratios"].values():
        assert set(row) == {"target", "cpu", "wall"}
        for clock in ("cpu", "wall"):
            assert set(row[clock]) == {"median", "low", "high", "fastest"}
            assert row[clock]["low"] <= row[clock]["median"] <= row[clock]["high"]
    arms = {name for _, arm, parts, _ in blend_cost.RATIOS for name in (arm, *parts)}
    assert set(result["milliseconds"]["cpu"]) == set(result["milliseconds"]["wall"]) == arms
    assert set(result["saved_bytes"]) >= PHASES
    json.dumps(result)
    assert "hand-written" in blend_cost.table("tiny", result)


def test_the_parts_hold_together(blend_cost: ModuleType) -> None:
    memory = blend_cost.measure(tiny_vit(blend_cost), repeats=1)["saved_bytes"]
    # What no machine can change: a released teacher leaves nothing, and a running one saves what its backward needs.
    assert memory["student"] == memory["hand"] < memory["blend"] < memory["blend_guidance"]
    assert memory["hand"] < memory["guide"] < memory["blend_guidance"]


def test_released_teachers_are_dead(blend_cost: ModuleType) -> None:
    ended = blend_cost.released(tiny_vit(blend_cost))
    assert ended["before"] == {"modules": 6, "storages": 8}
    assert ended["after"] == ended["after_collection"] == {"modules": 0, "storages": 0}


def test_arms_share_the_backbone_and_nothing_else(blend_cost: ModuleType) -> None:
    case = tiny_vit(blend_cost)
    hand, end = (dict(make(case).model.named_parameters()) for make in (blend_cost.hand_written, blend_cost.finalized))
    assert list(hand) == list(end)
    for name, parameter in hand.items():
        student = ".attn." in name
        assert (parameter is end[name]) is not student
        assert parameter.shape == end[name].shape
        assert parameter.requires_grad == end[name].requires_grad == student


def test_the_command_writes_its_file(
    blend_cost: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(blend_cost.CASES, "vit", lambda: tiny_vit(blend_cost))
    file = tmp_path / "out" / "results.json"
    threads = str(torch.get_num_threads())  # The script sets them for its process, which here is the tests'.
    blend_cost.run(["--case", "vit", "--repeats", "1", "--threads", threads, "--json", str(file)])
    written = json.loads(file.read_text(encoding="utf-8"))
    assert set(written) == {"benchmark", "command", "versions", "machine", "threads", "seed", "cases"}
    assert written["command"].startswith("python benchmarks/blend_cost.py --case vit")
    assert set(written["versions"]) >= {"python", "torch", "crossfade"}
    assert list(written["cases"]) == ["vit"]
    assert "sum of its parts" in capsys.readouterr().out


def test_bad_arguments_are_refused(blend_cost: ModuleType) -> None:
    for argv in (["--repeats", "0"], ["--case", "gpt"]):
        with pytest.raises(SystemExit) as stopped:
            blend_cost.parse(argv)
        assert stopped.value.code == 2
