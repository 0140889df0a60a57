"""FC-30: captured activations stayed alive.

Last outputs kept on modules held the whole graph after training and after export; under `no_grad` nothing ever freed
them; reading a term before the first forward crashed. In crossfade what a forward leaves behind is a handful of
numbers: outputs, inputs and masks of a step die with it, alignment frees what it captured, and an ended fade holds
nothing.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import crossfade
from crossfade.errors import StateError

from .models import Net, data, net, plan

GATES: dict[str, Any] = {
    "align": crossfade.Deterministic(1.0),
    "blend": crossfade.Deterministic(0.5),
    "guide": crossfade.Deterministic(0.0),
    "bernoulli": crossfade.Bernoulli(0.5),
    "bernoulli skip": crossfade.Bernoulli(0.5, "skip"),
    "adaptive": crossfade.Deterministic(crossfade.Adaptive()),
}


def faded(gate: str, guided: bool = True, **more: Any) -> tuple[Net, crossfade.Fade]:
    model = net()
    detach_input = more.pop("detach_input", False)
    guidance = crossfade.DeepFeatureGuidance(detach_input=detach_input) if guided else None
    settings = {"total_steps": 100, "release": "finalize", "metrics_every": 1} | more
    return model, crossfade.install(model, plan(gate=GATES[gate], guidance=guidance), **settings)


@pytest.fixture(autouse=True)
def _quick_collections() -> Iterator[None]:
    """Leaves what lives before a test out of its collections: they then take no time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def watch(fade: crossfade.Fade) -> list[weakref.ref[Tensor]]:
    """Weak references to what comes into and out of teachers and students."""
    seen: list[weakref.ref[Tensor]] = []

    def hook(module: nn.Module, args: Any, kwargs: Any, out: Tensor) -> None:
        seen.extend(weakref.ref(x) for x in (*args, *kwargs.values(), out) if isinstance(x, Tensor))

    for site in fade.sites:
        for module in (site.blend.teacher, site.blend.student):
            module.register_forward_hook(hook, with_kwargs=True)
    return seen


def alive(seen: list[weakref.ref[Tensor]]) -> int:
    gc.collect()
    return sum(reference() is not None for reference in seen)


@pytest.mark.parametrize("detach_input", [False, True])
@pytest.mark.parametrize("guided", [True, False])
@pytest.mark.parametrize("gate", GATES)
def test_nothing_of_a_step_survives_its_backward(gate: str, guided: bool, detach_input: bool) -> None:
    model, fade = faded(gate, guided, detach_input=detach_input)
    seen = watch(fade)
    x, y = data()
    (cross_entropy(model(x), y) + fade.guidance()).backward()
    assert len(seen) > 0
    assert alive(seen) == 0


@pytest.mark.parametrize("guided", [True, False])
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("training", [True, False])
def test_nothing_of_an_evaluation_survives(gate: str, guided: bool, training: bool) -> None:
    model, fade = faded(gate, guided)
    seen = watch(fade)
    model.train(training)
    with torch.no_grad():
        for step in range(3):
            model(data(step)[0])
    assert alive(seen) == 0
    assert fade.ledger.terms == {}


@pytest.mark.parametrize(
    ("mode", "guided"),
    [("read", True), ("read", False), ("never read", False), ("eval", True), ("eval", False), ("no_grad", True)],
)
def test_masks_of_past_batches_are_let_go(mode: str, guided: bool) -> None:
    # Whether or not anybody reads guidance: a long run, or a long evaluation, must not keep every mask.
    model, fade = faded("blend", guided)
    optimizer = torch.optim.SGD(fade.parameter_groups(), lr=0.01)
    fade.attach(optimizer)
    model.train(mode != "eval")
    masks: list[weakref.ref[Tensor]] = []
    for step in range(10):
        x, y = data(step)
        mask = torch.ones(4, 5)
        masks.append(weakref.ref(mask))
        with torch.set_grad_enabled(mode != "no_grad"):
            loss = cross_entropy(model(x, mask), y)
        del mask
        if mode.endswith("read"):
            (loss + fade.guidance() if mode == "read" else loss).backward()
            optimizer.step()
            optimizer.zero_grad()
    del loss
    assert alive(masks) <= 1


def tensors_alive() -> int:
    gc.collect()
    return sum(isinstance(thing, Tensor) for thing in gc.get_objects())


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("guided", [True, False])
@pytest.mark.parametrize("gate", GATES)
def test_memory_after_step_10_is_that_after_step_2(gate: str, guided: bool, masked: bool) -> None:
    model, fade = faded(gate, guided)
    optimizer = torch.optim.SGD(fade.parameter_groups(), lr=0.01, momentum=0.0)
    fade.attach(optimizer)
    counts = []
    for step in range(11):
        x, y = data(step)
        (cross_entropy(model(x, torch.ones(4, 5) if masked else None), y) + fade.guidance()).backward()
        optimizer.step()
        optimizer.zero_grad()
        del x, y
        if step in (2, 10):
            counts.append(tensors_alive())
    # A few 0-dim values may wait for the next measurement; ten batches may not.
    assert counts[1] <= counts[0] + 4


def test_a_skipped_step_does_not_pile_up() -> None:
    # Forwards without a backward or a step in between: the terms of the last read are gone.
    model, fade = faded("blend")
    seen = watch(fade)
    for step in range(3):
        model(data(step)[0])
        fade.guidance()
    assert alive(seen) == 0


READS: dict[str, Callable[[Net, crossfade.Fade], Any]] = {
    "before any forward": lambda model, fade: None,
    "after an evaluation": lambda model, fade: model.eval()(data()[0]),
    "twice": lambda model, fade: (model(data()[0]), fade.guidance()),
}


@pytest.mark.parametrize("name", READS)
def test_reading_guidance_too_early_is_a_clear_error(name: str) -> None:
    model, fade = faded("blend")
    READS[name](model, fade)
    with pytest.raises(StateError, match=r"(?s)no guidance was recorded.*where: blocks\.0\.attn.*model\.train\(\)"):
        fade.guidance()


def test_reading_guidance_without_any_is_zero() -> None:
    model, fade = faded("blend", guided=False)
    assert float(fade.guidance()) == 0.0
    model(data()[0])
    assert float(fade.guidance()) == 0.0


@pytest.mark.parametrize("end", ["finalize", "revert"])
@pytest.mark.parametrize("guided", [True, False])
def test_an_ended_fade_holds_nothing_although_its_handle_lives(end: str, guided: bool) -> None:
    model, fade = faded("blend", guided)
    optimizer = torch.optim.SGD(fade.parameter_groups(), lr=0.0)
    fade.attach(optimizer)
    seen = watch(fade)
    x, y = data()
    (cross_entropy(model(x), y) + fade.guidance()).backward()
    optimizer.step()
    gone = [site.blend for site in fade.sites]
    gone += [b.teacher if end == "finalize" else b.student for b in gone]
    references = [weakref.ref(module) for module in gone]
    del gone, optimizer
    model = fade.finalize(force=True) if end == "finalize" else fade.revert()
    assert alive(seen) == 0
    gc.collect()
    assert [reference() for reference in references] == [None] * len(references)
    assert fade.ended
    assert model(x).shape == (4, 3)


def test_a_teacher_that_is_done_is_let_go() -> None:
    model = net()
    fade = crossfade.install(model, plan(), total_steps=4, probe=data()[0])
    teachers = [weakref.ref(site.blend.teacher) for site in fade.sites]
    fade.seek(3)
    gc.collect()
    assert all(teacher() is not None for teacher in teachers)
    fade.seek(4)
    gc.collect()
    assert all(teacher() is None for teacher in teachers)


def test_alignment_frees_what_it_captured() -> None:
    _, fade = faded("align")
    seen = watch(fade)
    before = tensors_alive()
    report = fade.align([data(step)[0] for step in range(4)], steps=3)
    assert report.bytes > 0
    assert alive(seen) == 0
    assert tensors_alive() <= before + 4
    assert not any(site.blend._forward_pre_hooks for site in fade.sites)


def test_the_error_of_a_failing_forward_does_not_leave_terms_behind() -> None:
    model, fade = faded("blend")
    seen = watch(fade)

    def fail(*_: Any) -> None:
        raise RuntimeError("no")

    hook = model.head.register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="no"):
        model(data()[0])
    hook.remove()
    x, y = data(1)
    (cross_entropy(model(x), y) + fade.guidance()).backward()
    assert alive(seen) == 0
