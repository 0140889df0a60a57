"""finalize leaves nothing of the blend, puts the backbone's flags back, and equals alpha = 0."""

from __future__ import annotations

import copy
import itertools
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import crossfade
from crossfade.students import Adapter, Copy, Reinit
from tests.models import (
    GATES,
    KINDS,
    WIDTH,
    Net,
    adamw,
    batch,
    difference,
    equal,
    gates,
    net,
    plan,
    train,
)

COLD = Reinit("reset_parameters")
STEPS = 5


def assert_plain(model: nn.Module) -> None:
    """Nothing of ours is in the model: no class (but adapters), no attribute, no hook."""
    for path, module in model.named_modules():
        ours = type(module).__module__.startswith("crossfade")
        assert not ours or isinstance(module, Adapter), f"{path}: {type(module)}"
        assert "_crossfade" not in vars(module), path
        for name, value in vars(module).items():
            if "hooks" in name and hasattr(value, "keys"):
                assert not value, f"{path}.{name}"
    # What a pickle names is everything that is reachable, whatever its place.
    assert any(isinstance(m, Adapter) for m in model.modules()) or b"crossfade" not in pickle.dumps(model)


@given(
    gate=st.sampled_from(GATES),
    kind=st.sampled_from(KINDS),
    target=st.sampled_from(["blocks.*.attn", "blocks.*", "blocks[0:2]"]),
    guided=st.booleans(),
    trains=st.sampled_from(["students", "all", ("head",)]),
    release=st.sampled_from(["when_done", "finalize"]),
    flags=st.lists(st.booleans(), min_size=8, max_size=8),
    training=st.booleans(),
)
def test_finalize_leaves_a_plain_model_equal_to_alpha_0(
    gate: str, kind: str, target: str, guided: bool, trains: Any, release: Any, flags: list[bool], training: bool
) -> None:
    model = net(kind, layers=3)
    for parameter, flag in zip(model.parameters(), itertools.cycle(flags), strict=False):
        parameter.requires_grad_(flag)
    guidance = crossfade.DeepFeatureGuidance() if guided else None
    originals = list(model.parameters())  # Held, so that no student can get the identity of a released teacher.
    found = {id(p): p.requires_grad for p in originals}
    fade = crossfade.install(
        model, plan(gates()[gate](), guidance, targets=target, trains=trains), total_steps=STEPS, release=release
    )
    optimizer = adamw(fade)
    fade.attach(optimizer)
    train(model, fade, optimizer, 0, STEPS)
    model.train(training)
    ids, labels = batch(99)
    copied = copy.deepcopy(model)
    before = copied(ids)
    cross_entropy(before, labels).backward()
    twin = {name.replace(".student.", "."): p for name, p in copied.named_parameters() if ".teacher." not in name}
    fade.receipt = None
    assert fade.finalize(probe=ids) is model
    assert_plain(model)
    assert equal(model(ids), before)
    for parameter in model.parameters():
        if id(parameter) in found:  # Also one that a teacher shares with the rest of the model.
            assert parameter.requires_grad == found[id(parameter)]
        else:
            assert parameter.requires_grad  # A student goes on training.
    assert all(module.training == training for module in model.modules())
    assert fade.receipt.gap == 0.0
    assert fade.receipt.probed
    assert not fade.receipt.forced
    if target != "blocks[0:2]":  # The names of a run's later blocks change when the container is cut.
        assert list(model.state_dict()) == [key.replace(".student.", ".") for key in copied.state_dict()]
        model.zero_grad()
        cross_entropy(model(ids), labels).backward()
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and twin[name].requires_grad:
                assert equal(parameter.grad, twin[name].grad), name
    else:
        assert len(model.blocks) == model.num_layers == 2
    with pytest.raises(crossfade.CrossfadeError):
        crossfade.handle(model)


@given(gate=st.sampled_from(GATES), step=st.integers(0, STEPS - 1))
def test_finalize_refuses_before_the_end_and_changes_nothing(gate: str, step: int) -> None:
    alpha = crossfade.schedules.linear()
    model = net()
    fade = crossfade.install(model, plan(gates(alpha)[gate]()), total_steps=STEPS)
    fade.seek(step)
    if fade.sites[0].alpha == 0.0:
        return
    modules, ids = [id(m) for m in model.modules()], batch()[0]
    before = model(ids)
    with pytest.raises(crossfade.CrossfadeError, match="not over"):
        fade.finalize()
    assert [id(m) for m in model.modules()] == modules
    assert equal(model(ids), before)
    fade.seek(STEPS)
    assert_plain(fade.finalize(probe=ids))


def test_finalize_refuses_while_guidance_goes_on() -> None:
    model = net()
    fade = crossfade.install(
        model, plan(crossfade.Deterministic(0.0), crossfade.DeepFeatureGuidance()), total_steps=STEPS
    )
    with pytest.raises(crossfade.CrossfadeError, match="lambda 1"):
        fade.finalize()


@given(step=st.integers(0, STEPS - 1), seed=st.integers(0, 5))
def test_force_tells_what_was_dropped(step: int, seed: int) -> None:
    model = net(seed=seed).eval()
    fade = crossfade.install(model, plan(), total_steps=STEPS)
    fade.seek(step)
    ids, _ = batch(seed)
    blended = model(ids)
    with fade.view("student") as viewed:
        student = viewed(ids)
    fade.finalize(probe=ids, force=True)
    assert equal(model(ids), student)
    assert fade.receipt.forced
    # In double precision, as the receipt has it: the difference of two float32 numbers is exact there.
    assert fade.receipt.gap == (blended.double() - student.double()).abs().max().item() > 0.0


class Bare(nn.Module):
    """A student that returns the main tensor alone."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def test_a_bare_student_is_adapted_and_only_the_adapter_stays() -> None:
    model = net()
    fade = crossfade.install(
        model, plan(student=lambda teacher, site: Bare(), drop=("mask",)), total_steps=2, probe=batch()[0]
    )
    optimizer = adamw(fade)
    fade.attach(optimizer)
    train(model, fade, optimizer, 0, 2)
    before = model(batch()[0])
    fade.finalize(probe=batch()[0])
    assert_plain(model)
    assert equal(model(batch()[0]), before)
    assert sum(isinstance(m, Adapter) for m in model.modules()) == 2


class Tied(nn.Module):
    """Input and output embedding share one matrix, as in language models."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.middle, self.head = nn.Embedding(6, 4), nn.Linear(4, 4), nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.middle(self.embed(ids)))


@pytest.mark.parametrize("release", ["when_done", "finalize"])
@pytest.mark.parametrize("trains", ["students", "all"])
def test_finalize_restores_the_flag_of_a_tensor_that_teacher_and_backbone_share(release: Any, trains: str) -> None:
    model = Tied()
    found = {name: p.requires_grad for name, p in model.named_parameters()}
    fade = crossfade.install(
        model, plan(targets="head", student=Reinit("reset_parameters"), trains=trains), total_steps=1, release=release
    )
    model(torch.tensor([[1, 2]])).sum().backward()
    fade.step()
    fade.finalize()
    assert {name: p.requires_grad for name, p in model.named_parameters() if name in found} == found


class Restless(nn.Module):
    """Answers differently on every call, so no proof can succeed."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(WIDTH, WIDTH), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.linear(x) + self.calls


@pytest.mark.parametrize("target", ["blocks.*.mlp", "blocks[0:2]"])
def test_a_proof_that_fails_puts_the_blends_back(target: str) -> None:
    model = Net(3)
    fade = crossfade.install(
        model, plan(targets=target, student=lambda teacher, site: Restless(), drop=("mask",)), total_steps=1
    )
    fade.seek(1)
    modules = [(path, id(m)) for path, m in model.named_modules()]
    flags = [p.requires_grad for p in model.parameters()]
    with pytest.raises(crossfade.CrossfadeError):
        fade.finalize(probe=batch()[0])
    assert [(path, id(m)) for path, m in model.named_modules()] == modules
    assert [p.requires_grad for p in model.parameters()] == flags
    assert crossfade.handle(model) is fade
    fade.finalize()
    assert fade.receipt.gap is None
    assert not fade.receipt.probed


def test_a_second_install_after_finalize_works() -> None:
    model = net()
    for target in ("blocks.*.attn", "blocks.*.mlp", "blocks.*.attn"):
        fade = crossfade.install(model, plan(targets=target), total_steps=3)
        optimizer = adamw(fade)
        fade.attach(optimizer)
        train(model, fade, optimizer, 0, 3)
        assert_plain(fade.finalize(probe=batch()[0]))


def test_runs_shorten_counters_and_indices_of_real_architectures() -> None:
    import transformers

    config = transformers.BertConfig(
        vocab_size=20, hidden_size=8, num_hidden_layers=4, num_attention_heads=2, intermediate_size=8
    )
    model = transformers.BertModel(config).eval()
    probe = {"input_ids": torch.randint(20, (2, 5))}
    fade = crossfade.install(model, plan(targets="encoder.layer[1:3]", student=Copy()), total_steps=1, probe=probe)
    fade.seek(1)
    before = model(**probe).last_hidden_state
    fade.finalize(probe=probe)
    assert_plain(model)
    assert equal(model(**probe).last_hidden_state, before)
    assert len(model.encoder.layer) == model.config.num_hidden_layers == 3
    indices = [m.layer_idx for m in model.modules() if isinstance(getattr(m, "layer_idx", None), int)]
    assert sorted(set(indices)) == list(range(len(set(indices))))


@pytest.mark.parametrize("name", GATES)
def test_the_receipt_is_data(name: str) -> None:
    model = net()
    fade = crossfade.install(model, plan(gates()[name]()), total_steps=1)
    fade.seek(1)
    fade.finalize()
    receipt = fade.receipt.to_dict()
    assert crossfade.Plan.from_dict(receipt["plan"]) == fade.plan
    assert difference(receipt["sites"]["blocks.0.attn"], {}) != []
    assert set(receipt["sites"]) == {"blocks.0.attn", "blocks.1.attn"}
