"""Softmax attention with fewer key/value heads (grouped-query attention), and the pooling that makes them.

Shapes (see `base`): q [B, H, Lq, D], k [B, Hkv, Lk, D], v [B, Hkv, Lk, Dv], mask [B, Lk] -> [B, H, Lq, Dv].
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from ..errors import StudentError
from .base import Card, Operator, operator, visible

__all__ = ["Grouped", "pool_heads", "reference"]


@operator(
    Card(
        name="grouped",
        what="softmax attention whose query heads share fewer key/value heads",
        causal=True,
        bidirectional=True,
        padding=True,
        grouped=True,
        cross=True,
        any_length=True,
        class_token=True,
        exact_at_init=True,
        complexity="time O(L^2), a cache of Hkv / H",
        paper="2305.13245",
    )
)
class Grouped(Operator):
    """`scaled_dot_product_attention` with grouped heads, in the dtype of q, k and v.

    Args:
        heads: H.
        head_dim: D.
        kv_heads: Hkv; as many as q's when None.

    Raises:
        StudentError: The numbers of heads do not fit.

    Source: Ainslie et al. (arXiv 2305.13245).

    Example:
        >>> op = Grouped(4, 4, kv_heads=2)
        >>> op(torch.ones(1, 4, 5, 4), torch.ones(1, 2, 5, 4), torch.ones(1, 2, 5, 4), causal=True).shape
        torch.Size([1, 4, 5, 4])
    """

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float | None) -> Tensor:
        """See `Operator.attend`."""
        gqa = self.heads != self.kv_heads
        square = q.shape[2] == k.shape[2]
        if mask is None and (square or not causal):
            return functional.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=gqa)
        rows = q.shape[2] if causal else 1
        sees = visible(rows, k.shape[2], mask, causal, q.device)
        empty = ~sees.any(dim=-1, keepdim=True)
        # What a kernel gives for a row without keys differs from one to the next; such a row sees all, then nothing.
        sees = (sees | empty).expand(q.shape[0], 1, q.shape[2], k.shape[2])
        out = functional.scaled_dot_product_attention(q, k, v, attn_mask=sees, scale=scale, enable_gqa=gqa)
        return out.masked_fill(empty, 0.0)


def pool_heads(weight: Tensor, heads: int, groups: int) -> Tensor:
    """The mean over the heads of each group: key or value projections for fewer heads.

    Args:
        weight: [heads * D, ...]: rows of a projection's weight, or its bias.
        heads: Heads of the teacher.
        groups: Heads that are left; neighbours are pooled, as `Grouped` shares them.

    Returns:
        [groups * D, ...].

    Raises:
        StudentError: The rows do not divide into the heads, or the heads into the groups.

    Source: Ainslie et al. (arXiv 2305.13245).

    Example:
        >>> pool_heads(torch.tensor([1.0, 2.0, 3.0, 4.0]), heads=4, groups=2)
        tensor([1.5000, 3.5000])
    """
    if min(heads, groups) < 1 or heads % groups or weight.dim() < 1 or weight.shape[0] % heads:
        raise StudentError(
            "these heads cannot be pooled.",
            expected="rows that are a multiple of heads, heads that are a multiple of groups",
            got=f"a weight of shape {list(weight.shape)}, heads={heads}, groups={groups}",
        )
    grouped: Tensor = weight.unflatten(0, (groups, heads // groups, -1))
    return grouped.mean(dim=1).flatten(0, 1)


def reference(
    op: Grouped,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """The same in float64 with all weights written out. Shapes: as in `Operator.forward`."""
    q, k, v = q.double(), k.double(), v.double()
    k, v = (x.repeat_interleave(op.heads // op.kv_heads, dim=1) for x in (k, v))
    scores = torch.einsum("bhid,bhjd->bhij", q, k) * (op.head_dim**-0.5 if scale is None else scale)
    weights = torch.exp(scores) * visible(q.shape[2], k.shape[2], mask, causal, q.device)
    total = weights.sum(dim=-1, keepdim=True)
    return (weights / total.masked_fill(total == 0.0, 1.0)) @ v
