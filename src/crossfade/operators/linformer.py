"""Linformer: keys and values are projected along the length to a fixed number of rows, then softmax attention.

Shapes (see `base`): q [B, H, Lq, D], k [B, Hkv, Lk, D], v [B, Hkv, Lk, Dv], mask [B, Lk] -> [B, H, Lq, Dv].
Projections [P, R, N]: P = Hkv or 1 (shared by the heads), R rows (the rank), N the longest length.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..errors import StudentError
from .base import Card, Operator, fold, operator

__all__ = ["Linformer", "reference"]


@operator(
    Card(
        name="linformer",
        what="softmax attention over keys and values that are projected along the length to a fixed number of rows",
        causal=False,
        bidirectional=True,
        padding=True,
        grouped=True,
        cross=True,
        any_length=False,
        class_token=True,
        exact_at_init=False,
        complexity="time and memory O(L R)",
        paper="2006.04768",
    )
)
class Linformer(Operator):
    """Linformer.

    A shorter sequence uses the first columns of the projections; a longer one is refused. Padded positions enter as
    zeros, so they change nothing. The softmax runs over all R rows at every length: with a projection that is the
    identity this is softmax attention only for sequences of exactly N tokens without padding.

    Args:
        heads: H.
        head_dim: D.
        kv_heads: Hkv; as many as q's when None.
        max_length: N, the longest number of keys.
        rank: R, rows after the projection.
        per_head: A projection for each key/value head; else one for all.
        share_kv: One projection for keys and values.
        generator: Source of the initial values, N(0, 1 / R); torch's default one when None.

    Raises:
        StudentError: The sizes are not positive, or a call has more than N keys.

    Source: Wang et al. (arXiv 2006.04768).

    Example:
        >>> op = Linformer(2, 4, max_length=8, rank=3)
        >>> op(torch.ones(1, 2, 5, 4), torch.ones(1, 2, 5, 4), torch.ones(1, 2, 5, 4)).shape
        torch.Size([1, 2, 5, 4])
    """

    def __init__(
        self,
        heads: int,
        head_dim: int,
        *,
        max_length: int,
        rank: int,
        kv_heads: int | None = None,
        per_head: bool = False,
        share_kv: bool = False,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__(heads, head_dim, kv_heads=kv_heads)
        if min(max_length, rank) < 1:
            raise StudentError(
                "a Linformer needs a length and a rank of at least 1.",
                where=type(self).__name__,
                got=f"max_length={max_length}, rank={rank}",
            )
        self.max_length = max_length
        self.rank = rank
        shape = (self.kv_heads if per_head else 1, rank, max_length)
        self.k_projection = nn.Parameter(torch.empty(shape))
        self.v_projection = self.k_projection if share_kv else nn.Parameter(torch.empty(shape))
        self.reset_parameters(generator)

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """N(0, 1 / R), the scale of the paper's theorem."""
        with torch.no_grad():
            for projection in self.parameters():
                projection.normal_(0.0, self.rank**-0.5, generator=generator)

    def extra_repr(self) -> str:
        """What `print` shows of the settings."""
        return f"{super().extra_repr()}, max_length={self.max_length}, rank={self.rank}"

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float | None) -> Tensor:
        """See `Operator.attend`.

        Raises:
            StudentError: There are more keys than the longest length.
        """
        length = k.shape[2]
        if length > self.max_length:
            raise StudentError(
                "the sequence is longer than this Linformer was built for.",
                where=type(self).__name__,
                expected=f"at most {self.max_length} keys",
                got=length,
                do="build it with a larger max_length; its projections do not extend to new positions",
            )
        wide = torch.promote_types(q.dtype, torch.float32)
        scale = self.head_dim**-0.5 if scale is None else scale
        k = self.k_projection[..., :length].to(wide) @ k.to(wide)  # [B, Hkv, R, D]
        v = self.v_projection[..., :length].to(wide) @ v.to(wide)
        k, v = fold(k, self.kv_heads), fold(v, self.kv_heads)
        # Without any valid key the projected values are zero, and so is the output; no row needs special care.
        return ((fold(q.to(wide), self.kv_heads) * scale) @ k.mT).softmax(dim=-1).matmul(v).flatten(1, 2)


def reference(
    op: Linformer,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """The same in float64, as a matrix of weights over the keys themselves. Shapes: as in `Operator.forward`."""
    assert not causal
    q, k, v = q.double(), k.double(), v.double()
    rows = [
        p.double()[:, :, : k.shape[2]].expand(op.kv_heads, -1, -1).repeat_interleave(op.heads // op.kv_heads, dim=0)
        for p in (op.k_projection, op.v_projection)
    ]
    k, v = (x.repeat_interleave(op.heads // op.kv_heads, dim=1) for x in (k, v))
    if mask is not None:
        rows = [torch.einsum("hrj,bj->bhrj", p, mask.double()) for p in rows]
    scores = torch.einsum("bhid,bhrd->bhir", q, rows[0] @ k) * (op.head_dim**-0.5 if scale is None else scale)
    weights = torch.exp(scores) / torch.exp(scores).sum(dim=-1, keepdim=True)
    return (weights @ rows[1]) @ v
