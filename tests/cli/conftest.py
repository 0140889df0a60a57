"""A tiny random encoder with its tokenizer, as a transformers folder; and a way to call the command line."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from crossfade import cli

WORDS = "the quick brown fox jumps over a lazy dog while small birds sing about models".split()  # noqa: SIM905 - prose


def write_encoder(folder: Path) -> Path:
    """A BERT of two layers that the demo can use. Its weights are larger than usual, so that attention matters."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    vocabulary = {word: i for i, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)
    config = BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=64,
        initializer_range=0.2,
    )
    torch.manual_seed(0)
    BertModel(config).save_pretrained(folder)
    return folder


def some_text(paragraphs: int = 160) -> str:
    """Paragraphs of the tokenizer's words, all different, of different lengths."""
    generator = torch.Generator().manual_seed(1)
    lines = []
    for n in range(paragraphs):
        draw = torch.randint(len(WORDS), (10 + n % 30,), generator=generator)
        lines.append(" ".join(WORDS[i] for i in draw.tolist()))
    return "\n\n".join(lines)


@pytest.fixture(scope="session")
def tiny_encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_encoder(tmp_path_factory.mktemp("models") / "tiny-encoder")


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    file.write_text(some_text(), encoding="utf-8")
    return file


@dataclass
class Outcome:
    code: int
    out: str
    err: str


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """Calls `crossfade ARGUMENTS` in this process."""

    def call(*arguments: object) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["crossfade", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        captured = capsys.readouterr()
        code = ended.value.code
        return Outcome(code if isinstance(code, int) else int(bool(code)), captured.out, captured.err)

    return call
