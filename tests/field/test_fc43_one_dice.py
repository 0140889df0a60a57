"""FC-43: one dice for all layers.

A port of progressive replacement drew one gate per batch for all layers, so the net was all old or all new, where the
method mixes. crossfade draws per site by default; drawing once for all is an option with a name (`granularity`),
which the plan, and so every receipt, tells.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import crossfade

from .models import data, net, plan

SITES, STEPS = 12, 200


def weights(gate: Any, seed: int = 0, steps: int = STEPS) -> torch.Tensor:
    """The gates of a run. Shapes: [steps, sites]."""
    model = net(SITES)
    fade = crossfade.install(model, plan(gate=gate, seed=seed), total_steps=1000, release="finalize")
    rows = []
    for step in range(steps):
        fade.seek(step)
        rows.append([float(site.blend.gate_weight) for site in fade.sites])
    return torch.tensor(rows)


PER_SITE = {
    "bernoulli": lambda: crossfade.Bernoulli(0.5),
    "bernoulli skip": lambda: crossfade.Bernoulli(0.5, "skip"),
    "gumbel": lambda: crossfade.Gumbel(0.5),
    "hardened gumbel": lambda: crossfade.Gumbel(0.5, temperature=0.01),
}


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", PER_SITE)
def test_sites_draw_independently(name: str, seed: int) -> None:
    drawn = weights(PER_SITE[name](), seed)
    correlation = torch.corrcoef(drawn.T)
    off_diagonal = correlation[~torch.eye(SITES, dtype=torch.bool)]
    # 66 pairs over 200 steps: a standard deviation of 0.07, so none should reach 0.3.
    assert float(off_diagonal.abs().max()) < 0.3
    assert float(off_diagonal.mean().abs()) < 0.02
    all_equal = ((drawn > 0.5).sum(1) % SITES == 0).sum()
    assert int(all_equal) <= 3  # 2 of 4096 by chance, in 200 steps
    assert float((drawn > 0.5).float().mean()) == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize("name", PER_SITE)
def test_steps_draw_independently_too(name: str) -> None:
    drawn = weights(PER_SITE[name]())
    for lag in (1, 2, 5):
        pairs = torch.stack((drawn[:-lag].flatten(), drawn[lag:].flatten()))
        assert abs(float(torch.corrcoef(pairs)[0, 1])) < 0.08


@pytest.mark.parametrize("kind", [crossfade.Bernoulli, crossfade.Gumbel])
def test_one_draw_for_all_is_an_option_with_a_name(kind: Any) -> None:
    drawn = weights(kind(0.5, granularity="shared"))
    assert bool((drawn == drawn[:, :1]).all())
    assert 0.35 < float((drawn[:, 0] > 0.5).float().mean()) < 0.65


@pytest.mark.parametrize("granularity", ["site", "shared"])
@pytest.mark.parametrize("kind", [crossfade.Bernoulli, crossfade.Gumbel])
def test_the_option_is_written_to_plan_and_receipt(kind: Any, granularity: Any) -> None:
    settings = plan(gate=kind("linear", granularity=granularity))
    assert settings.to_dict()["swaps"][0]["gate"]["granularity"] == granularity
    model = net()
    fade = crossfade.install(model, settings, total_steps=2)
    fade.seek(2)
    fade.finalize(probe=data()[0])
    assert fade.receipt.to_dict()["plan"]["swaps"][0]["gate"]["granularity"] == granularity
    shared = plan(gate=kind("linear", granularity="shared")).fingerprint()
    assert (settings.fingerprint() == shared) is (granularity == "shared")


def test_an_unknown_granularity_is_refused() -> None:
    for kind in (crossfade.Bernoulli, crossfade.Gumbel):
        with pytest.raises(crossfade.CrossfadeError, match=r'(?s)granularity.*"site" or "shared".*token'):
            kind(0.5, granularity="token")


def test_different_probabilities_at_different_sites_are_kept_apart() -> None:
    schedule = crossfade.schedules.PerSite([k / (SITES - 1) for k in range(SITES)])
    drawn = weights(crossfade.Bernoulli(schedule), steps=400)
    means = drawn.mean(0)
    for k in range(SITES):
        assert float(means[k]) == pytest.approx(k / (SITES - 1), abs=0.1)


def test_two_swaps_of_one_plan_draw_by_site_as_well() -> None:
    model = net(4)
    swaps = [
        crossfade.Swap(targets=f"blocks.{i}.attn", student=crossfade.students.Copy(), gate=crossfade.Bernoulli(0.5))
        for i in range(4)
    ]
    fade = crossfade.install(model, crossfade.Plan(swaps), total_steps=1000, release="finalize")
    rows = []
    for step in range(200):
        fade.seek(step)
        rows.append([site.weight for site in fade.sites])
    drawn = torch.tensor(rows)
    for a, b in itertools.combinations(range(4), 2):
        assert abs(float(torch.corrcoef(drawn[:, [a, b]].T)[0, 1])) < 0.3
