"""Tiny models and helpers that tests share. Every model is a few kilobytes: a law needs structure, not size."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu
from torch.utils.checkpoint import checkpoint

import crossfade
from crossfade.gates import Gate
from crossfade.guidance import Guidance
from crossfade.students import Reinit

VOCABULARY, WIDTH, CLASSES = 11, 8, 3


class Attention(nn.Module):
    """Self-attention that returns a tuple and takes its padding mask by keyword, as most libraries' do."""

    def __init__(self, width: int = WIDTH, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Shapes: x [B, L, D], mask [B, L] (1 = real) -> ([B, L, D], [B, H, L, L])."""
        q, k, v = (f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        scores = q @ k.mT / q.shape[-1] ** 0.5
        if mask is not None:
            scores = scores.masked_fill(mask[:, None, None, :] == 0, float("-inf"))
        weights = scores.softmax(-1)
        return self.o((weights @ v).transpose(1, 2).flatten(2)), weights


class MLP(nn.Module):
    def __init__(self, width: int = WIDTH, dropout: float = 0.0) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(width, 2 * width), nn.Linear(2 * width, width), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.down(gelu(self.up(x))))


class Block(nn.Module):
    """One layer, pre-norm or post-norm."""

    def __init__(self, *, post_norm: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.post_norm = post_norm
        self.attn, self.mlp = Attention(), MLP(dropout=dropout)
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if self.post_norm:
            x = self.norm1(x + self.attn(x, mask=mask)[0])
            return self.norm2(x + self.mlp(x))
        x = x + self.attn(self.norm1(x), mask=mask)[0]
        return x + self.mlp(self.norm2(x))


class Net(nn.Module):
    """A small text classifier. `reentrant` switches gradient checkpointing on (None: off)."""

    def __init__(self, layers: int = 2, *, post_norm: bool = False, shared: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(post_norm=post_norm, dropout=dropout) for _ in range(layers))
        if shared:  # One attention for all layers, as ALBERT does.
            for block in self.blocks:
                block.attn = self.blocks[0].attn
        self.head = nn.Linear(WIDTH, CLASSES)
        self.num_layers = layers
        self.reentrant: bool | None = None

    def forward(self, ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Shapes: ids [B, L], attention_mask [B, L] (1 = real) -> [B, C]."""
        x = self.embed(ids)
        for block in self.blocks:
            if self.reentrant is None or not self.training:
                x = block(x, attention_mask)
            else:
                x = checkpoint(block, x, attention_mask, use_reentrant=self.reentrant)
        if attention_mask is None:
            return self.head(x.mean(1))
        mask = attention_mask.to(x.dtype).unsqueeze(-1)
        return self.head((x * mask).sum(1) / mask.sum(1))


KINDS = ("pre_norm", "post_norm", "shared")


def net(kind: str = "pre_norm", *, layers: int = 2, seed: int = 0, dropout: float = 0.0) -> Net:
    """A model of one kind, always the same for the same arguments. The global random state stays."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Net(layers, post_norm=kind == "post_norm", shared=kind == "shared", dropout=dropout)


def batch(step: int = 0, size: int = 4, length: int = 5) -> tuple[Tensor, Tensor]:
    """Data that depends on the step alone: ids [B, L] and labels [B]."""
    dice = torch.Generator().manual_seed(1000 + step)
    ids = torch.randint(VOCABULARY, (size, length), generator=dice)
    return ids, torch.randint(CLASSES, (size,), generator=dice)


def padding(lengths: list[int], total: int) -> Tensor:
    """A padding mask [B, L] with as many ones per row as `lengths` says."""
    return (torch.arange(total)[None, :] < torch.tensor(lengths)[:, None]).long()


def gates(alpha: Any = None) -> dict[str, Callable[[], Gate]]:
    """Every gate, over one alpha (default: from 1 to 0 over the first 60 % of the run)."""
    given = crossfade.schedules.linear(until=0.6) if alpha is None else alpha
    return {
        "deterministic": lambda: crossfade.Deterministic(given),
        "bernoulli": lambda: crossfade.Bernoulli(given),
        "bernoulli_skip": lambda: crossfade.Bernoulli(given, "skip"),
        "bernoulli_shared": lambda: crossfade.Bernoulli(given, granularity="shared"),
        "gumbel": lambda: crossfade.Gumbel(given),
        # Fast enough for a run of a few steps; the bound makes it end where the others end.
        "adaptive": lambda: crossfade.Deterministic(
            crossfade.Adaptive(low=-0.2, high=0.9, smoothing=0.5, at_most=given)
        ),
    }


GATES = tuple(gates())


def plan(gate: Gate | None = None, guidance: Guidance | None = None, **more: Any) -> crossfade.Plan:
    """All attentions by cold ones."""
    settings = {"targets": "blocks.*.attn", "student": Reinit("reset_parameters")} | more
    return crossfade.Plan(gate=gate or crossfade.Deterministic("linear"), guidance=guidance, **settings)


def adamw(fade: crossfade.Fade) -> torch.optim.AdamW:
    """An optimizer with momentum and weight decay, which would move a parameter even at gradient zero."""
    return torch.optim.AdamW(fade.parameter_groups(weight_decay=0.1), lr=1e-2)


def train(model: nn.Module, fade: crossfade.Fade, optimizer: torch.optim.Optimizer, begin: int, end: int) -> None:
    """The steps `begin` to `end` (exclusive) of a run; the optimizer is attached."""
    for step in range(begin, end):
        ids, labels = batch(step)
        loss = cross_entropy(model(ids), labels) + fade.guidance()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def backbone(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters that belong to no blend, by name."""
    return {n: p for n, p in model.named_parameters() if ".teacher." not in n and ".student." not in n}


def gradients(parameters: dict[str, nn.Parameter]) -> dict[str, Tensor | None]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in parameters.items()}


def equal(a: Any, b: Any) -> bool:
    """Bit equality of nested data: the same NaN in the same place counts as equal, 0.0 and -0.0 do too."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.nan_to_num(12.5), b.nan_to_num(12.5))
    if isinstance(a, dict) and isinstance(b, dict):
        return list(a) == list(b) and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)):
        return len(a) == len(b) and all(equal(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def difference(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """The keys under which two dictionaries are not `equal`."""
    return sorted(key for key in a.keys() | b.keys() if key not in a or key not in b or not equal(a[key], b[key]))


def random_states() -> dict[str, Any]:
    """The global random states that crossfade must leave alone."""
    return {"torch": torch.get_rng_state(), "random": random.getstate()}


def portrait(model: nn.Module) -> dict[str, Any]:
    """Everything about a model that a reversible operation has to put back, by name."""
    seen: dict[str, Any] = {"state_dict keys": list(model.state_dict())}
    for path, module in model.named_modules(remove_duplicate=False):
        seen[f"{path}: identity, class, mode"] = (id(module), type(module).__name__, module.training)
        seen[f"{path}: attributes"] = sorted(vars(module))
        seen[f"{path}: children"] = [(name, id(child)) for name, child in module._modules.items()]
        seen[f"{path}: hooks"] = {k: list(v) for k, v in vars(module).items() if "hooks" in k and hasattr(v, "keys")}
        for name, value in vars(module).items():
            if isinstance(value, (bool, int, float, str)):
                seen[f"{path}: {name}"] = value
    for name, tensor in named_tensors(model):
        seen[f"{name}: tensor"] = (id(tensor), tensor.data_ptr(), tensor.requires_grad, tensor.detach().clone())
    return seen


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)
