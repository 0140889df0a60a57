"""What a token must not change, it does not change; a query that sees nothing gives zeros."""

from __future__ import annotations

import pytest
import torch

from crossfade.operators import Window
from tests.operators.cases import CASES, CAUSAL, MODE_IDS, MODES, alive, inputs, outputs_and_gradients

LABELS = [c.label for c in CAUSAL]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=["64", "32", "16"])
@pytest.mark.parametrize(("case", "causal"), MODES, ids=MODE_IDS)
def test_rows_without_a_valid_key_are_zero_and_have_zero_gradients(case, causal, dtype):
    op = case.build(dtype=dtype)
    for q_len, k_len in [(1, 1), (7, 7), (70, 70), (3, 66)]:
        q, k, v = inputs(q_len, k_len, dtype=dtype, grad=True)
        mask = torch.ones(2, k_len, dtype=torch.bool)
        mask[0] = False
        found = outputs_and_gradients(op, op, (q, k, v), torch.ones(2, 4, q_len, 3).to(dtype), mask=mask, causal=causal)
        assert all(bool(value.isfinite().all()) for value in found.values())
        for name in ("out", "q", "k", "v"):
            assert bool((found[name][0] == 0).all()), name
        assert bool((found["out"][1] != 0).any())
        both = outputs_and_gradients(
            op, op, (q, k, v), torch.ones(2, 4, q_len, 3).to(dtype), mask=torch.zeros_like(mask), causal=causal
        )
        assert all(bool((value == 0).all()) for value in both.values())


@pytest.mark.parametrize("case", CAUSAL, ids=LABELS)
def test_causal_queries_before_the_first_key_give_zeros(case):
    op = case.build()
    q, k, v = alive(*inputs(9, 4, grad=True))
    found = outputs_and_gradients(op, op, (q, k, v), torch.ones(2, 4, 9, 3), causal=True)
    assert bool((found["out"][:, :, :5] == 0).all())
    assert bool((found["q"][:, :, :5] == 0).all())
    assert bool((found["out"][:, :, 5:] != 0).all())
    assert all(bool(value.isfinite().all()) for value in found.values())


@pytest.mark.parametrize(("case", "causal"), MODES, ids=MODE_IDS)
def test_what_stands_at_a_padded_position_has_no_influence(case, causal):
    op = case.build()
    q, k, v = inputs(70)
    mask = torch.rand(2, 70) > 0.4
    before = op(q, k, v, mask=mask, causal=causal)
    for value in (1e6, torch.nan, torch.inf):
        hidden = ~mask[:, None, :, None]
        after = op(q, k.masked_fill(hidden, value), v.masked_fill(hidden, value), mask=mask, causal=causal)
        assert torch.equal(before, after)
    changed = op(q, k.masked_fill(~hidden, 0.5), v, mask=mask, causal=causal)
    if case.label != "window-0":  # One key alone has weight 1 whatever it is.
        assert not torch.equal(before, changed)


@pytest.mark.parametrize("large", [1.0, 50.0], ids=["like the others", "very large"])
@pytest.mark.parametrize("case", CAUSAL, ids=LABELS)
def test_a_changed_future_changes_nothing_before_it(case, large):
    op = case.build()
    for length, at in [(7, 3), (130, 63), (130, 64), (130, 65), (130, 100)]:
        q, k, v = alive(*inputs(length))
        before = op(q, k, v, causal=True)
        k2, v2 = k.clone(), v.clone()
        k2[:, :, at:] += large * (1.0 + torch.rand_like(k2[:, :, at:]))
        v2[:, :, at:] += large
        after = op(q, k2, v2, causal=True)
        torch.testing.assert_close(after[:, :, :at], before[:, :, :at], rtol=0.0, atol=1e-13)
        assert bool((after[:, :, at:] != before[:, :, at:]).any(dim=-1).all())


@pytest.mark.parametrize("case", CAUSAL, ids=LABELS)
def test_a_huge_later_key_does_not_push_the_earlier_ones_out(case):
    """In float32 a shared maximum would turn the earlier features into zeros, a forgotten one overflow later."""
    op = case.build(dtype=torch.float32)
    q, k, v = inputs(300, dtype=torch.float32)
    before = op(q, k, v, causal=True)
    k[:, :, 40] = 500.0
    after = op(q, k, v, causal=True)
    torch.testing.assert_close(after[:, :, :40], before[:, :, :40], rtol=0.0, atol=1e-6)
    assert bool(after.isfinite().all())


@pytest.mark.parametrize(("case", "causal"), MODES, ids=MODE_IDS)
def test_one_sample_does_not_reach_another(case, causal):
    op = case.build()
    q, k, v = inputs(20)
    before = op(q, k, v, causal=causal)
    k[1] += 3.0
    v[1] += 3.0
    after = op(q, k, v, causal=causal)
    assert torch.equal(after[0], before[0])
    assert not torch.equal(after[1], before[1])


@pytest.mark.parametrize("causal", [False, True])
def test_a_token_outside_the_window_changes_only_its_neighbours_and_the_global_tokens(causal):
    radius, length, at = 4, 150, 77
    op = Window(4, 5, kv_heads=2, radius=radius, global_tokens=2).double()
    q, k, v = inputs(length)
    before = op(q, k, v, causal=causal)
    k[:, :, at] += 5.0
    v[:, :, at] += 5.0
    changed = (op(q, k, v, causal=causal) != before).any(dim=-1).any(dim=0).any(dim=0).nonzero().flatten().tolist()
    near = list(range(at if causal else at - radius, at + radius + 1))
    assert changed == (near if causal else [0, 1, *near])


@pytest.mark.parametrize("causal", [False, True])
def test_a_global_token_reaches_every_later_one(causal):
    op = Window(4, 5, kv_heads=2, radius=1, global_tokens=1).double()
    q, k, v = inputs(90)
    before = op(q, k, v, causal=causal)
    v[:, :, 0] += 1.0
    assert bool((op(q, k, v, causal=causal) != before).any(dim=-1).all())


@pytest.mark.parametrize("case", [c for c in CASES if c.kind.card.class_token and c.label != "window-0"], ids=str)
def test_a_class_token_sees_every_token(case):
    op = case.build()
    q, k, v = alive(*inputs(60, grad=True))
    (gradient,) = torch.autograd.grad(op(q, k, v)[:, :, 0].sum(), v)
    seen = (gradient != 0).any(dim=-1)
    assert bool(seen.all())
