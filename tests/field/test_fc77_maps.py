"""FC-77: alignment needs outputs alone, so fused attention is no obstacle; maps cannot be asked for by mistake."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

import crossfade
from crossfade.errors import PlanError
from crossfade.lab.inputs import InputError
from crossfade.lab.methods import build
from crossfade.lab.vit import VisionTransformer
from crossfade.students import Normal, Reinit


def test_asking_for_maps_is_an_error_at_once_that_names_what_there_is() -> None:
    with pytest.raises(PlanError, match=r"relative \| mean \| sum \| cosine"):
        crossfade.DeepFeatureGuidance(reduction="attention-map")
    with pytest.raises(InputError, match="'relative', 'mean', 'sum' or 'cosine'"):
        build("dcr+dfg", {"reduction": "attention-map"})


def test_outputs_are_aligned_although_no_map_is_ever_formed(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    fused = functional.scaled_dot_product_attention
    monkeypatch.setattr(functional, "scaled_dot_product_attention", lambda *a, **k: calls.append(1) or fused(*a, **k))
    model = VisionTransformer(size=8, width=16, depth=2, heads=2, stem=(), classes=3)
    fade = crossfade.install(
        model, crossfade.Plan(targets="blocks.*.attn", student=Reinit(Normal(0.02))), total_steps=10
    )
    report = fade.align([torch.randn(32, 1, 8, 8, generator=torch.Generator().manual_seed(0))], steps=60)
    assert calls
    assert all(site.error < 0.9 * site.error_before for site in report.sites)
