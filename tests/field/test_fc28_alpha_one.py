"""FC-28: at alpha 1 the student only decayed.

A parameter with a zero (not absent) gradient still gets weight decay and momentum updates, so a student that had no
part in the step shrank towards zero. In crossfade a student without a learning signal does not move, to the bit; with
guidance it learns at alpha 1, and a student that a random gate left out of one step rests in that step.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import crossfade

from .models import Net, adamw, data, net, plan, same, train, values

OPTIMIZERS = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.1),
    "sgd with momentum": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, weight_decay=0.1),
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, lr=0.1, momentum=0.9),
}


def faded(gate: Any, **more: Any) -> tuple[Net, crossfade.Fade]:
    model = net()
    return model, crossfade.install(model, plan(gate=gate, **more), total_steps=100, release="finalize")


def students(fade: crossfade.Fade) -> dict[str, torch.Tensor]:
    return {f"{s.path}.{n}": v for s in fade.sites for n, v in values(s.blend.student).items()}


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("trains", ["students", "all"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("gate", [crossfade.Deterministic, crossfade.Bernoulli, crossfade.Gumbel])
def test_twenty_steps_at_alpha_1_leave_the_students_to_the_bit(
    gate: Any, kind: str, trains: Any, to_none: bool
) -> None:
    model, fade = faded(gate(1.0), trains=trains)
    optimizer = OPTIMIZERS[kind](fade.parameter_groups(weight_decay=0.1))
    fade.attach(optimizer)
    before = students(fade)
    for step in range(20):
        x, y = data(step)
        cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=to_none)
    assert fade.step_count == 20
    assert same(students(fade), before)


@pytest.mark.parametrize("reduction", ["relative", "mean", "sum", "cosine"])
def test_with_guidance_the_students_learn_at_alpha_1(reduction: Any) -> None:
    model, fade = faded(crossfade.Deterministic(1.0), guidance=crossfade.DeepFeatureGuidance(reduction=reduction))
    optimizer = adamw(fade, lr=3e-2)
    before, errors = students(fade), []
    for step in range(40):
        train(model, fade, optimizer, [step % 4])
        errors.append(fade.log()["guidance"])
    assert not any(torch.equal(value, before[name]) for name, value in students(fade).items())
    assert errors[-1] < 0.6 * errors[0]


def test_one_site_without_guidance_rests_while_the_other_learns() -> None:
    guidance = crossfade.DeepFeatureGuidance(site_weights={"blocks.0.attn": 0.0})
    model, fade = faded(crossfade.Deterministic(1.0), guidance=guidance)
    before = [values(site.blend.student) for site in fade.sites]
    train(model, fade, adamw(fade), range(5))
    moved = [not same(values(site.blend.student), old) for site, old in zip(fade.sites, before, strict=True)]
    assert moved == [False, True]


@pytest.mark.parametrize("execution", ["both", "skip"])
def test_a_student_that_the_gate_left_out_rests_in_that_step(execution: Any) -> None:
    model, fade = faded(crossfade.Bernoulli(0.5, execution))
    optimizer = adamw(fade)
    seen = set()
    for step in range(30):
        weights = [site.weight for site in fade.sites]
        before = [values(site.blend.student) for site in fade.sites]
        train(model, fade, optimizer, [step])
        for site, w, old in zip(fade.sites, weights, before, strict=True):
            assert same(values(site.blend.student), old) is (w == 1.0)
            seen.add(w)
    assert seen == {0.0, 1.0}


def test_the_hold_of_a_schedule_is_a_rest_and_then_the_students_move() -> None:
    model, fade = faded(crossfade.Deterministic(crossfade.schedules.hold(1.0, 0.1, "linear")))
    optimizer = adamw(fade)
    before = students(fade)
    train(model, fade, optimizer, range(11))  # Steps 0 to 9 see 1, and so does 10, where the line begins.
    assert same(students(fade), before)
    train(model, fade, optimizer, range(11, 13))
    assert not any(torch.equal(value, before[name]) for name, value in students(fade).items())


def test_a_model_without_anything_else_to_train_still_runs_backward_at_alpha_1() -> None:
    model, fade = faded(crossfade.Deterministic(1.0))
    optimizer = adamw(fade)
    x, y = data()
    loss = cross_entropy(model(x), y)
    assert loss.requires_grad
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    assert fade.step_count == 1
