"""The data of the demo: tokens of each part of the text, and the original model's embeddings as targets."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..lab.pretrained import Encoder, embed
from ..lab.text import Split

__all__ = ["Batch", "Data", "by_length", "cosine", "encode", "trim"]

Batch = dict[str, Tensor]


@dataclass
class Data:
    """Tokens and the original model's embeddings of each part of the split.

    Attributes:
        tokens: Per part: ids and mask, [N, L].
        targets: Per part: unit vectors, [N, D].
    """

    tokens: dict[str, Batch]
    targets: dict[str, Tensor]

    @classmethod
    def of(cls, encoder: Encoder, split: Split) -> Data:
        """Tokenise, and run the original model once over everything."""
        parts: dict[str, Sequence[str]] = {
            "train": split.train,
            "validation": split.validation,
            "held_out": split.held_out,
        }
        tokens = {name: encoder.tokens(texts) for name, texts in parts.items()}
        return cls(tokens, {name: encode(encoder.model, part) for name, part in tokens.items()})

    def batch(self, index: Tensor, part: str = "train") -> tuple[Batch, Tensor]:
        """Some texts, padded to the longest of them, and their targets. Shapes: [b] -> [b, l], [b, D]."""
        return trim({name: t[index] for name, t in self.tokens[part].items()}), self.targets[part][index]

    def score(self, model: nn.Module, part: str) -> float:
        """Mean cosine between a model's embeddings and the original ones."""
        return cosine(encode(model, self.tokens[part]), self.targets[part])


def cosine(a: Tensor, b: Tensor) -> float:
    """Mean cosine of unit vectors. Shapes: [N, D] or [D] each."""
    return float((a.double() * b.double()).sum(-1).mean())


def trim(batch: Batch) -> Batch:
    """Cut padding that the whole batch has, to a multiple of 16, so that few different lengths occur."""
    longest = int(batch["attention_mask"].sum(1).max())
    width = max(16, math.ceil(longest / 16) * 16)
    return {name: tensor[:, :width] for name, tensor in batch.items()}


def by_length(tokens: Batch, size: int, generator: torch.Generator | None = None) -> list[Tensor]:
    """Indices of batches whose texts have similar lengths; their order is random when a generator is given."""
    lengths = tokens["attention_mask"].sum(1).div(16).ceil()
    n = len(lengths)
    shuffled = torch.arange(n) if generator is None else torch.randperm(n, generator=generator)
    batches = list(shuffled[lengths[shuffled].argsort(stable=True)].split(size))
    if generator is None:
        return batches
    return [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]


@torch.no_grad()
def encode(model: nn.Module, tokens: Batch, size: int = 64) -> Tensor:
    """Unit sentence vectors in eval mode; the modes of all modules come back. Shapes: [N, L] -> [N, D]."""
    modes = [(m, m.training) for m in model.modules()]
    model.eval()
    index = by_length(tokens, size)
    try:
        parts = [embed(model, trim({name: t[i] for name, t in tokens.items()})) for i in index]
    finally:
        for module, mode in modes:
            module.training = mode
    return torch.cat(parts)[torch.cat(index).argsort()]
