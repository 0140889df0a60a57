"""FC-51: removing the wrapper left traces.

Stale marks made a second use warn, double-wrapped parts stayed, outputs changed after merging, hooks were removed
late or never. In crossfade install and revert without training are the identity, bit for bit, with the user's own
hooks alive throughout; finalize at alpha 0 changes no output; finalize before that is an error unless forced, and
then the receipt tells the gap; and after either end a new install works.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import crossfade
from crossfade.errors import StateError

from .models import Net, adamw, data, net, plan, same, tiny_bert, tiny_vit, tokens, train, values

GATES = {
    "deterministic": crossfade.Deterministic("linear"),
    "bernoulli": crossfade.Bernoulli("linear"),
    "bernoulli skip": crossfade.Bernoulli("linear", "skip"),
    "gumbel": crossfade.Gumbel("linear"),
}
TARGETS = ("blocks.*.attn", "blocks.*", "blocks.0.attn.q", "blocks[0:2]", "head")


def portrait(model: nn.Module) -> list[Any]:
    """What a reversible operation has to put back."""
    rows: list[Any] = [list(model.state_dict())]
    for path, module in model.named_modules():
        hooks = [len(v) for k, v in sorted(vars(module).items()) if "hooks" in k and hasattr(v, "keys")]
        rows.append((path, id(module), type(module), module.training, sorted(vars(module)), hooks))
    rows += [(name, id(p), p.requires_grad) for name, p in model.named_parameters()]
    return rows


def settings(targets: str, gate: str = "deterministic", **more: Any) -> crossfade.Plan:
    if "[" in targets or targets == "head":
        more.setdefault("student", crossfade.students.Copy())
    return plan(targets=targets, gate=GATES[gate], **more)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("targets", TARGETS)
@pytest.mark.parametrize("gate", GATES)
def test_install_and_cancel_are_the_identity(gate: str, targets: str, training: bool) -> None:
    model = net().train(training)
    model.stem.requires_grad_(False)
    model.blocks[1].attn.o.bias.requires_grad_(False)
    model.blocks[0].norm.eval()
    before, tensors = portrait(model), values(model)
    x, _ = data()
    out = model(x)
    for _ in range(2):  # And again: nothing stale makes the second time different.
        fade = crossfade.install(
            model, settings(targets, gate, guidance=crossfade.DeepFeatureGuidance()), total_steps=4, release="finalize"
        )
        model(x)
        fade.revert()
        assert portrait(model) == before
        assert same(values(model), tensors)
        assert torch.equal(model(x), out)


@pytest.mark.parametrize("targets", TARGETS)
def test_a_revert_after_training_students_alone_is_the_identity_too(targets: str) -> None:
    model = net()
    before, tensors = portrait(model), values(model)
    fade = crossfade.install(model, settings(targets), total_steps=4, release="finalize")
    train(model, fade, adamw(fade), range(2))
    fade.revert()
    model.zero_grad()
    assert portrait(model) == before
    assert same(values(model), tensors)


def test_the_users_hooks_on_the_old_module_fire_during_and_after() -> None:
    model = net()
    fired: list[str] = []
    attn = model.blocks[0].attn
    attn.register_forward_pre_hook(lambda *_: fired.append("before"))
    attn.register_forward_hook(lambda *_: fired.append("after"))
    attn.q.register_forward_hook(lambda *_: fired.append("inner"))
    attn.register_full_backward_hook(lambda *_: fired.append("backward"))
    x = data()[0].requires_grad_()
    once = ["before", "inner", "after", "backward"]
    model(x).sum().backward()
    assert fired == once
    fade = crossfade.install(model, settings("blocks.*.attn"), total_steps=4, release="finalize")
    for step in (0, 1):  # The teacher alone, and both: the student, a copy of the structure, fires none.
        fired.clear()
        fade.seek(step)
        model(x).sum().backward()
        assert fired == once
    fade.revert()
    fired.clear()
    model(x).sum().backward()
    assert fired == once


def test_hooks_on_the_model_keep_their_order_and_ours_goes() -> None:
    model = net()
    order: list[int] = []
    handles = [model.register_forward_pre_hook(lambda *_, k=k: order.append(k)) for k in range(2)]
    fade = crossfade.install(model, settings("head"), total_steps=4, release="finalize")
    handles.append(model.register_forward_pre_hook(lambda *_: order.append(2)))
    model(data()[0])
    fade.revert()
    model(data()[0])
    assert order == [0, 1, 2] * 2
    assert list(model._forward_pre_hooks) == [handle.id for handle in handles]
    assert model._forward_pre_hooks_with_kwargs == {}


@pytest.mark.parametrize("probed", [True, False])
@pytest.mark.parametrize("targets", TARGETS)
@pytest.mark.parametrize("gate", GATES)
def test_finalize_at_alpha_0_changes_no_output_and_leaves_no_trace(gate: str, targets: str, probed: bool) -> None:
    model = net()
    fade = crossfade.install(model, settings(targets, gate), total_steps=4)
    train(model, fade, adamw(fade), range(4))
    x, _ = data(9)
    model.eval()
    before = model(x)
    plain = fade.finalize(probe=x if probed else None)
    assert plain is model
    assert torch.equal(plain(x), before)
    assert fade.receipt.probed is probed
    assert fade.receipt.gap == (0.0 if probed else None)
    assert not fade.receipt.forced
    for module in plain.modules():
        assert "crossfade" not in type(module).__module__
        assert not any("crossfade" in name for name in vars(module))
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    fresh = crossfade.install(plain, plan(targets="stem"), total_steps=2)
    assert torch.equal(plain(x), before)
    fresh.revert()


@pytest.mark.parametrize("gate", GATES)
def test_finalize_before_the_end_is_an_error_that_names_the_sites_and_changes_nothing(gate: str) -> None:
    model = net()
    fade = crossfade.install(model, settings("blocks.*.attn", gate), total_steps=4)
    fade.seek(1)
    before = portrait(model)
    with pytest.raises(StateError, match=r"(?s)not over.*blocks\.0\.attn \(alpha 0\.75.*step 1 of 4.*force=True"):
        fade.finalize()
    assert portrait(model) == before
    fade.seek(4)
    fade.finalize()


@pytest.mark.parametrize("gate", GATES)
def test_a_forced_finalize_reports_the_gap(gate: str) -> None:
    model = net()
    fade = crossfade.install(model, settings("blocks.*.attn", gate), total_steps=4)
    fade.seek(1)
    x, _ = data()
    model.eval()
    before = model(x).detach()
    plain = fade.finalize(probe=x, force=True)
    assert fade.receipt.forced
    assert fade.receipt.step == 1
    assert fade.receipt.gap == pytest.approx(float((before - plain(x).detach()).abs().max()), rel=1e-6)
    assert fade.receipt.gap > 0.0


@pytest.mark.parametrize("call", ["guidance", "step_count", "finalize", "revert", "state_dict", "seek"])
def test_an_ended_fade_says_so(call: str) -> None:
    for end in ("revert", "finalize"):
        model = net()
        fade = crossfade.install(model, settings("head"), total_steps=1, release="finalize")
        fade.seek(1)
        getattr(fade, end)()
        with pytest.raises(StateError, match=r"no plan is installed"):
            crossfade.handle(model)
        if call == "step_count":
            assert fade.step_count == 1
            continue
        with pytest.raises(StateError, match=r"(?s)has ended.*install again"):
            getattr(fade, call)(*([0] if call == "seek" else []))


@pytest.mark.parametrize("trains", ["students", ("head",), "all"])
@pytest.mark.parametrize("end", ["finalize", "revert"])
def test_flags_return_to_what_they_were(end: str, trains: Any) -> None:
    model = net()
    model.stem.weight.requires_grad_(False)
    flags = {n: p.requires_grad for n, p in model.named_parameters()}
    fade = crossfade.install(model, settings("blocks.*.attn", trains=trains), total_steps=1, release="finalize")
    fade.seek(1)
    if end == "revert" and trains != "students":
        with pytest.raises(StateError, match=r"(?s)backbone has trained.*snapshot=True"):
            fade.revert()
        return
    getattr(fade, end)()
    assert {n: p.requires_grad for n, p in model.named_parameters()} == flags


REAL = {
    "bert": (tiny_bert, "bert.encoder.layer.*.attention", tokens()),
    "bert, run": (tiny_bert, "bert.encoder.layer[0:2]", tokens()),
    "vit": (tiny_vit, "blocks.*.attn", torch.ones(2, 3, 16, 16)),
    "vit, run": (tiny_vit, "blocks[0:2]", torch.ones(2, 3, 16, 16)),
}


@pytest.mark.parametrize("name", REAL)
def test_real_models_come_back_as_they_were(name: str) -> None:
    make, targets, batch = REAL[name]
    model = make()
    before, tensors = portrait(model), values(model)
    config = model.config.to_dict() if hasattr(model, "config") else None
    fade = crossfade.install(
        model,
        crossfade.Plan(targets=targets, student=crossfade.students.Copy(), gate=crossfade.Deterministic("linear")),
        total_steps=4,
        probe=batch,
        release="finalize",
    )
    fade.seek(2)
    model(**batch) if isinstance(batch, dict) else model(batch)
    fade.revert()
    assert portrait(model) == before
    assert same(values(model), tensors)
    assert config is None or model.config.to_dict() == config


def test_a_user_hook_added_to_the_blend_during_the_fade_does_not_stop_the_end() -> None:
    model = net()
    fade = crossfade.install(model, settings("blocks.*.attn"), total_steps=1, release="finalize")
    count: list[int] = []
    model.blocks[0].attn.register_forward_hook(lambda *_: count.append(1))
    model(data()[0])
    fade.seek(1)
    final: Net = fade.finalize(probe=data()[0])
    fired = len(count)
    final(data()[0])
    assert len(count) == fired
