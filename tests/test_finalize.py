"""Finalize: the proof, what is left, and the receipt."""

from __future__ import annotations

import copy
import gc
import json
import math
import weakref

import pytest
import torch
from torch import nn

import crossfade
from crossfade import DeepFeatureGuidance, Deterministic, Plan, students
from crossfade.errors import CrossfadeError, StateError
from crossfade.finalize import check_over, largest_difference, look, receipt_of
from crossfade.students import Adapter, Reinit
from tests.models import MLP, adamw, batch, difference, net, plan, portrait, train

IDS, _ = batch()
KINDS = ("pre_norm", "post_norm", "shared")


def over(kind: str = "pre_norm", *, steps: int = 2, **more) -> crossfade.Fade:
    """A fade that is over."""
    model = net(kind)
    fade = crossfade.install(model, plan(**more), total_steps=steps, probe=IDS)
    optimizer = adamw(fade)
    fade.attach(optimizer)
    train(model, fade, optimizer, 0, steps)
    return fade


# ---- what is left ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_that_a_plain_model_is_left(kind):
    reference = net(kind)
    fade = over(kind, guidance=DeepFeatureGuidance())
    model = fade.model
    assert fade.finalize(probe=IDS) is model
    assert not any(type(m).__module__.startswith("crossfade") for m in model.modules())
    assert list(model.state_dict()) == list(reference.state_dict())
    assert {n: type(m) for n, m in model.named_modules()} == {n: type(m) for n, m in reference.named_modules()}
    assert "_crossfade" not in vars(model)
    assert not model._forward_pre_hooks
    assert not model._forward_pre_hooks_with_kwargs
    assert all(p.requires_grad for p in model.parameters())


def test_that_backbone_flags_and_modes_come_back():
    model = net()
    model.embed.weight.requires_grad_(False)
    model.blocks[1].mlp.eval()
    fade = crossfade.install(model, plan(gate=Deterministic(0.0)), total_steps=1)
    fade.seek(1)
    fade.finalize()
    assert [n for n, p in model.named_parameters() if not p.requires_grad] == ["embed.weight"]
    assert not model.blocks[1].mlp.training
    assert model.blocks[1].attn.training


def test_that_teachers_and_handle_are_free_afterwards():
    fade = over()
    model = fade.finalize()
    reference = weakref.ref(fade)
    del fade
    gc.collect()
    assert reference() is None
    assert model is not None


def test_that_a_finalized_model_takes_a_second_plan():
    model = over().finalize()
    fade = crossfade.install(model, plan(targets="blocks.*.mlp"), total_steps=2, probe=IDS)
    optimizer = adamw(fade)
    fade.attach(optimizer)
    train(model, fade, optimizer, 0, 2)
    assert fade.finalize(probe=IDS) is model


# ---- the check -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gate", "guidance", "step", "match"),
    [
        (Deterministic("linear"), None, 1, "alpha 0.5"),
        (Deterministic(0.0), DeepFeatureGuidance(), 1, "lambda 1"),
        (crossfade.Bernoulli("linear"), None, 0, "alpha 1"),
    ],
)
def test_that_a_fade_which_is_not_over_is_not_ended(gate, guidance, step, match):
    model = net()
    fade = crossfade.install(model, plan(gate, guidance), total_steps=2)
    fade.seek(step)
    before = portrait(model)
    with pytest.raises(StateError, match=match) as caught:
        fade.finalize(probe=IDS)
    assert f"step {step} of 2" in str(caught.value)
    assert "force=True" in str(caught.value)
    assert not difference(portrait(model), before)
    assert crossfade.handle(model) is fade


def test_check_over():
    fade = over()
    assert check_over(fade.sites, 2, 2, force=False) is False
    fade.seek(0)
    assert check_over(fade.sites, 0, 2, force=True) is True


def test_that_many_open_sites_are_counted():
    fade = crossfade.install(net(layers=6), plan(), total_steps=2)
    with pytest.raises(StateError, match="and 2 more"):
        fade.finalize()


def test_that_force_drops_the_teachers_and_says_what_that_cost():
    model = net()
    fade = crossfade.install(model, plan(), total_steps=2, probe=IDS)
    fade.seek(1)
    model.eval()
    blended = model(IDS)
    with fade.view("student"):
        student = model(IDS)
    model = fade.finalize(probe=IDS, force=True)
    assert torch.equal(model(IDS), student)
    assert fade.receipt.forced
    assert fade.receipt.gap == pytest.approx((blended - student).abs().max().item())
    assert fade.receipt.gap > 0


# ---- the proof -------------------------------------------------------------------------------------------------------


class Restless(MLP):
    """Answers differently in every call."""

    def forward(self, x, mask=None):
        self.count = getattr(self, "count", 0) + 1
        return super().forward(x) + self.count


def test_that_a_failed_proof_puts_everything_back():
    model = net()
    fade = crossfade.install(model, plan(Deterministic(0.0), student=lambda teacher, site: Restless()), total_steps=1)
    fade.seek(1)
    before = portrait(model)
    with pytest.raises(CrossfadeError, match="largest difference") as caught:
        fade.finalize(probe=IDS)
    assert "blocks.0.attn, blocks.1.attn" in str(caught.value)
    learned = ("count", "attributes", "bare_student", "main_place")  # What a forward leaves in blends and students.
    assert [key for key in difference(portrait(model), before) if not key.endswith(learned)] == []
    assert crossfade.handle(model) is fade
    assert type(model.blocks[0].attn).__name__ == "Blend"
    fade.finalize()  # Without a probe nothing is proven, and the receipt says so.
    assert fade.receipt.probed is False
    assert fade.receipt.gap is None


def test_that_the_proof_runs_in_eval_and_leaves_the_modes():
    fade = over()
    model = fade.model
    model.train()
    model.blocks[0].mlp.eval()
    fade.finalize(probe=IDS)
    assert model.training
    assert not model.blocks[0].mlp.training


@pytest.mark.parametrize(
    ("a", "b", "gap"),
    [
        (torch.ones(2), torch.ones(2), 0.0),
        (torch.tensor([math.nan]), torch.tensor([math.nan]), math.inf),
        (torch.ones(2), torch.ones(3), math.inf),
        (torch.ones(2), torch.ones(2).double(), math.inf),
        ((torch.ones(2), None), (torch.ones(2),), 0.0),
        ((torch.ones(2),), (), math.inf),
        ([torch.zeros(2), torch.ones(1)], [torch.zeros(2), torch.full((1,), 1.25)], 0.25),
        (torch.zeros(0), torch.zeros(0), 0.0),
        (torch.tensor([1, 2]), torch.tensor([1, 5]), 3.0),
        (torch.tensor([True]), torch.tensor([False]), 1.0),
        (torch.tensor([math.inf]), torch.tensor([0.0]), math.inf),
        ({"a": torch.zeros(1)}, {"a": torch.full((1,), 2.0**-149)}, 2.0**-149),
    ],
)
def test_largest_difference(a, b, gap):
    assert largest_difference(a, b) == gap


def test_that_look_changes_no_mode():
    model = net()
    model.blocks[0].mlp.eval()
    before = [m.training for m in model.modules()]
    out = look(model, IDS)
    assert not out.requires_grad
    assert [m.training for m in model.modules()] == before
    with pytest.raises(CrossfadeError):
        look(model, {"wrong": IDS})
    assert [m.training for m in model.modules()] == before


# ---- adapters and carried attributes ---------------------------------------------------------------------------------


def bare(teacher, site):
    return MLP()


@pytest.mark.parametrize("drop", [[], ["mask"]], ids=["takes the mask", "loses the mask"])
def test_that_a_bare_student_keeps_answering_in_the_callers_structure(drop):
    class Takes(MLP):
        def forward(self, x, mask=None):
            return super().forward(x)

    fade = over(student=bare if drop else lambda teacher, site: Takes(), drop=drop)
    fade.model.eval()
    out = fade.model(IDS)
    model = fade.finalize(probe=IDS)
    assert torch.equal(model(IDS), out)
    assert type(model.blocks[0].attn) is Adapter
    assert len(model.blocks[0].attn(torch.zeros(1, 2, 8))) == 2


def test_that_carried_attributes_come_from_the_teacher_unless_the_student_has_its_own():
    class Own(MLP):
        def __init__(self) -> None:
            super().__init__()
            self.scale = "student"

        def forward(self, x, mask=None):
            return super().forward(x)

    for keep in ("when_done", "finalize"):
        model = net()
        for block in model.blocks:
            block.attn.scale = "teacher"
            block.attn.window = 7
        the_plan = plan(student=lambda teacher, site: Own(), carry=["scale", "window"])
        fade = crossfade.install(model, the_plan, total_steps=2, release=keep, probe=IDS)
        for _ in range(2):
            model(IDS).sum().backward()
            fade.step()
        model = fade.finalize(probe=IDS)
        for block in model.blocks:
            assert block.attn.window == 7
            inner = block.attn.module if isinstance(block.attn, Adapter) else block.attn
            assert inner.scale == "student"
            assert getattr(block.attn, "scale", None) == "student"


def test_that_an_attribute_to_carry_which_no_one_has_is_an_error():
    with pytest.raises(CrossfadeError, match="nothing_of_that_name"):
        over(carry=["nothing_of_that_name"]).finalize(probe=IDS)


# ---- the receipt -----------------------------------------------------------------------------------------------------


def test_the_receipt():
    the_plan = plan()
    fade = over(targets="blocks.*.attn")
    model = fade.finalize(probe=IDS)
    receipt = fade.receipt
    assert receipt_of(model) is receipt
    assert (receipt.step, receipt.total_steps, receipt.forced, receipt.probed, receipt.gap) == (2, 2, False, True, 0.0)
    assert receipt.plan == the_plan.to_dict()
    row = receipt.sites["blocks.1.attn"]
    parameters = sum(p.numel() for p in model.blocks[1].attn.parameters())
    assert row == {
        "paths": ["blocks.1.attn"],
        "run": None,
        "swap": 0,
        "index": 1,
        "n": 2,
        "carry": [],
        "teacher": "Attention",
        "student": "Attention",
        "parameters_before": parameters,
        "parameters_after": parameters,
        "adapter": None,
    }
    assert json.loads(json.dumps(receipt.to_dict(), allow_nan=False))["sites"] == receipt.sites


def test_that_a_receipt_of_a_diverged_run_can_be_written():
    model = net()
    fade = crossfade.install(model, plan(), total_steps=2)
    fade.seek(1)
    nn.init.constant_(fade.sites[0].blend.teacher.q.weight, math.nan)
    fade.finalize(probe=IDS, force=True)
    json.dumps(fade.receipt.to_dict(), allow_nan=False)


def test_that_an_unregistered_plan_leaves_a_receipt_without_plan():
    fade = over(student=bare, drop=["mask"])
    fade.finalize()
    assert fade.receipt.plan is None
    assert fade.receipt.sites["blocks.0.attn"]["adapter"]["drop"] == ["mask"]


def test_that_other_models_have_no_receipt_and_a_dead_one_is_forgotten():
    assert receipt_of(net()) is None
    fade = over()
    model = fade.finalize()
    assert receipt_of(copy.deepcopy(model)) is None
    weak = weakref.ref(model)
    del model, fade
    gc.collect()
    assert weak() is None


def test_that_a_shared_site_is_one_row_with_all_its_paths():
    fade = over("shared", student=Reinit("reset_parameters"))
    model = fade.finalize(probe=IDS)
    assert model.blocks[0].attn is model.blocks[1].attn
    assert fade.receipt.sites["blocks.0.attn"]["paths"] == ["blocks.0.attn", "blocks.1.attn"]


def test_that_an_ended_fade_says_so():
    fade = over()
    fade.finalize()
    for call in (
        fade.finalize,
        fade.revert,
        fade.guidance,
        fade.state_dict,
        fade.parameter_groups,
        lambda: fade.seek(0),
        lambda: fade.align([IDS]),
        lambda: fade.calibrate([IDS]),
        lambda: fade.attach(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)),
        lambda: fade.load_state_dict({}),
        lambda: fade.begin(Plan(targets="a", student=students.Copy()), 3),
        lambda: fade.view("student").__enter__(),
        fade.step,
    ):
        with pytest.raises(StateError, match="ended"):
            call()
