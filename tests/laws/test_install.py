"""install then revert is the identity; an install that fails has changed nothing."""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import crossfade
from crossfade.students import Copy, Reinit, SiteInfo
from tests.models import (
    GATES,
    KINDS,
    WIDTH,
    Attention,
    Net,
    adamw,
    batch,
    difference,
    equal,
    gates,
    net,
    plan,
    portrait,
    random_states,
    train,
)

COLD = Reinit("reset_parameters")
TARGETS = {
    "attentions": {"targets": "blocks.*.attn", "student": COLD},
    "last attention": {"targets": crossfade.Targets("blocks.*.attn", last=1), "student": COLD},
    "mlps": {"targets": "blocks.*.mlp", "student": COLD, "guidance": crossfade.DeepFeatureGuidance()},
    "blocks": {"targets": "blocks.*", "student": Copy()},
    "run": {"targets": "blocks[0:2]", "student": COLD},
    "whole container": {"targets": "blocks[:]", "student": COLD},
    "exact paths": {"targets": ("blocks.0.norm1", "blocks.1.mlp.up"), "student": Copy()},
    "two swaps": {
        "swaps": (
            crossfade.Swap(targets="blocks.*.attn", student=COLD),
            crossfade.Swap(targets="blocks.*.mlp", student=Copy(), gate=crossfade.Bernoulli("linear")),
        )
    },
}


@given(
    kind=st.sampled_from(KINDS),
    targets=st.sampled_from(sorted(TARGETS)),
    trains=st.sampled_from(["students", "all", ("embed", "head")]),
    flags=st.lists(st.booleans(), min_size=8, max_size=8),
    modes=st.lists(st.booleans(), min_size=8, max_size=8),
    probe=st.booleans(),
    steps=st.integers(0, 2),
)
def test_install_then_revert_is_the_identity(
    kind: str, targets: str, trains: Any, flags: list[bool], modes: list[bool], probe: bool, steps: int
) -> None:
    model = net(kind, layers=3)
    for parameter, flag in zip(model.parameters(), itertools.cycle(flags), strict=False):
        parameter.requires_grad_(flag)
    for module, mode in zip(model.modules(), itertools.cycle(modes), strict=False):
        module.training = mode
    model.training = True  # So that a step can be taken without touching the modes.
    ids, labels = batch()
    before, output, states = portrait(model), model(ids), random_states()
    settings = TARGETS[targets] | {"trains": trains}
    fade = crossfade.install(
        model, crossfade.Plan(**settings), total_steps=5, release="finalize", probe=ids if probe else None
    )
    if settings["trains"] == "students":
        optimizer = torch.optim.SGD(fade.parameter_groups(), lr=0.1)
        fade.attach(optimizer)
        for _ in range(steps):
            for site in fade.sites:  # Some modes were drawn as eval: guidance is recorded in train only.
                site.blend.training = True
            (cross_entropy(model(ids), labels) + fade.guidance()).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert fade.revert() is model
    assert difference(before, portrait(model)) == []
    assert equal(model(ids), output)
    assert difference(states, random_states()) == []


@pytest.mark.parametrize("end", ["revert", "failing install"])
def test_a_module_inside_several_sites_returns_to_its_mode(end: str) -> None:
    # Both blocks hold the one attention, so two blends put it in eval, and both put it back.
    model = net("shared").train()
    before = portrait(model)
    if end == "revert":
        crossfade.install(model, plan(targets="blocks.*"), total_steps=5).revert()
    else:
        with pytest.raises(crossfade.CrossfadeError):
            crossfade.install(model, plan(targets="blocks.*"), total_steps=None)
    assert difference(before, portrait(model)) == []


def test_revert_after_the_mode_was_changed_follows_the_model() -> None:
    model = net().train()
    fade = crossfade.install(model, plan(), total_steps=5)
    model.eval()
    fade.revert()
    assert not any(module.training for module in model.modules())


def test_revert_restores_a_trained_backbone_from_its_snapshot() -> None:
    model = net()
    before = portrait(model)
    fade = crossfade.install(model, plan(trains="all"), total_steps=5, release="finalize", snapshot=True)
    optimizer = adamw(fade)
    fade.attach(optimizer)
    train(model, fade, optimizer, 0, 3)
    fade.revert()
    assert difference(before, portrait(model)) == []


def test_revert_refuses_a_trained_backbone_without_snapshot_and_changes_nothing() -> None:
    model = net()
    fade = crossfade.install(model, plan(trains="all"), total_steps=5, release="finalize")
    optimizer = adamw(fade)
    fade.attach(optimizer)
    train(model, fade, optimizer, 0, 2)
    before = portrait(model)
    with pytest.raises(crossfade.CrossfadeError, match="snapshot"):
        fade.revert()
    assert difference(before, portrait(model)) == []


class WithNorm(nn.Module):
    """A model with BatchNorm in its backbone."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)))


@pytest.mark.parametrize("norm_mode", [True, False])
@pytest.mark.parametrize("end", ["revert", "finalize"])
def test_a_backbone_norm_returns_to_the_mode_in_which_it_was_found(norm_mode: bool, end: str) -> None:
    # A user who froze the statistics by hand (`norm.eval()` in a model that trains) must find them frozen again.
    model = WithNorm().train()
    model.norm.train(norm_mode)
    fade = crossfade.install(model, plan(targets="last"), total_steps=1)
    model(torch.randn(3, 4))
    if end == "finalize":
        fade.step()
    getattr(fade, end)()
    assert model.training
    assert model.norm.training == norm_mode


def test_frozen_statistics_do_not_move_while_the_students_train() -> None:
    model = WithNorm().train()
    fade = crossfade.install(model, plan(targets="last"), total_steps=3)
    before = copy.deepcopy(model.norm.state_dict())
    for _ in range(3):
        model.train()
        model(torch.randn(3, 4)).sum().backward()
        fade.step()
    assert difference(before, model.norm.state_dict()) == []


@pytest.mark.parametrize("name", ["bert", "vit"])
def test_install_then_revert_is_the_identity_for_a_run_of_a_real_architecture(name: str) -> None:
    import transformers

    small = {"hidden_size": 8, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 8}
    if name == "bert":
        model: nn.Module = transformers.BertModel(transformers.BertConfig(vocab_size=20, **small))
        probe: Any = {"input_ids": torch.randint(20, (2, 5)), "attention_mask": torch.ones(2, 5, dtype=torch.long)}
        container = "encoder.layer"
    else:
        model = transformers.ViTModel(transformers.ViTConfig(image_size=8, patch_size=4, **small))
        probe = {"pixel_values": torch.randn(2, 3, 8, 8)}
        container = next(path for path, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) == 3)
    model.eval()
    before, output = portrait(model), model(**probe).last_hidden_state
    config = copy.deepcopy(model.config.to_dict())
    fade = crossfade.install(
        model, crossfade.Plan(targets=f"{container}[0:2]", student=Reinit()), total_steps=2, probe=probe
    )
    assert equal(model(**probe).last_hidden_state, output)
    fade.revert()
    assert difference(before, portrait(model)) == []
    assert model.config.to_dict() == config
    assert equal(model(**probe).last_hidden_state, output)


# ---- an install that fails -----------------------------------------------------------------------------------------


class Wrong(nn.Module):
    """A student whose output has another width or structure than the teacher's."""

    def __init__(self, *, width: int = WIDTH, extra: bool = False) -> None:
        super().__init__()
        self.linear, self.extra = nn.Linear(WIDTH, width), extra

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        out = self.linear(x)
        return (out, None, None) if self.extra else out


class Warm(Attention):
    """Has a tensor that no reset reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(3))


def second(make: Callable[[nn.Module, SiteInfo], Any]) -> Callable[[nn.Module, SiteInfo], Any]:
    """A factory whose first student is fine; it draws random numbers, as factories do."""

    def build(teacher: nn.Module, site: SiteInfo) -> Any:
        torch.rand(3)
        random.random()
        return make(teacher, site) if site.index == 1 else copy.deepcopy(teacher)

    return build


def _raise(*_: Any, **__: Any) -> nn.Module:
    raise RuntimeError("the factory broke")


def _nan_late(t: float) -> float:
    return float("nan") if t >= 0.5 else 1.0


FAILURES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a factory breaks": ({"student": second(_raise)}, {}),
    "no module": ({"student": second(lambda teacher, site: "text")}, {}),
    "the teacher itself": ({"student": second(lambda teacher, site: teacher)}, {}),
    "a shared tensor": ({"student": second(lambda teacher, site: nn.ParameterList([teacher.q.weight]))}, {}),
    "a meta tensor": ({"student": second(lambda teacher, site: nn.Linear(2, 2, device="meta"))}, {}),
    "wrong shape": ({"student": second(lambda teacher, site: Wrong(width=3))}, {"probe": batch()[0]}),
    "wrong structure": ({"student": second(lambda teacher, site: Wrong(extra=True))}, {"probe": batch()[0]}),
    "wrong call": ({"student": second(lambda teacher, site: nn.Linear(WIDTH, WIDTH))}, {"probe": batch()[0]}),
    "probe breaks": ({}, {"probe": torch.full((1, 2), 10**6)}),
    "site not reached": ({"targets": ("blocks.0.attn", "unused")}, {"probe": batch()[0]}),
    "warm tensor": ({"targets": ("blocks.0.attn", "blocks.2.attn")}, {}),
    "no rule": ({"student": Reinit()}, {}),
    "one module for all": ({"student": Attention()}, {}),
    "a path without student": ({"student": {"blocks.0.attn": Attention()}}, {}),
    "unknown student": ({"student": "there is none"}, {}),
    "one schedule for two": ({"gate": crossfade.Deterministic(crossfade.schedules.PerSite(["linear"]))}, {}),
    "a site's schedule leaves [0, 1]": (
        {
            "gate": crossfade.Bernoulli(
                crossfade.schedules.PerSite(lambda site, index, n: 2.0 if site == "blocks.1.attn" else 1.0)
            )
        },
        {},
    ),
    "no length": ({}, {"total_steps": None}),
    "bad length": ({}, {"total_steps": 0}),
    "bad release": ({}, {"release": "never"}),
    "nothing matches": ({"targets": "blocks.*.attention"}, {}),
    "one entry matches nothing": ({"targets": ("blocks.0.attn", "blocks.9.attn")}, {}),
    "nested": ({"targets": ("blocks.0", "blocks.0.attn")}, {}),
    "overlapping runs": ({"targets": ("blocks[0:2]", "blocks[1:3]")}, {}),
    "nothing to train": ({"trains": ("head", "no such thing")}, {}),
    "a weight for no site": ({"guidance": crossfade.DeepFeatureGuidance(site_weights={"blocks.7": 2.0})}, {}),
}


@pytest.mark.parametrize("name", sorted(FAILURES))
@pytest.mark.parametrize("training", [True, False])
def test_a_failing_install_leaves_the_model_untouched(name: str, training: bool) -> None:
    settings, arguments = FAILURES[name]
    model = net(layers=3)
    model.unused = nn.Linear(2, 2)
    model.blocks[2].attn = Warm()
    model.train(training)
    model.blocks[0].mlp.eval()
    model.blocks[1].norm1.weight.requires_grad_(False)
    ids, _ = batch()
    targets = {"targets": ("blocks.0.attn", "blocks.1.attn"), "student": COLD}
    output = model(ids)
    before, states = portrait(model), random_states()
    with pytest.raises((crossfade.CrossfadeError, RuntimeError, IndexError)):
        crossfade.install(model, crossfade.Plan(**(targets | settings)), **({"total_steps": 10} | arguments))
    assert difference(before, portrait(model)) == []
    assert difference(states, random_states()) == []
    assert equal(model(ids), output)


@pytest.mark.parametrize("where", ["crossfade.surgery._start", "crossfade.surgery.freeze"])
@pytest.mark.parametrize("targets", ["blocks.*.attn", "blocks[0:2]"])
def test_a_failure_in_the_middle_of_the_change_is_taken_back(
    where: str, targets: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = net(layers=3)
    before, states = portrait(model), random_states()
    monkeypatch.setattr(where, _raise)
    with pytest.raises(RuntimeError, match="broke"):
        crossfade.install(model, plan(targets=targets), total_steps=5)
    assert difference(before, portrait(model)) == []
    assert difference(states, random_states()) == []


def test_a_second_install_is_refused_and_leaves_the_first() -> None:
    model = net()
    fade = crossfade.install(model, plan(), total_steps=5)
    before = portrait(model)
    with pytest.raises(crossfade.CrossfadeError, match="already installed"):
        crossfade.install(model, plan(targets="blocks.*.mlp"), total_steps=5)
    assert crossfade.handle(model) is fade
    assert difference(before, portrait(model)) == []


@pytest.mark.parametrize("name", GATES)
def test_a_plan_that_failed_can_be_installed_after_its_cause_is_gone(name: str) -> None:
    model = net()
    good = plan(gates()[name]())
    with pytest.raises(crossfade.CrossfadeError):
        crossfade.install(model, good)
    assert isinstance(crossfade.install(model, good, total_steps=5).model, Net)
