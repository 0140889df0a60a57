"""Guidance over micro-batches of unequal size and length equals the full batch; padding is never counted."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import crossfade
from tests.models import batch, difference, equal, gradients, net, padding, plan

ROWS, LENGTH = 6, 5
# Double precision: what is left is the order of a sum.
CLOSE = {"rtol": 1e-9, "atol": 1e-12}


def start(reduction: Any, alpha: float, *, calibrated: bool, detach: bool = False) -> tuple[nn.Module, crossfade.Fade]:
    model = net(layers=2).double()
    guidance = crossfade.DeepFeatureGuidance(weight=0.7, reduction=reduction, detach_input=detach)
    chosen = plan(crossfade.Deterministic(alpha), guidance, trains="all")
    fade = crossfade.install(model, chosen, total_steps=10, release="finalize")
    if calibrated:
        fade.calibrate([batch(5)[0]])
    return model, fade


def pieces(lengths: list[int], cuts: list[int], *, trim: bool) -> list[tuple[Tensor, Tensor]]:
    ids, mask = batch(0, ROWS, LENGTH)[0], padding(lengths, LENGTH)
    result = []
    for a, b in itertools.pairwise([0, *cuts, ROWS]):
        width = max(lengths[a:b]) if trim else LENGTH
        result.append((ids[a:b, :width], mask[a:b, :width]))
    return result


@settings(max_examples=25)
@given(
    reduction=st.sampled_from(["relative", "mean", "cosine", "sum"]),
    alpha=st.sampled_from([1.0, 0.4, 0.0]),
    lengths=st.lists(st.integers(1, LENGTH), min_size=ROWS, max_size=ROWS),
    cuts=st.sets(st.integers(1, ROWS - 1)).map(sorted),
    trim=st.booleans(),
    detach=st.booleans(),
)
def test_unequal_micro_batches_add_up_to_the_full_batch(
    reduction: Any, alpha: float, lengths: list[int], cuts: list[int], trim: bool, detach: bool
) -> None:
    items = sum(lengths)
    results = []
    for split in ([], cuts):
        model, fade = start(reduction, alpha, calibrated=True, detach=detach)
        total = torch.zeros((), dtype=torch.float64)
        for ids, mask in pieces(lengths, split, trim=trim):
            model(ids, mask)
            loss = fade.guidance(num_items=items)
            loss.backward()
            total += loss.detach()
        results.append((total, gradients(dict(model.named_parameters()))))
    (one, whole), (many, parts) = results
    torch.testing.assert_close(many, one, **CLOSE)
    assert one > 0
    assert [k for k, v in whole.items() if v is None] == [k for k, v in parts.items() if v is None]
    for name, grad in whole.items():
        if grad is not None:
            torch.testing.assert_close(parts[name], grad, **CLOSE, msg=name)
    # The full batch without num_items: its own count is that number.
    model, fade = start(reduction, alpha, calibrated=True, detach=detach)
    model(*pieces(lengths, [], trim=False)[0])
    torch.testing.assert_close(fade.guidance().double(), one, **CLOSE)


@pytest.mark.parametrize("reduction", ["relative", "mean", "cosine"])
def test_equal_micro_batches_average_to_the_full_batch_without_num_items(reduction: Any) -> None:
    values = []
    for cuts in ([], [3]):
        model, fade = start(reduction, 0.4, calibrated=True)
        each = []
        for ids, mask in pieces([LENGTH] * ROWS, cuts, trim=False):
            model(ids, mask)
            each.append(fade.guidance().double())
        values.append(sum(each) / len(each))
    torch.testing.assert_close(values[0], values[1], **CLOSE)


def test_several_forwards_before_one_read_give_their_mean() -> None:
    model, fade = start("mean", 0.4, calibrated=True)
    each = []
    for k in range(3):
        model(batch(k)[0])
        each.append(fade.guidance().double())
    for k in range(3):
        model(batch(k)[0])
    torch.testing.assert_close(fade.guidance().double(), sum(each) / 3, **CLOSE)


@settings(max_examples=15)
@given(
    reduction=st.sampled_from(["relative", "mean", "cosine", "sum"]),
    lengths=st.lists(st.integers(1, LENGTH), min_size=ROWS, max_size=ROWS),
    calibrated=st.booleans(),
    filler=st.integers(0, 10),
)
def test_what_stands_in_the_padding_does_not_matter(
    reduction: Any, lengths: list[int], calibrated: bool, filler: int
) -> None:
    (ids, mask), results = pieces(lengths, [], trim=False)[0], []
    for tokens in (ids, ids.masked_fill(mask == 0, filler)):
        model, fade = start(reduction, 0.4, calibrated=False)
        if calibrated:
            fade.calibrate([(tokens, mask)])
        model(tokens, mask)
        loss = fade.guidance()
        loss.backward()
        fade.step()
        results.append((loss.detach(), gradients(dict(model.named_parameters())), fade.state_dict(), fade.log()))
    (loss, grads, state, log), (loss2, grads2, state2, log2) = results
    assert equal(loss, loss2)
    # Two rows of the embedding differ in whether they were looked up at all, with gradient zero.
    assert difference(grads, grads2) == []
    assert equal(state, state2)
    assert log == log2


def test_mask_false_counts_every_position() -> None:
    lengths = [1, 2, 3, 4, 5, 5]
    values = {}
    for use in (True, False):
        model = net(layers=2).double()
        guidance = crossfade.DeepFeatureGuidance(reduction="mean", mask=use)
        fade = crossfade.install(model, plan(crossfade.Deterministic(0.4), guidance), total_steps=10)
        model(*pieces(lengths, [], trim=False)[0])
        assert [t.positions.item() for terms in fade.ledger.terms.values() for t in terms] == [
            20.0 if use else 30.0
        ] * 2
        values[use] = fade.guidance().item()
    assert values[True] != values[False]


def test_an_explicit_mask_wins_over_the_arguments() -> None:
    model, fade = start("mean", 0.4, calibrated=True)
    ids, mask = pieces([1, 2, 3, 4, 5, 5], [], trim=False)[0]
    model(ids, mask)
    expected = fade.guidance()
    model, fade = start("mean", 0.4, calibrated=True)
    with fade.mask(mask):
        # The model computes with its own mask; only what is counted is told.
        model(ids, mask)
        assert equal(fade.guidance(), expected)
    with fade.mask(torch.ones_like(mask)):
        model(ids, mask)
        assert fade.guidance() != expected


@pytest.mark.parametrize("reduction", ["relative", "mean", "cosine", "sum"])
def test_guidance_is_zero_for_a_perfect_student_and_one_for_a_student_of_zeros_if_relative(reduction: Any) -> None:
    model, fade = start(reduction, 1.0, calibrated=False)
    for site in fade.sites:
        site.blend.student.load_state_dict(site.blend.teacher.state_dict())
    model(batch()[0])
    assert fade.guidance().item() == pytest.approx(0.0, abs=1e-12)
    for site in fade.sites:
        for parameter in site.blend.student.parameters():
            torch.nn.init.zeros_(parameter)
    model(batch()[0])
    value = fade.guidance().item()
    if reduction == "relative":
        # lambda 0.7 at two sites, each measured against the very power of this batch.
        assert value == pytest.approx(1.4, rel=1e-6)
    assert value > 0.0
