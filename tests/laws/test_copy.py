"""Deep copies: an independent model with a handle of its own, and averaged copies that follow."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy

import crossfade
from tests.models import GATES, adamw, batch, difference, equal, gates, named_tensors, net, plan, train

STEPS = 5


def start(gate: str, target: str = "blocks.*.attn") -> tuple[torch.nn.Module, crossfade.Fade]:
    model = net(layers=3)
    guidance = crossfade.DeepFeatureGuidance()
    fade = crossfade.install(
        model, plan(gates()[gate](), guidance, targets=target), total_steps=STEPS, release="finalize", metrics_every=1
    )
    return model, fade


def sgd(fade: crossfade.Fade) -> torch.optim.Optimizer:
    # Without momentum, so that a copy can go on with an optimizer of its own.
    optimizer = torch.optim.SGD(fade.parameter_groups(), lr=0.1)
    fade.attach(optimizer)
    return optimizer


@settings(max_examples=25)
@given(
    gate=st.sampled_from(GATES), step=st.integers(0, STEPS), target=st.sampled_from(["blocks.*.attn", "blocks[0:2]"])
)
def test_a_copy_goes_on_as_the_original_does_and_neither_moves_the_other(gate: str, step: int, target: str) -> None:
    model, fade = start(gate, target)
    optimizer = sgd(fade)
    train(model, fade, optimizer, 0, step)
    if step < STEPS:
        # In the middle of a step: the terms that wait in the ledger belong to the original's graph.
        cross_entropy(model(batch(step)[0]), batch(step)[1])
    twin = copy.deepcopy(model)
    other = crossfade.handle(twin)
    if step < STEPS:
        fade.guidance()
    assert other is not fade
    assert other.model is twin
    assert {id(m) for m in twin.modules()}.isdisjoint({id(m) for m in model.modules()})
    theirs = {t.data_ptr() for _, t in named_tensors(model)}
    assert theirs.isdisjoint({t.data_ptr() for _, t in named_tensors(twin)})
    assert [s.blend for s in other.sites] == [m for m in twin.modules() if type(m).__name__ == "Blend"]
    assert other.ledger is not fade.ledger
    assert all(site.blend.ledger is other.ledger for site in other.sites)
    ids, _ = batch(77)
    assert equal(twin.eval()(ids), model.eval()(ids))
    assert equal(twin.train()(ids), model.train()(ids))
    for each in (fade, other):
        each.ledger.clear()
    # Stepping one does not move the other.
    before, state = copy.deepcopy(twin.state_dict()), other.state_dict()
    train(model, fade, optimizer, step, STEPS)
    assert other.step_count == step
    assert difference(before, twin.state_dict()) == []
    assert equal(state, other.state_dict())
    # And the copy ends where the original ended.
    train(twin, other, sgd(other), step, STEPS)
    assert difference(dict(model.state_dict()), dict(twin.state_dict())) == []
    twin, model = other.finalize(probe=ids), fade.finalize(probe=ids)
    assert equal(twin(ids), model(ids))


def test_ending_the_copy_leaves_the_original() -> None:
    model, fade = start("deterministic")
    twin = copy.deepcopy(model)
    ids, _ = batch()
    before = model(ids)
    fade.guidance()
    crossfade.handle(twin).revert()
    assert crossfade.handle(model) is fade
    assert equal(model(ids), before)
    assert list(twin.state_dict()) == list(net(layers=3).state_dict())
    with pytest.raises(crossfade.CrossfadeError):
        crossfade.handle(twin)


def test_a_copy_of_a_finalized_model_is_plain() -> None:
    model, fade = start("deterministic")
    fade.seek(STEPS)
    fade.finalize()
    assert not any(type(m).__module__.startswith("crossfade") for m in copy.deepcopy(model).modules())


@pytest.mark.parametrize("gate", GATES)
def test_an_averaged_copy_follows(gate: str) -> None:
    model, fade = start(gate)
    optimizer = adamw(fade)
    fade.attach(optimizer)
    averaged = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
    follower = crossfade.handle(averaged.module)
    for step in range(STEPS):
        train(model, fade, optimizer, step, step + 1)
        averaged.update_parameters(model)
        follower.follow(fade)
        assert follower.step_count == fade.step_count
        for mine, theirs in zip(follower.sites, fade.sites, strict=True):
            # An average of alphas would lag behind; a copy of the state would not.
            assert (mine.alpha, mine.weight, mine.lam) == (theirs.alpha, theirs.weight, theirs.lam)
            assert mine.blend.gate_alpha.item() == theirs.blend.gate_alpha.item()
            assert mine.power.value == theirs.power.value
    ids, _ = batch()
    assert follower.finalize(probe=ids)(ids).isfinite().all()
