"""Changes are taken back in reverse order, exactly."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from crossfade.changes import Changes, refuse_wrapped, unwrapped
from crossfade.errors import StateError
from tests.models import equal, net, portrait


def everything(changes: Changes, model: nn.Module) -> None:
    changes.put(model, ["blocks.0.attn", "blocks.1.attn"], nn.Identity())
    changes.put(model, ["head"], nn.Linear(8, 3))
    changes.children(model.blocks, [model.blocks[1], None])
    changes.set(model, "num_layers", 1)
    changes.set(model, "fresh", "value")
    changes.train_flag(model.embed.weight, False)
    changes.mode(model, False)


def broken(model: nn.Module, error: type[BaseException]) -> dict[str, Any]:
    """What the model was like when the exception came."""
    changed: dict[str, Any] = {}

    def work() -> None:
        with Changes() as changes:
            everything(changes, model)
            changed.update(portrait(model))
            raise error

    with pytest.raises(error):
        work()
    return changed


def test_that_an_exception_takes_everything_back():
    model = net()
    model.blocks[0].mlp.eval()
    before = portrait(model)
    changed = broken(model, ZeroDivisionError)
    assert not equal(changed, before)
    assert equal(portrait(model), before)


def test_that_a_block_that_ends_well_keeps_its_changes():
    model = net()
    with Changes() as changes:
        everything(changes, model)
    assert model.num_layers == 1
    assert list(model.blocks._modules) == ["0", "1"]
    assert model.blocks[1] is None
    assert not model.training


def test_that_undo_can_be_called_and_called_again():
    model = net()
    before = portrait(model)
    changes = Changes()
    everything(changes, model)
    changes.undo()
    assert equal(portrait(model), before)
    changes.undo()
    assert equal(portrait(model), before)


def test_that_even_an_interrupt_takes_back():
    model = net()
    before = portrait(model)
    broken(model, KeyboardInterrupt)
    assert equal(portrait(model), before)


def test_that_the_last_change_goes_first():
    order: list[int] = []
    changes = Changes()
    for i in range(3):
        changes.later(lambda i=i: order.append(i))
    changes.undo()
    assert order == [2, 1, 0]


def test_that_attributes_of_any_object_can_be_set():
    class Slots:
        __slots__ = ("depth",)

    plain, slots = SimpleNamespace(depth=3), Slots()
    slots.depth = 3
    changes = Changes()
    for owner in (plain, slots):
        changes.set(owner, "depth", 1)
        changes.set(owner, "depth", 2)
        assert owner.depth == 2
    changes.set(plain, "new", 1)
    changes.undo()
    assert plain == SimpleNamespace(depth=3)
    assert slots.depth == 3


def test_that_a_name_with_a_dot_and_the_order_of_children_survive():
    model = nn.Sequential()
    model._modules.update({"a.b": nn.Linear(1, 1), "c": nn.Linear(1, 1)})
    changes = Changes()
    changes.put(model, ["c"], nn.Identity())
    assert list(model._modules) == ["a.b", "c"]


def test_unwrapped():
    model = nn.Linear(1, 1)
    assert unwrapped(model) is model
    assert unwrapped(nn.DataParallel(model)) is model
    compiled = torch.compile(model, backend="eager")
    assert unwrapped(compiled) is model
    assert unwrapped(nn.DataParallel(compiled)) is model


def test_that_wrapped_and_sharded_models_are_refused():
    class FSDPLinear(nn.Linear):
        pass

    refuse_wrapped(net())
    for wrong in (nn.DataParallel(net()), torch.compile(net(), backend="eager")):
        with pytest.raises(StateError, match="install first"):
            refuse_wrapped(wrong)
    with pytest.raises(StateError, match="where: 1"):
        refuse_wrapped(nn.Sequential(nn.Linear(1, 1), FSDPLinear(1, 1)))
    for wrong in (None, "model", net):
        with pytest.raises(StateError, match=r"an nn\.Module"):
            refuse_wrapped(wrong)
