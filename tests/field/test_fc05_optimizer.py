"""FC-05: the optimizer still held the old parameters.

Built before the modules were replaced, it trained without error while the new weights never moved. crossfade audits
the groups at once when an optimizer is attached: student parameters that are missing and teacher parameters that are
present are errors that name the parameter and say what to do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import crossfade
from crossfade.errors import StateError

from .models import Net, net, plan, train, values

BUILT_BEFORE: dict[str, tuple[Callable[[Net], Any], str]] = {
    "all parameters": (lambda m: m.parameters(), r"(?s)parameters of a teacher.*where: blocks\.0\.attn\.q\.weight"),
    "one group per layer": (
        lambda m: [{"params": block.parameters()} for block in m.blocks],
        r"(?s)parameters of a teacher.*where: blocks\.0\.attn\.q\.weight",
    ),
    "the head alone": (
        lambda m: m.head.parameters(),
        r"(?s)8 trainable parameters are in no parameter group.*where: blocks\.0\.attn\.student\.q\.weight",
    ),
}


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("name", BUILT_BEFORE)
def test_an_optimizer_built_before_install_is_an_error_at_once(name: str, kind: Any) -> None:
    model = net()
    choose, message = BUILT_BEFORE[name]
    optimizer = kind(choose(model), lr=0.1)
    fade = crossfade.install(model, plan(), total_steps=10)
    with pytest.raises(StateError, match=message + r".*what to do: .*fade\.parameter_groups\(\)"):
        fade.attach(optimizer)
    # A refused optimizer leaves no hook behind.
    assert not optimizer._optimizer_step_post_hooks
    assert not optimizer._optimizer_step_pre_hooks


def test_one_site_of_two_missing_is_an_error() -> None:
    model = net()
    fade = crossfade.install(model, plan(), total_steps=10)
    optimizer = torch.optim.SGD(model.blocks[0].attn.student.parameters(), lr=0.1)
    with pytest.raises(StateError, match=r"(?s)4 trainable parameters.*blocks\.1\.attn\.student\.q\.weight"):
        fade.attach(optimizer)


def test_a_single_teacher_tensor_among_the_right_ones_is_an_error() -> None:
    model = net()
    fade = crossfade.install(model, plan(), total_steps=10)
    right = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD([*right, model.blocks[1].attn.teacher.o.bias], lr=0.1)
    with pytest.raises(StateError, match=r"(?s)parameters of a teacher.*blocks\.1\.attn\.o\.bias"):
        fade.attach(optimizer)


@pytest.mark.parametrize("trains", ["students", "all", ("*norm*", "head")])
def test_after_install_every_student_moves_and_no_teacher_does(trains: Any) -> None:
    model = net()
    fade = crossfade.install(
        model, plan(gate=crossfade.Deterministic(0.5), trains=trains), total_steps=10, release="finalize"
    )
    optimizer = torch.optim.AdamW(fade.parameter_groups(), lr=1e-2)
    fade.attach(optimizer)
    before = values(model)
    train(model, fade, optimizer, range(1))
    moved = {name for name, value in values(model).items() if not torch.equal(value, before[name])}
    assert moved == {name for name, p in model.named_parameters() if p.requires_grad}
    assert {name for name in moved if ".student." in name} == {n for n in before if ".student." in n}
    assert not any(".teacher." in name for name in moved)


def test_several_optimizers_are_audited_together_and_tick_once_per_round() -> None:
    model = net()
    fade = crossfade.install(model, plan(trains=("head",)), total_steps=10)
    students = torch.optim.AdamW([p for s in fade.sites for p in s.blend.student.parameters()], lr=1e-2)
    head = torch.optim.SGD(model.head.parameters(), lr=1e-2)
    with pytest.raises(StateError, match=r"head\.weight"):
        fade.attach(students)
    fade.attach(students, head)
    for round_ in range(3):
        model(torch.randn(2, 5, 8)).sum().backward()
        students.step()
        assert fade.step_count == round_
        head.step()
        assert fade.step_count == round_ + 1


def test_a_wrapped_optimizer_is_opened_and_something_else_is_refused() -> None:
    class Wrapper(torch.optim.Optimizer):  # As Accelerate's: an optimizer that holds the real one.
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optimizer = optimizer

        def step(self, closure: Any = None) -> None:
            self.optimizer.step(closure)

    model = net()
    fade = crossfade.install(model, plan(), total_steps=10)
    with pytest.raises(StateError, match="not an optimizer"):
        fade.attach(nn.Linear(1, 1))
    inner = torch.optim.SGD(fade.parameter_groups(), lr=0.1)
    fade.attach(Wrapper(Wrapper(inner)))
    train(model, fade, inner, range(2))
    assert fade.step_count == 2


def test_revert_and_finalize_let_the_optimizer_go() -> None:
    for end in ("revert", "finalize"):
        model = net()
        fade = crossfade.install(model, plan(), total_steps=2, release="finalize")
        optimizer = torch.optim.SGD(fade.parameter_groups(), lr=0.1)
        fade.attach(optimizer)
        train(model, fade, optimizer, range(2))
        getattr(fade, end)()
        assert not optimizer._optimizer_step_post_hooks
        assert not optimizer._optimizer_step_pre_hooks
