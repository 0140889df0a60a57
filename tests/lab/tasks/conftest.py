"""Each task on a tiny random model and a few samples made here: no package, no network."""

from __future__ import annotations

import random
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from crossfade.lab.tasks import TASKS, Loaded
from tests.cli.conftest import WORDS, write_encoder

RESIDUES = "ACDEFGHIKLMNPQRSTVWY"


def write_reviews(folder: Path, reviews: int = 40) -> Path:
    """Two files like those of the rated sentences: one with reviews of three sentences, one with sentences alone."""
    dice = random.Random(0)
    folder.mkdir(parents=True, exist_ok=True)

    def line(number: str) -> str:
        return f"{number}\t0.5\t{' '.join(dice.choices(WORDS, k=dice.randint(10, 16)))} models\r\n"

    several = [line(f"{review}_{sentence}") for review in range(1, reviews + 1) for sentence in (1, 2, 3)]
    (folder / "amazon_GroundTruth.txt").write_text("".join(several), newline="")
    (folder / "movie_GroundTruth.txt").write_text("".join(line(str(n)) for n in range(1, reviews + 1)), newline="")
    return folder


def genes(families: int = 12, members: int = 6) -> list[list[str]]:
    """Families of sequences whose members differ from each other in one to three residues."""
    dice = random.Random(1)
    found = []
    for _ in range(families):
        base = dice.choices(RESIDUES, k=dice.randint(40, 60))
        family = []
        for _ in range(members):
            copy = list(base)
            for place in dice.sample(range(len(base)), dice.randint(1, 3)):
                copy[place] = dice.choice(RESIDUES)
            family.append("".join(copy))
        found.append(family)
    return found


def write_antibody_model(folder: Path) -> Path:
    from transformers import BertConfig, BertForMaskedLM

    folder.mkdir(parents=True)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *RESIDUES]
    (folder / "vocab.txt").write_text("\n".join(words))
    config = BertConfig(
        vocab_size=len(words),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        initializer_range=0.2,
    )
    torch.manual_seed(0)
    BertForMaskedLM(config).save_pretrained(folder)
    return folder


def write_causal_model(folder: Path) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = "the a of is to and in that for are as an be by with not this it or if".split()  # noqa: SIM905 - prose
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0} | {w: i + 1 for i, w in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]").save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(words) + 1,
        hidden_size=16,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=32,
        initializer_range=0.2,
        max_position_embeddings=64,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def write_images(folder: Path, train: int = 20, test: int = 4) -> Path:
    """Three classes of images of one colour each, with noise."""
    from PIL import Image

    dice = random.Random(2)
    for part, count in (("train", train), ("test", test)):
        for channel, name in enumerate(("blue", "green", "red")):
            (folder / part / name).mkdir(parents=True)
            for number in range(count):
                pixels = bytearray(dice.randint(0, 90) for _ in range(32 * 32 * 3))
                for place in range(channel, len(pixels), 3):
                    pixels[place] += 150
                Image.frombytes("RGB", (32, 32), bytes(pixels)).save(folder / part / name / f"{number:03}.png")
    return folder


TINY_VIT: dict[str, Any] = {
    "resolution": 32,
    "model_args": {"patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2},
    "pretrained": False,
    "stage_zero": {"head_epochs": 1, "epochs": 3, "batch_size": 6, "lr": 3e-3},
}


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("PIL")
    return write_images(tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="session")
def causal_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_causal_model(tmp_path_factory.mktemp("models") / "causal")


@pytest.fixture(scope="session")
def antibody_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_antibody_model(tmp_path_factory.mktemp("models") / "antibody")


@pytest.fixture(scope="session")
def minilm(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    folder = tmp_path_factory.mktemp("minilm")
    encoder = write_encoder(folder / "encoder")
    return TASKS["minilm"](model=str(encoder), text="vader", path=write_reviews(folder / "text"), length=32).load()


@pytest.fixture(scope="session")
def antiberty(antibody_model: Path) -> Loaded:
    file = antibody_model / "genes.fasta"
    file.write_text("".join(f">{i}\n{gene[:30]}\n{gene[30:]}\n" for i, gene in enumerate(chain.from_iterable(genes()))))
    return TASKS["antiberty"](weights=antibody_model, sequences=file).load()


@pytest.fixture(scope="session")
def smollm2(causal_model: Path) -> Loaded:
    return TASKS["smollm2"](weights=causal_model, layers="0,2", length=16, train=64, validation=8, test=16).load()


@pytest.fixture(scope="session")
def cifar100(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    pytest.importorskip("timm")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        return TASKS["cifar100"](images=images, **TINY_VIT).load()


@pytest.fixture(params=["minilm", "antiberty", "smollm2", "cifar100"])
def loaded(request: pytest.FixtureRequest) -> Loaded:
    found = request.getfixturevalue(request.param)
    assert isinstance(found, Loaded)
    return found
