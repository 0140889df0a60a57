"""Which module runs in which phase, what has a gradient, and that released teachers are really gone."""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.functional import cross_entropy

import crossfade
from crossfade.blend import Blend
from crossfade.ledger import Ledger
from tests.models import GATES, adamw, batch, gates, net, plan, train


@dataclass
class Calls:
    """Counts the calls of one site's modules and whether their outputs carried a gradient."""

    teacher: int = 0
    student: int = 0
    gradient: dict[str, bool] = field(default_factory=dict)

    def watch(self, site: Any) -> Calls:
        for name in ("teacher", "student"):
            module = getattr(site.blend, name)
            if module is not None:
                module.register_forward_hook(lambda m, a, out, name=name: self._count(name, out))
        return self

    def _count(self, name: str, out: Any) -> None:
        setattr(self, name, getattr(self, name) + 1)
        self.gradient[name] = (out[0] if isinstance(out, tuple) else out).requires_grad


def start(alpha: float, gate: str, *, guided: bool, metrics_every: int = 0) -> tuple[nn.Module, crossfade.Fade, Calls]:
    model = net(layers=2)
    guidance = crossfade.DeepFeatureGuidance() if guided else None
    # The last site, so that the first student's gradient passes through the second's teacher.
    fade = crossfade.install(
        model, plan(gates(alpha)[gate](), guidance), total_steps=10, release="finalize", metrics_every=metrics_every
    )
    return model, fade, Calls().watch(fade.sites[1])


# alpha, guided -> phase, calls of teacher and student in training
PHASES = [
    (1.0, True, "align", 1, 1),
    (1.0, False, "align", 1, 0),
    (0.5, True, "blend", 1, 1),
    (0.5, False, "blend", 1, 1),
    (0.0, True, "guide", 1, 1),
    (0.0, False, "student", 0, 1),
]


@pytest.mark.parametrize("gate", ["deterministic", "bernoulli", "gumbel", "bernoulli_shared"])
@pytest.mark.parametrize(("alpha", "guided", "phase", "teacher", "student"), PHASES)
def test_a_phase_runs_what_it_needs_and_no_more(
    alpha: float, guided: bool, phase: str, teacher: int, student: int, gate: str
) -> None:
    model, fade, calls = start(alpha, gate, guided=guided)
    assert fade.sites[1].phase == phase
    model(batch()[0])
    assert (calls.teacher, calls.student) == (teacher, student)
    if phase == "guide":  # A target only.
        assert calls.gradient == {"teacher": False, "student": True}
    if phase == "blend":  # Earlier students learn through this teacher, frozen as it is.
        assert calls.gradient == {"teacher": True, "student": True}


@pytest.mark.parametrize("guided", [True, False])
def test_skip_runs_the_chosen_module_alone(guided: bool) -> None:
    model, fade, calls = start(0.5, "bernoulli_skip", guided=guided)
    for step in range(8):
        fade.seek(step)
        calls.teacher = calls.student = 0
        model(batch()[0])
        fade.ledger.clear()
        w = int(fade.sites[1].weight)
        assert (calls.teacher, calls.student) == ((1, 1) if guided else (w, 1 - w))


@pytest.mark.parametrize("guided", [True, False])
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize(("alpha", "expected"), [(1.0, (1, 0)), (0.5, (1, 1)), (0.0, (0, 1))])
def test_evaluation_runs_what_alpha_says_whatever_the_gate(
    alpha: float, expected: tuple[int, int], gate: str, guided: bool
) -> None:
    model, fade, calls = start(alpha, gate, guided=guided, metrics_every=1)
    model.eval()
    model(batch()[0])
    assert (calls.teacher, calls.student) == expected
    assert fade.ledger.terms == {}
    assert fade.ledger.similarities == {}
    for view, only in (("student", (0, 1)), ("teacher", (1, 0)), ("blend", expected)):
        calls.teacher = calls.student = 0
        with fade.view(view):
            model(batch()[0])
        assert (calls.teacher, calls.student) == only


def test_without_teacher_gradient_the_teacher_is_a_constant() -> None:
    model = net(layers=2)
    fade = crossfade.install(model, plan(crossfade.Deterministic(0.5), teacher_gradient=False), total_steps=4)
    calls = Calls().watch(fade.sites[1])
    model(batch()[0])
    assert calls.gradient == {"teacher": False, "student": True}


def test_the_gradient_of_the_student_carries_1_minus_w_and_reaches_earlier_students_through_the_teacher() -> None:
    model = net(layers=2).double()
    fade = crossfade.install(model, plan(crossfade.Deterministic(0.25)), total_steps=4)
    blend = fade.sites[0].blend
    x, direction = torch.randn(2, 2, 3, 8, dtype=torch.float64).unbind()
    x.requires_grad_(True)
    (blend(x)[0] * direction).sum().backward()
    ours, upstream = [p.grad.clone() for p in blend.student.parameters()], x.grad.clone()
    blend.student.zero_grad()
    x.grad = None
    # Zero times the bias of k cancels in softmax: gradients of 1e-18 are rounding.
    (0.75 * blend.student(x)[0] * direction).sum().backward()
    for mine, p in zip(ours, blend.student.parameters(), strict=True):
        torch.testing.assert_close(mine, p.grad, rtol=1e-9, atol=1e-14)
    (0.25 * blend.teacher(x)[0] * direction).sum().backward()
    torch.testing.assert_close(upstream, x.grad, rtol=1e-9, atol=1e-14)


def _storages(module: nn.Module) -> list[StorageWeakRef]:
    return [StorageWeakRef(p.untyped_storage()) for p in module.parameters()]


@pytest.mark.parametrize("target", ["blocks.*.attn", "blocks[0:2]"])
@pytest.mark.parametrize("gate", GATES)
def test_the_teacher_is_released_and_its_memory_dead_once_it_is_never_needed_again(gate: str, target: str) -> None:
    model = net(layers=2)
    given = plan(gates()[gate](), targets=target)
    fade = crossfade.install(model, given, total_steps=10, metrics_every=1)
    optimizer = adamw(fade)
    fade.attach(optimizer)
    modules = [weakref.ref(site.blend.teacher) for site in fade.sites]
    storages = [s for site in fade.sites for s in _storages(site.blend.teacher)]
    train(model, fade, optimizer, 0, 5)
    if gate != "adaptive":  # Which may be done earlier.
        assert not any(s.expired() for s in storages)  # alpha is above 0 up to t = 0.6.
    train(model, fade, optimizer, 5, 7)
    gc.collect()
    assert all(ref() is None for ref in modules)
    assert all(s.expired() for s in storages)
    assert [site.phase for site in fade.sites] == ["student"] * len(fade.sites)
    train(model, fade, optimizer, 7, 10)
    fade.finalize(probe=batch()[0])


def test_memory_is_freed_without_waiting_for_the_collector() -> None:
    # A cycle would keep the largest tensors of the run until Python happens to collect.
    model = net(layers=2)
    fade = crossfade.install(model, plan(crossfade.Deterministic("linear")), total_steps=2)
    optimizer = adamw(fade)
    fade.attach(optimizer)
    storages = [s for site in fade.sites for s in _storages(site.blend.teacher)]
    gc.collect()
    gc.disable()
    try:
        train(model, fade, optimizer, 0, 2)
        assert all(s.expired() for s in storages)
    finally:
        gc.enable()


def test_a_teacher_whose_schedule_returns_is_kept() -> None:
    model = net(layers=2)
    back = crossfade.schedules.piecewise((0.0, 1.0), (0.3, 0.0), (0.6, 0.0), (0.8, 0.5), (1.0, 0.0))
    fade = crossfade.install(model, plan(crossfade.Deterministic(back)), total_steps=10)
    optimizer = adamw(fade)
    fade.attach(optimizer)
    for step in range(10):
        train(model, fade, optimizer, step, step + 1)
        assert all((site.blend.teacher is None) == (step + 1 >= 10) for site in fade.sites)


def test_a_teacher_is_kept_while_guidance_lasts() -> None:
    model = net(layers=2)
    guidance = crossfade.DeepFeatureGuidance(schedule=crossfade.schedules.linear(until=0.7))
    fade = crossfade.install(model, plan(crossfade.Deterministic(0.0), guidance), total_steps=10)
    optimizer = adamw(fade)
    fade.attach(optimizer)
    for step in range(10):
        assert [site.phase for site in fade.sites] == ["guide" if step < 7 else "student"] * 2
        train(model, fade, optimizer, step, step + 1)
        assert all((site.blend.teacher is None) == (step + 1 >= 7) for site in fade.sites)


def test_release_at_finalize_keeps_teachers_but_never_runs_them() -> None:
    model, fade, calls = start(0.0, "deterministic", guided=False, metrics_every=1)
    optimizer = adamw(fade)
    fade.attach(optimizer)
    train(model, fade, optimizer, 0, 3)
    assert calls.teacher == 0
    assert fade.sites[1].blend.teacher is not None
    with fade.view("teacher"):
        model.eval()(batch()[0])
    assert calls.teacher == 1


def test_a_finished_fade_holds_no_teacher() -> None:
    model = net(layers=2)
    fade = crossfade.install(model, plan(), total_steps=2, release="finalize", snapshot=True)
    storages = [s for site in fade.sites for s in _storages(site.blend.teacher)]
    fade.seek(2)
    fade.finalize()
    gc.collect()
    assert all(s.expired() for s in storages)


@pytest.mark.parametrize("mode", [True, False])
def test_the_teacher_is_always_in_eval_and_never_in_the_optimizer(mode: bool) -> None:
    model = net(layers=2, dropout=0.5)
    fade = crossfade.install(model, plan(targets="blocks.*"), total_steps=4)
    model.train(mode)
    held = {id(p) for group in fade.parameter_groups() for p in group["params"]}
    for site in fade.sites:
        assert not any(m.training for m in site.blend.teacher.modules())
        assert all(m.training == mode for m in site.blend.student.modules())
        assert held.isdisjoint({id(p) for p in site.blend.teacher.parameters()})
        assert {id(p) for p in site.blend.student.parameters()} <= held


def test_alignment_phase_gives_students_only_the_guidance_gradient() -> None:
    model, fade, _ = start(1.0, "deterministic", guided=True)
    ids, labels = batch()
    local = cross_entropy(model(ids), labels) * 0 + fade.guidance()
    local.backward()
    expected = [p.grad.clone() for site in fade.sites for p in site.blend.student.parameters()]
    model.zero_grad()
    (cross_entropy(model(ids), labels) + fade.guidance()).backward()
    found: list[Tensor] = [p.grad for site in fade.sites for p in site.blend.student.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


@pytest.mark.parametrize("alpha", [1.0, 0.5])
def test_the_teachers_output_is_a_constant_target_of_the_guidance(alpha: float) -> None:
    # The teacher runs with a graph, being on the main path; the guidance must not pull it towards the student.
    torch.manual_seed(0)
    teacher, student, ledger = nn.Linear(4, 4), nn.Linear(4, 4), Ledger()
    blend = Blend(teacher, student, path="fc", ledger=ledger).train()
    blend.set_gate(alpha=alpha, weight=alpha, hard=False)
    blend.guidance_error, blend.guided = crossfade.DeepFeatureGuidance(reduction="sum").error, True
    x = torch.randn(3, 4, requires_grad=True)
    blend(x)
    (got,) = torch.autograd.grad(ledger.read()["fc"][0].error, x)
    (right,) = torch.autograd.grad((student(x) - teacher(x).detach()).square().sum(), x)
    torch.testing.assert_close(got, right)
