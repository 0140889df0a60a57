"""`crossfade inspect` and `crossfade --version`."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.cli.conftest import Outcome

Run = Callable[..., Outcome]


def test_version(run: Run) -> None:
    outcome = run("--version")
    assert outcome == Outcome(0, f"crossfade {version('crossfade')}\n", "")


def test_a_transformers_folder(run: Run, tiny_encoder: Path) -> None:
    outcome = run("inspect", tiny_encoder)
    assert outcome.code == 0, outcome.err
    assert "BertModel, targets '**.attention.self'" in outcome.out
    assert "encoder.layer.1.attention.self" in outcome.out
    assert "2 sites" in outcome.out


def test_a_pattern(run: Run, tiny_encoder: Path) -> None:
    outcome = run("inspect", tiny_encoder, "--targets", "encoder.layer.0.*")
    assert outcome.code == 0, outcome.err
    assert "encoder.layer.0.output" in outcome.out
    assert "encoder.layer.1" not in outcome.out


def test_a_timm_name(run: Run) -> None:
    outcome = run("inspect", "timm:vit_tiny_patch16_224")
    assert outcome.code == 0, outcome.err
    assert "targets '**.attn'" in outcome.out
    assert "12 sites" in outcome.out


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["timm:no_such_vit"], "timm does not know"),
        (["./nowhere"], "unknown model"),
        (["timm:resnet10t"], "no attention modules"),
        (["timm:vit_tiny_patch16_224", "--targets", "**.attention"], "0 of"),
    ],
)
def test_bad_input(run: Run, arguments: list[str], what: str) -> None:
    outcome = run("inspect", *arguments)
    assert outcome.code == 2
    assert what in outcome.err
    assert outcome.out == ""


def test_a_model_without_attention_names_its_classes(run: Run) -> None:
    assert "Conv2d" in run("inspect", "timm:resnet10t").err
