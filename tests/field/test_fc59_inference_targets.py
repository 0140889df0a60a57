"""FC-59: teacher outputs made in inference mode got into the loss.

Tensors made in inference mode cannot be saved for backward: with a fixed blend that passed, and broke on the day when
guidance was switched on. crossfade takes such outputs (cached, or of a teacher that runs in inference mode by itself)
in every gate, loss and phase, since they are constants there anyway.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import crossfade
from crossfade.students import Reinit

from .models import Mixer, Net, data, net, plan

GATES = {
    "align": crossfade.Deterministic(1.0),
    "blend": crossfade.Deterministic(0.5),
    "guide": crossfade.Deterministic(0.0),
    "bernoulli": crossfade.Bernoulli(0.5),
    "bernoulli skip": crossfade.Bernoulli(0.5, "skip"),
    "gumbel": crossfade.Gumbel(0.5),
}
REDUCTIONS = ("relative", "mean", "sum", "cosine")


class Inferring(Mixer):
    """A teacher that runs in inference mode by itself."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        with torch.inference_mode():
            return super().forward(x.detach(), mask)


class Cached(Mixer):
    """A teacher that answers from what was computed offline, and forgets nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.cache: list[Tensor] = []

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if not self.cache:
            with torch.inference_mode():
                self.cache.append(super().forward(x.detach(), mask))
        return self.cache[0]


class Tuple(Inferring):
    """The same inside a structure."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        return super().forward(x, mask), None


def student(teacher: nn.Module, site: Any) -> nn.Module:
    return Mixer()


def faded(teacher: type[nn.Module], gate: str, reduction: str | None, **more: Any) -> tuple[Net, crossfade.Fade]:
    model = net(1, teacher)
    if teacher is Tuple:
        block = model.blocks[0]
        block.forward = lambda x, mask=None: x + block.attn(block.norm(x), mask=mask)[0]
    guidance = None if reduction is None else crossfade.DeepFeatureGuidance(reduction=reduction, **more)
    plan_ = plan(gate=GATES[gate], guidance=guidance, student=student, trains=("head",))
    return model, crossfade.install(model, plan_, total_steps=10, release="finalize", metrics_every=1)


def step(model: Net, fade: crossfade.Fade) -> None:
    x, y = data()
    (cross_entropy(model(x), y) + fade.guidance()).backward()


@pytest.mark.parametrize("reduction", [None, *REDUCTIONS])
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("teacher", [Inferring, Cached, Tuple])
def test_outputs_made_in_inference_mode_are_taken(teacher: Any, gate: str, reduction: str | None) -> None:
    model, fade = faded(teacher, gate, reduction)
    plain, plain_fade = faded(Mixer, gate, reduction)
    plain.load_state_dict(model.state_dict())
    plain.blocks[0].attn.teacher.load_state_dict(model.blocks[0].attn.teacher.state_dict())
    optimizer = torch.optim.SGD(fade.parameter_groups(), lr=0.0)
    fade.attach(optimizer)
    plain_fade.attach(torch.optim.SGD(plain_fade.parameter_groups(), lr=0.0))
    for _ in range(2):  # The first step copies inputs and calibrates, the second does not.
        model.zero_grad()
        plain.zero_grad()
        step(model, fade)
        step(plain, plain_fade)
    ours, right = model.blocks[0].attn.student, plain.blocks[0].attn.student
    for a, b in zip(ours.parameters(), right.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None)
        if a.grad is not None:
            torch.testing.assert_close(a.grad, b.grad)
    optimizer.step()
    assert fade.step_count == 1


@pytest.mark.parametrize("gate", GATES)
def test_local_guidance_takes_them_too(gate: str) -> None:
    model, fade = faded(Inferring, gate, "relative", detach_input=True)
    step(model, fade)
    assert all(p.grad is not None for p in model.blocks[0].attn.student.parameters())


@pytest.mark.parametrize("budget", ["1MiB", "8KB"])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("teacher", [Inferring, Tuple])
def test_alignment_takes_them_whether_or_not_the_targets_fit_into_memory(
    teacher: Any, reduction: Any, budget: str
) -> None:
    _, fade = faded(teacher, "align", None)
    batches = [data(step)[0] for step in range(4)]
    loss = crossfade.DeepFeatureGuidance(reduction=reduction)
    report = fade.align(batches, steps=20, lr=3e-2, check_every=10, loss=loss, memory_budget=budget)
    assert report.sites[0].error < report.sites[0].error_before


@pytest.mark.parametrize("gate", GATES)
def test_a_whole_evaluation_in_inference_mode_works_and_training_goes_on(gate: str) -> None:
    model = net()
    guidance = crossfade.DeepFeatureGuidance()
    settings = plan(gate=GATES[gate], guidance=guidance, student=Reinit("reset_parameters"))
    fade = crossfade.install(model, settings, total_steps=10, release="finalize")
    x, _ = data()
    for _ in range(2):
        model.eval()
        with torch.inference_mode():
            first = model(x)
            for view in ("student", "teacher", "blend"):
                with fade.view(view):
                    assert model(x).shape == first.shape
        model.train()
        step(model, fade)
        assert bool(torch.isfinite(fade.sites[0].blend.student.q.weight).all())


def test_steps_taken_inside_inference_mode_leave_ordinary_tensors() -> None:
    # An evaluation that moves the clock (a callback, say) must not leave inference tensors as gate values.
    model = net()
    fade = crossfade.install(model, plan(gate=crossfade.Deterministic(0.5)), total_steps=10)
    with torch.inference_mode():
        fade.seek(3)
        fade.log()
        fade.state_dict()
    step(model, fade)
    assert not fade.sites[0].blend.gate_weight.is_inference()
