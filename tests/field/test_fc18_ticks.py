"""FC-18: the schedule ticked at the wrong rate.

Schedulers advanced per micro-batch under gradient accumulation, once per process, or although the optimizer step was
skipped after an overflow; annealing finished early. crossfade's clock follows the attached optimizer's real steps and
nothing else: after k of them alpha is the formula at k.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import crossfade
from crossfade.errors import StateError

from .models import Net, data, net, plan

N = 10
SCHEDULES = {
    "linear": lambda t: 1.0 - t,
    "aggr20": crossfade.schedules.aggr20(),
    "cosine": crossfade.schedules.cosine(),
    "ends early": crossfade.schedules.linear(until=0.5),
}


def faded(gate: Any = None, **more: Any) -> tuple[Net, crossfade.Fade, torch.optim.Optimizer]:
    model = net()
    fade = crossfade.install(model, plan(gate=gate or crossfade.Deterministic("linear"), **more), total_steps=N)
    optimizer = torch.optim.SGD(fade.parameter_groups(), lr=0.01)
    fade.attach(optimizer)
    return model, fade, optimizer


def backward(model: nn.Module, step: int, scale: float = 1.0) -> None:
    x, y = data(step)
    (cross_entropy(model(x), y) * scale).backward()


@pytest.mark.parametrize("name", SCHEDULES)
def test_alpha_after_k_steps_is_the_formula_at_k_with_exact_ends(name: str) -> None:
    formula = SCHEDULES[name]
    model, fade, optimizer = faded(crossfade.Deterministic(formula))
    seen = [fade.sites[0].alpha]
    for step in range(N + 3):
        backward(model, step)
        optimizer.step()
        seen.append(fade.sites[0].alpha)
    assert seen == [formula(min(1.0, k / N)) for k in range(N + 4)]
    assert seen[0] == 1.0
    assert seen[N:] == [0.0] * 4
    assert float(fade.sites[0].blend.gate_alpha) == 0.0


@pytest.mark.parametrize("accumulation", [1, 4, 7])
def test_micro_batches_do_not_tick(accumulation: int) -> None:
    model, fade, optimizer = faded()
    for k in range(3):
        for part in range(accumulation):
            assert fade.step_count == k
            backward(model, accumulation * k + part, 1 / accumulation)
        optimizer.step()
        optimizer.zero_grad()
    assert fade.step_count == 3
    assert fade.log()["alpha"] == pytest.approx(0.7)


def test_forward_evaluation_and_zero_grad_do_not_tick() -> None:
    model, fade, optimizer = faded()
    for training in (True, False):
        model.train(training)
        for _ in range(3):
            model(data()[0])
            with torch.no_grad():
                model(data()[0])
    with fade.view("student"):
        model(data()[0])
    optimizer.zero_grad()
    fade.log()
    assert fade.step_count == 0
    assert fade.sites[0].alpha == 1.0


def overflow(model: Net, fade: crossfade.Fade) -> None:
    for site in fade.sites:
        for p in site.blend.student.parameters():
            p.grad = torch.full_like(p, float("inf"))


def test_a_step_that_a_scaler_skips_does_not_tick() -> None:
    model, fade, optimizer = faded(crossfade.Deterministic(0.5))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in range(6):
        x, y = data(step)
        scaler.scale(cross_entropy(model(x), y)).backward()
        if step in (1, 2):
            overflow(model, fade)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert fade.step_count == 4


GATES = {
    "deterministic": lambda: crossfade.Deterministic("linear"),
    "aggr20": lambda: crossfade.Deterministic("aggr20"),
    "bernoulli": lambda: crossfade.Bernoulli("linear"),
    "bernoulli skip": lambda: crossfade.Bernoulli("linear", "skip"),
    "gumbel": lambda: crossfade.Gumbel("linear"),
}


@pytest.mark.parametrize("guided", [False, True])
@pytest.mark.parametrize("gate", GATES)
def test_a_scaler_works_from_the_first_step_on(gate: str, guided: bool) -> None:
    # At alpha 1 no student takes part: the scaler must not find an optimizer without any gradient.
    guidance = crossfade.DeepFeatureGuidance() if guided else None
    model, fade, optimizer = faded(GATES[gate](), guidance=guidance)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in range(N):
        x, y = data(step)
        scaler.scale(cross_entropy(model(x), y) + fade.guidance()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert fade.step_count == N
    fade.finalize()


@pytest.mark.parametrize("gate", ["deterministic", "bernoulli", "gumbel"])
@pytest.mark.parametrize("guided", [False, True])
def test_after_a_skipped_overflow_the_next_good_step_counts(gate: str, guided: bool) -> None:
    # A forward that overflows leaves marks behind (values that are not finite); they belong to the skipped step.
    kinds = {"deterministic": crossfade.Deterministic, "bernoulli": crossfade.Bernoulli, "gumbel": crossfade.Gumbel}
    model, fade, optimizer = faded(kinds[gate](0.5), guidance=crossfade.DeepFeatureGuidance() if guided else None)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in range(3):
        x, y = data(step)
        if step == 0:
            x = x * float("inf")
        scaler.scale(cross_entropy(model(x), y) + fade.guidance()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert fade.step_count == 2
    if guided:
        assert 0.0 < fade.log()["guidance"] < 1e3  # Nor did the overflow enter the calibration.


def test_accelerates_optimizer_ticks_once_per_real_step() -> None:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    try:
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
        model = net()
        fade = crossfade.install(model, plan(), total_steps=N)
        optimizer = torch.optim.SGD(fade.parameter_groups(), lr=0.01)
        model, optimizer = accelerator.prepare(model, optimizer)
        fade.attach(optimizer)
        for step in range(12):
            with accelerator.accumulate(model):
                x, y = data(step)
                accelerator.backward(cross_entropy(model(x), y) + crossfade.handle(model).guidance())
                optimizer.step()
                optimizer.zero_grad()
            assert fade.step_count == (step + 1) // 4
    finally:  # Accelerate keeps its state in singletons.
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


@pytest.mark.parametrize("kind", ["SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "NAdam", "Adafactor"])
def test_every_optimizer_of_torch_ticks(kind: str) -> None:
    model = net()
    fade = crossfade.install(model, plan(gate=crossfade.Deterministic(0.5)), total_steps=N)
    optimizer = getattr(torch.optim, kind)(fade.parameter_groups(), lr=1e-3)
    fade.attach(optimizer)
    for step in range(2):
        backward(model, step)
        optimizer.step()
    assert fade.step_count == 2


def test_a_step_with_a_closure_ticks_once() -> None:
    model = net()
    fade = crossfade.install(model, plan(gate=crossfade.Deterministic(0.5)), total_steps=N)
    students = [p for site in fade.sites for p in site.blend.student.parameters()]
    optimizer = torch.optim.LBFGS(students, lr=0.1, max_iter=4)
    fade.attach(optimizer)

    def closure() -> Any:
        optimizer.zero_grad()
        x, y = data()
        loss = cross_entropy(model(x), y)
        loss.backward()
        return loss

    optimizer.step(closure)
    assert fade.step_count == 1


def test_a_learning_rate_schedule_does_not_tick_the_fade() -> None:
    model, fade, optimizer = faded()
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: 1.0 / (1 + k))
    for step in range(3):
        backward(model, step)
        optimizer.step()
        rates.step()
        rates.step()
    assert fade.step_count == 3


def test_two_replicas_with_half_a_batch_each_keep_the_pace_of_one_process() -> None:
    replicas = []
    for _ in range(2):
        model, fade, optimizer = faded()
        replicas.append((model, fade, optimizer))
    for step in range(4):
        for rank, (model, _, _) in enumerate(replicas):
            x, y = data(step)
            cross_entropy(model(x[rank::2]), y[rank::2]).backward()
        pairs = zip(*(m.parameters() for m, _, _ in replicas), strict=True)
        for pair in pairs:  # What DDP does between backward and step.
            if pair[0].grad is not None:
                mean = (pair[0].grad + pair[1].grad) / 2
                pair[0].grad, pair[1].grad = mean.clone(), mean.clone()
        for _, _, optimizer in replicas:
            optimizer.step()
            optimizer.zero_grad()
    assert [fade.step_count for _, fade, _ in replicas] == [4, 4]
    assert [fade.sites[0].alpha for _, fade, _ in replicas] == [0.6, 0.6]


def test_manual_steps_count_without_attach_and_are_an_error_with_it() -> None:
    model = net()
    fade = crossfade.install(model, plan(), total_steps=N)
    for _ in range(3):
        fade.step()
    assert fade.sites[0].alpha == pytest.approx(0.7)
    _, attached, _ = faded()
    with pytest.raises(StateError, match=r"(?s)already counts.*what to do: remove the call"):
        attached.step()
    assert attached.step_count == 0


def test_an_optimizer_of_a_copy_does_not_tick_the_original() -> None:
    model, fade, _ = faded()
    twin = copy.deepcopy(model)
    other = crossfade.handle(twin)
    optimizer = torch.optim.SGD(other.parameter_groups(), lr=0.01)
    other.attach(optimizer)
    backward(twin, 0)
    optimizer.step()
    assert (fade.step_count, other.step_count) == (0, 1)


RUNS: dict[str, Callable[[], Any]] = {
    "steps": lambda: crossfade.schedules.in_steps("linear", 4),
    "steps, per site": lambda: crossfade.schedules.PerSite([crossfade.schedules.in_steps("linear", k) for k in (2, 4)]),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_of_unknown_length_counts_in_steps(name: str) -> None:
    model = net()
    fade = crossfade.install(model, plan(gate=crossfade.Deterministic(RUNS[name]())), total_steps=None)
    optimizer = torch.optim.SGD(fade.parameter_groups(), lr=0.01)
    fade.attach(optimizer)
    for step in range(4):
        assert fade.sites[1].alpha == 1.0 - step / 4
        backward(model, step)
        optimizer.step()
    assert [site.alpha for site in fade.sites] == [0.0, 0.0]
    fade.finalize()
