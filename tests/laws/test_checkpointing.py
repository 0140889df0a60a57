"""Gradient checkpointing: the same gradients, guidance counted once; or a clear refusal."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import crossfade
from tests.models import GATES, batch, difference, equal, gates, gradients, net, padding, plan

GUIDANCE = {
    "none": None,
    "relative": crossfade.DeepFeatureGuidance(),
    "local": crossfade.DeepFeatureGuidance(reduction="mean", detach_input=True),
}
MASK = padding([5, 3, 1, 4], 5)


def start(gate: str, guidance: str, reentrant: bool | None, alpha: Any) -> tuple[nn.Module, crossfade.Fade]:
    model = net(layers=3)
    # The embedding trains, so that reentrant checkpoints have an input with a gradient (a limit of theirs).
    chosen = plan(gates(alpha)[gate](), GUIDANCE[guidance], trains="all")
    fade = crossfade.install(model, chosen, total_steps=8, release="finalize", metrics_every=1)
    model.reentrant = reentrant
    return model, fade


def step(model: nn.Module, fade: crossfade.Fade) -> tuple[dict[str, Tensor | None], Tensor]:
    ids, labels = batch()
    loss = cross_entropy(model(ids, MASK), labels)
    local = fade.guidance()
    (loss + local).backward()
    found = gradients(dict(model.named_parameters()))
    # A student without part in the loss has no gradient or zeros, which `attach` treats alike.
    return {name: None if grad is None or not grad.any() else grad for name, grad in found.items()}, local.detach()


@pytest.mark.parametrize("alpha", [1.0, 0.4, 0.0])
@pytest.mark.parametrize("guidance", sorted(GUIDANCE))
@pytest.mark.parametrize("gate", GATES)
def test_checkpointing_gives_the_same_gradients_and_counts_guidance_once(
    gate: str, guidance: str, alpha: float
) -> None:
    plain, checkpointed = (start(gate, guidance, reentrant, alpha) for reentrant in (None, False))
    for k in range(3):  # Several steps, hence several draws.
        plain[1].seek(k)
        checkpointed[1].seek(k)
        (expected, local), (found, again) = step(*plain), step(*checkpointed)
        assert equal(local, again)
        assert difference(expected, found) == []
        assert checkpointed[1].ledger.terms == {}  # The recomputation left nothing to be counted a second time.
        for model, fade in (plain, checkpointed):
            model.zero_grad()
            fade.ledger.clear()


@pytest.mark.parametrize("gate", GATES)
def test_reentrant_checkpointing_is_right_without_guidance(gate: str) -> None:
    plain, checkpointed = (start(gate, "none", reentrant, 0.4) for reentrant in (None, True))
    for k in range(3):
        plain[1].seek(k)
        checkpointed[1].seek(k)
        assert difference(step(*plain)[0], step(*checkpointed)[0]) == []
        plain[0].zero_grad()
        checkpointed[0].zero_grad()


@pytest.mark.parametrize("gate", GATES)
def test_reentrant_checkpointing_with_guidance_is_refused_clearly(gate: str) -> None:
    model, fade = start(gate, "relative", True, 0.4)
    model(batch()[0])
    with pytest.raises(crossfade.CrossfadeError, match="use_reentrant=False"):
        fade.guidance()


def test_two_forwards_with_different_masks_before_one_backward_are_refused() -> None:
    model, fade = start("deterministic", "relative", False, 0.4)
    ids, labels = batch()
    loss = cross_entropy(model(ids, MASK), labels) + cross_entropy(model(ids), labels)
    loss = loss + fade.guidance()
    with pytest.raises(crossfade.CrossfadeError, match="mask"):
        loss.backward()


def test_micro_batches_with_different_masks_are_right_when_each_is_run_back_at_once() -> None:
    results = []
    for reentrant in (None, False):
        model, fade = start("deterministic", "relative", reentrant, 0.4)
        for mask in (MASK, None, padding([1, 1, 2, 5], 5)):
            ids, labels = batch()
            (cross_entropy(model(ids, mask), labels) + fade.guidance()).backward()
        results.append(gradients(dict(model.named_parameters())))
    assert difference(*results) == []


@pytest.mark.parametrize("size", [4, 2])
@pytest.mark.parametrize("when", ["before the forward", "before the backward"])
def test_an_evaluation_beside_the_step_does_not_change_its_gradient(when: str, size: int) -> None:
    results = []
    for reentrant in (None, False):
        model, fade = start("deterministic", "relative", reentrant, 0.4)
        ids, labels = batch()

        def evaluate(model: nn.Module = model) -> None:
            with torch.no_grad():  # A validation batch, which has a mask of its own.
                model.eval()
                model(batch(7, size=size)[0], padding([3, 2, 5, 1][:size], 5))
                model.train()

        if when == "before the forward":
            evaluate()
        loss = cross_entropy(model(ids, MASK), labels) + fade.guidance()
        if when == "before the backward":
            evaluate()
        loss.backward()
        results.append(gradients(dict(model.named_parameters())))
    assert difference(*results) == []
