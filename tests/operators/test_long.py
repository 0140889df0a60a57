"""Causal fast paths against the recurrence over tokens, and 16k tokens in float32 and bfloat16."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from crossfade.operators import LinearAttention, Performer, Window, WindowLinear, linear, performer, window
from tests.operators.cases import CAUSAL, MODES, inputs

LONG = 16_384


def features(op: LinearAttention | Performer, x: Tensor, which: str) -> Tensor:
    """Feature maps once more, as the papers write them, in float64."""
    x = x.double()
    if isinstance(op, Performer):
        x = x * op.head_dim**-0.25
        return torch.exp(x @ op.projection.double().T - x.square().sum(-1, keepdim=True) / 2)
    if op.feature_map == "hedgehog":
        weight = (op.q_map if which == "q" else op.k_map).weight.double()
        y = torch.einsum("hed,bhld->bhle", weight, x)
        return torch.softmax(torch.cat([y, -y], -1), -1)
    return {"elu": lambda t: functional.elu(t) + 1, "relu": torch.relu, "exp": torch.exp}[op.feature_map](x)


def recurrence(op: LinearAttention | Performer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Linear attention as a recurrent network: one state, one token after another, in float64."""
    group = op.heads // op.kv_heads
    phi_q, phi_k, v = features(op, q, "q"), features(op, k, "k"), v.double()
    phi_k, v = phi_k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    state = torch.zeros(*phi_q.shape[:2], phi_q.shape[-1], v.shape[-1], dtype=torch.float64)
    norm = torch.zeros(*phi_q.shape[:2], phi_q.shape[-1], dtype=torch.float64)
    outs = []
    for t in range(q.shape[2]):
        state = state + phi_k[:, :, t, :, None] * v[:, :, t, None, :]
        norm = norm + phi_k[:, :, t]
        weight = (phi_q[:, :, t] * norm).sum(-1, keepdim=True)
        out = (phi_q[:, :, t, None, :] @ state).squeeze(-2)
        outs.append(torch.where(weight == 0, 0.0, out / torch.where(weight == 0, 1.0, weight)))
    return torch.stack(outs, 2)


RECURRENT = [c for c in CAUSAL if c.kind in (LinearAttention, Performer)]


@pytest.mark.parametrize("case", RECURRENT, ids=[c.label for c in RECURRENT])
def test_the_fast_path_is_the_recurrence(case):
    op = case.build()
    with torch.no_grad():
        for length in (1, 2, 63, 64, 65, 200):
            q, k, v = inputs(length)
            error = (op(q, k, v, causal=True) - recurrence(op, q, k, v)).abs().max().item()
            assert error < 1e-11, f"L={length}: {error}"


@pytest.mark.parametrize("case", CAUSAL, ids=[c.label for c in CAUSAL])
def test_one_query_on_a_cache_gives_the_row_of_the_whole(case):
    op = case.build()
    q, k, v = inputs(80)
    whole = op(q, k, v, causal=True)
    for t in (0, 1, 40, 63, 64, 79):
        row = op(q[:, :, t : t + 1], k[:, :, : t + 1], v[:, :, : t + 1], causal=True)
        torch.testing.assert_close(row[:, :, 0], whole[:, :, t], rtol=0.0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("case", RECURRENT, ids=[c.label for c in RECURRENT])
def test_16k_tokens_against_the_recurrence(case, dtype):
    """exp and Performer get keys whose features would overflow float32 if they were written out."""
    op = case.build(heads=2, head_dim=4, kv_heads=1, dtype=dtype)
    q, k, v = inputs(LONG, heads=2, kv_heads=1, head_dim=4, batch=1, dtype=dtype)
    if case.label in ("linear-exp", "performer"):
        k = k * 20.0
        assert not bool(features(op, k, "k").float().isfinite().all() and features(op, k, "k").float().min() > 0)
    v = v + 1.0  # Not a mean of nothing: a lost normaliser would show.
    with torch.no_grad():
        out = op(q, k, v, causal=True)
        wanted = recurrence(op, q, k, v)
    assert bool(out.isfinite().all())
    error = (out.double() - wanted).abs().max().item() / wanted.abs().max().item()
    assert error < {torch.float32: 2e-4, torch.bfloat16: 6e-3}[dtype], error


def kept_for_backward(op: torch.nn.Module, length: int, causal: bool) -> int:
    """Entries of the tensors that a forward keeps for its backward."""
    sizes: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        sizes.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        op(*inputs(length, dtype=torch.float32, batch=1, grad=True), causal=causal)
    return sum(sizes)


LINEAR = [(c, causal) for c, causal in MODES if "O(L^2)" not in c.kind.card.complexity]


@pytest.mark.parametrize(("case", "causal"), LINEAR, ids=[f"{c.label}-{causal}" for c, causal in LINEAR])
def test_memory_grows_with_the_length_and_not_with_its_square(case, causal):
    settings = {**case.settings, "max_length": 4096} if case.name == "linformer" else case.settings
    op = case.kind(4, 5, kv_heads=2, **settings)
    short, long = (kept_for_backward(op, length, causal) for length in (1024, 4096))
    assert short > 1024
    assert long / short < 4.5


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", [Window, WindowLinear, LinearAttention, Performer])
def test_the_last_rows_of_16k_tokens(kind, causal):
    """The reference for a few queries; Lq < Lk puts them at the end."""
    more = {"radius": 40} if kind in (Window, WindowLinear) else {}
    op = kind(2, 4, kv_heads=1, **more)
    q, k, v = inputs(LONG, heads=2, kv_heads=1, head_dim=4, batch=1, dtype=torch.float32)
    with torch.no_grad():
        out = op(q, k, v, causal=causal)[:, :, -50:]
        short = op(q[:, :, -50:], k, v, causal=causal)
        reference = {
            Window: window.reference,
            WindowLinear: window.hybrid_reference,
            LinearAttention: linear.reference,
            Performer: performer.reference,
        }[kind]
        wanted = reference(op, q[:, :, -50:], k, v, causal=causal)
    assert (out - wanted).abs().max().item() < 1e-4
    assert (short - wanted).abs().max().item() < 1e-4
