"""alpha stays exact in half-precision models, dtypes are kept, autocast works, and non-finite values stop the step."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import crossfade
from tests.models import GATES, Attention, adamw, batch, difference, equal, gates, net, plan

HALF = [torch.bfloat16, torch.float16]
STEPS = 1000


def linear() -> crossfade.Deterministic:
    return crossfade.Deterministic("linear")


@pytest.mark.parametrize("when", ["before install", "after install"])
@pytest.mark.parametrize("dtype", HALF)
def test_a_half_precision_model_keeps_alpha_exact(dtype: torch.dtype, when: str) -> None:
    model = net()
    if when == "before install":
        model.to(dtype)
    fade = crossfade.install(model, plan(linear()), total_steps=STEPS, release="finalize", metrics_every=0)
    if when == "after install":
        model.to(dtype)
    blend = fade.sites[0].blend
    seen = set()
    for step in range(STEPS + 1):
        fade.seek(step)
        seen.add(blend.gate_weight.item())
        # What the schedule says, rounded once to float32.
        expected = torch.tensor(1.0 - step / STEPS, dtype=torch.float32).item()
        assert blend.gate_alpha.item() == blend.gate_weight.item() == expected
    assert len(seen) == STEPS + 1  # In bfloat16 only a few hundred would be left.
    assert blend.gate_alpha.dtype == blend.gate_weight.dtype == torch.float32
    assert not [name for name, _ in blend.named_buffers() if "alpha" in name or "weight" in name]
    assert all(p.dtype == dtype for p in model.parameters())


@pytest.mark.parametrize("cast", ["half", "bfloat16", "double", "deepcopy"])
def test_no_cast_or_copy_moves_alpha(cast: str) -> None:
    model = net()
    fade = crossfade.install(model, plan(linear()), total_steps=STEPS)
    fade.seek(1)
    exact = fade.sites[0].blend.gate_alpha.item()
    model = copy.deepcopy(model) if cast == "deepcopy" else getattr(model, cast)()
    blend = crossfade.handle(model).sites[0].blend
    assert (blend.gate_alpha.item(), blend.gate_alpha.dtype) == (exact, torch.float32)


class Wide(nn.Module):
    """A student that computes in float32 whatever the model does."""

    crossfade_keep_dtype = True

    def __init__(self) -> None:
        super().__init__()
        self.inner = Attention()

    def forward(self, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, None]:
        return self.inner(x.float(), mask=mask)[0], None


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("alpha", [1.0, 0.5, 0.0])
@pytest.mark.parametrize("student", ["same", "wide"])
@pytest.mark.parametrize("dtype", HALF)
def test_the_output_keeps_the_teachers_dtype(dtype: torch.dtype, student: str, alpha: float, gate: str) -> None:
    model = net().to(dtype)
    more: dict[str, Any] = {} if student == "same" else {"student": lambda teacher, site: Wide()}
    guidance = crossfade.DeepFeatureGuidance()
    chosen = plan(gates(alpha)[gate](), guidance, **more)
    fade = crossfade.install(model, chosen, total_steps=4, release="finalize", metrics_every=1)
    if student == "wide" and (alpha == 0.0 or gate == "bernoulli_skip"):
        return  # A student that speaks alone: see the next test.
    out = model(batch()[0])
    local = fade.guidance()
    assert out.dtype == dtype
    assert local.dtype == torch.float32
    (out.float().sum() + local).backward()
    fade.step()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


def test_the_dtype_does_not_change_when_the_teacher_goes() -> None:
    # Either the student's dtype is refused when it is first seen, or it is cast; a run must not break at its end.
    model = net().bfloat16()
    chosen = plan(crossfade.Deterministic("linear"), student=lambda teacher, site: Wide())
    try:
        fade = crossfade.install(model, chosen, total_steps=2, release="finalize", probe=batch()[0])
    except crossfade.CrossfadeError:
        return
    for step in range(3):
        fade.seek(step)
        assert model(batch()[0]).dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", HALF)
def test_a_half_precision_mixture_is_rounded_from_float32(dtype: torch.dtype) -> None:
    from crossfade.outputs import mix

    t, s = torch.randn(1000).to(dtype), torch.randn(1000).to(dtype)
    for w in (0.001, 0.3, 0.999):
        weight = torch.tensor(w)
        exact = w * t.double() + (1.0 - w) * s.double()
        # Three roundings: of either product and of their sum.
        bound = torch.finfo(dtype).eps * ((w * t).abs() + ((1.0 - w) * s).abs()).double()
        assert bool(((mix(t, s, weight).double() - exact).abs() <= 1.5 * bound + 1e-7).all())


@pytest.mark.parametrize("dtype", HALF)
def test_guidance_is_computed_in_float32(dtype: torch.dtype) -> None:
    model = net().to(dtype)
    guidance = crossfade.DeepFeatureGuidance(reduction="sum")
    fade = crossfade.install(model, plan(crossfade.Deterministic(1.0), guidance, targets="blocks.0.mlp"), total_steps=4)
    blend = fade.sites[0].blend
    seen: list[tuple[Tensor, Tensor]] = []
    blend.guidance_error = lambda s, t, mask: (seen.append((s, t)), guidance.error(s, t, mask))[1]
    with torch.no_grad():  # Errors whose squares overflow float16.
        blend.student.down.bias.fill_(1000.0)
    model(batch()[0])
    value = fade.guidance()
    s, t = seen[0]
    torch.testing.assert_close(value, (s.float() - t.float()).square().sum())
    assert value > torch.finfo(torch.float16).max


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("alpha", [1.0, 0.5, 0.0])
def test_autocast_works(gate: str, alpha: float) -> None:
    base = net()
    model = copy.deepcopy(base)
    chosen = plan(gates(alpha)[gate](), crossfade.DeepFeatureGuidance())
    fade = crossfade.install(model, chosen, total_steps=4, release="finalize", metrics_every=1)
    optimizer = adamw(fade)
    fade.attach(optimizer)
    ids, labels = batch()
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            out = model(ids)
            expected = base(ids)
            local = fade.guidance()
            loss = cross_entropy(out, labels) + local
        assert out.dtype == expected.dtype == torch.bfloat16
        assert local.dtype == torch.float32
        if all(site.alpha == 1.0 for site in fade.sites):  # The adaptive gate moves on after its first step.
            assert equal(out, expected)
        loss.backward()
        assert all(p.grad.dtype == torch.float32 for p in model.parameters() if p.grad is not None)
        optimizer.step()
        optimizer.zero_grad()
    assert all(p.dtype == torch.float32 for p in model.parameters())


def at_weight(fade: crossfade.Fade, weight: float) -> None:
    """Go to a step whose first gate is `weight`."""
    step = next(k for k in range(100) if _weight(fade, k) == weight)
    fade.seek(step)


def _weight(fade: crossfade.Fade, step: int) -> float:
    fade.seek(step)
    return fade.sites[0].weight


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("bad", ["teacher", "student"])
@pytest.mark.parametrize("guided", [False, True])
def test_a_bad_value_on_the_side_of_weight_0_stays_out_of_the_output_and_stops_the_step(
    bad: str, value: float, guided: bool
) -> None:
    base = net()
    model = copy.deepcopy(base)
    guidance = crossfade.DeepFeatureGuidance() if guided else None
    chosen = plan(crossfade.Bernoulli(0.5), guidance, targets=("blocks.0.attn",), trains="all")
    fade = crossfade.install(model, chosen, total_steps=100)
    optimizer = adamw(fade)
    fade.attach(optimizer)
    ids, labels = batch()
    at_weight(fade, 0.0 if bad == "teacher" else 1.0)
    clean = model(ids).detach()
    fade.ledger.clear()
    with torch.no_grad():
        getattr(fade.sites[0].blend, bad).o.bias[0] = value
    out = model(ids)
    assert equal(out.detach(), clean)
    (cross_entropy(out, labels) + fade.guidance()).backward()
    before, step = copy.deepcopy(dict(model.state_dict())), fade.step_count
    with pytest.raises(crossfade.CrossfadeError, match=r"not finite[\s\S]*blocks\.0\.attn"):
        optimizer.step()
    assert difference(before, dict(model.state_dict())) == []
    assert fade.step_count == step
    assert not optimizer.state


def test_a_step_that_the_user_leaves_out_does_not_stop_the_next_one() -> None:
    # As a gradient scaler does: no optimizer.step() for the bad batch, so no hook of ours runs.
    model = net()
    chosen = plan(crossfade.Bernoulli(0.5), targets=("blocks.0.attn",), trains="all")
    fade = crossfade.install(model, chosen, total_steps=100)
    optimizer = adamw(fade)
    fade.attach(optimizer)
    at_weight(fade, 1.0)
    ids, labels = batch()
    embedding = model.embed.weight.detach().clone()
    with torch.no_grad():
        model.embed.weight[ids[0, 0]] = float("inf")
    cross_entropy(model(ids), labels).backward()
    optimizer.zero_grad()  # Skipped.
    with torch.no_grad():
        model.embed.weight.copy_(embedding)
    cross_entropy(model(ids), labels).backward()
    optimizer.step()
    assert all(p.isfinite().all() for p in model.parameters())


def test_a_deterministic_blend_of_a_bad_value_stops_through_its_guidance() -> None:
    model = net()
    fade = crossfade.install(model, plan(crossfade.Deterministic(1.0), crossfade.DeepFeatureGuidance()), total_steps=4)
    optimizer = adamw(fade)
    fade.attach(optimizer)
    with torch.no_grad():
        fade.sites[1].blend.student.o.weight[0, 0] = float("nan")
    ids, labels = batch()
    (cross_entropy(model(ids), labels) + fade.guidance()).backward()
    with pytest.raises(crossfade.CrossfadeError, match=r"blocks\.1\.attn"):
        optimizer.step()
