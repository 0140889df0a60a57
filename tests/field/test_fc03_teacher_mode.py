"""FC-03: the frozen teacher went back to train mode.

The teacher was put in eval once; the next `model.train()` (each epoch after validation, or at each step in the
Hugging Face Trainer) switched dropout and stochastic depth back on and let BatchNorm statistics drift, even under
`no_grad`. crossfade promises a teacher in eval on every call, whatever is done to the modes above it or to the
modules one by one, while the student follows the model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import crossfade

from .models import WIDTH, Net, data, net, same, seeded, values


class Noisy(nn.Module):
    """Dropout, stochastic depth and BatchNorm in one module."""

    def __init__(self) -> None:
        super().__init__()
        from timm.layers import DropPath

        self.fc, self.bn = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.drop, self.path = nn.Dropout(0.5), DropPath(0.5)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.path(self.drop(self.bn(self.fc(x).mT).mT))


def by_apply(model: nn.Module) -> None:
    model.apply(lambda module: module.train())


def one_by_one(model: nn.Module) -> None:
    for module in model.modules():
        module.train()


def by_flag(model: nn.Module) -> None:
    for module in model.modules():
        module.training = True


def dropout_only(model: nn.Module) -> None:  # Monte Carlo dropout
    model.train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.train()


def after_evaluation(model: nn.Module) -> None:
    model.train()
    model.eval()
    model.train()


HABITS: dict[str, Callable[[nn.Module], Any]] = {
    "train()": lambda model: model.train(),
    "train(), eval(), train()": after_evaluation,
    "apply": by_apply,
    "each module": one_by_one,
    "each flag": by_flag,
    "dropout only": dropout_only,
}

# alpha and guidance of every phase in which the teacher runs
PHASES = {"align": (1.0, True), "teacher alone": (1.0, False), "blend": (0.5, False), "guide": (0.0, True)}


def faded(phase: str, targets: str = "blocks.*.attn") -> tuple[Net, crossfade.Fade]:
    alpha, guided = PHASES[phase]
    model = net(attn=Noisy)
    plan = crossfade.Plan(
        targets=targets,
        student=crossfade.students.Copy(),
        gate=crossfade.Deterministic(alpha),
        guidance=crossfade.DeepFeatureGuidance() if guided else None,
    )
    return model, crossfade.install(model, plan, total_steps=10, release="finalize")


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("habit", HABITS)
def test_the_teacher_answers_in_eval_whatever_is_done_to_modes(habit: str, phase: str) -> None:
    model, fade = faded(phase)
    teachers = [site.blend.teacher for site in fade.sites]
    before = [values(teacher) for teacher in teachers]
    answers: list[Tensor] = []
    fade.sites[0].blend.teacher.register_forward_hook(lambda module, args, out: answers.append(out.detach().clone()))
    x, _ = data()
    for _ in range(5):  # Every step, as the Hugging Face Trainer does.
        HABITS[habit](model)
        model(x)
        model.zero_grad()
        fade.ledger.clear()
    assert len(answers) == 5
    assert all(torch.equal(answer, answers[0]) for answer in answers)
    for teacher, old in zip(teachers, before, strict=True):
        assert same(values(teacher), old)
        assert not any(module.training for module in teacher.modules())
    # The student follows the model: its statistics move.
    assert all(module.training for site in fade.sites for module in site.blend.student.modules())


@pytest.mark.parametrize("habit", HABITS)
def test_the_teachers_of_a_run_stay_in_eval_too(habit: str) -> None:
    model, fade = faded("blend", "blocks[0:2]")
    before = values(fade.sites[0].blend.teacher)
    HABITS[habit](model)
    model(data()[0])
    assert same(values(fade.sites[0].blend.teacher), before)


@pytest.mark.parametrize("mode", [True, False])
def test_install_finds_a_teacher_in_any_mode(mode: bool) -> None:
    model = net(attn=Noisy).train(mode)
    plan = crossfade.Plan(targets="blocks.*.attn", student=crossfade.students.Copy(), gate=crossfade.Deterministic(0.5))
    fade = crossfade.install(model, plan, total_steps=10)
    for site in fade.sites:
        assert not any(module.training for module in site.blend.teacher.modules())
        assert all(module.training is mode for module in site.blend.student.modules())


def test_alignment_and_calibration_leave_teachers_and_modes_alone() -> None:
    model, fade = faded("align")
    model.train()
    before, modes = [values(s.blend.teacher) for s in fade.sites], [m.training for m in model.modules()]
    batches = [data(step)[0] for step in range(3)]
    fade.calibrate(batches)
    fade.align(batches, steps=4)
    assert [m.training for m in model.modules()] == modes
    assert all(same(values(site.blend.teacher), old) for site, old in zip(fade.sites, before, strict=True))


def test_a_copy_of_a_faded_model_keeps_its_teachers_in_eval() -> None:
    import copy

    model, _ = faded("blend")
    twin = copy.deepcopy(model).train()
    twin(data()[0])
    assert not any(m.training for site in crossfade.handle(twin).sites for m in site.blend.teacher.modules())


def test_a_model_without_noise_needs_no_mode_at_all() -> None:
    # The blend of equal modules is the module, in train as in eval: nothing of the teacher depends on the mode.
    model = seeded(net)
    plan = crossfade.Plan(targets="blocks.*.attn", student=crossfade.students.Copy(), gate=crossfade.Deterministic(0.5))
    crossfade.install(model, plan, total_steps=10)
    x, _ = data()
    torch.testing.assert_close(model.train()(x), model.eval()(x))
