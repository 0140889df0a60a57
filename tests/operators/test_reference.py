"""Every operator against its plain float64 reference: outputs and gradients."""

from __future__ import annotations

import pytest
import torch

from crossfade.operators import OPERATORS
from tests.operators.cases import CASES, MODE_IDS, MODES, alive, inputs, masks, outputs_and_gradients

# One token, odd sizes, both sides of a block and a chunk, one query on a cache, more queries than keys.
LENGTHS = [(1, 1), (7, 7), (131, 131), (64, 64), (5, 150), (1, 150), (65, 200), (40, 13)]
HEADS = [(4, 2), (3, 1), (2, 2)]


def test_that_every_registered_operator_is_in_the_matrix():
    assert len(OPERATORS) >= 6
    assert {c.name for c in CASES} == set(OPERATORS)
    assert all(OPERATORS[c.name] is c.kind for c in CASES)


def test_that_every_case_can_be_told_apart():
    assert len({c.label for c in CASES}) == len(CASES)


@pytest.mark.parametrize(("case", "causal"), MODES, ids=MODE_IDS)
@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
def test_float64(case, causal, heads, kv_heads):
    op = case.build(heads=heads, kv_heads=kv_heads)
    for q_len, k_len in LENGTHS:
        for label, mask in masks(k_len):
            tensors = inputs(q_len, k_len, heads=heads, kv_heads=kv_heads, grad=True)
            weight = torch.randn(2, heads, q_len, 3, dtype=torch.float64)
            got = outputs_and_gradients(op, op, tensors, weight, mask=mask, causal=causal)
            wanted = outputs_and_gradients(
                lambda *t, **more: case.reference(op, *t, **more), op, tensors, weight, mask=mask, causal=causal
            )
            for name, value in wanted.items():
                error = (got[name] - value).abs().max().item()
                assert error < 1e-10, f"{name} with Lq={q_len}, Lk={k_len}, mask {label}: {error}"


@pytest.mark.parametrize(("case", "causal"), MODES, ids=MODE_IDS)
def test_a_given_scale(case, causal):
    op = case.build()
    q, k, v = inputs(9)
    for scale in (0.25, 1.0):
        torch.testing.assert_close(
            op(q, k, v, causal=causal, scale=scale),
            case.reference(op, q, k, v, causal=causal, scale=scale),
            rtol=0.0,
            atol=1e-10,
        )


# Relative to the largest entry of what is compared. Measured: at most 6e-6 and 4e-3; rounding a bfloat16 costs 4e-3.
BOUNDS = {torch.float32: 2e-5, torch.bfloat16: 1e-2}


@pytest.mark.parametrize("dtype", list(BOUNDS), ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("case", "causal"), MODES, ids=MODE_IDS)
def test_lower_precision(case, causal, dtype):
    low = case.build(dtype=dtype)
    for q_len, k_len in [(1, 1), (65, 65), (131, 131), (3, 97)]:
        for label, mask in masks(k_len):
            tensors = alive(*inputs(q_len, k_len, dtype=dtype, grad=True))
            weight = torch.randn(2, 4, q_len, 3).to(dtype)
            got = outputs_and_gradients(low, low, tensors, weight, mask=mask, causal=causal)
            wanted = outputs_and_gradients(
                lambda *t, **more: case.reference(low, *t, **more), low, tensors, weight, mask=mask, causal=causal
            )
            assert got["out"].dtype == dtype
            for name, value in wanted.items():
                # Gradients of q, k and parameters that are zero up to rounding have no size of their own.
                size = max(value.abs().max().item(), 0.1)
                error = (got[name].double() - value.double()).abs().max().item() / size
                assert error < BOUNDS[dtype], f"{name} with Lq={q_len}, Lk={k_len}, mask {label}: {error}"


@pytest.mark.parametrize(("case", "causal"), MODES, ids=MODE_IDS)
def test_autocast_does_not_reach_the_sums(case, causal):
    op = case.build(dtype=torch.float32)
    q, k, v = inputs(70, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = op(q, k, v, causal=causal)
    assert torch.equal(inside, op(q, k, v, causal=causal))


@pytest.mark.parametrize(("case", "causal"), MODES, ids=MODE_IDS)
def test_mixed_dtypes_meet_in_the_wider_one(case, causal):
    op = case.build(dtype=torch.float32)
    q, k, v = inputs(5, dtype=torch.float32)
    out = op(q, k.bfloat16(), v.bfloat16(), causal=causal)
    assert out.dtype == torch.float32
    assert torch.equal(out, op(q, k.bfloat16().float(), v.bfloat16().float(), causal=causal))


@pytest.mark.parametrize(("case", "causal"), MODES, ids=MODE_IDS)
def test_gradcheck(case, causal):
    op = case.build(heads=2, head_dim=2, kv_heads=1)
    tensors = inputs(4, 6, heads=2, kv_heads=1, head_dim=2, v_dim=1, batch=1, grad=True)
    mask = torch.tensor([[True, False, True, True, True, True]])
    assert torch.autograd.gradcheck(lambda *t: op(*t, mask=mask, causal=causal), tensors)
