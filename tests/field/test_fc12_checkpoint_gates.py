"""FC-12: gradient checkpointing drew the gate again.

A layer was skipped at random in the forward; the recomputation in the backward drew again, since only torch's global
generator is restored. The old flavour then trained the wrong branch without a word. crossfade draws once per
optimizer step, outside the model: whatever recomputes a forward sees the same gate, to the bit.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

import crossfade
from crossfade import site as site_module

from .models import Net, data, net, plan

GATES = {
    "deterministic": crossfade.Deterministic(0.5),
    "bernoulli": crossfade.Bernoulli(0.5),
    "bernoulli skip": crossfade.Bernoulli(0.5, "skip"),
    "bernoulli shared": crossfade.Bernoulli(0.5, granularity="shared"),
    "gumbel": crossfade.Gumbel(0.5),
    "gumbel, nearly hard": crossfade.Gumbel(0.5, temperature=0.01),
}


def run(model: Net, x: Tensor, reentrant: bool | None) -> Tensor:
    """The forward of `Net`, each block under checkpointing."""
    x = model.stem(x)
    for block in model.blocks:
        x = block(x) if reentrant is None else checkpoint(block, x, use_reentrant=reentrant)
    return model.head(x.mean(1))


def gradients(gate: Any, seed: int, step: int, reentrant: bool | None) -> tuple[list[Tensor | None], Tensor]:
    model = net()
    fade = crossfade.install(model, plan(gate=gate, trains=("stem",), seed=seed), total_steps=100)
    fade.seek(step)
    x, y = data(step)
    x.requires_grad_()
    loss = cross_entropy(run(model, x, reentrant), y)
    loss.backward()
    return [p.grad for p in model.parameters() if p.requires_grad] + [x.grad], loss.detach()


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("gate", GATES)
def test_gradients_equal_those_without_checkpointing_to_the_bit(gate: str, reentrant: bool) -> None:
    for seed in range(20):
        plain, loss = gradients(GATES[gate], seed, seed, None)
        recomputed, again = gradients(GATES[gate], seed, seed, reentrant)
        assert torch.equal(loss, again)
        for a, b in zip(plain, recomputed, strict=True):
            # Reentrant checkpointing gives zeros where a student had no part, plain autograd gives none.
            nothing = all(g is None or not bool(g.any()) for g in (a, b))
            assert nothing or torch.equal(a, b)


@pytest.mark.parametrize("reentrant", [None, True, False])
@pytest.mark.parametrize("gate", GATES)
def test_the_gate_is_drawn_once_per_site_and_step(
    gate: str, reentrant: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = net()
    fade = crossfade.install(model, plan(gate=GATES[gate], trains=("stem",)), total_steps=100)
    optimizer = torch.optim.SGD(fade.parameter_groups(), lr=0.1)
    fade.attach(optimizer)
    drawn: list[tuple[int, str, int]] = []
    original = site_module.uniform

    def spy(*key: Any) -> float:
        drawn.append(key)
        return original(*key)

    monkeypatch.setattr(site_module, "uniform", spy)
    for step in range(3):
        for part in range(2):  # Two micro-batches see one gate.
            x, y = data(10 * step + part)
            cross_entropy(run(model, x.requires_grad_(), reentrant), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert len(drawn) == 3 * len(fade.sites)
    assert {key[2] for key in drawn} == {1, 2, 3}


@pytest.mark.parametrize("reentrant", [None, False])
def test_a_site_that_is_itself_checkpointed_inside_the_block_is_right_too(reentrant: bool) -> None:
    found = []
    for inner in (False, True):
        model = net()
        fade = crossfade.install(model, plan(gate=crossfade.Bernoulli(0.5), trains=("stem",)), total_steps=100)
        fade.seek(5)
        if inner:
            for block in model.blocks:
                attn, forward = block.attn, block.attn.forward
                attn.forward = lambda x, mask=None, f=forward: checkpoint(f, x, mask, use_reentrant=False)
        x, y = data()
        cross_entropy(run(model, x.requires_grad_(), reentrant), y).backward()
        found.append(x.grad)
    assert torch.equal(*found)


def test_draws_do_not_depend_on_how_often_the_model_ran() -> None:
    weights = []
    for forwards in (0, 1, 7):
        model = net()
        fade = crossfade.install(model, plan(gate=crossfade.Bernoulli(0.5)), total_steps=100)
        seen = []
        for step, _ in itertools.product(range(20), range(max(forwards, 1))):
            if forwards:
                model(data(step)[0])
            fade.seek(step)
            seen.append((step, [site.weight for site in fade.sites]))
        weights.append(dict(seen))
    assert weights[0] == weights[1] == weights[2]
