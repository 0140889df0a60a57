"""Bernoulli "both" and "skip" are one method: the same weights at the end, bit for bit."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import crossfade
from tests.models import adamw, batch, difference, equal, net, plan, train

STEPS = 8


def finish(execution: Any, granularity: Any, seed: int, trains: Any, alpha: Any, guided: bool) -> dict[str, Any]:
    model = net(layers=3)
    gate = crossfade.Bernoulli(alpha, execution, granularity)
    guidance = crossfade.DeepFeatureGuidance(schedule="alpha") if guided else None
    fade = crossfade.install(model, plan(gate, guidance, seed=seed, trains=trains), total_steps=STEPS)
    optimizer = adamw(fade)
    fade.attach(optimizer)
    train(model, fade, optimizer, 0, STEPS)
    return dict(model.state_dict())


@settings(max_examples=10)
@given(
    granularity=st.sampled_from(["site", "shared"]),
    seed=st.integers(0, 1000),
    trains=st.sampled_from(["students", "all"]),
    alpha=st.sampled_from(["linear", "aggr20", 0.5]),
    guided=st.booleans(),
)
def test_both_and_skip_end_with_equal_weights(
    granularity: Any, seed: int, trains: Any, alpha: Any, guided: bool
) -> None:
    results = [finish(execution, granularity, seed, trains, alpha, guided) for execution in ("both", "skip")]
    assert difference(*results) == []


@pytest.mark.parametrize("execution", ["both", "skip"])
@pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, torch.optim.SGD])
def test_a_student_without_part_in_a_step_is_not_moved_by_it(execution: Any, optimizer_class: Any) -> None:
    # Momentum and weight decay would move it even at gradient zero.
    model = net(layers=3)
    fade = crossfade.install(model, plan(crossfade.Bernoulli(0.5, execution)), total_steps=STEPS)
    more = {"momentum": 0.9} if optimizer_class is torch.optim.SGD else {}
    optimizer = optimizer_class(fade.parameter_groups(weight_decay=0.1), lr=0.01, **more)
    fade.attach(optimizer)
    moved = set()
    for step in range(STEPS):
        weights = {site.path: site.weight for site in fade.sites}
        before = {site.path: copy.deepcopy(site.blend.student.state_dict()) for site in fade.sites}
        train(model, fade, optimizer, step, step + 1)
        for site in fade.sites:
            same = not difference(dict(before[site.path]), dict(site.blend.student.state_dict()))
            assert same == (weights[site.path] == 1.0)
            moved.add(same)
    assert moved == {True, False}


@given(seed=st.integers(0, 200))
@settings(max_examples=10)
def test_both_and_skip_have_equal_outputs_in_every_step(seed: int) -> None:
    fades = []
    for execution in ("both", "skip"):
        gate = crossfade.Bernoulli(0.5, execution)
        fades.append(crossfade.install(net(layers=3), plan(gate, seed=seed), total_steps=STEPS))
    for step in range(STEPS):
        outs = []
        for fade in fades:
            fade.seek(step)
            outs.append(fade.model(batch(step)[0]))
        assert equal(*outs)
