"""Capture: what each site is called with while the teachers run, kept within a memory budget and cut by sample."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from . import outputs
from .errors import PlanError, StateError
from .ledger import Ledger
from .site import Site

__all__ = ["Capture", "Chunk", "Group", "capture", "parse_bytes"]


def parse_bytes(value: int | str) -> int:
    """Bytes from a number or from text such as `"512MiB"` or `"2GB"`.

    Raises:
        PlanError: It is neither.
    """
    if isinstance(value, int) and value > 0:
        return value
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B\s*", str(value), re.IGNORECASE)
    if not found:
        raise PlanError("this is not an amount of memory.", expected='"1GiB", "512MB" or bytes', got=repr(value))
    return int(float(found[1]) * (1024 if found[3] else 1000) ** " KMGT".index(found[2].upper() or " "))


@dataclass
class Chunk:
    """One captured call: the call with its tensors, its padding mask, and its number of samples."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    mask: Tensor | None
    samples: int


@dataclass
class Group:
    """Calls of one site that differ in their samples only. Tensors named in `rows` are cut by sample."""

    chunks: list[Chunk]
    rows: list[Tensor | None] = field(default_factory=list)
    mask: Tensor | None = None
    target: Tensor | None = None

    def __len__(self) -> int:
        return sum(chunk.samples for chunk in self.chunks)

    def join(self, cut: Sequence[bool]) -> bool:
        """Lay the chunks' samples one after another; False if a tensor that is not cut differs between chunks.

        Args:
            cut: For each tensor of the call, whether it is cut by sample.
        """
        first = self.chunks[0]
        columns = list(zip(*(list(outputs.tensors((c.args, c.kwargs))) for c in self.chunks), strict=True))
        if not all(
            by_sample or all(torch.equal(column[0], x) for x in column)
            for column, by_sample in zip(columns, cut, strict=True)
        ):
            return False
        self.rows = [_joined(column) if by_sample else None for column, by_sample in zip(columns, cut, strict=True)]
        self.mask = None if first.mask is None else _joined([c.mask for c in self.chunks if c.mask is not None])
        # From here on the rows hold the samples; a second copy would not be in the budget.
        flags = iter(cut)
        first.args, first.kwargs = outputs.map_tensors(
            (first.args, first.kwargs), lambda tensor: tensor.new_empty(0) if next(flags) else tensor
        )
        first.mask = None
        for chunk in self.chunks[1:]:
            chunk.args, chunk.kwargs, chunk.mask = (), {}, None
        return True

    def call(self, index: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The call for the samples at `index`. Shapes: [b]."""
        rows = iter(self.rows)

        def pick(tensor: Tensor) -> Tensor:
            row = next(rows)
            return tensor if row is None else row[index]

        first = self.chunks[0]
        args, kwargs = outputs.map_tensors((first.args, first.kwargs), pick)
        return args, kwargs


def _joined(column: Sequence[Tensor]) -> Tensor:
    return column[0] if len(column) == 1 else torch.cat(list(column))


def by_sample(tensor: Tensor, samples: int) -> bool:
    """Whether a tensor's first dimension has the length of the batch: it is then probably cut by sample."""
    return tensor.dim() > 0 and tensor.shape[0] == samples


class Capture:
    """Takes what each blend is called with while the teachers run, until the budget is reached."""

    def __init__(self, sites: list[Site], ledger: Ledger, budget: int) -> None:
        self.ledger, self.budget, self.bytes = ledger, budget, 0
        self.groups: dict[str, list[Group]] = {site.path: [] for site in sites}
        self.pending: list[tuple[str, Chunk]] = []
        self.copies: dict[int, tuple[Tensor, Tensor]] = {}
        self.blends = {id(site.blend): site.blend for site in sites}

    def hook(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Forward pre-hook of the blends."""
        blend = self.blends[id(module)]
        hidden = blend.input_of(args, kwargs)
        mask = self.ledger.mask if self.ledger.mask is not None else outputs.padding_mask(kwargs, hidden)
        kept_args, kept_kwargs = outputs.map_tensors((args, dict(kwargs)), self._copy)
        kept_mask = None if mask is None else self._copy(mask)
        self.pending.append((blend.site_path, Chunk(kept_args, kept_kwargs, kept_mask, hidden.shape[0])))

    def _copy(self, tensor: Tensor) -> Tensor:
        """One copy of each tensor per batch: masks are shared by all sites."""
        if id(tensor) not in self.copies:
            self.copies[id(tensor)] = (tensor, tensor.detach().clone())
        return self.copies[id(tensor)][1]

    def commit(self) -> bool:
        """Keep the batch that ran if it fits; False when the budget is reached."""
        size = sum(copy.nbytes for _, copy in self.copies.values())
        pending, self.pending, self.copies = self.pending, [], {}
        if self.bytes + size > self.budget:
            if self.bytes == 0:
                raise PlanError(
                    "the memory budget does not hold the inputs of a single batch.",
                    expected=f"memory_budget of at least {size:,} bytes",
                    got=f"{self.budget:,} bytes",
                    do="smaller batches, fewer sites at a time, or a larger budget",
                )
            return False
        self.bytes += size
        for path, chunk in pending:
            if chunk.samples == 0:
                continue
            group = next((g for g in self.groups[path] if _same_but_samples(g.chunks[0], chunk)), None)
            if group is None:
                self.groups[path].append(Group([chunk]))
            else:
                group.chunks.append(chunk)
        return True


def _same_but_samples(a: Chunk, b: Chunk) -> bool:
    """Whether two calls may be laid one after another: same structure, same shapes per sample, same shared tensors."""
    left, right = list(outputs.tensors((a.args, a.kwargs))), list(outputs.tensors((b.args, b.kwargs)))
    if len(left) != len(right) or (a.mask is None) != (b.mask is None):
        return False
    if a.mask is not None and b.mask is not None and a.mask.shape[1:] != b.mask.shape[1:]:
        return False
    if repr(outputs.map_tensors((a.args, a.kwargs), lambda _: "tensor")) != repr(
        outputs.map_tensors((b.args, b.kwargs), lambda _: "tensor")
    ):
        return False
    for x, y in zip(left, right, strict=True):
        if by_sample(x, a.samples) != by_sample(y, b.samples) or x.dtype != y.dtype:
            return False
        if x.shape[1:] != y.shape[1:] if by_sample(x, a.samples) else not torch.equal(x, y):
            return False
    return True


@torch.no_grad()
def capture(
    model: nn.Module,
    sites: list[Site],
    ledger: Ledger,
    batches: Iterable[Any],
    budget: int,
    forward: Callable[[nn.Module, Any], object] | None,
) -> tuple[Capture, bool]:
    """Run the batches through the teachers; returns what was taken, and whether the budget held all of it.

    Raises:
        PlanError: The budget does not hold one batch.
        StateError: Some site was never called.
    """
    taken = Capture(sites, ledger, budget)
    modes = [(m, m.training) for m in model.modules()]
    hooks = [site.blend.register_forward_pre_hook(taken.hook, with_kwargs=True) for site in sites]
    complete = True
    try:
        model.eval()
        for batch in batches:
            (forward or outputs.feed)(model, batch)
            if not taken.commit():
                complete = False
                break
    finally:
        for hook in hooks:
            hook.remove()
        for module, mode in modes:
            module.training = mode
    missing = [path for path, groups in taken.groups.items() if not groups]
    if missing:
        raise StateError(
            "nothing was captured: the batches were empty, or the forward does not reach these sites.",
            where=", ".join(missing),
            do="give batches whose forward calls every site",
        )
    return taken, complete
