"""FC-04, 48, 49, 50: a target hits what its author meant, all of it, once; or an error says why it does not.

Other libraries took a list entry for a suffix, ignored a misspelt name because others matched, split a string into
characters, replaced a shared module at one place only (`named_modules` shows it once) or twice, wrapped the parts of
their own wrapper at a second call, and swapped the root inside a function, which its caller never saw. crossfade
matches whole paths, makes every zero match an error with the nearest names, keeps all paths of a module in one match,
never looks inside a blend, and refuses the root and containers without a forward.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import crossfade
from crossfade.blend import Blend
from crossfade.errors import SelectionError, StateError
from crossfade.students import Reinit
from crossfade.targets import parent_of
from tests.models import difference, portrait

from .models import WIDTH, Block, Mixer, Net, adamw, data, net, plan, train

COLD = Reinit("reset_parameters")


def refuse(model: nn.Module, message: str, **settings: Any) -> None:
    """`install` raises, and the model stays as it was."""
    before = portrait(model)
    with pytest.raises(SelectionError, match=message):
        crossfade.install(model, plan(**settings), total_steps=4)
    assert difference(before, portrait(model)) == []


def paths_of_blends(model: nn.Module) -> list[str]:
    return [p for p, m in model.named_modules(remove_duplicate=False) if isinstance(m, Blend)]


# ---- FC-04: nothing, one of three, or too much -----------------------------------------------------------------------


class Deep(nn.Module):
    """`layers.0.attn` at the root and `model.layers.0.attn` to `model.layers.10.attn` below it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(Mixer())])
        self.model = nn.Module()
        self.model.layers = nn.ModuleList(Block(Mixer()) for _ in range(11))

    def forward(self, x: Tensor) -> Tensor:
        for layer in (*self.layers, *self.model.layers):
            x = layer(x)
        return x


@pytest.mark.parametrize(
    ("targets", "paths"),
    [
        ("layers.*.attn", ["layers.0.attn"]),
        ("**.layers.0.attn", ["layers.0.attn", "model.layers.0.attn"]),
        ("**.layers.1.attn", ["model.layers.1.attn"]),
        ("model.layers.1*.attn", ["model.layers.1.attn", "model.layers.10.attn"]),
        (["model.layers.10.attn", "layers.0.attn"], ["layers.0.attn", "model.layers.10.attn"]),
        (re.compile(r".*layers\.1\.attn"), ["model.layers.1.attn"]),
    ],
)
def test_fc04_exactly_the_named_modules_are_replaced(targets: Any, paths: list[str]) -> None:
    model = Deep()
    assert list(crossfade.select(model, targets).paths) == paths
    fade = crossfade.install(model, plan(targets=targets), total_steps=4)
    assert [site.path for site in fade.sites] == paths_of_blends(model) == paths


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        ("layers.1.attn", r'pattern "layers\.1\.attn" matched 0 of(?s:.*)nearest paths: (?s:.*)"layers\.0\.attn"'),
        ("attn", 'pattern "attn" matched 0 of'),  # no suffix
        (["attn"], 'path "attn" matched 0 of'),
        (
            ["layers.0.attn", "model.layers.3.atn"],
            r'path "model\.layers\.3\.atn" matched(?s:.*)"model\.layers\.0',
        ),
        (["layers.*.attn"], "give a pattern as a string by itself"),
        (tuple("attn"), 'path "a" matched 0 of'),
        (crossfade.Targets("**.attn", exclude="layers.7.*"), r'exclude pattern "layers\.7\.\*" matched 0 of'),
        (crossfade.Targets("**.attn", exclude="**.norm"), r'exclude pattern "\*\*\.norm" hits none of the 12 matches'),
        (crossfade.Targets("**.attn", first=13), "first=13 asks for more than the 12 matches"),
    ],
)
def test_fc04_one_entry_without_a_match_stops_the_install(targets: Any, message: str) -> None:
    refuse(Deep(), message, targets=targets)


def test_fc04_a_dry_run_prints_path_class_and_parameters_of_each_match() -> None:
    model = Deep()
    table = str(crossfade.select(model, "**.attn", last=2))
    count = sum(p.numel() for p in model.layers[0].attn.parameters())
    for line, path in zip(table.splitlines()[1:3], ("model.layers.9.attn", "model.layers.10.attn"), strict=True):
        assert re.fullmatch(rf" +\d  {re.escape(path)} +Mixer +{count}  +\d+\.\d%", line)
    assert paths_of_blends(model) == []


# ---- FC-48: one module at several places, or called several times ----------------------------------------------------


def shared() -> Net:
    """Three blocks around one mixer."""
    mixer = Mixer()
    return net(3, attn=lambda: mixer)


@pytest.mark.parametrize("targets", ["blocks.*.attn", "blocks.1.attn", ["blocks.2.attn"], Mixer])
def test_fc48_a_shared_module_becomes_one_blend_at_every_place(targets: Any) -> None:
    model = shared()
    teacher = model.blocks[0].attn
    fade = crossfade.install(model, plan(targets=targets), total_steps=2)
    (site,) = fade.sites
    assert site.paths == ("blocks.0.attn", "blocks.1.attn", "blocks.2.attn")
    assert all(block.attn is site.blend for block in model.blocks)
    assert site.blend.teacher is teacher
    optimizer = adamw(fade)
    train(model, fade, optimizer, range(2))
    fade.finalize(probe=data()[0])
    assert all(block.attn is model.blocks[0].attn and type(block.attn) is Mixer for block in model.blocks)
    assert model.blocks[0].attn is not teacher


def test_fc48_revert_restores_the_sharing() -> None:
    model = shared()
    before = portrait(model)
    crossfade.install(model, plan(), total_steps=2).revert()
    assert difference(before, portrait(model)) == []


@pytest.mark.parametrize("calls", [1, 3, 6])
def test_fc48_guidance_is_the_mean_over_calls_and_the_gate_is_drawn_once_per_step(calls: int) -> None:
    class Repeated(nn.Module):
        """One block called several times per forward, as ALBERT does."""

        def __init__(self) -> None:
            super().__init__()
            self.block, self.seen, self.gates = nn.Linear(WIDTH, WIDTH), [], []

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(calls):
                self.seen.append(x.detach())
                x = torch.tanh(self.block(x))
                self.gates.append(float(self.block.gate_weight if isinstance(self.block, Blend) else 1.0))
            return x

    model = Repeated()
    guidance = crossfade.DeepFeatureGuidance(weight=1.0, reduction="mean")
    fade = crossfade.install(
        model, plan(targets="block", gate=crossfade.Bernoulli(0.5), guidance=guidance), total_steps=20
    )
    blend = model.block
    optimizer = torch.optim.SGD(fade.parameter_groups(), lr=0.0)
    fade.attach(optimizer)
    drawn = set()
    for step in range(20):
        model.seen.clear()
        model.gates.clear()
        model(data(step)[0])
        with torch.no_grad():
            errors = [(blend.student(x) - blend.teacher(x)).square().mean() for x in model.seen]
        found = fade.guidance()
        torch.testing.assert_close(found.detach(), torch.stack(errors).mean())
        assert len(model.gates) == calls
        assert len(set(model.gates)) == 1
        drawn.add(model.gates[0])
        found.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert drawn == {0.0, 1.0}


def test_fc48_albert_like_sharing_through_a_run_of_modules_that_stand_elsewhere_is_refused() -> None:
    model = net(3)
    model.first = model.blocks[0]
    refuse(model, r'"blocks\[0:2\]" has a module at more places \("blocks\.0", "first"\)', targets="blocks[0:2]")


# ---- FC-49: nested and repeated targets ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (["blocks.0", "blocks.0.attn"], '"blocks.0" contains "blocks.0.attn"'),
        ("blocks.1.**", '"blocks.1" contains "blocks.1.attn"'),
        (["blocks[0:2]", "blocks.1.attn.q"], r'"blocks\[0:2\]" contains "blocks\.1\.attn\.q"'),
        (["blocks[0:2]", "blocks[1:3]"], r'"blocks\[0:2\]" and "blocks\[1:3\]" share a module'),
    ],
)
def test_fc49_nested_sites_are_refused_by_name(targets: Any, message: str) -> None:
    refuse(net(3), re.escape(message) if "\\" not in message else message, targets=targets)


def test_fc49_nested_sites_of_two_swaps_are_refused_too() -> None:
    def swaps(*targets: Any) -> tuple[crossfade.Swap, ...]:
        return tuple(crossfade.Swap(targets=target, student=COLD) for target in targets)

    model = net(3)
    before = portrait(model)
    for first, second, message in [
        ("blocks.*", "blocks.*.attn", '"blocks.0" contains "blocks.0.attn"'),
        ("blocks.*.attn", "blocks.1.attn", "two swaps of the plan have the same site"),
    ]:
        with pytest.raises(SelectionError, match=re.escape(message)):
            crossfade.install(model, crossfade.Plan(swaps=swaps(first, second)), total_steps=2)
    assert difference(before, portrait(model)) == []


def test_fc49_a_second_install_never_reaches_into_the_first() -> None:
    model = net(2)
    fade = crossfade.install(model, plan(), total_steps=4)
    before = portrait(model)
    with pytest.raises(StateError, match="already installed"):
        crossfade.install(model, plan(), total_steps=4)
    assert difference(before, portrait(model)) == []
    for target in ("**", nn.Linear, re.compile(".*"), lambda path, module: True):
        found = crossfade.select(model, target).paths
        assert not [path for path in found if "teacher" in path or "student" in path]
    with pytest.raises(SelectionError, match=r"matched 0 of"):
        crossfade.select(model, "**.{teacher,student}")
    with pytest.raises(SelectionError, match="already being replaced; finalize or revert first"):
        crossfade.select(model, "blocks.*.attn").check()
    fade.revert()
    again = crossfade.install(model, plan(), total_steps=4)
    assert [site.path for site in again.sites] == ["blocks.0.attn", "blocks.1.attn"]


def test_fc49_a_selection_from_before_the_install_does_not_pass_its_check() -> None:
    model = net(2)
    found = crossfade.select(model, "blocks.*.attn")
    found.check()
    crossfade.install(model, plan(), total_steps=4)
    with pytest.raises(SelectionError, match=r'"blocks\.0\.attn" leads to another module'):
        found.check()


# ---- FC-50: the model itself, or a container -------------------------------------------------------------------------


@pytest.mark.parametrize("targets", ["", Net, [""], crossfade.Targets(Net, first=1)])
def test_fc50_the_model_itself_is_refused(targets: Any) -> None:
    model = net()
    before = portrait(model)
    with pytest.raises(SelectionError, match=r"the model itself cannot be a site(?s:.*)nn\.Sequential\(model\)"):
        crossfade.install(model, plan(targets=targets), total_steps=2)
    assert difference(before, portrait(model)) == []


def test_fc50_a_container_without_a_forward_is_refused_and_its_items_are_proposed() -> None:
    refuse(net(2), r'"blocks" is a ModuleList without a forward(?s:.*)"blocks\.0", "blocks\.1"', targets="blocks")
    model = net(2)
    model.extra = nn.ModuleDict({"a": nn.Linear(2, 2)})
    refuse(model, r'"extra" is a ModuleDict without a forward(?s:.*)"extra\.a"', targets="extra")


class Places(nn.Module):
    """A child in every kind of place: list, sequence, dictionary, and a name with dots."""

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.ModuleList([nn.Linear(4, 4)])
        self.row = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.table = nn.ModuleDict({"a": nn.Linear(4, 4)})
        self.odd = nn.Module()
        self.odd._modules["v1.5"] = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.row(self.items[0](x))
        return self.odd._modules["v1.5"](self.table["a"](x))


@pytest.mark.parametrize("path", ["items.0", "row.0", "row", "table.a", "odd.v1.5"])
def test_fc50_every_kind_of_place_can_be_replaced_and_put_back(path: str) -> None:
    model, x = Places(), torch.randn(3, 4)
    before, parent_and_name = portrait(model), parent_of(model, path)
    order = list(model.state_dict())
    fade = crossfade.install(model, plan(targets=path, gate=crossfade.Deterministic(0.0)), total_steps=1, probe=x)
    parent, name = parent_and_name
    assert paths_of_blends(model) == [path]
    assert isinstance(parent._modules[name], Blend)
    fade.revert()
    assert difference(before, portrait(model)) == []
    fade = crossfade.install(model, plan(targets=path, gate=crossfade.Deterministic(0.0)), total_steps=1, probe=x)
    model = fade.finalize(probe=x)
    assert paths_of_blends(model) == []
    assert list(model.state_dict()) == order
    assert parent_of(model, path) == parent_and_name
