"""Where an operator can be softmax attention, it is; Performer comes closer with more features."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional

from crossfade.operators import Grouped, Linformer, Performer, Window, WindowLinear, pool_heads
from tests.operators.cases import CASES, inputs


def softmax_attention(q, k, v, causal=False):
    return functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", [1, 30, 75])
@pytest.mark.parametrize("kind", [Window, WindowLinear])
def test_a_full_window_is_softmax_attention(kind, length, causal):
    q, k, v = inputs(length)
    op = kind(4, 5, kv_heads=2, radius=length - 1).double()
    torch.testing.assert_close(op(q, k, v, causal=causal), softmax_attention(q, k, v, causal), rtol=0.0, atol=1e-12)
    if length > 1:
        narrow = kind(4, 5, kv_heads=2, radius=length // 3).double()
        assert (narrow(q, k, v, causal=causal) - softmax_attention(q, k, v, causal)).abs().max() > 1e-3


def test_everything_global_is_softmax_attention():
    q, k, v = inputs(40)
    op = Window(4, 5, kv_heads=2, radius=0, global_tokens=40).double()
    for causal in (False, True):
        torch.testing.assert_close(op(q, k, v, causal=causal), softmax_attention(q, k, v, causal), rtol=0.0, atol=1e-12)


def test_a_hybrid_with_all_weight_on_the_window_is_the_window():
    q, k, v = inputs(75)
    hybrid = WindowLinear(4, 5, kv_heads=2, radius=5).double()
    torch.nn.init.constant_(hybrid.mix, 50.0)
    alone = Window(4, 5, kv_heads=2, radius=5, global_tokens=0).double()
    for causal in (False, True):
        torch.testing.assert_close(hybrid(q, k, v, causal=causal), alone(q, k, v, causal=causal), rtol=0.0, atol=1e-12)


@pytest.mark.parametrize("per_head", [False, True])
def test_a_linformer_with_the_identity_is_softmax_attention(per_head):
    q, k, v = inputs(33)
    op = Linformer(4, 5, kv_heads=2, max_length=33, rank=33, per_head=per_head).double()
    with torch.no_grad():
        for projection in op.parameters():
            projection.copy_(torch.eye(33))
    torch.testing.assert_close(op(q, k, v), softmax_attention(q, k, v), rtol=0.0, atol=1e-12)


def test_a_linformer_reads_a_shorter_sequence_like_a_padded_one():
    q, k, v = inputs(12)
    op = Linformer(4, 5, kv_heads=2, max_length=20, rank=4).double()
    padded = [functional.pad(t, (0, 0, 0, 8), value=7.0) for t in (k, v)]
    mask = torch.arange(20).expand(2, -1) < 12
    torch.testing.assert_close(op(q, *padded, mask=mask), op(q, k, v), rtol=0.0, atol=1e-12)


def test_a_performer_comes_closer_as_one_over_the_root_of_its_features():
    q, k, v = inputs(24, 24, heads=2, kv_heads=2, head_dim=8)
    q, k = 0.4 * q, 0.4 * k  # Larger logits have heavy tails, and come to the rate only with more features.
    wanted = softmax_attention(q, k, v)
    counts, errors = [16, 64, 256, 1024, 4096], []
    for features in counts:
        seeds = range(12)
        found = []
        for seed in seeds:
            op = Performer(2, 8, features=features, generator=torch.Generator().manual_seed(seed)).double()
            found.append((op(q, k, v) - wanted).square().mean())
        errors.append(torch.stack(found).mean().sqrt().item())
    slope = (math.log(errors[-1]) - math.log(errors[0])) / (math.log(counts[-1]) - math.log(counts[0]))
    assert -0.6 < slope < -0.4, (slope, errors)
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.02


def test_the_card_says_whether_an_operator_is_softmax_attention_as_it_is_built():
    q, k, v = inputs(75)
    for case in CASES:
        op = case.kind(4, 5, kv_heads=2, **case.settings).double()
        exact = (op(q, k, v) - softmax_attention(q, k, v)).abs().max().item() < 1e-12
        assert exact == case.kind.card.exact_at_init, case.label


def test_pooled_heads_that_were_equal_change_nothing():
    """Grouped attention on pooled projections is the teacher's, when heads of a group held the same weights."""
    heads, groups, dim, width = 6, 2, 4, 10
    x = torch.randn(3, 7, width, dtype=torch.float64)
    few = torch.randn(groups, dim, width, dtype=torch.float64)
    many = few.repeat_interleave(heads // groups, 0).flatten(0, 1)
    pooled = pool_heads(many, heads, groups)
    torch.testing.assert_close(pooled, few.flatten(0, 1))

    def split(weight):
        return (x @ weight.T).unflatten(-1, (-1, dim)).transpose(1, 2)

    q = torch.randn(3, heads, 7, dim, dtype=torch.float64)
    wanted = Grouped(heads, dim)(q, split(many), split(many))
    torch.testing.assert_close(Grouped(heads, dim, kv_heads=groups)(q, split(pooled), split(pooled)), wanted)


def test_pooling_is_the_mean_of_neighbours():
    weight = torch.arange(24.0).view(8, 3)
    pooled = pool_heads(weight, heads=4, groups=2)
    torch.testing.assert_close(pooled, torch.stack([(weight[i] + weight[i + 2]) / 2 for i in (0, 1, 4, 5)]))
    assert torch.equal(pool_heads(weight, 4, 4), weight)
    torch.testing.assert_close(pool_heads(weight[:, 0], 4, 1), weight[:, 0].view(4, 2).mean(0))
