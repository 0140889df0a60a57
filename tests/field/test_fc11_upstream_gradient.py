"""FC-11: `no_grad` around the teacher cut the gradient to earlier students.

A frozen module in the middle of the net was run without gradient, so layers before it learned nothing through it; in
one code base "joint" training turned out to be independent per layer. In crossfade a teacher on the main path is
frozen, not cut; cutting (`teacher_gradient=False`) and local guidance (`detach_input=True`) are options with names.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import crossfade

from .models import Net, data, net, plan

GATES = {
    "deterministic": crossfade.Deterministic(0.95),
    "bernoulli": crossfade.Bernoulli(0.95),
    "bernoulli skip": crossfade.Bernoulli(0.95, "skip"),
    "gumbel": crossfade.Gumbel(0.95),
}


class Frozen(nn.Module):
    """The blend written by hand, its teacher frozen by flag and nothing else."""

    def __init__(self, teacher: nn.Module, student: nn.Module, w: float) -> None:
        super().__init__()
        self.teacher, self.student, self.w = teacher.requires_grad_(False), student, w

    def forward(self, x: Tensor, mask: Any = None) -> Tensor:
        return self.w * self.teacher(x) + (1 - self.w) * self.student(x)


def gradients(model: Net) -> list[Tensor]:
    x, y = data()
    cross_entropy(model(x), y).backward()
    return [p.grad for p in model.blocks[0].attn.student.parameters()]


def faded(**settings: Any) -> tuple[Net, crossfade.Fade]:
    model = net()
    return model, crossfade.install(model, plan(**settings), total_steps=100, release="finalize")


@pytest.mark.parametrize("gate", GATES)
def test_the_first_student_learns_through_the_teacher_of_the_second(gate: str) -> None:
    model, fade = faded(gate=GATES[gate])
    # A step at which the first site lets its student speak and the second its teacher.
    for step in range(1000):
        fade.seek(step)
        if fade.sites[0].weight < 0.98 and fade.sites[1].weight > 0.3:
            break
    weights = [site.weight for site in fade.sites]
    by_hand = net()
    for block, site, w in zip(by_hand.blocks, fade.sites, weights, strict=True):
        block.attn = Frozen(block.attn, copy.deepcopy(site.blend.student), w)
    for name, p in by_hand.named_parameters():
        p.requires_grad_(".student." in name)
    expected = gradients(by_hand)
    for ours, right in zip(gradients(model), expected, strict=True):
        torch.testing.assert_close(ours, right)
    assert weights[0] < 0.98
    assert sum(float(g.abs().sum()) for g in expected) > 0.0
    assert all(p.grad is None for site in fade.sites for p in site.blend.teacher.parameters())


@pytest.mark.parametrize("guided", [True, False])
def test_no_teacher_parameter_ever_gets_a_gradient(guided: bool) -> None:
    guidance = crossfade.DeepFeatureGuidance() if guided else None
    for alpha in (1.0, 0.5, 0.0):
        model, fade = faded(gate=crossfade.Deterministic(alpha), guidance=guidance, trains="all")
        x, y = data()
        (cross_entropy(model(x), y) + fade.guidance()).backward()
        for site in fade.sites:
            assert all(p.grad is None and not p.requires_grad for p in site.blend.teacher.parameters())
        assert all(p.grad is not None for p in model.stem.parameters())


def test_cutting_the_teacher_is_an_option_and_biases_the_gradient_upstream() -> None:
    norms = []
    for flag in (True, False):
        model, _ = faded(gate=crossfade.Deterministic(0.95), teacher_gradient=flag)
        # Without the residual connection nothing else carries the gradient.
        model.blocks[1].forward = lambda x, mask=None, block=model.blocks[1]: block.attn(block.norm(x))
        norms.append(sum(float(g.square().sum()) for g in gradients(model)) ** 0.5)
    assert 0.0 < norms[1] < 0.5 * norms[0]


@pytest.mark.parametrize("alpha", [1.0, 0.5, 0.0])
@pytest.mark.parametrize("local", [True, False])
def test_local_guidance_stays_at_its_site_and_the_default_does_not(local: bool, alpha: float) -> None:
    guidance = crossfade.DeepFeatureGuidance(detach_input=local, site_weights={"blocks.0.attn": 0.0})
    model, fade = faded(gate=crossfade.Deterministic(alpha), guidance=guidance, trains=("stem",))
    model(data()[0])
    fade.guidance().backward()  # From the second site alone.
    reached = sum(float(p.grad.abs().sum()) for p in model.stem.parameters() if p.grad is not None)
    assert (reached == 0.0) is local
    assert all(float(p.grad.abs().sum()) > 0.0 for p in model.blocks[1].attn.student.parameters())


@pytest.mark.parametrize("alpha", [1.0, 0.5, 0.0])
def test_local_guidance_has_the_value_of_the_default_one(alpha: float) -> None:
    found = []
    for local in (True, False):
        model, fade = faded(
            gate=crossfade.Deterministic(alpha), guidance=crossfade.DeepFeatureGuidance(detach_input=local)
        )
        model(data()[0])
        found.append(fade.guidance().detach())
    torch.testing.assert_close(found[0], found[1])


def test_the_teacher_is_a_constant_target() -> None:
    # With the student off the path, guidance reaches what lies upstream through the student's input alone.
    model, fade = faded(gate=crossfade.Deterministic(1.0), guidance=crossfade.DeepFeatureGuidance(), trains=("stem",))
    x, _ = data()
    model(x)
    fade.guidance().backward()
    blend = model.blocks[0].attn
    assert all(p.grad is None for p in blend.teacher.parameters())
    assert all(p.grad is not None for p in model.stem.parameters())
