"""Performer (FAVOR+): softmax attention estimated with positive orthogonal random features.

exp(q . k) is the mean over w ~ N(0, 1) of exp(w . q - |q|^2 / 2) exp(w . k - |k|^2 / 2).

Shapes (see `base`): q [B, H, Lq, D], k [B, Hkv, Lk, D], v [B, Hkv, Lk, Dv], mask [B, Lk] -> [B, H, Lq, Dv].
Projection [F, D], shared by all heads as in the paper's code.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..errors import StudentError
from .base import Card, Operator, fold, log_feature_sum, operator, quotient, visible, with_count

__all__ = ["Performer", "orthogonal_rows", "reference"]


@operator(
    Card(
        name="performer",
        what="softmax attention estimated with positive orthogonal random features (FAVOR+)",
        causal=True,
        bidirectional=True,
        padding=True,
        grouped=True,
        cross=True,
        any_length=True,
        class_token=True,
        exact_at_init=False,
        complexity="time and memory O(L)",
        paper="2009.14794",
    )
)
class Performer(Operator):
    """FAVOR+.

    Features stay in logarithms until they are summed, with no constant added to them, so that neither large q and k
    nor a large later key spoil a sum. The projection is a saved buffer and changes only when `redraw` is called: the
    same weights give the same function.

    Args:
        heads: H.
        head_dim: D.
        kv_heads: Hkv; as many as q's when None.
        features: F; D log D when None.
        generator: Source of the projection; torch's default one when None.

    Raises:
        StudentError: There is not one feature, or the numbers of heads do not fit.

    Source: Choromanski et al. (arXiv 2009.14794).

    Example:
        >>> op = Performer(2, 4, features=16)
        >>> op(torch.ones(1, 2, 5, 4), torch.ones(1, 2, 5, 4), torch.ones(1, 2, 5, 4)).shape
        torch.Size([1, 2, 5, 4])
    """

    projection: Tensor

    def __init__(
        self,
        heads: int,
        head_dim: int,
        *,
        kv_heads: int | None = None,
        features: int | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__(heads, head_dim, kv_heads=kv_heads)
        self.features = max(1, int(head_dim * math.log(head_dim))) if features is None else features
        if self.features < 1:
            raise StudentError(
                "a Performer needs at least one feature.", where=type(self).__name__, got=f"features={features}"
            )
        self.register_buffer("projection", torch.empty(self.features, head_dim))
        self.reset_parameters(generator)

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw the projection, as the constructor does."""
        with torch.no_grad():
            self.projection.copy_(orthogonal_rows(self.features, self.head_dim, generator))

    def redraw(self, seed: int) -> None:
        """Draw another projection from a seed, without touching torch's own random state.

        The module never does so by itself: a forward holds no dice, and what was saved must load as it was.
        """
        self.reset_parameters(torch.Generator().manual_seed(seed))

    def extra_repr(self) -> str:
        """What `print` shows of the settings."""
        return f"{super().extra_repr()}, features={self.features}"

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float | None) -> Tensor:
        """See `Operator.attend`."""
        wide = torch.promote_types(q.dtype, torch.float32)
        root = (self.head_dim**-0.5 if scale is None else scale) ** 0.5
        q, k = q.to(wide) * root, k.to(wide) * root
        projection = self.projection.to(wide)
        q = q @ projection.mT  # exp(-|q|^2 / 2) is the same for all keys, so the normaliser takes it out.
        k = k @ projection.mT - k.square().sum(dim=-1, keepdim=True) / 2.0
        total = log_feature_sum(
            fold(q, self.kv_heads), fold(k, self.kv_heads), with_count(v.to(wide), mask), causal=causal
        )
        return quotient(total)


def orthogonal_rows(rows: int, width: int, generator: torch.Generator | None = None) -> Tensor:
    """Rows that are each N(0, 1) vectors, and orthogonal in groups of `width`. Returns [rows, width] in float32.

    Args:
        rows: Number of rows.
        width: Their width.
        generator: Source; torch's default one when None.

    Example:
        >>> w = orthogonal_rows(3, 3)
        >>> bool(torch.allclose(w @ w.mT, torch.diag((w @ w.mT).diag()), atol=1e-5))
        True
    """
    groups = -(-rows // width)
    gaussian = torch.randn(groups, width, width, generator=generator, dtype=torch.float64)
    directions, triangle = torch.linalg.qr(gaussian)
    # The signs make the directions uniform: QR alone prefers some.
    directions = directions * triangle.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)
    lengths = torch.randn(groups * width, width, generator=generator, dtype=torch.float64).norm(dim=-1, keepdim=True)
    result: Tensor = directions.mT.reshape(groups * width, width) * lengths
    return result[:rows].float()


def reference(
    op: Performer,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """The same in float64 with all weights written out. Shapes: as in `Operator.forward`."""
    root = (op.head_dim**-0.5 if scale is None else scale) ** 0.5
    q, k, v = q.double() * root, k.double() * root, v.double()
    w = op.projection.double()
    phi_q, phi_k = (torch.exp(x @ w.T - (x**2).sum(dim=-1, keepdim=True) / 2.0) / len(w) ** 0.5 for x in (q, k))
    phi_k, v = (x.repeat_interleave(op.heads // op.kv_heads, dim=1) for x in (phi_k, v))
    weights = torch.einsum("bhif,bhjf->bhij", phi_q, phi_k)
    weights = weights * visible(q.shape[2], k.shape[2], mask, causal, q.device)
    total = weights.sum(dim=-1, keepdim=True)
    return (weights / total.masked_fill(total == 0.0, 1.0)) @ v
