"""FC-71: Gumbel gates gave NaN.

Sampling took the log of 0, first on GPUs and in half precision. crossfade draws in double precision from numbers
strictly inside (0, 1), outside the model and whatever its dtype: every weight is finite and inside [0, 1], hard gates
are exactly 0 or 1, and evaluation uses no noise.
"""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

import crossfade
from crossfade.gates import uniform

from .models import data, net, plan

SMALL, LARGE = 0.5 / 2.0**52, 1.0 - 0.5 / 2.0**52  # The smallest and (about) the largest number that is ever drawn.
EXTREMES = (SMALL, 1e-12, 0.3, 0.5, 0.7, 1.0 - 1e-12, math.nextafter(1.0, 0.0), LARGE)
ALPHAS = (0.0, 5e-324, 1e-300, 1e-16, 1e-7, 0.3, 0.5, 1.0 - 1e-7, math.nextafter(1.0, 0.0), 1.0)


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-8, 0.01, 0.5, 1.0, 10.0, 1e300])
def test_extreme_values_stay_finite_and_inside(temperature: float) -> None:
    gate = crossfade.Gumbel(0.5, temperature=temperature)
    for alpha in ALPHAS:
        for draw in EXTREMES:
            if draw >= 1.0:
                continue
            w = gate.weight(alpha, draw)
            assert math.isfinite(w)
            assert 0.0 <= w <= 1.0
            if alpha in (0.0, 1.0):
                assert w == alpha


@pytest.mark.parametrize("temperature", [0.01, 1.0])
def test_many_draws_are_finite(temperature: float) -> None:
    dice = random.Random(0)
    gate = crossfade.Gumbel(0.3, temperature=temperature)
    weights = torch.tensor([gate.weight(0.3, dice.random() or SMALL) for _ in range(300_000)], dtype=torch.float64)
    assert bool(weights.isfinite().all())
    assert float(weights.min()) >= 0.0
    assert float(weights.max()) <= 1.0
    assert float((weights > 0.5).double().mean()) == pytest.approx(0.3, abs=0.005)


def test_no_draw_is_ever_0_or_1() -> None:
    drawn = [uniform(seed, "site", step) for seed in range(20) for step in range(1000)]
    assert min(drawn) > 0.0
    assert max(drawn) < 1.0
    assert sum(drawn) / len(drawn) == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("gate", [crossfade.Gumbel("linear", temperature=0.01), crossfade.Gumbel("linear")])
def test_a_whole_run_in_any_dtype_has_finite_weights_and_gradients(gate: Any, dtype: torch.dtype) -> None:
    model = net().to(dtype)
    fade = crossfade.install(model, plan(gate=gate, trains=("stem",)), total_steps=60, release="finalize")
    for step in range(60):
        fade.seek(step)
        for site in fade.sites:
            assert site.blend.gate_weight.dtype == torch.float32
            assert 0.0 <= float(site.blend.gate_weight) <= 1.0
        if step % 6 == 0:
            x, y = data(step)
            loss = cross_entropy(model(x.to(dtype)).float(), y)
            loss.backward()
            assert bool(loss.isfinite())
            assert all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("execution", ["both", "skip"])
def test_hard_gates_are_exactly_0_or_1_and_have_finite_gradients(execution: Any) -> None:
    model = net()
    gate = crossfade.Bernoulli("linear", execution)
    fade = crossfade.install(model, plan(gate=gate, trains=("stem",)), total_steps=60, release="finalize")
    seen = set()
    for step in range(60):
        fade.seek(step)
        seen |= {float(site.blend.gate_weight) for site in fade.sites}
        x, y = data(step)
        cross_entropy(model(x), y).backward()
    assert seen == {0.0, 1.0}
    assert all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None)


GATES = {
    "gumbel": crossfade.Gumbel(0.3),
    "cold gumbel": crossfade.Gumbel(0.3, temperature=0.01),
    "bernoulli": crossfade.Bernoulli(0.3),
    "bernoulli skip": crossfade.Bernoulli(0.3, "skip"),
}


@pytest.mark.parametrize("name", GATES)
def test_evaluation_uses_no_noise(name: str) -> None:
    x, _ = data()
    outputs = []
    model = net()
    fade = crossfade.install(model, plan(gate=GATES[name]), total_steps=100, release="finalize")
    model.eval()
    for step in range(8):
        fade.seek(step)
        outputs.append(model(x).detach())
    assert all(torch.equal(out, outputs[0]) for out in outputs)
    mean = net()
    crossfade.install(mean, plan(gate=crossfade.Deterministic(0.3)), total_steps=100, release="finalize")
    assert torch.equal(mean.eval()(x), outputs[0])


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan"), float("inf")])
def test_a_temperature_that_would_give_nan_is_refused(temperature: float) -> None:
    with pytest.raises(crossfade.CrossfadeError, match="temperature"):
        crossfade.Gumbel(0.5, temperature=temperature)


def test_a_relaxed_gate_keeps_a_nan_of_the_other_branch_visible_and_named() -> None:
    # Unlike a hard gate a relaxed one mixes; a value that is not finite must stop the step, with the name of its site.
    model = net()
    fade = crossfade.install(
        model,
        plan(gate=crossfade.Gumbel(0.5), guidance=crossfade.DeepFeatureGuidance()),
        total_steps=100,
    )
    optimizer = torch.optim.SGD(fade.parameter_groups(), lr=0.1)
    fade.attach(optimizer)
    with torch.no_grad():
        model.blocks[0].attn.student.o.bias.fill_(float("nan"))
    x, y = data()
    (cross_entropy(model(x), y) + fade.guidance()).backward()
    with pytest.raises(crossfade.CrossfadeError, match=r"(?s)not finite.*where: blocks\.0\.attn"):
        optimizer.step()
