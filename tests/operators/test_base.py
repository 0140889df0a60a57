"""Cards, the registry, refusals, and where random numbers come from."""

from __future__ import annotations

import copy
import dataclasses
import re

import pytest
import torch

from crossfade.errors import PlanError, StudentError
from crossfade.operators import OPERATORS, Card, Grouped, LinearAttention, Linformer, Operator, Performer, operator
from crossfade.operators.base import CHUNK, SoftmaxMap
from crossfade.operators.performer import orthogonal_rows
from tests.operators.cases import CASES, MODE_IDS, MODES, inputs

LABELS = [c.label for c in CASES]


def test_cards_are_complete_and_name_their_paper():
    for name, kind in OPERATORS.items():
        assert kind.card.name == name
        assert re.fullmatch(r"\d{4}\.\d{5}", kind.card.paper)
        assert kind.card.what
        assert kind.card.complexity
        assert kind.card.paper in (kind.__doc__ or "")


def test_a_name_is_taken_once(monkeypatch):
    monkeypatch.setattr("crossfade.operators.base.OPERATORS", dict(OPERATORS))
    card = dataclasses.replace(Grouped.card, what="another")
    with pytest.raises(PlanError, match="'grouped' is taken"):

        @operator(card)
        class Other(Operator):
            pass


def test_a_new_operator_is_listed_and_checked(monkeypatch):
    known = dict(OPERATORS)
    monkeypatch.setattr("crossfade.operators.base.OPERATORS", known)

    @operator(Card("mean", "the mean", False, True, False, False, False, True, True, False, "O(L)", "0000.00000"))
    class Mean(Operator):
        def attend(self, q, k, v, mask, causal, scale):
            return v.mean(-2, keepdim=True).expand_as(v)

    assert known["mean"] is Mean
    q, k, v = inputs(4, kv_heads=4)
    op = Mean(4, 5)
    assert op(q, k, v).shape == v.shape
    for call in (
        lambda: op(q, k, v, causal=True),
        lambda: op(q, k, v, mask=torch.ones(2, 4, dtype=torch.bool)),
        lambda: op(q[:, :, :2], k, v),
        lambda: Mean(4, 5, kv_heads=2)(q, k[:, :2], v[:, :2]),
    ):
        with pytest.raises(StudentError, match="does not support this call"):
            call()


def test_a_base_operator_computes_nothing():
    with pytest.raises(NotImplementedError):
        Operator(1, 1).attend(*inputs(1), None, False, None)


@pytest.mark.parametrize("case", CASES, ids=LABELS)
def test_cards_tell_the_truth(case):
    op = case.build()
    q, k, v = inputs(9)
    card = case.kind.card
    assert (card.bidirectional, card.padding, card.grouped, card.cross) == (True, True, True, True)
    if not card.causal:
        with pytest.raises(StudentError, match="does not support") as caught:
            op(q, k, v, causal=True)
        assert "linear" in str(caught.value)
        assert card.name in str(caught.value)
    if not card.any_length:
        with pytest.raises(StudentError, match="longer than"):
            op(*inputs(201))


@pytest.mark.parametrize(
    "change",
    [
        lambda q, k, v: (q[0], k, v, None),
        lambda q, k, v: (q[:, :3], k, v, None),
        lambda q, k, v: (q, k[..., :4], v, None),
        lambda q, k, v: (q, k, v[:, :, :-1], None),
        lambda q, k, v: (q, k[:, :1], v[:, :1], None),
        lambda q, k, v: (q[:1], k, v, None),
        lambda q, k, v: (q.long(), k, v, None),
        lambda q, k, v: (q, k, v, torch.ones(2, 6)),
        lambda q, k, v: (q, k, v, torch.ones(2, 5, dtype=torch.bool)),
        lambda q, k, v: (q, k, v, torch.ones(2, 1, 6, 6, dtype=torch.bool)),
    ],
)
def test_tensors_that_do_not_fit_are_refused(change):
    *tensors, mask = change(*inputs(6))
    with pytest.raises(StudentError, match="do not fit the operator"):
        LinearAttention(4, 5, kv_heads=2)(*tensors, mask=mask)


@pytest.mark.parametrize("case", CASES, ids=LABELS)
def test_settings_show_and_copies_and_state_dicts_give_the_same_function(case):
    op = case.build()
    assert "heads=4, head_dim=5, kv_heads=2" in repr(op)
    q, k, v = inputs(20)
    other = case.kind(4, 5, kv_heads=2, **case.settings).double()
    other.load_state_dict(op.state_dict())
    for same in (other, copy.deepcopy(op)):
        assert torch.equal(same(q, k, v), op(q, k, v))


@pytest.mark.parametrize(("case", "causal"), MODES, ids=MODE_IDS)
def test_a_forward_holds_no_dice_and_changes_nothing(case, causal):
    op = case.build()
    tensors = inputs(70)
    before = [t.clone() for t in (*tensors, *op.state_dict().values())]
    state = torch.get_rng_state()
    first = op(*tensors, causal=causal)
    assert torch.equal(op(*tensors, causal=causal), first)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(before, (*tensors, *op.state_dict().values()), strict=True))


@pytest.mark.parametrize(("kind", "more"), [(Performer, {}), (Linformer, {"max_length": 9, "rank": 4})])
def test_a_generator_decides_the_values_and_leaves_the_default_one_alone(kind, more):
    state = torch.get_rng_state()
    a, b, c = (kind(2, 4, generator=torch.Generator().manual_seed(s), **more).state_dict() for s in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a[name], b[name]) and not torch.equal(a[name], c[name]) for name in a)
    kind(2, 4, **more)
    assert not torch.equal(torch.get_rng_state(), state)


def test_a_redraw_follows_its_seed():
    op = Performer(2, 4, features=7)
    assert list(op.state_dict()) == ["projection"]
    assert not list(op.parameters())
    state, first = torch.get_rng_state(), op.projection.clone()
    op.redraw(3)
    again = op.projection.clone()
    op.redraw(4)
    assert not torch.equal(op.projection, again)
    assert not torch.equal(first, again)
    op.redraw(3)
    assert torch.equal(op.projection, again)
    assert torch.equal(torch.get_rng_state(), state)


def test_orthogonal_rows_are_orthogonal_in_groups_and_as_long_as_gaussian_ones():
    rows = orthogonal_rows(21, 8).double()
    for group in (rows[:8], rows[8:16], rows[16:]):
        products = group @ group.T
        torch.testing.assert_close(products, torch.diag(products.diag()), rtol=0.0, atol=1e-5)
    many = orthogonal_rows(4000, 8).double()
    assert abs(many.square().sum(-1).mean().item() - 8.0) < 0.2
    assert many.mean(0).abs().max().item() < 0.08  # Neither direction is preferred.


def test_a_softmax_map_starts_from_the_identity_and_sums_to_one():
    x = torch.randn(2, 3, 5, 4)
    features = SoftmaxMap(3, 4)(x)
    torch.testing.assert_close(features, torch.softmax(torch.cat([x, -x], -1), -1))
    torch.testing.assert_close(features.sum(-1), torch.ones(2, 3, 5))


@pytest.mark.parametrize("map_name", ["elu", "relu", "exp", "hedgehog"])
def test_large_inputs_stay_finite(map_name):
    op = LinearAttention(2, 4, feature_map=map_name)
    q, k, v = inputs(CHUNK + 9, heads=2, kv_heads=2, head_dim=4, dtype=torch.float32, grad=True)
    for causal in (False, True):
        out = op(1e3 * q, 1e3 * k, v, causal=causal)
        out.sum().backward()
        assert bool(out.isfinite().all())
        assert all(bool(t.grad.isfinite().all()) for t in (q, k, v))


def test_a_nan_of_the_callers_stays_visible():
    q, k, v = inputs(6)
    q[0, 0, 2] = torch.nan
    for case in CASES:
        out = case.build()(q, k, v)
        assert bool(out[0, 0, 2].isnan().all()), case.label
        assert bool(out[1].isfinite().all()), case.label
