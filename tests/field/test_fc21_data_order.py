"""FC-21: random numbers drawn for the method changed the data order.

Building a model, or sampling inside it, advanced the global generator; two runs that should differ in the method only
also saw other data. crossfade builds students, draws gates, aligns, calibrates, probes and finalizes without moving
any global random state, so a shuffled loader gives every method the same batches.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import DataLoader, TensorDataset

import crossfade
from crossfade.students import Normal, Reinit

from .models import CLASSES, WIDTH, Mixer, Net, data, net, plan

METHODS: dict[str, Callable[[], Any]] = {
    "blend": lambda: crossfade.Deterministic("linear"),
    "bernoulli": lambda: crossfade.Bernoulli("linear"),
    "bernoulli skip": lambda: crossfade.Bernoulli("linear", "skip"),
    "gumbel": lambda: crossfade.Gumbel("linear"),
    "adaptive": lambda: crossfade.Deterministic(crossfade.Adaptive()),
}


def loader() -> DataLoader:
    dice = torch.Generator().manual_seed(0)
    x = torch.randn(24, 5, WIDTH, generator=dice)
    y = torch.randint(CLASSES, (24,), generator=dice)
    return DataLoader(TensorDataset(torch.arange(24), x, y), batch_size=8, shuffle=True)


def batches(method: str) -> list[list[int]]:
    torch.manual_seed(5)
    model, order = net(), []
    base = copy.deepcopy(model)
    fade = None
    if method != "full distillation":
        guidance = crossfade.DeepFeatureGuidance()
        fade = crossfade.install(model, plan(gate=METHODS[method](), guidance=guidance), total_steps=9, probe=data()[0])
        fade.align([data()[0]], steps=2)
        optimizer = torch.optim.SGD(fade.parameter_groups(), lr=0.01)
        fade.attach(optimizer)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(3):
        for ids, x, y in loader():
            order.append(ids.tolist())
            loss = cross_entropy(model(x), y)
            loss = loss + (fade.guidance() if fade else mse_loss(model(x), base(x).detach()))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    if fade:
        fade.finalize(probe=data()[0])
    order.append(torch.randperm(1000).tolist())
    return order


def test_every_method_sees_the_same_batches_in_all_epochs() -> None:
    first = batches("full distillation")
    assert first[0] != first[3]  # Shuffled: the epochs differ.
    for method in METHODS:
        assert batches(method) == first


def states() -> list[Any]:
    numpy = np.random.get_state()
    return [torch.get_rng_state().tolist(), random.getstate(), [numpy[0], numpy[1].tolist(), *numpy[2:]]]


STUDENTS: dict[str, Any] = {
    "copy": crossfade.students.Copy(),
    "reset": Reinit("reset_parameters"),
    "normal": Reinit(Normal()),
    "factory": lambda teacher, site: Mixer(),
    "factory that seeds": lambda teacher, site: (torch.manual_seed(1), random.seed(1), Mixer())[-1],
}

ACTIONS: dict[str, Callable[[Net, crossfade.Fade], Any]] = {
    "install": lambda model, fade: None,
    "ten draws": lambda model, fade: [fade.seek(k) for k in range(10)],
    "forward": lambda model, fade: model(data()[0]),
    "align": lambda model, fade: fade.align([data()[0]], steps=3),
    "calibrate": lambda model, fade: fade.calibrate([data()[0]]),
    "state": lambda model, fade: fade.load_state_dict(fade.state_dict()),
    "copy": lambda model, fade: copy.deepcopy(model),
    "finalize": lambda model, fade: fade.finalize(probe=data()[0], force=True),
    "revert": lambda model, fade: fade.revert(),
}


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("student", STUDENTS)
def test_nothing_moves_the_global_random_states(student: str, action: str) -> None:
    for method in ("bernoulli", "gumbel"):
        model = net()
        x, _ = data()
        before = states()
        fade = crossfade.install(
            model,
            plan(gate=METHODS[method](), student=STUDENTS[student]),
            total_steps=20,
            probe=x,
            release="finalize",
        )
        ACTIONS[action](model, fade)
        assert states() == before


def test_a_failing_install_puts_the_random_states_back() -> None:
    def wrong(teacher: Any, site: Any) -> Any:
        torch.rand(7)
        random.random()
        raise RuntimeError("no")

    before = states()
    with pytest.raises(RuntimeError, match="no"):
        crossfade.install(net(), plan(student=wrong), total_steps=3)
    assert states() == before


@pytest.mark.parametrize("seed", [0, 1])
def test_students_depend_on_the_plans_seed_and_not_on_the_global_state(seed: int) -> None:
    built = []
    for noise in (1, 2):
        torch.manual_seed(noise)
        model = net()
        crossfade.install(model, plan(seed=seed, student=lambda t, s: Mixer()), total_steps=3)
        built.append([p.detach().clone() for p in model.blocks[0].attn.student.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*built, strict=True))
    other = net()
    crossfade.install(other, plan(seed=seed + 2, student=lambda t, s: Mixer()), total_steps=3)
    assert not torch.equal(other.blocks[0].attn.student.q.weight, built[0][0])
    assert not torch.equal(other.blocks[0].attn.student.q.weight, other.blocks[1].attn.student.q.weight)


@pytest.mark.parametrize("method", METHODS)
def test_resume_equals_the_unbroken_run_to_the_bit(method: str) -> None:
    def run(model: Net, fade: crossfade.Fade, optimizer: Any, steps: range) -> None:
        for step in steps:
            x, y = data(step)
            (cross_entropy(model(x), y) + fade.guidance()).backward()
            optimizer.step()
            optimizer.zero_grad()

    def begin() -> tuple[Net, crossfade.Fade, torch.optim.Optimizer]:
        model = net()
        settings = plan(gate=METHODS[method](), guidance=crossfade.DeepFeatureGuidance())
        fade = crossfade.install(model, settings, total_steps=12)
        optimizer = torch.optim.AdamW(fade.parameter_groups(), lr=1e-2)
        fade.attach(optimizer)
        return model, fade, optimizer

    unbroken, fade, optimizer = begin()
    run(unbroken, fade, optimizer, range(5))
    saved = copy.deepcopy((unbroken.state_dict(), fade.state_dict(), optimizer.state_dict()))
    run(unbroken, fade, optimizer, range(5, 12))
    torch.rand(3)  # The new process has drawn other numbers before.
    resumed, again, restored = begin()
    resumed.load_state_dict(saved[0])
    again.load_state_dict(saved[1])
    restored.load_state_dict(saved[2])
    run(resumed, again, restored, range(5, 12))
    for name, value in unbroken.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name
