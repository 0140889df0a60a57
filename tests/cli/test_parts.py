"""The smaller parts of the command line: output folders, the clock, batches by length."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
from rich.console import Console

from crossfade.cli.data import by_length, encode, trim
from crossfade.cli.progress import meter
from crossfade.lab.clock import Clock
from crossfade.lab.inputs import InputError, need, staging
from crossfade.lab.pretrained import embed, load_encoder, no_dropout
from crossfade.lab.surroundings import write_json


def test_staging_moves_files_when_all_went_well(tmp_path: Path) -> None:
    out = tmp_path / "a" / "b"
    with staging(out) as folder:
        (folder / "model").mkdir()
        (folder / "model" / "x").write_text("new")
        assert not out.exists()
    assert (out / "model" / "x").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_staging_replaces_its_files_and_keeps_others(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("old")
    (tmp_path / "mine").write_text("mine")
    with staging(tmp_path) as folder:
        (folder / "x").write_text("new")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"x": "new", "mine": "mine"}


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_staging_leaves_nothing_after_an_error(tmp_path: Path, error: type[BaseException]) -> None:
    def fail(folder: Path) -> None:
        (folder / "x").write_text("half")
        raise error

    with pytest.raises(error), staging(tmp_path / "out") as folder:
        fail(folder)
    assert list(tmp_path.iterdir()) == []


def test_need_names_the_missing_dependency() -> None:
    with pytest.raises(InputError, match=r"no_such_module_here[\s\S]*pip install 'crossfade\[hf\]'"):
        need("no_such_module_here", "hf")


def test_the_clock_stands_still_while_paused() -> None:
    clock = Clock()
    with clock.paused():
        before = clock.seconds
        torch.randn(300, 300).mm(torch.randn(300, 300))
        assert clock.seconds == before
    assert clock.seconds >= before


@pytest.mark.parametrize("terminal", [True, False])
def test_the_meter_shows_what_is_known(terminal: bool) -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=terminal, width=160)
    with meter(console, "an arm", 20.0) as line:
        line.show(0.0, "align", alpha=1.0)
        line.show(5.0, "fade", task=0.25, alpha=0.5)
        line.show(12.0, "fade", task=None)
        line.done(13.0, "done")
    text = stream.getvalue()
    assert "an arm" in text
    # A terminal is redrawn ten times a second, so only the last state is sure to have been on the screen.
    assert terminal or "align  alpha 1.000  (20 s left)" in text
    assert terminal or "fade  alpha 0.500  (8 s left)" in text
    assert "done" in text


def test_batches_by_length_hold_every_text_once() -> None:
    lengths = torch.randint(3, 64, (101,))
    mask = (torch.arange(64)[None] < lengths[:, None]).long()
    tokens = {"input_ids": mask * 7, "attention_mask": mask}
    for generator in (None, torch.Generator().manual_seed(3)):
        index = by_length(tokens, 16, generator)
        assert torch.cat(index).sort().values.tolist() == list(range(101))
    widths = [trim({name: t[i] for name, t in tokens.items()})["input_ids"].shape[1] for i in index]
    assert set(widths) <= {16, 32, 48, 64}
    assert sum(widths) < 0.8 * 64 * len(widths)


def test_encoding_by_length_equals_encoding_one_by_one(tiny_encoder: Path) -> None:
    encoder = load_encoder(str(tiny_encoder), length=48)
    tokens = encoder.tokens(["the fox", "seven small birds sing about models " * 5, "a dog jumps " * 40])
    assert tokens["input_ids"].shape == (3, 48)
    encoder.model.train()
    together = encode(encoder.model, tokens, size=2)
    assert encoder.model.training
    encoder.model.eval()
    with torch.no_grad():
        alone = torch.cat([embed(encoder.model, {name: t[i : i + 1] for name, t in tokens.items()}) for i in range(3)])
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)


def test_no_dropout_puts_every_rate_back(tiny_encoder: Path) -> None:
    model = load_encoder(str(tiny_encoder), length=16).model.train()
    ids = torch.randint(5, 20, (2, 9))
    rates = [(m, m.p) for m in model.modules() if isinstance(m, torch.nn.Dropout)]
    assert any(p > 0 for _, p in rates)
    with no_dropout(model):
        assert torch.equal(model(ids).last_hidden_state, model(ids).last_hidden_state)
    assert all(m.p == p for m, p in rates)
    assert not torch.equal(model(ids).last_hidden_state, model(ids).last_hidden_state)


def test_results_are_strict_json(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON"):
        write_json({"x": float("nan")}, tmp_path / "r.json")
