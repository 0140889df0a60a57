"""The order of the data: a function of seed, epoch and index alone, so the same for every method and after a resume."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

__all__ = ["generator", "indices", "order"]


def generator(*parts: object) -> torch.Generator:
    """A generator whose state is a function of the parts, on every machine."""
    digest = hashlib.blake2b("\0".join(map(str, parts)).encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "big") % 2**63)


def order(seed: int, epoch: int, n: int) -> Tensor:
    """The samples of one epoch in their order. Shapes: [n].

    Example:
        >>> torch.equal(order(0, 3, 10), order(0, 3, 10)), torch.equal(order(0, 3, 10), order(0, 4, 10))
        (True, False)
    """
    return torch.randperm(n, generator=generator("order", seed, epoch))


def indices(seed: int, step: int, n: int, batch_size: int) -> Tensor:
    """The samples of one optimizer step; the rest of an epoch that fills no batch is left out. Shapes: [batch_size]."""
    size = min(batch_size, n)
    per_epoch = n // size
    epoch, place = divmod(step, per_epoch)
    return order(seed, epoch, n)[place * size : (place + 1) * size]
