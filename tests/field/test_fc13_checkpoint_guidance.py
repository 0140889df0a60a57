"""FC-13: the alignment loss was lost, doubled or crashed under checkpointing.

A side loss stored during forward was stored again in the recomputation; state that was empty in the first pass and
set in the second changed the operations. crossfade records a call once, whichever pass it is in, with the gradient of
the run without checkpointing. The old (reentrant) flavour runs its forward without gradients, so guidance cannot work
there: an error says so, and names the flavour that works, instead of a gradient of zero.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

import crossfade
from crossfade.errors import StateError

from .models import Net, data, net, plan, tiny_bert, tokens

GATES = {
    "align": crossfade.Deterministic(1.0),
    "blend": crossfade.Deterministic(0.5),
    "guide": crossfade.Deterministic(0.0),
    "bernoulli": crossfade.Bernoulli(0.5),
    "bernoulli skip": crossfade.Bernoulli(0.5, "skip"),
    "gumbel": crossfade.Gumbel(0.5),
}
REDUCTIONS = ("relative", "mean", "sum", "cosine")


def forward(model: Net, x: Tensor, mask: Tensor | None, reentrant: bool | None) -> Tensor:
    for hook in model._forward_pre_hooks.values():  # What calling the model would do: note its mask.
        hook(model, (x,), {"attention_mask": mask})
    x = model.stem(x)
    for block in model.blocks:
        x = block(x, mask) if reentrant is None else checkpoint(block, x, mask, use_reentrant=reentrant)
    return model.head(x.mean(1))


def faded(gate: str, reduction: str = "relative", **more: Any) -> tuple[Net, crossfade.Fade]:
    model = net()
    guidance = crossfade.DeepFeatureGuidance(reduction=reduction, **more)
    settings = plan(gate=GATES[gate], guidance=guidance, trains=("stem",))
    return model, crossfade.install(model, settings, total_steps=100)


def gradients(model: Net, fade: crossfade.Fade, reentrant: bool | None, masked: bool) -> tuple[Tensor, list[Tensor]]:
    x, y = data(3)
    mask = (torch.arange(5)[None, :] < torch.tensor([5, 3, 4, 2])[:, None]).long() if masked else None
    task = cross_entropy(forward(model, x.requires_grad_(), mask, reentrant), y)
    guidance = fade.guidance()
    (task + guidance).backward()
    return guidance.detach(), [p.grad for p in model.parameters() if p.requires_grad]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("gate", GATES)
def test_value_and_gradient_are_those_without_checkpointing(gate: str, reduction: str, masked: bool) -> None:
    plain, plain_grads = gradients(*faded(gate, reduction), None, masked)
    value, grads = gradients(*faded(gate, reduction), False, masked)
    assert torch.equal(plain, value)
    assert float(value) > 0.0
    for a, b in zip(plain_grads, grads, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("gate", ["align", "blend", "guide"])
def test_local_guidance_is_right_too(gate: str) -> None:
    _, plain = gradients(*faded(gate, detach_input=True), None, False)
    _, grads = gradients(*faded(gate, detach_input=True), False, False)
    for a, b in zip(plain, grads, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("gate", GATES)
def test_the_recomputation_records_nothing(gate: str) -> None:
    model, fade = faded(gate)
    gradients(model, fade, False, False)
    with pytest.raises(StateError, match=r"no guidance was recorded"):
        fade.guidance()
    # And metrics are not counted twice: one call per site since the step began.
    assert all(len(rows) == 1 for rows in fade.ledger.similarities.values())


@pytest.mark.parametrize("gate", GATES)
def test_the_old_flavour_is_refused_with_the_way_out(gate: str) -> None:
    model, fade = faded(gate)
    x, _ = data()
    forward(model, x.requires_grad_(), None, True)
    with pytest.raises(StateError, match=r"(?s)where: blocks\.0\.attn.*use_reentrant=False"):
        fade.guidance()


def test_the_old_flavour_works_when_guidance_is_off() -> None:
    model, fade = faded("blend")
    fade.seek(100)  # Beyond the end guidance is over.
    assert fade.sites[0].lam == 0.0
    x, y = data()
    cross_entropy(forward(model, x.requires_grad_(), None, True), y).backward()
    assert float(fade.guidance()) == 0.0


def test_several_steps_calibrate_and_learn_alike() -> None:
    ends = []
    for reentrant in (None, False):
        model, fade = faded("blend")
        optimizer = torch.optim.AdamW(fade.parameter_groups(), lr=1e-2)
        fade.attach(optimizer)
        for step in range(4):
            x, y = data(step)
            (cross_entropy(forward(model, x, None, reentrant), y) + fade.guidance()).backward()
            optimizer.step()
            optimizer.zero_grad()
        ends.append({site.path: site.power.value for site in fade.sites})
        ends.append({n: p.detach() for n, p in model.named_parameters() if p.requires_grad})
    assert ends[0] == pytest.approx(ends[2], rel=1e-6)
    for name, value in ends[1].items():
        torch.testing.assert_close(value, ends[3][name])


def test_tearing_down_before_the_backward_does_not_change_the_gradient() -> None:
    # `view` and `log` between forward and backward must not change what the recomputation sees.
    found = []
    for disturbed in (False, True):
        model, fade = faded("blend")
        x, y = data()
        loss = cross_entropy(forward(model, x.requires_grad_(), None, False), y) + fade.guidance()
        if disturbed:
            with fade.view("student"), torch.no_grad():
                model.eval()
                model(data(1)[0])
                model.train()
            fade.log()
        loss.backward()
        found.append([p.grad for p in model.parameters() if p.requires_grad])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("targets", ["bert.encoder.layer.*.attention", "bert.encoder.layer.*"])
def test_checkpointing_of_transformers_itself(targets: str) -> None:
    found = []
    for on in (False, True):
        model = tiny_bert(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
        fade = crossfade.install(
            model,
            crossfade.Plan(
                targets=targets,
                gate=crossfade.Deterministic(0.5),
                guidance=crossfade.DeepFeatureGuidance(),
                trains=("*embeddings*",),
            ),
            total_steps=10,
        )
        model.train()
        if on:
            model.activation_checkpointing_enable({"use_reentrant": False})
        loss = model(**tokens(), labels=torch.tensor([0, 1])).loss
        guidance = fade.guidance()
        (loss + guidance).backward()
        found.append((guidance.detach(), [p.grad for s in fade.sites for p in s.blend.student.parameters()]))
    assert torch.equal(found[0][0], found[1][0])
    for a, b in zip(found[0][1], found[1][1], strict=True):
        torch.testing.assert_close(a, b)
