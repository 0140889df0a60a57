"""What an interface tells: agreement of teacher and student, and the cost of random gates.

All metrics are computed in float32 (or the wider input dtype), over valid positions only. A position is everything but
the last dimension.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .errors import PlanError

__all__ = [
    "bernoulli_variance",
    "cka",
    "cosine",
    "cosine_sum",
    "count",
    "curvature_bound",
    "gate_gradient_variance",
    "masked",
    "power_sum",
    "relative_error",
    "squared_error_sum",
    "wide",
]


def wide(x: Tensor) -> Tensor:
    """At least float32: half precision overflows at 256 squared."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def count(like: Tensor, mask: Tensor | None) -> Tensor:
    """Number of valid positions, a 0-dim float32 tensor. Shapes: like [..., D], mask [...] or leading part of it."""
    if mask is None:
        return torch.full((), like.numel() // max(1, like.shape[-1]), dtype=torch.float32, device=like.device)
    repeats = like[..., 0].numel() // max(1, mask.numel())  # A mask over [B, L] counts every position beneath.
    return mask.sum(dtype=torch.float32) * repeats


def masked(x: Tensor, mask: Tensor | None) -> Tensor:
    """`x` with exact zeros at invalid positions, whatever stood there (also NaN). Shapes: x [..., D], mask [...]."""
    if mask is None:
        return x
    return x.masked_fill(~mask.reshape(*mask.shape, *(1,) * (x.dim() - mask.dim())), 0.0)


def squared_error_sum(student: Tensor, teacher: Tensor, mask: Tensor | None = None) -> Tensor:
    """Sum of squared differences over valid positions, 0-dim float32. Shapes: student, teacher [..., D]."""
    difference = masked(wide(student) - wide(teacher), mask)
    return (difference * difference).sum()


def power_sum(teacher: Tensor, mask: Tensor | None = None) -> Tensor:
    """Sum of squares of the teacher's output over valid positions, 0-dim float32."""
    x = masked(wide(teacher), mask)
    return (x * x).sum()


def cosine_sum(student: Tensor, teacher: Tensor, mask: Tensor | None = None) -> Tensor:
    """Sum over valid positions of the cosine along the last dimension, 0-dim float32.

    Two zero vectors agree (cosine 1): a student that copies a dead position is not wrong there.
    """
    s, t = masked(wide(student), mask), masked(wide(teacher), mask)
    dot, ss, tt = (s * t).sum(-1), (s * s).sum(-1), (t * t).sum(-1)
    # The product of roots: the root of the product leaves float32's range at 1e10 and below 1e-10.
    tiny = torch.finfo(dot.dtype).tiny
    scale = ss.clamp_min(tiny).sqrt() * tt.clamp_min(tiny).sqrt()
    each = torch.where((ss == 0) & (tt == 0), torch.ones_like(dot), dot / scale)
    return each.sum() if mask is None else masked(each.unsqueeze(-1), mask).sum()


def cosine(student: Tensor, teacher: Tensor, mask: Tensor | None = None) -> Tensor:
    """Interface cosine: mean over valid positions of cos(S(h), T(h)).

    Shapes: student, teacher [..., D], mask [...] (True = valid) -> 0-dim. No valid position gives 0.

    Example:
        >>> cosine(torch.tensor([[1.0, 0.0]]), torch.tensor([[1.0, 1.0]])).item()  # doctest: +ELLIPSIS
        0.7071...
    """
    return cosine_sum(student, teacher, mask) / count(student, mask).clamp_min(1.0)


def relative_error(student: Tensor, teacher: Tensor, mask: Tensor | None = None) -> Tensor:
    """`sum ||S - T||^2 / sum ||T||^2` over valid positions: 0 = equal, 1 = as bad as a student of zeros."""
    power = power_sum(teacher, mask)
    return squared_error_sum(student, teacher, mask) / power.clamp_min(torch.finfo(power.dtype).tiny)


def cka(student: Tensor, teacher: Tensor, mask: Tensor | None = None) -> Tensor:
    """Linear centred kernel alignment over valid positions (Kornblith et al., arXiv 1905.00414).

    Shapes: student [..., D1], teacher [..., D2] -> 0-dim in [0, 1].
    """
    s, t = wide(student).flatten(0, -2), wide(teacher).flatten(0, -2)
    if mask is not None:
        keep = mask.reshape(*mask.shape, *(1,) * (student.dim() - 1 - mask.dim())).expand(student.shape[:-1]).flatten()
        s, t = s[keep], t[keep]
    s, t = s - s.mean(0), t - t.mean(0)
    scale = torch.linalg.matrix_norm(s.mT @ s) * torch.linalg.matrix_norm(t.mT @ t)
    result: Tensor = torch.linalg.matrix_norm(t.mT @ s).square() / scale.clamp_min(torch.finfo(s.dtype).tiny)
    return result


def bernoulli_variance(p: float, difference: Tensor) -> Tensor:
    """Gradient variance of one hard gate, conditional on the batch: `p (1 - p) ||a||^2`.

    Args:
        p: Probability of the teacher.
        difference: `a`, the gradient with the teacher minus the gradient with the student, any shape.
    """
    return p * (1.0 - p) * difference.square().sum()


def curvature_bound(bound: float, p: float, difference: Tensor) -> Tensor:
    """How far a random gate bends the mean: `|E[psi(Y)] - psi(E[Y])| <= (M / 2) p (1 - p) ||Delta||^2`.

    Args:
        bound: `M`, a bound of the curvature (largest eigenvalue of the Hessian) of `psi`.
        p: Probability of the teacher.
        difference: `Delta`, the teacher's output minus the student's.
    """
    return 0.5 * bound * p * (1.0 - p) * difference.square().sum()


def gate_gradient_variance(
    gradient: Callable[[Sequence[float]], Tensor],
    alphas: Sequence[float],
    *,
    draws: int | None = None,
    seed: int = 0,
) -> Tensor:
    """`E ||g(w) - E g||^2` over independent hard gates, with everything else fixed.

    Args:
        gradient: From one weight (0 or 1) per site to the flat gradient on a fixed batch, shape [P].
        alphas: P(w = 1) of each site.
        draws: None enumerates all 2^n masks exactly (n <= 12); a number samples that many.
        seed: Of the sampling; the global generators are not touched.

    Raises:
        PlanError: Too many sites to enumerate, or fewer than two draws.

    Example:
        >>> g = lambda w: torch.tensor([3.0]) * w[0]
        >>> gate_gradient_variance(g, [0.25]).item()  # p (1 - p) a^2
        1.6875
    """
    if draws is None:
        if len(alphas) > 12:
            raise PlanError("too many sites to enumerate.", expected="at most 12", got=len(alphas), do="pass draws=")
        masks = list(itertools.product((0.0, 1.0), repeat=len(alphas)))
        odds = [_probability(mask, alphas) for mask in masks]
    else:
        if draws < 2:
            raise PlanError("a variance needs draws.", expected=">= 2", got=draws)
        dice = random.Random(seed)  # noqa: S311 - sampling masks, not a secret
        masks = [tuple(1.0 if dice.random() < a else 0.0 for a in alphas) for _ in range(draws)]
        odds = [1.0 / draws] * draws
    kept = [(mask, p) for mask, p in zip(masks, odds, strict=True) if p > 0.0]
    gradients = [gradient(mask).double() for mask, _ in kept]
    mean = sum((p * g for g, (_, p) in zip(gradients, kept, strict=True)), torch.zeros_like(gradients[0]))
    total = sum((p * (g - mean).square().sum() for g, (_, p) in zip(gradients, kept, strict=True)), mean.new_zeros(()))
    return total if draws is None else total * draws / (draws - 1)


def _probability(mask: Sequence[float], alphas: Sequence[float]) -> float:
    p = 1.0
    for w, alpha in zip(mask, alphas, strict=True):
        p *= alpha if w == 1.0 else 1.0 - alpha
    return p
