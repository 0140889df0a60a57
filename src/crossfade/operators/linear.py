"""Linear attention: weights phi(q) . phi(k), normalised per query, with a choice of feature maps phi.

Shapes (see `base`): q [B, H, Lq, D], k [B, Hkv, Lk, D], v [B, Hkv, Lk, Dv], mask [B, Lk] -> [B, H, Lq, Dv].
Features [B, H or Hkv, L, F]: F = D, for the Hedgehog map F = 2 D.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional

from ..errors import StudentError
from .base import (
    Card,
    Operator,
    SoftmaxMap,
    feature_sum,
    fold,
    log_feature_sum,
    operator,
    quotient,
    visible,
    with_count,
)

__all__ = ["FeatureMap", "LinearAttention", "reference"]

FeatureMap = Literal["elu", "relu", "exp", "hedgehog"]
"""elu(x) + 1 (arXiv 2006.16236), max(x, 0), exp(x), or the learned softmax map (arXiv 2402.04347)."""


@operator(
    Card(
        name="linear",
        what="weights phi(q) . phi(k) with elu+1, ReLU, exponential or learned softmax features",
        causal=True,
        bidirectional=True,
        padding=True,
        grouped=True,
        cross=True,
        any_length=True,
        class_token=True,
        exact_at_init=False,
        complexity="time and memory O(L)",
        paper="2006.16236",
    )
)
class LinearAttention(Operator):
    """Linear attention.

    Without a `scale` the maps see q and k as they are, as in the papers; a scale multiplies both by its square root
    first. A query gives zeros where the weights of all its keys are zero or too small for the dtype's normal numbers:
    with `"relu"` where no feature meets a key's, with `"elu"` and `"hedgehog"` where every product is below about
    1e-38. `"exp"` knows no such limit.

    Args:
        heads: H.
        head_dim: D.
        kv_heads: Hkv; as many as q's when None.
        feature_map: `"elu"`, `"relu"`, `"exp"` (in logarithms, so that no size of q and k overflows) or `"hedgehog"`
            (learned, one matrix per head of q and per head of k, from the identity).

    Raises:
        StudentError: The feature map is unknown, or the numbers of heads do not fit.

    Source: Katharopoulos et al. (arXiv 2006.16236); the learned map: Zhang et al., Hedgehog (arXiv 2402.04347).

    Example:
        >>> op = LinearAttention(2, 4, feature_map="hedgehog")
        >>> op(torch.ones(1, 2, 5, 4), torch.ones(1, 2, 5, 4), torch.ones(1, 2, 5, 4), causal=True).shape
        torch.Size([1, 2, 5, 4])
    """

    def __init__(
        self, heads: int, head_dim: int, *, kv_heads: int | None = None, feature_map: FeatureMap = "elu"
    ) -> None:
        super().__init__(heads, head_dim, kv_heads=kv_heads)
        if feature_map not in get_args(FeatureMap):
            raise StudentError(
                "unknown feature map.",
                where=type(self).__name__,
                expected=" | ".join(get_args(FeatureMap)),
                got=repr(feature_map),
            )
        self.feature_map = feature_map
        if feature_map == "hedgehog":
            self.q_map = SoftmaxMap(self.heads, head_dim)
            self.k_map = SoftmaxMap(self.kv_heads, head_dim)

    def extra_repr(self) -> str:
        """What `print` shows of the settings."""
        return f"{super().extra_repr()}, feature_map={self.feature_map!r}"

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float | None) -> Tensor:
        """See `Operator.attend`."""
        wide = torch.promote_types(q.dtype, torch.float32)
        root = 1.0 if scale is None else scale**0.5
        q, k = q.to(wide) * root, k.to(wide) * root
        values = with_count(v.to(wide), mask)
        if self.feature_map == "exp":
            return quotient(log_feature_sum(fold(q, self.kv_heads), fold(k, self.kv_heads), values, causal=causal))
        if self.feature_map == "hedgehog":
            q, k = self.q_map(q), self.k_map(k)
        elif self.feature_map == "relu":
            q, k = q.relu(), k.relu()
        else:
            q, k = _elu(q), _elu(k)
        if mask is not None:
            k = k.masked_fill(~mask[:, None, :, None], 0.0)
        return quotient(feature_sum(fold(q, self.kv_heads), fold(k, self.kv_heads), values, causal=causal))


def _elu(x: Tensor) -> Tensor:
    """elu(x) + 1, written so that a small value is not the difference of two large ones. Shapes: any."""
    return torch.where(x > 0.0, x + 1.0, x.clamp(max=0.0).exp())


def reference(
    op: LinearAttention,
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
    if scale is not None:
        q, k = q * scale**0.5, k * scale**0.5
    if op.feature_map == "hedgehog":
        q = torch.einsum("hed,bhld->bhle", op.q_map.weight.double(), q)
        k = torch.einsum("hed,bhld->bhle", op.k_map.weight.double(), k)
        q, k = (torch.softmax(torch.cat([x, -x], dim=-1), dim=-1) for x in (q, k))
    elif op.feature_map == "elu":
        q, k = functional.elu(q) + 1.0, functional.elu(k) + 1.0
    else:
        q, k = (torch.relu(x) if op.feature_map == "relu" else torch.exp(x) for x in (q, k))
    k, v = (x.repeat_interleave(op.heads // op.kv_heads, dim=1) for x in (k, v))
    weights = torch.einsum("bhif,bhjf->bhij", q, k)
    weights = weights * visible(q.shape[2], k.shape[2], mask, causal, q.device)
    total = weights.sum(dim=-1, keepdim=True)
    return (weights / total.masked_fill(total == 0.0, 1.0)) @ v
