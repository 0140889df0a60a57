"""Sliding-window attention with global tokens, and the hybrid of a softmax window with linear attention outside it.

Shapes (see `base`): q [B, H, Lq, D], k [B, Hkv, Lk, D], v [B, Hkv, Lk, Dv], mask [B, Lk] -> [B, H, Lq, Dv].

Query i stands at position i + Lk - Lq: the ends of q and k are aligned. The band is computed in blocks of C queries
(C at least the radius); block b meets a slab of S keys: blocks b - 1 and b, and b + 1 where it is not causal.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..errors import StudentError
from .base import Card, Operator, SoftmaxMap, fold, operator, quotient, visible, with_count

__all__ = ["Window", "WindowLinear", "hybrid_reference", "reference"]

SMALLEST_BLOCK = 32  # Smaller blocks would make many tiny products out of a narrow window.


class _Blocks(NamedTuple):
    """How the band of one call is cut: C, the number n of query blocks, Lk - Lq, and the blocks in a slab."""

    size: int
    number: int
    shift: int
    slab: int

    @classmethod
    def of(cls, q_len: int, k_len: int, radius: int, causal: bool) -> _Blocks:
        size = min(max(radius, SMALLEST_BLOCK), max(q_len, k_len))
        return cls(size, -(-q_len // size), k_len - q_len, 2 if causal else 3)

    def queries(self, x: Tensor) -> Tensor:
        """[.., Lq, .] -> [.., n, C, .], zeros at the end."""
        padded = functional.pad(x, (0, 0, 0, self.size * self.number - x.shape[-2]))
        blocks: Tensor = padded.unflatten(-2, (self.number, self.size))
        return blocks

    def keys(self, x: Tensor) -> Tensor:
        """The keys from one block before the first query on. [.., Lk, .] -> [.., n + slab - 1, C, .]."""
        number = self.number + self.slab - 1
        front = self.size - self.shift  # A negative pad cuts the keys that no window reaches.
        padded = functional.pad(x, (0, 0, front, number * self.size - front - x.shape[-2]))
        blocks: Tensor = padded.unflatten(-2, (number, self.size))
        return blocks

    def slabs(self, x: Tensor) -> Tensor:
        """[.., Lk, .] -> [.., n, S, .]."""
        blocks = self.keys(x)
        return torch.cat([blocks[..., i : i + self.number, :, :] for i in range(self.slab)], dim=-2)

    def positions(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Positions of queries [n, C, 1] and of the keys in their slabs [n, 1, S]; both may leave the sequence."""
        start = torch.arange(self.number, device=device).view(-1, 1, 1) * self.size + self.shift
        within = torch.arange(self.slab * self.size, device=device)
        return start + within[: self.size].view(-1, 1), start - self.size + within

    def rows(self, x: Tensor, q_len: int) -> Tensor:
        """[.., n, C, .] -> [.., Lq, .]."""
        return x.flatten(-3, -2)[..., :q_len, :]


def _softmax_weights(scores: Tensor, allowed: Tensor) -> Tensor:
    """exp(score - largest allowed score of the row), zero where it is not allowed. Shapes: [.., S], both.

    A row without an allowed key gives zeros. The gradient flows through the largest score too: where the weights meet
    others (`WindowLinear`) it is part of the function, where they are only divided by their sum it cancels.
    """
    low = torch.finfo(scores.dtype).min
    scores = scores.masked_fill(~allowed, low)
    return (scores - scores.amax(dim=-1, keepdim=True)).exp().masked_fill(~allowed, 0.0)


def _check_radius(where: str, radius: int, global_tokens: int = 0) -> None:
    if min(radius, global_tokens) < 0:
        raise StudentError(
            "the radius and the number of global tokens must not be negative.",
            where=where,
            got=f"radius={radius}, global_tokens={global_tokens}",
        )


@operator(
    Card(
        name="window",
        what="softmax attention to the neighbours within a radius, and to and from global tokens at the front",
        causal=True,
        bidirectional=True,
        padding=True,
        grouped=True,
        cross=True,
        any_length=True,
        class_token=True,
        exact_at_init=False,
        complexity="time and memory O(L (radius + global tokens))",
        paper="2004.05150",
    )
)
class Window(Operator):
    """Sliding window with global tokens.

    A query at position p sees the keys at p - radius to p + radius (causal: to p) and the global tokens; a global
    token sees all keys (causal: the earlier ones). Global tokens use the same q, k and v as the others: the paper's
    second set of projections belongs to the module around the operator. With a radius of at least Lk - 1 this is
    softmax attention.

    Args:
        heads: H.
        head_dim: D.
        kv_heads: Hkv; as many as q's when None.
        radius: Keys seen on each side.
        global_tokens: Number of tokens at the front that are global; one serves a class token, or the first token
            that a causal model rests its attention on.

    Raises:
        StudentError: A number is negative, or the numbers of heads do not fit.

    Source: Beltagy et al., Longformer (arXiv 2004.05150).

    Example:
        >>> op = Window(2, 4, radius=1)
        >>> op(torch.ones(1, 2, 5, 4), torch.ones(1, 2, 5, 4), torch.ones(1, 2, 5, 4), causal=True).shape
        torch.Size([1, 2, 5, 4])
    """

    def __init__(
        self, heads: int, head_dim: int, *, radius: int, kv_heads: int | None = None, global_tokens: int = 1
    ) -> None:
        super().__init__(heads, head_dim, kv_heads=kv_heads)
        _check_radius(type(self).__name__, radius, global_tokens)
        self.radius = radius
        self.global_tokens = global_tokens

    def extra_repr(self) -> str:
        """What `print` shows of the settings."""
        return f"{super().extra_repr()}, radius={self.radius}, global_tokens={self.global_tokens}"

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float | None) -> Tensor:
        """See `Operator.attend`."""
        wide = torch.promote_types(q.dtype, torch.float32)
        scale = self.head_dim**-0.5 if scale is None else scale
        q, k = fold(q.to(wide) * scale, self.kv_heads), fold(k.to(wide), self.kv_heads)
        v = with_count(v.to(wide), mask)
        result = self._band(q, k, v, causal)
        # The rows of global tokens, written out over all keys: there are few of them.
        shift = k.shape[-2] - q.shape[-2]
        first, last = max(-shift, 0), min(max(self.global_tokens - shift, 0), q.shape[-2])
        if first < last:
            scores = q[..., first:last, :] @ k.mT
            key = torch.arange(k.shape[-2], device=q.device)
            position = torch.arange(first, last, device=q.device).view(-1, 1) + shift
            allowed = (key <= position if causal else key >= 0) & (v[..., -1] > 0).unsqueeze(-2)
            full = _softmax_weights(scores, allowed.expand_as(scores)) @ v
            result = torch.cat([result[..., :first, :], full, result[..., last:, :]], dim=-2)
        return quotient(result)

    def _band(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        """Window and global keys in one softmax. Shapes: q [B, Hkv, G, Lq, D], v [B, Hkv, 1, Lk, E] -> [.., Lq, E]."""
        q_len = q.shape[-2]
        blocks = _Blocks.of(q_len, k.shape[-2], self.radius, causal)
        position, key = blocks.positions(q.device)
        near_v, far_v = blocks.slabs(v), v[..., : self.global_tokens, :].unsqueeze(-3)
        # Global keys stand beside the band, so the band leaves them out.
        near = _in_window(position, key, self.radius, causal) & (key >= self.global_tokens)
        near = near & (near_v[..., -1] > 0).unsqueeze(-2)
        global_key = torch.arange(far_v.shape[-2], device=q.device)
        far = global_key <= (position if causal else torch.full_like(position, self.global_tokens))
        far = far & (far_v[..., -1] > 0).unsqueeze(-2)
        rows = blocks.queries(q)
        scores = [rows @ blocks.slabs(k).mT, rows @ k[..., : self.global_tokens, :].unsqueeze(-3).mT]
        allowed = [sees.expand_as(s) for sees, s in zip((near, far), scores, strict=True)]
        weights = _softmax_weights(torch.cat(scores, dim=-1), torch.cat(allowed, dim=-1))
        width = near_v.shape[-2]
        return blocks.rows(weights[..., :width] @ near_v + weights[..., width:] @ far_v, q_len)


def _in_window(position: Tensor, key: Tensor, radius: int, causal: bool) -> Tensor:
    """Whether a key is within the radius of a query. Shapes: broadcast."""
    distance = position - key
    return (distance <= radius) & (distance >= (0 if causal else -radius))


@operator(
    Card(
        name="window_linear",
        what="softmax attention within a radius and linear attention outside it, under one normaliser (LoLCATs)",
        causal=True,
        bidirectional=True,
        padding=True,
        grouped=True,
        cross=True,
        any_length=True,
        class_token=True,
        exact_at_init=False,
        complexity="time and memory O(L radius)",
        paper="2410.10254",
    )
)
class WindowLinear(Operator):
    """Softmax inside a window, linear attention outside, one normaliser.

    With m the largest score s of a query inside its window, the weight of a key is `g exp(s - m)` inside and
    `(1 - g) phi(q) . phi(k)` outside; g is learned per head, phi are learned softmax maps, and the weights are divided
    by their sum. Subtracting m is part of the definition: it keeps both kinds of weight within [0, 1]. With a
    radius of at least Lk - 1 this is softmax attention.

    Args:
        heads: H.
        head_dim: D.
        kv_heads: Hkv; as many as q's when None.
        radius: Keys seen by the softmax on each side.

    Raises:
        StudentError: The radius is negative, or the numbers of heads do not fit.

    Source: Zhang et al., LoLCATs (arXiv 2410.10254).

    Example:
        >>> op = WindowLinear(2, 4, radius=1)
        >>> op(torch.ones(1, 2, 5, 4), torch.ones(1, 2, 5, 4), torch.ones(1, 2, 5, 4), causal=True).shape
        torch.Size([1, 2, 5, 4])
    """

    def __init__(self, heads: int, head_dim: int, *, radius: int, kv_heads: int | None = None) -> None:
        super().__init__(heads, head_dim, kv_heads=kv_heads)
        _check_radius(type(self).__name__, radius)
        self.radius = radius
        self.q_map = SoftmaxMap(self.heads, head_dim)
        self.k_map = SoftmaxMap(self.kv_heads, head_dim)
        self.mix = nn.Parameter(torch.empty(heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Equal weights (g = 1/2) for every head; the maps reset themselves."""
        with torch.no_grad():
            self.mix.zero_()

    def extra_repr(self) -> str:
        """What `print` shows of the settings."""
        return f"{super().extra_repr()}, radius={self.radius}"

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float | None) -> Tensor:
        """See `Operator.attend`."""
        wide = torch.promote_types(q.dtype, torch.float32)
        scale = self.head_dim**-0.5 if scale is None else scale
        q, k, v = q.to(wide), k.to(wide), with_count(v.to(wide), mask)
        phi_q, phi_k = fold(self.q_map(q), self.kv_heads), fold(self.k_map(k), self.kv_heads)
        q, k = fold(q * scale, self.kv_heads), fold(k, self.kv_heads)
        q_len = q.shape[-2]
        blocks = _Blocks.of(q_len, k.shape[-2], self.radius, causal)
        position, key = blocks.positions(q.device)
        near_v = blocks.slabs(v)
        valid = (near_v[..., -1] > 0).unsqueeze(-2)
        inside = _in_window(position, key, self.radius, causal)
        outside = ~inside & ((key <= position) if causal else torch.ones_like(inside))
        scores = blocks.queries(q) @ blocks.slabs(k).mT
        soft = _softmax_weights(scores, (inside & valid).expand_as(scores)) @ near_v
        rows = blocks.queries(phi_q)
        linear = (rows @ blocks.slabs(phi_k).mT).masked_fill(~outside, 0.0) @ near_v
        linear = linear + rows @ self._beyond(blocks, phi_k, v)
        g = self.mix.to(wide).sigmoid().view(self.kv_heads, -1, 1, 1, 1)
        return quotient(blocks.rows(g * soft + (1.0 - g) * linear, q_len))

    def _beyond(self, blocks: _Blocks, k: Tensor, v: Tensor) -> Tensor:
        """The states of all keys outside each slab, [B, Hkv, 1, Lk, .] -> [B, Hkv, 1, n, F, E].

        Sums of what is outside, not a total less what is inside: a difference would lose digits, and the future would
        leak into the past by rounding.
        """
        states = blocks.keys(k).mT @ blocks.keys(v)  # [B, Hkv, 1, n + slab - 1, F, E]
        first = max(blocks.shift - blocks.size, 0)
        start = (k[..., :first, :].mT @ v[..., :first, :]).unsqueeze(-3)
        beyond = torch.cat([start, states[..., : blocks.number - 1, :, :]], dim=-3).cumsum(dim=-3)
        if blocks.slab == 3:
            later = states[..., 3:, :, :].flip(-3).cumsum(dim=-3).flip(-3)
            beyond = beyond + functional.pad(later, (0, 0, 0, 0, 0, 1))
        return beyond


def _window(q_len: int, k_len: int, radius: int, device: torch.device) -> Tensor:
    """Which key is near which query, written out: bool [Lq, Lk]."""
    position = torch.arange(q_len, device=device).view(-1, 1) + k_len - q_len
    return (position - torch.arange(k_len, device=device)).abs() <= radius


def reference(
    op: Window,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """`Window` in float64 with all weights written out. Shapes: as in `Operator.forward`."""
    q, k, v = q.double(), k.double(), v.double()
    k, v = (x.repeat_interleave(op.heads // op.kv_heads, dim=1) for x in (k, v))
    q_len, k_len = q.shape[2], k.shape[2]
    sees = _window(q_len, k_len, op.radius, q.device)
    sees[:, : op.global_tokens] = True
    for i in range(q_len):
        if 0 <= i + k_len - q_len < op.global_tokens:
            sees[i] = True
    scores = torch.einsum("bhid,bhjd->bhij", q, k) * (op.head_dim**-0.5 if scale is None else scale)
    weights = torch.exp(scores) * (sees & visible(q_len, k_len, mask, causal, q.device))
    total = weights.sum(dim=-1, keepdim=True)
    return (weights / total.masked_fill(total == 0.0, 1.0)) @ v


def hybrid_reference(
    op: WindowLinear,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """`WindowLinear` in float64 with all weights written out. Shapes: as in `Operator.forward`."""
    q, k, v = q.double(), k.double(), v.double()
    maps = ((op.q_map, q), (op.k_map, k))
    features = [torch.einsum("hed,bhld->bhle", m.weight.double(), x) for m, x in maps]
    phi_q, phi_k = (torch.softmax(torch.cat([x, -x], dim=-1), dim=-1) for x in features)
    k, v, phi_k = (x.repeat_interleave(op.heads // op.kv_heads, dim=1) for x in (k, v, phi_k))
    sees = visible(q.shape[2], k.shape[2], mask, causal, q.device)
    near = _window(q.shape[2], k.shape[2], op.radius, q.device)
    scores = torch.einsum("bhid,bhjd->bhij", q, k) * (op.head_dim**-0.5 if scale is None else scale)
    inside = torch.where(near & sees, scores, -torch.inf)
    largest = inside.amax(dim=-1, keepdim=True)
    largest = torch.where(largest == -torch.inf, 0.0, largest)
    g = torch.sigmoid(op.mix.double()).view(-1, 1, 1)
    linear = torch.einsum("bhif,bhjf->bhij", phi_q, phi_k)
    weights = g * torch.exp(inside - largest) + (1.0 - g) * linear * (sees & ~near)
    total = weights.sum(dim=-1, keepdim=True)
    return (weights / total.masked_fill(total == 0.0, 1.0)) @ v
