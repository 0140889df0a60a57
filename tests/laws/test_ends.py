"""alpha = 1 is the original model, alpha = 0 the student alone: outputs and gradients, bit for bit."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import cross_entropy

import crossfade
from crossfade.targets import parent_of
from tests.models import GATES, KINDS, backbone, batch, difference, equal, gates, gradients, net, padding, plan

REDUCTIONS = ("relative", "mean", "sum", "cosine")

situations = st.fixed_dictionaries(
    {
        "gate": st.sampled_from(GATES),
        "kind": st.sampled_from(KINDS),
        "target": st.sampled_from(["blocks.*.attn", "blocks.*.mlp", "blocks.*", "blocks.1.attn"]),
        "reduction": st.sampled_from([None, *REDUCTIONS]),
        "training": st.booleans(),
        "masked": st.booleans(),
        "metrics_every": st.sampled_from([0, 1]),
        "seed": st.integers(0, 50),
    }
)


def situation(case: dict[str, Any], alpha: float, **guidance: Any) -> tuple[nn.Module, nn.Module, crossfade.Fade]:
    base = net(case["kind"], seed=case["seed"])
    if case["kind"] == "shared" and case["target"] == "blocks.1.attn":
        case["target"] = "blocks.*.attn"
    model = copy.deepcopy(base).train(case["training"])
    loss = None
    if case["reduction"] is not None:
        loss = crossfade.DeepFeatureGuidance(reduction=case["reduction"], **guidance)
    given_plan = plan(gates(alpha)[case["gate"]](), loss, targets=case["target"], trains="all")
    fade = crossfade.install(model, given_plan, total_steps=10, release="finalize", metrics_every=case["metrics_every"])
    return base.train(case["training"]), model, fade


def run(model: nn.Module, case: dict[str, Any], fade: crossfade.Fade | None = None) -> torch.Tensor:
    ids, labels = batch(case["seed"])
    out = model(ids, padding([5, 3, 1, 4], 5) if case["masked"] else None)
    loss = cross_entropy(out, labels)
    if fade is not None and case["training"]:
        loss = loss + fade.guidance()
    loss.backward()
    return out


@given(situations)
def test_alpha_1_is_the_original_model_in_outputs_and_upstream_gradients(case: dict[str, Any]) -> None:
    # Guidance with detach_input stays at its site, so nothing outside may notice it.
    base, model, fade = situation(case, 1.0, detach_input=True)
    assert all(site.phase == "align" for site in fade.sites)
    assert equal(run(model, case, fade), run(base, case))
    ours = gradients(backbone(model))
    theirs = {name: grad for name, grad in gradients(dict(base.named_parameters())).items() if name in ours}
    assert difference(ours, theirs) == []
    for site in fade.sites:
        assert all(p.grad is None and not p.requires_grad for p in site.blend.teacher.parameters())
        if case["reduction"] is None or not case["training"]:
            # Zeros or nothing: the student had no part in this loss.
            assert all(p.grad is None or not p.grad.any() for p in site.blend.student.parameters())


@given(situations)
def test_alpha_1_with_guidance_that_reaches_upstream_leaves_the_task_gradient_alone(case: dict[str, Any]) -> None:
    # The gradient of the task loss alone, although the forward has recorded guidance.
    base, model, _ = situation(case, 1.0)
    assert equal(run(model, case), run(base, case))
    ours = gradients(backbone(model))
    theirs = {name: grad for name, grad in gradients(dict(base.named_parameters())).items() if name in ours}
    assert difference(ours, theirs) == []


def student_alone(base: nn.Module, fade: crossfade.Fade) -> nn.Module:
    """What a user would write by hand: a copy of the base with copies of the students in it."""
    alone = copy.deepcopy(base)
    for site in fade.sites:
        student = copy.deepcopy(site.blend.student)
        for path in site.paths:
            parent, name = parent_of(alone, path)
            parent._modules[name] = student
    return alone


@given(situations)
def test_alpha_0_is_the_student_alone_in_outputs_and_gradients(case: dict[str, Any]) -> None:
    base, model, fade = situation(case, 0.0)
    alone = student_alone(base, fade)
    # The gradient of the task loss alone; in the guide phase the forward has recorded guidance beside it.
    assert equal(run(model, case), run(alone, case))
    ours = {name.replace(".student.", "."): grad for name, grad in gradients(dict(model.named_parameters())).items()}
    ours = {name: grad for name, grad in ours.items() if ".teacher." not in name}
    theirs = gradients(dict(alone.named_parameters()))
    assert difference(ours, theirs) == []


@given(situations)
def test_alpha_0_with_detached_guidance_is_the_student_alone_upstream(case: dict[str, Any]) -> None:
    # A run of one site: with several, the guidance of a later one reaches earlier students by design.
    case = case | {"target": "blocks.1.mlp"}
    base, model, fade = situation(case, 0.0, detach_input=True)
    alone = student_alone(base, fade)
    assert equal(run(model, case, fade), run(alone, case))
    ours = gradients(backbone(model))
    theirs = {name: grad for name, grad in gradients(dict(alone.named_parameters())).items() if name in ours}
    assert difference(ours, theirs) == []


@pytest.mark.parametrize("name", GATES)
def test_both_ends_hold_at_the_ends_of_a_real_run(name: str) -> None:
    base = net()
    model = copy.deepcopy(base)
    fade = crossfade.install(model, plan(gates()[name]()), total_steps=6, release="finalize")
    ids, _ = batch()
    assert equal(model(ids), base(ids))
    fade.seek(6)
    alone = student_alone(base, fade)
    assert equal(model(ids), alone(ids))
    assert equal(model.eval()(ids), alone.eval()(ids))


@given(alpha=st.floats(0.0, 1.0), seed=st.integers(0, 20))
def test_in_between_the_blend_is_the_stated_mixture(alpha: float, seed: int) -> None:
    base = net(seed=seed).double()
    model = copy.deepcopy(base)
    fade = crossfade.install(model, plan(crossfade.Deterministic(alpha)), total_steps=10, release="finalize")
    blend = fade.sites[0].blend
    x = torch.randn(2, 3, 8, dtype=torch.float64)
    expected = alpha * blend.teacher(x)[0] + (1.0 - alpha) * blend.student(x)[0]
    # alpha is kept in float32, hence its rounding.
    torch.testing.assert_close(blend(x)[0], expected, rtol=1e-6, atol=1e-6)
