"""FC-08: keys moved when a wrapper was added, and a lenient load hid it.

All tensors of a checkpoint were dropped because one prefix differed and the load was not strict; the model then ran
with random weights. A checkpoint of the plain model loads into a faded one with nothing missing or unexpected: its
tensors go to the teachers, the students stay. After finalize the keys outside the sites are those of the plain model.
A load that brings nothing for a site, or only a part of it, is an error, even when `strict=False` was asked for in
the first case.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

import crossfade

from .models import Net, adamw, data, net, plan, same, train, values

TARGETS = {"attention": "blocks.*.attn", "one leaf": "blocks.0.attn.q", "whole block": "blocks.*", "run": "blocks[0:2]"}


def faded(targets: str, **more: Any) -> tuple[Net, crossfade.Fade]:
    model = net(3)
    student = crossfade.students.Copy() if "[" in targets else crossfade.students.Reinit("reset_parameters")
    settings = {"total_steps": 4, "release": "finalize"} | more
    return model, crossfade.install(model, plan(targets=targets, student=student), **settings)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("name", TARGETS)
def test_a_plain_checkpoint_goes_to_the_teachers_and_leaves_the_students(name: str, strict: bool) -> None:
    model, fade = faded(TARGETS[name])
    other = net(3, seed=1)
    students = [values(site.blend.student) for site in fade.sites]
    result = model.load_state_dict(other.state_dict(), strict=strict)
    assert (result.missing_keys, result.unexpected_keys) == ([], [])
    x, _ = data()
    with fade.view("teacher"):
        assert torch.equal(model(x), other(x))
    assert all(same(values(s.blend.student), old) for s, old in zip(fade.sites, students, strict=True))
    assert torch.equal(fade.revert()(x), other(x))


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("name", TARGETS)
def test_a_checkpoint_in_mid_fade_returns_everything_that_trains(name: str, strict: bool) -> None:
    model, fade = faded(TARGETS[name], release="when_done")
    train(model, fade, adamw(fade), range(2))
    saved = {key: value.clone() for key, value in model.state_dict().items()}
    assert not any(".teacher." in key for key in saved)
    twin, twin_fade = faded(TARGETS[name], release="when_done")
    result = twin.load_state_dict(saved, strict=strict)
    assert (result.missing_keys, result.unexpected_keys) == ([], [])
    twin_fade.load_state_dict(fade.state_dict())
    x, _ = data()
    assert torch.equal(twin.eval()(x), model.eval()(x))


@pytest.mark.parametrize("name", ["attention", "one leaf", "whole block"])
def test_after_finalize_the_keys_are_the_plain_models(name: str) -> None:
    plain_keys = list(net(3).state_dict())
    model, fade = faded(TARGETS[name])
    train(model, fade, adamw(fade), range(4))
    assert list(fade.finalize(probe=data()[0]).state_dict()) == plain_keys


def test_after_finalize_only_keys_below_the_sites_differ_for_another_architecture() -> None:
    model = net(3)
    before = set(model.state_dict())
    fade = crossfade.install(model, plan(student=lambda t, s: Wide()), total_steps=4)
    fade.seek(4)
    after = set(fade.finalize(probe=data()[0]).state_dict())
    assert after != before
    assert all(re.fullmatch(r"blocks\.\d\.attn\..*", key) for key in after ^ before)


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor, mask: Any = None) -> torch.Tensor:
        return self.down(self.up(x).relu())


PREFIXES = {
    "another prefix": lambda key: "module." + key,
    "another name of the site": lambda key: key.replace(".attn.", ".attention."),
    "nothing of the site": lambda key: None if ".attn." in key else key,
}


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("name", PREFIXES)
def test_a_load_that_brings_nothing_for_a_site_is_an_error_even_when_lenient(name: str, strict: bool) -> None:
    model, fade = faded("blocks.*.attn")
    before = [values(site.blend) for site in fade.sites]
    moved = {PREFIXES[name](key): value for key, value in net(3, seed=1).state_dict().items()}
    moved.pop(None, None)
    with pytest.raises(RuntimeError, match=r"blocks\.0\.attn: none of the \d+ keys"):
        model.load_state_dict(moved, strict=strict)
    assert all(same(values(site.blend), old) for site, old in zip(fade.sites, before, strict=True))


@pytest.mark.parametrize("kind", ["plain", "mid-fade"])
@pytest.mark.parametrize("targets", ["blocks.*.attn", "blocks.*", "blocks[0:2]"])
def test_a_strict_load_names_a_tensor_that_is_missing_inside_a_site(targets: str, kind: str) -> None:
    model, _ = faded(targets)
    saved = (net(3, seed=1) if kind == "plain" else model).state_dict()
    lost = next(key for key in saved if key.startswith("blocks.0.") and key.endswith("q.weight"))
    del saved[lost]
    with pytest.raises(RuntimeError, match=r"(?s)Missing key.*q\.weight"):
        model.load_state_dict(saved)


@pytest.mark.parametrize("kind", ["plain", "mid-fade"])
def test_a_strict_load_names_a_tensor_that_is_too_much_inside_a_site(kind: str) -> None:
    model, _ = faded("blocks.*.attn")
    saved = (net(3, seed=1) if kind == "plain" else model).state_dict()
    saved["blocks.0.attn.extra"] = torch.zeros(1)
    with pytest.raises(RuntimeError, match=r"Unexpected key.*blocks\.0\.attn\.extra"):
        model.load_state_dict(saved)


def test_a_plain_checkpoint_loaded_after_a_save_is_hashed_anew() -> None:
    # The hash of the teachers is what a resume is checked against: it must be of those that are there now.
    model, fade = faded("blocks.*.attn")
    fade.state_dict()
    other = net(3, seed=1)
    model.load_state_dict(other.state_dict())
    saved = fade.state_dict()
    fresh = crossfade.install(other, plan(), total_steps=4, release="finalize")
    fresh.load_state_dict(saved)
    assert fresh.step_count == 0


def test_finalized_weights_load_into_a_finalized_twin_strictly() -> None:
    ends = []
    for seed in (0, 1):
        model = net(3, seed=seed)
        fade = crossfade.install(model, plan(student=lambda t, s: Wide()), total_steps=4)
        fade.seek(4)
        ends.append(fade.finalize())
    ends[1].load_state_dict(ends[0].state_dict())
    x, _ = data()
    assert torch.equal(ends[0](x), ends[1](x))
