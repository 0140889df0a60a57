"""Gate-induced gradient variance and curvature bias, on real models, against the formulas."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, softplus

import crossfade
from crossfade import metrics
from tests.models import batch, equal, gates, net, plan

ALPHAS = (0.3, 0.5, 0.8)
Gradient = Callable[[Sequence[float]], Tensor]


def start(alphas: Sequence[float], gate: str = "bernoulli") -> tuple[nn.Module, crossfade.Fade]:
    """As many sites as alphas, each with a constant one, in double precision."""
    model = net(layers=len(alphas)).double()
    made = gates(crossfade.schedules.PerSite(list(alphas)))[gate]()
    given = plan(made, trains="all")
    return model, crossfade.install(model, given, total_steps=10_000, metrics_every=0, release="finalize")


def flat_gradient(model: nn.Module) -> Tensor:
    """The gradient of everything that trains, at the weights that the blends hold now."""
    ids, labels = batch()
    trained = [p for p in model.parameters() if p.requires_grad]
    found = torch.autograd.grad(cross_entropy(model(ids), labels), trained, allow_unused=True)
    filled = [torch.zeros_like(p) if g is None else g for p, g in zip(trained, found, strict=True)]
    return torch.cat([g.flatten() for g in filled])


def gradient_of(model: nn.Module, fade: crossfade.Fade) -> Gradient:
    known: dict[tuple[float, ...], Tensor] = {}

    def gradient(weights: Sequence[float]) -> Tensor:
        key = tuple(weights)
        if key not in known:
            for site, weight in zip(fade.sites, weights, strict=True):
                site.blend.set_gate(alpha=site.alpha, weight=weight, hard=True)
            known[key] = flat_gradient(model)
        return known[key]

    return gradient


def test_the_deterministic_gate_has_no_variance_at_all() -> None:
    model, fade = start(ALPHAS, "deterministic")
    gradients = []
    for step in (0, 1, 17, 400):  # Another step is another draw, which this gate must not see.
        fade.seek(step)
        gradients += [flat_gradient(model), flat_gradient(model)]
    assert all(torch.equal(gradients[0], other) for other in gradients)
    assert gradients[0].norm() > 0


@settings(max_examples=10)
@given(p=st.floats(0.05, 0.95))
def test_one_bernoulli_gate_has_variance_p_times_1_minus_p_times_a_squared(p: float) -> None:
    model, fade = start([p])
    gradient = gradient_of(model, fade)
    a = gradient([1.0]) - gradient([0.0])
    expected = p * (1.0 - p) * float(a.square().sum())
    assert expected > 0.0
    assert metrics.gate_gradient_variance(gradient, [p]).item() == pytest.approx(expected, rel=1e-9)
    assert metrics.bernoulli_variance(p, a).item() == pytest.approx(expected, rel=1e-12)


def test_the_steps_of_a_real_run_have_that_variance() -> None:
    # The gradients of real steps take two values; their variance follows from how often each came.
    model, fade = start([0.3])
    gradient, steps = gradient_of(model, fade), 400
    a = gradient([1.0]) - gradient([0.0])
    seen, ones = [], 0
    for step in range(steps):
        fade.seek(step)
        ones += int(fade.sites[0].weight)
        if step < 8:  # The real forward, at the weight that the clock set.
            assert torch.equal(flat_gradient(model), gradient([fade.sites[0].weight]))
        seen.append(gradient([fade.sites[0].weight]))
    share = ones / steps
    assert abs(share - 0.3) <= 4.0 * math.sqrt(0.3 * 0.7 / steps)
    stacked = torch.stack(seen)
    measured = (stacked - stacked.mean(0)).square().sum(1).mean().item()
    assert measured == pytest.approx(share * (1.0 - share) * float(a.square().sum()), rel=1e-9)


def by_hand(gradient: Gradient, alphas: Sequence[float]) -> float:
    """E||g||^2 - ||E g||^2, written without the library."""
    mean: Tensor | float = 0.0
    square = 0.0
    for number in range(2 ** len(alphas)):
        mask = [float(number >> i & 1) for i in range(len(alphas))]
        probability = math.prod(p if w else 1.0 - p for w, p in zip(mask, alphas, strict=True))
        mean = mean + probability * gradient(mask)
        square += probability * float(gradient(mask).square().sum())
    return square - float(torch.as_tensor(mean).square().sum())


def test_several_gates_equal_the_enumeration_over_all_masks() -> None:
    model, fade = start(ALPHAS)
    gradient = gradient_of(model, fade)
    exact = metrics.gate_gradient_variance(gradient, ALPHAS).item()
    assert exact == pytest.approx(by_hand(gradient, ALPHAS), rel=1e-9)
    # Every weight differs in its effect, or the test could not tell a permuted mask.
    assert len({round(gradient([float(i == j) for j in range(3)]).norm().item(), 12) for i in range(3)}) == 3
    sampled = metrics.gate_gradient_variance(gradient, ALPHAS, draws=3000, seed=1).item()
    # The standard error of a mean of 3000 squared distances, four of them.
    distances, mean = [], torch.zeros(())
    for number in range(8):
        mask = [float(number >> i & 1) for i in range(3)]
        odds = math.prod(p if w else 1.0 - p for w, p in zip(mask, ALPHAS, strict=True))
        mean = mean + odds * gradient(mask)
        distances.append((odds, mask))
    squares = [(odds, float((gradient(mask) - mean).square().sum())) for odds, mask in distances]
    spread = math.sqrt(sum(odds * (d - exact) ** 2 for odds, d in squares))
    assert abs(sampled - exact) <= 4.0 * spread / math.sqrt(3000)
    # And the draws of a real run: the clock's own gates, at constant alpha.
    real = []
    for step in range(1500):
        fade.seek(step)
        real.append(gradient([site.weight for site in fade.sites]))
    stacked = torch.stack(real)
    measured = (stacked - stacked.mean(0)).square().sum(1).mean().item()
    assert abs(measured - exact) <= 4.0 * spread / math.sqrt(1500)


def test_gates_at_their_ends_add_nothing() -> None:
    model, fade = start((0.0, 0.5, 1.0))
    gradient = gradient_of(model, fade)
    one = gradient([0.0, 1.0, 1.0]) - gradient([0.0, 0.0, 1.0])
    variance = metrics.gate_gradient_variance(gradient, [0.0, 0.5, 1.0]).item()
    assert variance == pytest.approx(0.25 * float(one.square().sum()), rel=1e-9)
    assert metrics.gate_gradient_variance(gradient, [1.0, 0.0, 1.0]).item() == 0.0


# The largest |f''| of each function: 1; at 0, 2 / sqrt(2 pi); 4 / (3 sqrt 3); 1 / 4.
CURVED: dict[str, tuple[Callable[[Tensor], Tensor], float]] = {
    "sin": (torch.sin, 1.0),
    "gelu": (gelu, 2.0 / math.sqrt(2.0 * math.pi)),
    "tanh": (torch.tanh, 4.0 / (3.0 * math.sqrt(3.0))),
    "softplus": (softplus, 0.25),
}
numbers = st.lists(st.floats(-4.0, 4.0), min_size=3, max_size=3)


def bias(psi: Callable[[Tensor], Tensor], p: float, t: Tensor, s: Tensor) -> float:
    """|E[psi(Y)] - psi(E[Y])| of a hard gate between t and s."""
    return abs(float(p * psi(t).sum() + (1.0 - p) * psi(s).sum() - psi(p * t + (1.0 - p) * s).sum()))


@given(name=st.sampled_from(sorted(CURVED)), p=st.floats(0.0, 1.0), t=numbers, s=numbers)
def test_the_curvature_bound_holds(name: str, p: float, t: list[float], s: list[float]) -> None:
    psi, bound = CURVED[name]
    a, b = torch.tensor(t, dtype=torch.float64), torch.tensor(s, dtype=torch.float64)
    limit = metrics.curvature_bound(bound, p, a - b).item()
    assert bias(psi, p, a, b) <= limit + 1e-12  # Rounding of a sum of three numbers below 10.


@given(m=st.floats(0.1, 10.0), p=st.floats(0.0, 1.0), t=numbers, s=numbers)
def test_a_quadratic_attains_the_curvature_bound(m: float, p: float, t: list[float], s: list[float]) -> None:
    a, b = torch.tensor(t, dtype=torch.float64), torch.tensor(s, dtype=torch.float64)
    limit = metrics.curvature_bound(m, p, a - b).item()
    assert bias(lambda y: 0.5 * m * y * y, p, a, b) == pytest.approx(limit, rel=1e-9, abs=1e-11)


@pytest.mark.parametrize("name", sorted(CURVED))
def test_a_real_blend_keeps_the_curvature_bound_and_a_deterministic_gate_has_no_bias(name: str) -> None:
    psi, bound = CURVED[name]
    p = 0.375  # Exact in float32, in which the blend keeps it.
    _, fade = start([p])
    blend = fade.sites[0].blend
    x = torch.randn(2, 3, 8, dtype=torch.float64)

    def output(weight: float) -> Tensor:
        blend.set_gate(alpha=p, weight=weight, hard=weight in (0.0, 1.0))
        return blend(x)[0].detach()

    t, s, mean = output(1.0), output(0.0), output(p)
    assert equal(t, blend.teacher(x)[0].detach())
    torch.testing.assert_close(mean, p * t + (1.0 - p) * s, rtol=1e-12, atol=1e-12)
    error = abs(float(p * psi(t).sum() + (1.0 - p) * psi(s).sum() - psi(mean).sum()))
    assert 0.0 < error <= metrics.curvature_bound(bound, p, t - s).item()
