"""FC-50 (the wrapper's part): items of containers, and names that no attribute access reaches.

Items of lists and dicts of modules, children of a Sequential, and names with a dot in them could not be set by
attribute. crossfade replaces through the parent's own table, keeps the order of the children, and puts everything
back. The model itself and bare containers are refused with what to do instead.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import crossfade
from crossfade.errors import SelectionError
from crossfade.students import Reinit

from .models import WIDTH, same, seeded, values


class Places(nn.Module):
    """One linear at each kind of place."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = nn.Linear(WIDTH, WIDTH)
        self.listed = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(11))
        self.chain = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.keyed = nn.ModuleDict({"a": nn.Linear(WIDTH, WIDTH), "b": nn.Linear(WIDTH, WIDTH)})
        self.nested = nn.ModuleList([nn.ModuleDict({"x": nn.Sequential(nn.Linear(WIDTH, WIDTH))})])
        self.optional = None

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.plain(x))
        for layer in self.listed:
            x = x + layer(x)
        x = self.chain(x)
        for layer in self.keyed.values():
            x = x + layer(x)
        return self.nested[0]["x"](x)


class Dotted(Places):
    """A name that no attribute access and no path of torch's reaches."""

    def __init__(self) -> None:
        super().__init__()
        self._modules["dot.ted"] = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self._modules["dot.ted"](super().forward(x))


PLACES = ("plain", "listed.1", "listed.10", "chain.0", "chain.2", "keyed.a", "keyed.b", "nested.0.x.0")
X = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0))


def child(model: nn.Module, path: str) -> nn.Module:
    if path == "dot.ted":
        return model._modules[path]
    for name in path.split("."):
        model = model._modules[name]
    return model


def kind(targets: Any) -> type[Places]:
    return Dotted if "dot.ted" in targets else Places


def faded(targets: Any) -> tuple[Places, crossfade.Fade]:
    model = seeded(kind(targets))
    plan = crossfade.Plan(targets=targets, student=Reinit("reset_parameters"), gate=crossfade.Deterministic("linear"))
    return model, crossfade.install(model, plan, total_steps=2, probe=X, release="finalize")


@pytest.mark.parametrize("targets", [*PLACES, list(PLACES), "dot.ted"], ids=str)
def test_every_place_is_replaced_trained_and_finalized(targets: Any, tmp_path: Path) -> None:
    paths = [targets] if isinstance(targets, str) else targets
    plain = seeded(kind(targets))
    model, fade = faded(targets)
    assert torch.equal(model(X), plain(X))
    assert [type(child(model, path)).__name__ for path in paths] == ["Blend"] * len(paths)
    optimizer = torch.optim.SGD(fade.parameter_groups(), lr=0.1)
    fade.attach(optimizer)
    for _ in range(2):
        model(X).square().sum().backward()
        optimizer.step()
    students = [site.blend.student for site in fade.sites]
    final = fade.finalize(probe=X)
    assert {id(child(final, path)) for path in paths} == {id(student) for student in students}
    assert list(final.state_dict()) == list(plain.state_dict())
    # The children keep their order: a Sequential runs by it.
    assert [list(m._modules) for m in final.modules()] == [list(m._modules) for m in plain.modules()]
    crossfade.save(final, tmp_path)
    assert torch.equal(crossfade.load(tmp_path, base=kind(targets))(X), final(X))


@pytest.mark.parametrize("targets", [*PLACES, list(PLACES), "dot.ted"], ids=str)
def test_every_place_is_put_back(targets: Any) -> None:
    plain = seeded(kind(targets))
    model, fade = faded(targets)
    fade.revert()
    assert [(n, type(m)) for n, m in model.named_modules()] == [(n, type(m)) for n, m in plain.named_modules()]
    assert list(model.state_dict()) == list(plain.state_dict())
    assert same(values(model), values(plain))
    assert model.optional is None


@pytest.mark.parametrize("path", ["listed", "keyed", "nested", "nested.0"])
def test_a_bare_container_is_refused_and_its_items_are_proposed(path: str) -> None:
    first = next(iter(child(seeded(Places), path)._modules))
    with pytest.raises(SelectionError, match=rf'"{path}".*without a forward.*"{path}\.{first}"'):
        faded(path)


@pytest.mark.parametrize("target", [Places, "", lambda path, module: isinstance(module, Places)], ids=str)
def test_the_model_itself_is_refused_and_left_as_it_was(target: Any) -> None:
    model = seeded(Places)
    with pytest.raises(SelectionError):
        crossfade.install(model, crossfade.Plan(targets=target, student=crossfade.students.Copy()), total_steps=2)
    assert same(values(model), values(seeded(Places)))
    assert not hasattr(model, "_crossfade")


def test_a_sequential_can_be_a_site_since_it_has_a_forward() -> None:
    model = seeded(Places)
    plan = crossfade.Plan(targets="chain", student=lambda teacher, site: nn.Linear(WIDTH, WIDTH))
    fade = crossfade.install(model, plan, total_steps=2, probe=X)
    fade.seek(2)
    assert isinstance(fade.finalize(probe=X).chain, nn.Linear)


def test_index_1_is_not_index_10() -> None:
    model, fade = faded("listed.1")
    assert fade.sites[0].paths == ("listed.1",)
    assert type(model.listed[10]) is nn.Linear
