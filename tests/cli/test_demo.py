"""`crossfade demo` from end to end: on a tiny encoder, and on the real one with a tiny budget."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import crossfade
from tests.cli.conftest import Outcome

Run = Callable[..., Outcome]


def check(results: dict[str, Any], out: Path, seconds: float) -> None:
    """What holds for every run."""
    for name in ("original", "baseline", "floor", "student_only", "crossfade"):
        assert -1.0 <= results[name] <= 1.0 + 1e-6
    assert results["original"] == pytest.approx(1.0, abs=1e-5)
    assert results["reload_max_abs_diff"] == 0.0
    took, steps = results["seconds"], results["steps"]
    assert took["crossfade"] == pytest.approx(took["align"] + took["fade"])
    assert took["student_only"] >= max(seconds, took["crossfade"])
    assert steps["student_only"]["train"] >= steps["crossfade"]["align"] + steps["crossfade"]["fade"]
    assert steps["crossfade"]["align"] >= 5
    assert steps["crossfade"]["fade"] >= 5
    for name, curve in results["curves"].items():
        times = [point[0] for point in curve]
        assert times == sorted(times)
        assert times[-1] <= took[name] + 1e-6
        assert len(curve) >= 5
    assert results["config"]["seed"] == 3
    assert results["surroundings"]["threads"] == torch.get_num_threads()
    assert results["command"].startswith("crossfade demo ")
    assert results["versions"]["torch"] == torch.__version__.partition("+")[0] or "+" in results["versions"]["torch"]
    for figure in ("learning_curves.png", "interface_cosine.png"):
        assert (out / figure).read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_a_tiny_encoder_from_end_to_end(run: Run, tiny_encoder: Path, text_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine.txt").write_text("mine")
    arguments = ("--model", tiny_encoder, "--text", text_file, "--out", out, "--seconds", 1.5, "--seed", 3)
    outcome = run("demo", *arguments)
    assert outcome.code == 0, outcome.err
    results = json.loads((out / "results.json").read_text(encoding="utf-8"))
    check(results, out, 1.5)
    assert results["text"]["source"] == "text.txt"
    assert set(results["interface"]) == {"floor", "student_only", "crossfade"}
    assert f"{results['crossfade']:.4f}" in outcome.out
    assert f"{results['student_only']:.4f}" in outcome.out
    assert "outputs identical" in outcome.out
    assert (out / "mine.txt").read_text() == "mine"
    assert {path.name for path in tmp_path.iterdir()} == {"out", "text.txt"}


def test_the_saved_model_loads_from_its_config(run: Run, tiny_encoder: Path, text_file: Path, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModel

    outcome = run("demo", "--model", tiny_encoder, "--text", text_file, "--out", tmp_path / "out", "--seconds", 0.1)
    assert outcome.code == 0, outcome.err
    folder = tmp_path / "out" / "model"
    model = crossfade.load(folder, base=lambda: AutoModel.from_config(AutoConfig.from_pretrained(folder)))
    assert not any(type(module).__module__.startswith("crossfade") for module in model.modules())
    with pytest.raises(OSError, match=r"model\.safetensors"):
        AutoModel.from_pretrained(folder)


@pytest.mark.real
@pytest.mark.slow
def test_the_real_encoder_with_a_tiny_budget(run: Run, tmp_path: Path) -> None:
    outcome = run("demo", "--out", tmp_path / "out", "--seconds", 5, "--seed", 3)
    assert outcome.code == 0, outcome.err
    results = json.loads((tmp_path / "out" / "results.json").read_text(encoding="utf-8"))
    check(results, tmp_path / "out", 5)
    assert results["floor"] < results["baseline"] < 0.6
    assert results["crossfade"] > results["floor"] + 0.05
    assert results["config"]["targets"] == "**.attention.self"
    assert len(results["config"]["sites"]) == 6
