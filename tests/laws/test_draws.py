"""Gate draws are a function of (seed, site, step) alone, fair, independent, and touch no global random state."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import crossfade
from crossfade.gates import uniform
from tests.models import GATES, batch, difference, gates, net, plan, random_states

SITES = [f"blocks.{i}.attn" for i in range(4)]
DRAWS = 4000


def test_a_draw_is_the_same_number_on_every_machine_and_in_every_version() -> None:
    # Written down once: a checkpoint of today must resume with the same gates tomorrow.
    assert uniform(0, "blocks.0.attn", 7) == RECORDED[0]
    assert uniform(2**40, "encoder.layer[0:2]", 10**6) == RECORDED[1]
    assert uniform(-1, "", 0) == RECORDED[2]


RECORDED = (0.28545249977645815, 0.5771229932614758, 0.24016133288855934)


@given(seed=st.integers(-(2**63), 2**63), site=st.text(max_size=20), step=st.integers(0, 10**9))
def test_a_draw_lies_strictly_inside_0_and_1(seed: int, site: str, step: int) -> None:
    assert 0.0 < uniform(seed, site, step) < 1.0
    assert uniform(seed, site, step) == uniform(seed, site, step)


@given(gate=st.sampled_from(GATES[:5]), steps=st.permutations(range(8)), seed=st.integers(0, 99))
def test_weights_depend_on_seed_site_and_step_alone(gate: str, steps: list[int], seed: int) -> None:
    made = gates(crossfade.schedules.linear(0.9, 0.1))[gate]()
    fade = crossfade.install(net(layers=3), plan(made, seed=seed), total_steps=8, release="finalize")
    torch.manual_seed(seed)  # A function of the plan's seed, not of the global one.
    for step in steps:  # In any order, after whatever history.
        fade.seek(step)
        for site in fade.sites:
            key = "" if gate == "bernoulli_shared" else site.path
            assert site.weight == made.weight(site.alpha, uniform(seed, key, step))
            assert site.blend.gate_weight.item() == torch.tensor(site.weight, dtype=torch.float32).item()


def test_another_model_or_another_site_beside_it_does_not_change_a_draw() -> None:
    gate = crossfade.Bernoulli(0.5)
    few = crossfade.install(net(layers=3), plan(gate, targets="blocks.1.attn"), total_steps=40)
    many = crossfade.install(net(layers=4, kind="post_norm"), plan(gate), total_steps=40)
    here = next(site for site in many.sites if site.path == "blocks.1.attn")
    for step in range(40):
        few.seek(step)
        many.seek(step)
        assert few.sites[0].weight == here.weight


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.8, 1.0])
def test_bernoulli_takes_the_teacher_with_frequency_alpha(p: float) -> None:
    gate = crossfade.Bernoulli(p)
    for site in SITES:
        frequency = sum(gate.weight(p, uniform(0, site, k)) for k in range(DRAWS)) / DRAWS
        # Four standard deviations; exact at both ends.
        assert abs(frequency - p) <= 4.0 * math.sqrt(p * (1.0 - p) / DRAWS)


@pytest.mark.parametrize("alpha", [0.1, 0.3, 0.9])
@pytest.mark.parametrize("temperature", [0.2, 1.0])
def test_gumbel_exceeds_one_half_with_frequency_alpha(alpha: float, temperature: float) -> None:
    gate = crossfade.Gumbel(alpha, temperature)
    above = sum(gate.weight(alpha, uniform(1, "site", k)) > 0.5 for k in range(DRAWS)) / DRAWS
    assert abs(above - alpha) <= 4.0 * math.sqrt(alpha * (1.0 - alpha) / DRAWS)


@given(alpha=st.floats(0.0, 1.0), draw=st.floats(1e-16, 1.0 - 1e-16), temperature=st.floats(1e-3, 1e3))
def test_every_gate_stays_inside_0_and_1_and_is_exact_at_both_ends(
    alpha: float, draw: float, temperature: float
) -> None:
    for gate in (crossfade.Deterministic(), crossfade.Bernoulli(), crossfade.Gumbel(temperature=temperature)):
        assert 0.0 <= gate.weight(alpha, draw) <= 1.0
        assert gate.weight(0.0, draw) == 0.0
        assert gate.weight(1.0, draw) == 1.0
    assert crossfade.Deterministic().weight(alpha, draw) == alpha
    assert crossfade.Bernoulli().weight(alpha, draw) in (0.0, 1.0)


def correlation(a: list[float], b: list[float]) -> float:
    x, y = torch.tensor(a, dtype=torch.float64), torch.tensor(b, dtype=torch.float64)
    return torch.corrcoef(torch.stack((x, y)))[0, 1].item()


def test_draws_are_uncorrelated_over_sites_steps_and_seeds() -> None:
    streams = {site: [uniform(0, site, k) for k in range(DRAWS)] for site in SITES}
    streams |= {f"seed {seed}": [uniform(seed, SITES[0], k) for k in range(DRAWS)] for seed in (1, 2)}
    bound = 4.0 / math.sqrt(DRAWS)
    for a, b in itertools.combinations(streams.values(), 2):
        assert abs(correlation(a, b)) <= bound
        for lag in (1, 2):
            assert abs(correlation(a[lag:], b[:-lag])) <= bound
    for stream in streams.values():
        assert abs(correlation(stream[1:], stream[:-1])) <= bound
        # And gates, which is what is used of them.
        hard = [float(u < 0.3) for u in stream]
        assert abs(correlation(hard[1:], hard[:-1])) <= bound


def test_a_shared_draw_is_one_for_all_sites_and_varies_over_steps() -> None:
    gate = crossfade.Bernoulli(0.5, granularity="shared")
    fade = crossfade.install(net(layers=4), plan(gate), total_steps=50, release="finalize")
    seen = set()
    for step in range(50):
        fade.seek(step)
        weights = {site.weight for site in fade.sites}
        assert len(weights) == 1
        seen |= weights
    assert seen == {0.0, 1.0}


@pytest.mark.parametrize("name", GATES)
def test_nothing_moves_the_global_random_states(name: str) -> None:
    # In train mode with dropout 0: what draws is then ours alone.
    model = net(layers=3)
    ids, _ = batch()
    torch.rand(3)
    before = random_states()

    def unmoved(what: str) -> None:
        assert difference(before, random_states()) == [], what

    chosen = plan(gates()[name](), crossfade.DeepFeatureGuidance())
    fade = crossfade.install(model, chosen, total_steps=6, release="finalize", probe=ids, metrics_every=1)
    unmoved("install")
    fade.calibrate([ids])
    unmoved("calibrate")
    fade.align([ids, batch(1)[0]], steps=3, batch_size=2)
    unmoved("align")
    for step in range(7):
        fade.seek(step)
        model(ids)
        fade.ledger.clear()
        fade.log()
        fade.state_dict()
        with fade.view("student"):
            model(ids)
        unmoved(f"step {step}")
    fade.finalize(probe=ids, recalibrate=[ids])
    unmoved("finalize")


@pytest.mark.parametrize("name", GATES)
def test_watching_a_run_does_not_change_it(name: str) -> None:
    # Metrics in a step whose student has no part in the output must not consume the run's dropout stream.
    from tests.models import adamw, train

    results = []
    for metrics_every in (0, 1):
        torch.manual_seed(0)
        model = net(layers=2, dropout=0.5)
        chosen = plan(gates()[name](), targets="blocks.*.mlp")
        fade = crossfade.install(model, chosen, total_steps=5, metrics_every=metrics_every)
        optimizer = adamw(fade)
        fade.attach(optimizer)
        train(model, fade, optimizer, 0, 5)
        results.append(dict(model.state_dict()))
    assert difference(*results) == []
