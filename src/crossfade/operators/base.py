"""What an attention operator is: from q, k and v to the output, without projections; and the sums that several share.

Shape legend, used in every file of this folder:

- B batch, H query heads, Hkv key/value heads (H is a multiple of Hkv), G = H / Hkv query heads per key/value head
- Lq queries, Lk keys, D width of a head of q and k, Dv width of a head of v, F features, E = Dv + 1
- q [B, H, Lq, D], k [B, Hkv, Lk, D], v [B, Hkv, Lk, Dv], mask [B, Lk] bool (True = a real key), out [B, H, Lq, Dv]

Head h of q reads head h // G of k and v, as in `scaled_dot_product_attention(..., enable_gqa=True)`.

Inside, query heads stand as [B, Hkv, G, Lq, .] and keys as [B, Hkv, 1, Lk, .], so that keys are never repeated. Values
carry a last column of ones: sums over keys then hold the numerator (Dv columns) and the normaliser (the last one).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..errors import PlanError, StudentError

__all__ = [
    "OPERATORS",
    "Card",
    "LogSum",
    "Operator",
    "SoftmaxMap",
    "check_call",
    "feature_sum",
    "fold",
    "log_feature_sum",
    "operator",
    "quotient",
    "visible",
    "with_count",
]

CHUNK = 64  # Keys per chunk of the causal sums: the quadratic part costs L * CHUNK, the states cost L / CHUNK * F * E.


@dataclass(frozen=True)
class Card:
    """What an operator can do, as data: read by `check_call`, by the tests and by the docs.

    Attributes:
        name: Its name in `OPERATORS`.
        what: One sentence.
        causal: Whether it can hide later keys from a query.
        bidirectional: Whether it can show every key to every query.
        padding: Whether it takes a key padding mask.
        grouped: Whether k and v may have fewer heads than q.
        cross: Whether Lq and Lk may differ.
        any_length: Whether every length works; else the constructor names the longest.
        class_token: Whether a first token that must reach all others does so, at the default settings.
        exact_at_init: Whether it gives softmax attention as it is built.
        complexity: Time and memory in the length.
        paper: arXiv number.
    """

    name: str
    what: str
    causal: bool
    bidirectional: bool
    padding: bool
    grouped: bool
    cross: bool
    any_length: bool
    class_token: bool
    exact_at_init: bool
    complexity: str
    paper: str


class Operator(nn.Module):
    """Base of the attention operators.

    A subclass gives `attend`; the call is checked, padded keys are cleared and autocast is switched off before it.

    Args:
        heads: H, heads of q.
        head_dim: D, width of a head of q and k.
        kv_heads: Hkv, heads of k and v; as many as q's when None.

    Raises:
        StudentError: The numbers do not fit each other.
    """

    card: ClassVar[Card]

    def __init__(self, heads: int, head_dim: int, *, kv_heads: int | None = None) -> None:
        super().__init__()
        kv_heads = heads if kv_heads is None else kv_heads
        if min(heads, head_dim, kv_heads) < 1 or heads % kv_heads:
            raise StudentError(
                "these numbers of heads do not fit.",
                where=type(self).__name__,
                expected="heads, head_dim and kv_heads of at least 1, heads a multiple of kv_heads",
                got=f"heads={heads}, head_dim={head_dim}, kv_heads={kv_heads}",
            )
        self.heads = heads
        self.head_dim = head_dim
        self.kv_heads = kv_heads

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        mask: Tensor | None = None,
        causal: bool = False,
        scale: float | None = None,
    ) -> Tensor:
        """Attend.

        Sums and normalisers are formed in at least float32, also under autocast; the output has the common dtype of q,
        k and v. What stands in a padded key or value, NaN included, has no influence. A query that sees no valid key
        gives exact zeros and zero gradients.

        Args:
            q: [B, H, Lq, D], any floating dtype.
            k: [B, Hkv, Lk, D].
            v: [B, Hkv, Lk, Dv].
            mask: [B, Lk] bool, True = a real key; None = all are real.
            causal: Query i sees key j if j <= i + Lk - Lq: the ends are aligned, as decoding with a cache needs it
                (SDPA's lower-right bias). With Lq > Lk the first Lq - Lk queries see nothing.
            scale: Factor of q.k; None = the operator's own (D ** -0.5 unless it says otherwise).

        Returns:
            [B, H, Lq, Dv].

        Raises:
            StudentError: The operator does not support this call, or the shapes do not fit.
        """
        check_call(self, q, k, v, mask=mask, causal=causal)
        dtype = torch.promote_types(torch.promote_types(q.dtype, k.dtype), v.dtype)
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
        if mask is not None:
            hidden = ~mask[:, None, :, None]
            k, v = k.masked_fill(hidden, 0.0), v.masked_fill(hidden, 0.0)
        # Autocast would form the normalisers in half precision, whatever dtype they are asked for.
        with torch.autocast(q.device.type, enabled=False):
            return self.attend(q, k, v, mask, causal, scale).to(dtype)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float | None) -> Tensor:
        """What a subclass computes: q, k and v in one dtype, zeros where the mask is False. Shapes: as in `forward`."""
        raise NotImplementedError

    def extra_repr(self) -> str:
        """What `print` shows of the settings."""
        return f"heads={self.heads}, head_dim={self.head_dim}, kv_heads={self.kv_heads}"


O = TypeVar("O", bound=Operator)  # noqa: E741 - the operator class that the decorator gives back

OPERATORS: dict[str, type[Operator]] = {}
"""Every operator by the name on its card."""


def operator(card: Card) -> Callable[[type[O]], type[O]]:
    """Give a class its card and list it in `OPERATORS`.

    Raises:
        PlanError: The name is taken by another class.
    """

    def add(cls: type[O]) -> type[O]:
        taken = OPERATORS.get(card.name, cls)
        if (taken.__module__, taken.__qualname__) != (cls.__module__, cls.__qualname__):
            raise PlanError(f"the operator name {card.name!r} is taken.", got=cls.__qualname__, expected="a new name")
        cls.card = card
        OPERATORS[card.name] = cls
        return cls

    return add


def check_call(
    op: Operator, q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None, causal: bool = False
) -> None:
    """Whether the operator can answer this call. Shapes: see the legend.

    Raises:
        StudentError: It cannot.
    """
    _check_shapes(op, q, k, v, mask)
    card = op.card
    unsupported = {
        "causal=True": causal and not card.causal,
        "causal=False": not causal and not card.bidirectional,
        "a padding mask": mask is not None and not card.padding,
        "fewer heads in k than in q": q.shape[1] != k.shape[1] and not card.grouped,
        "as many keys as queries only": q.shape[2] != k.shape[2] and not card.cross,
    }
    for call, refused in unsupported.items():
        if refused:
            able = [name for name in sorted(OPERATORS) if causal <= OPERATORS[name].card.causal]
            raise StudentError(
                f"the operator {card.name!r} does not support this call.",
                where=type(op).__name__,
                got=f"{call} (q {list(q.shape)}, k {list(k.shape)})",
                do=f"choose another operator: {', '.join(able)}",
            )


def _check_shapes(op: Operator, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> None:
    expected = (
        f"floating q [B, {op.heads}, Lq, {op.head_dim}], k [B, {op.kv_heads}, Lk, {op.head_dim}], "
        f"v [B, {op.kv_heads}, Lk, Dv]; mask None or bool [B, Lk], True = a real key"
    )
    fits = q.dim() == k.dim() == v.dim() == 4 and all(t.is_floating_point() for t in (q, k, v))
    fits = fits and q.shape[1::2] == (op.heads, op.head_dim) and k.shape[1::2] == (op.kv_heads, op.head_dim)
    fits = fits and v.shape[:3] == k.shape[:3] and q.shape[0] == k.shape[0]
    fits = fits and (mask is None or (mask.dtype == torch.bool and mask.shape == (k.shape[0], k.shape[2])))
    if not fits:
        given = [("q", q), ("k", k), ("v", v), *([] if mask is None else [("mask", mask)])]
        raise StudentError(
            "the tensors of this call do not fit the operator.",
            where=type(op).__name__,
            expected=expected,
            got=", ".join(f"{name} {list(t.shape)} {str(t.dtype).removeprefix('torch.')}" for name, t in given),
        )


def visible(q_len: int, k_len: int, mask: Tensor | None, causal: bool, device: torch.device) -> Tensor:
    """Which query sees which key, written out. For references and small sizes: it has Lq x Lk entries.

    Shapes: mask [B, Lk] -> bool [B, 1, Lq, Lk], or [1, 1, Lq, Lk] without a mask.
    """
    sees = torch.ones(1, 1, q_len, k_len, dtype=torch.bool, device=device)
    if causal:
        sees = sees.tril(k_len - q_len)
    return sees if mask is None else sees & mask[:, None, None, :]


def fold(x: Tensor, kv_heads: int) -> Tensor:
    """Query heads in groups, or key heads ready for them. Shapes: [B, H, L, .] -> [B, Hkv, G, L, .]."""
    folded: Tensor = x.unflatten(1, (kv_heads, -1))
    return folded


def with_count(v: Tensor, mask: Tensor | None) -> Tensor:
    """Values with a last column of ones, all zero where the mask is False. Shapes: [B, Hkv, Lk, Dv] -> [.., 1, Lk, E].

    A sum over keys then holds numerator and normaliser.
    """
    counted = functional.pad(v, (0, 1), value=1.0)
    if mask is not None:
        counted = counted.masked_fill(~mask[:, None, :, None], 0.0)
    return counted.unsqueeze(2)


def quotient(total: Tensor) -> Tensor:
    """Numerator by normaliser; zero, and with zero gradient, where nothing was seen.

    A normaliser below the dtype's normal numbers counts as nothing: its inverse, and so the gradient, would overflow.

    Shapes: [B, Hkv, G, Lq, E] -> [B, H, Lq, Dv].
    """
    weight = total[..., -1:]
    # Not `~(weight >= ...)`: that would turn a NaN of the caller's into zeros.
    empty = weight < 4.0 * torch.finfo(weight.dtype).tiny
    return torch.where(empty, 0.0, total[..., :-1] / torch.where(empty, 1.0, weight)).flatten(1, 2)


class SoftmaxMap(nn.Module):
    """The learned feature map of Hedgehog: per head a linear map, then softmax over (x, -x).

    It starts from the identity. Features lie in [0, 1] and sum to 1, so they cannot overflow.

    Args:
        heads: Heads, each with its own matrix.
        head_dim: D.

    Source: Hedgehog (arXiv 2402.04347).

    Example:
        >>> SoftmaxMap(2, 4)(torch.zeros(1, 2, 3, 4)).shape
        torch.Size([1, 2, 3, 8])
    """

    def __init__(self, heads: int, head_dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(heads, head_dim, head_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The identity for each head."""
        with torch.no_grad():
            self.weight.copy_(torch.eye(self.weight.shape[-1]))

    def forward(self, x: Tensor) -> Tensor:
        """Shapes: [B, heads, L, D] -> [B, heads, L, 2 D]."""
        y = x @ self.weight.to(x.dtype).mT
        return torch.cat([y, -y], dim=-1).softmax(dim=-1)


def feature_sum(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    """Sum over the keys that a query sees of (q . k) v, in time and memory linear in the length.

    Causal: within chunks by masked products, across chunks by cumulative states. Later keys enter only as products
    with zero, so they cannot change a bit.

    Args:
        q: Features of the queries, [B, Hkv, G, Lq, F], at least 0.
        k: Features of the keys, [B, Hkv, 1, Lk, F], at least 0.
        v: Counted values, [B, Hkv, 1, Lk, E] (see `with_count`).
        causal: As in `Operator.forward`.

    Returns:
        [B, Hkv, G, Lq, E].
    """
    if not causal:
        return q @ (k.mT @ v)
    length, first = q.shape[-2], max(k.shape[-2] - q.shape[-2], 0)
    start = (k[..., :first, :].mT @ v[..., :first, :]).unsqueeze(-3)  # Keys that every query sees.
    q, k, v = _chunks(q, k, v, min(CHUNK, length))
    states = k.mT @ v  # [B, Hkv, 1, n, F, E]
    before = torch.cat([start, states[..., :-1, :, :]], dim=-3).cumsum(dim=-3)
    total = (q @ k.mT).tril() @ v + q @ before
    return total.flatten(-3, -2)[..., :length, :]


def _chunks(q: Tensor, k: Tensor, v: Tensor, size: int, low: float = 0.0) -> tuple[Tensor, Tensor, Tensor]:
    """The last Lq keys beside the queries, all in chunks; what is missing of keys is `low` with values of zero.

    Shapes: [.., L, .] -> [.., n, size, .].
    """
    length = q.shape[-2]
    front, back = length - k.shape[-2], -length % size  # A negative pad cuts.
    q = functional.pad(q, (0, 0, 0, back))
    k = functional.pad(k, (0, 0, front, back), value=low)
    v = functional.pad(v, (0, 0, front, back))
    return q.unflatten(-2, (-1, size)), k.unflatten(-2, (-1, size)), v.unflatten(-2, (-1, size))


class LogSum(NamedTuple):
    """A sum that may be too large or small to write: `exp(top) * total`. Shapes: top [.., Lq, 1], total [.., Lq, E].

    The top has no gradient: numerator and normaliser carry the same, so it cancels.
    """

    top: Tensor
    total: Tensor

    def plus(self, other: LogSum) -> LogSum:
        """The sum of two."""
        top = torch.maximum(self.top, other.top)
        return LogSum(top, self.total * (self.top - top).exp() + other.total * (other.top - top).exp())


def log_feature_sum(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    """`feature_sum` of features exp(q) and exp(k), for logarithms of any size; up to a factor per query.

    A maximum over all keys would do for bidirectional attention. In causal attention it lets a large later key push
    the earlier ones below the smallest number, so every maximum here is over keys that the query sees: a chunk is
    halved until single tokens are left, and the queries of a second half meet the keys of the first half as a block.

    Args:
        q: Logarithms of the features, [B, Hkv, G, Lq, F].
        k: The same of the keys, [B, Hkv, 1, Lk, F]; what stands at padded keys must be finite.
        v: Counted values, [B, Hkv, 1, Lk, E], zero at padded keys.
        causal: As in `Operator.forward`.

    Returns:
        [B, Hkv, G, Lq, E]; each row holds the sum times a positive number, which the normaliser shares.
    """
    low = torch.finfo(k.dtype).min / 4  # Finite, because -inf - (-inf) is NaN; the zeros in v make it exact.
    k = k.masked_fill(v[..., -1:] == 0.0, low)
    if not causal:
        return _block(q, k, v).total
    length, first = q.shape[-2], max(k.shape[-2] - q.shape[-2], 0)
    state = _State.of(k[..., :first, :], v[..., :first, :], low)
    size = min(CHUNK, 1 << (length - 1).bit_length())
    q, k, v = _chunks(q, k, v, size, low)
    result = _within(q, k, v)
    tops, totals = [], []
    for i in range(q.shape[-3]):
        before = state.read(q[..., i, :, :])
        tops.append(before.top)
        totals.append(before.total)
        state = state.plus(k[..., i, :, :], v[..., i, :, :])
    total = result.plus(LogSum(torch.stack(tops, dim=-3), torch.stack(totals, dim=-3))).total
    return total.flatten(-3, -2)[..., :length, :]


def _block(q: Tensor, k: Tensor, v: Tensor) -> LogSum:
    """Every query sees every key. No factor exceeds 1, and the largest product is 1. Shapes: as in `_State`."""
    highest = k.amax(dim=-2, keepdim=True).detach()
    top = (q + highest).amax(dim=-1, keepdim=True).detach()
    left, right = (q + highest - top).exp(), (k - highest).exp()
    few = k.shape[-2] < k.shape[-1]  # Which order of the products is cheaper.
    return LogSum(top, (left @ right.mT) @ v if few else left @ (right.mT @ v))


def _within(q: Tensor, k: Tensor, v: Tensor) -> LogSum:
    """Causal sums inside chunks whose size is a power of two. Shapes: [.., n, size, .]."""
    both = q + k
    top = both.amax(dim=-1, keepdim=True).detach()
    result = LogSum(top, (both - top).exp().sum(dim=-1, keepdim=True) * v)  # Each token and itself.
    half = 1
    while half < q.shape[-2]:
        pairs = [t.unflatten(-2, (-1, 2, half)) for t in (q, k, v, *result)]
        late = _block(pairs[0][..., 1, :, :], pairs[1][..., 0, :, :], pairs[2][..., 0, :, :])
        late = late.plus(LogSum(pairs[3][..., 1, :, :], pairs[4][..., 1, :, :]))
        early = LogSum(pairs[3][..., 0, :, :], pairs[4][..., 0, :, :])
        joined = [torch.stack([e, t], dim=-3).flatten(-4, -2) for e, t in zip(early, late, strict=True)]
        result = LogSum(*joined)
        half *= 2
    return result


class _State(NamedTuple):
    """The keys so far: `exp(highest)` per feature times `total`. Shapes: highest [.., 1, F], total [.., F, E]."""

    highest: Tensor
    total: Tensor

    @classmethod
    def of(cls, k: Tensor, v: Tensor, low: float) -> _State:
        shape = (*k.shape[:-2], k.shape[-1], v.shape[-1])
        empty = cls(k.new_full((*k.shape[:-2], 1, k.shape[-1]), low), k.new_zeros(shape))
        return empty.plus(k, v) if k.shape[-2] else empty

    def plus(self, k: Tensor, v: Tensor) -> _State:
        highest = torch.maximum(self.highest, k.amax(dim=-2, keepdim=True).detach())
        return _State(highest, self.total * (self.highest - highest).exp().mT + (k - highest).exp().mT @ v)

    def read(self, q: Tensor) -> LogSum:
        top = (q + self.highest).amax(dim=-1, keepdim=True).detach()
        return LogSum(top, (q + self.highest - top).exp() @ self.total)
