"""The matrix: every operator with settings small enough to write all its weights out, and what it is compared with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from crossfade.operators import (
    Grouped,
    LinearAttention,
    Linformer,
    Operator,
    Performer,
    Window,
    WindowLinear,
    grouped,
    linear,
    linformer,
    performer,
    window,
)

LONGEST = 200


@dataclass(frozen=True)
class Case:
    """One operator with its settings: `build(heads, head_dim, kv_heads)`."""

    label: str
    name: str
    kind: type[Operator]
    reference: Callable[..., Tensor]
    settings: dict[str, Any]

    def build(self, heads: int = 4, head_dim: int = 5, kv_heads: int = 2, dtype: torch.dtype = torch.float64) -> Any:
        op = self.kind(heads, head_dim, kv_heads=kv_heads, **self.settings).to(dtype)
        with torch.no_grad():
            for parameter in op.parameters():  # Away from the identity, where every head is the same.
                parameter.add_(0.3 * torch.randn_like(parameter))
        return op


def case(label: str, name: str, kind: type[Operator], reference: Callable[..., Tensor], **settings: Any) -> Case:
    return Case(label, name, kind, reference, settings)


CASES = [
    case("linear-elu", "linear", LinearAttention, linear.reference, feature_map="elu"),
    case("linear-relu", "linear", LinearAttention, linear.reference, feature_map="relu"),
    case("linear-exp", "linear", LinearAttention, linear.reference, feature_map="exp"),
    case("linear-hedgehog", "linear", LinearAttention, linear.reference, feature_map="hedgehog"),
    case("performer", "performer", Performer, performer.reference, features=11),
    case("linformer", "linformer", Linformer, linformer.reference, max_length=LONGEST, rank=6),
    case("linformer-per-head", "linformer", Linformer, linformer.reference, max_length=LONGEST, rank=6, per_head=True),
    case("linformer-shared", "linformer", Linformer, linformer.reference, max_length=LONGEST, rank=6, share_kv=True),
    case("window-0", "window", Window, window.reference, radius=0, global_tokens=0),
    case("window-3", "window", Window, window.reference, radius=3),
    case("window-40", "window", Window, window.reference, radius=40, global_tokens=3),
    case("window-linear-0", "window_linear", WindowLinear, window.hybrid_reference, radius=0),
    case("window-linear-3", "window_linear", WindowLinear, window.hybrid_reference, radius=3),
    case("window-linear-40", "window_linear", WindowLinear, window.hybrid_reference, radius=40),
    case("grouped", "grouped", Grouped, grouped.reference),
]
CAUSAL = [c for c in CASES if c.kind.card.causal]
MODES = [(c, causal) for c in CASES for causal in (False, True) if not causal or c.kind.card.causal]
MODE_IDS = [f"{c.label}-{'causal' if causal else 'all'}" for c, causal in MODES]


def inputs(
    q_len: int,
    k_len: int | None = None,
    *,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 5,
    v_dim: int = 3,
    batch: int = 2,
    dtype: torch.dtype = torch.float64,
    grad: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    k_len = q_len if k_len is None else k_len
    q = torch.randn(batch, heads, q_len, head_dim, dtype=dtype)
    k = torch.randn(batch, kv_heads, k_len, head_dim, dtype=dtype)
    v = torch.randn(batch, kv_heads, k_len, v_dim, dtype=dtype)
    return q.requires_grad_(grad), k.requires_grad_(grad), v.requires_grad_(grad)


def alive(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same with a first feature of one in q and k, so that ReLU features always meet.

    Without it a query may see nothing, or a weight so small that its inverse, and the gradient, are ill-conditioned.
    """
    with torch.no_grad():
        q[..., 0] = 1.0
        k[..., 0] = 1.0
    return q, k, v


def masks(k_len: int, batch: int = 2) -> Iterator[tuple[str, Tensor | None]]:
    """None; some keys padded; one row of the batch without any key; keys padded on the left."""
    yield "none", None
    some = torch.rand(batch, k_len) > 0.4
    some[:, 0] = True
    yield "some", some
    empty = some.clone()
    empty[0] = False
    yield "one row empty", empty
    left = torch.ones(batch, k_len, dtype=torch.bool)
    left[1, : (k_len + 1) // 2] = False
    yield "left", left


def outputs_and_gradients(
    call: Callable[..., Tensor], op: nn.Module, tensors: tuple[Tensor, ...], weight: Tensor, **more: Any
) -> dict[str, Tensor]:
    """The output, and the gradients of its weighted sum for q, k, v and the parameters."""
    named = dict(zip("qkv", tensors, strict=True)) | dict(op.named_parameters())
    out = call(*tensors, **more)
    gradients = torch.autograd.grad((out * weight).sum(), list(named.values()), allow_unused=True)
    found = {"out": out.detach()}
    for (name, tensor), gradient in zip(named.items(), gradients, strict=True):
        found[name] = torch.zeros_like(tensor) if gradient is None else gradient
    return found
