"""Stop and resume equals never stopped: every gate, any step, before and after the teachers are gone."""

from __future__ import annotations

import copy
import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import crossfade
from tests.models import GATES, WIDTH, adamw, batch, difference, equal, gates, net, plan, train

STEPS = 7
GUIDANCE = {
    "none": None,
    "relative": crossfade.DeepFeatureGuidance(),
    "follows alpha": crossfade.DeepFeatureGuidance(weight=0.5, schedule="alpha", reduction="cosine"),
}


def begin(gate: str, guidance: str, target: str, release: Any, total: int = STEPS) -> tuple[nn.Module, crossfade.Fade]:
    model = net(layers=3)
    chosen = plan(gates()[gate](), GUIDANCE[guidance], targets=target, trains=("embed", "head"), seed=3)
    return model, crossfade.install(model, chosen, total_steps=total, release=release, metrics_every=2)


def round_trip(data: Any) -> Any:
    """Through a file, as a job that was killed has to; `weights_only` admits plain data and tensors alone."""
    file = io.BytesIO()
    torch.save(data, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def is_plain(data: Any) -> bool:
    if isinstance(data, Mapping):
        return type(data) is dict and all(isinstance(key, str) and is_plain(value) for key, value in data.items())
    if isinstance(data, list):
        return all(map(is_plain, data))
    return data is None or type(data) in (bool, int, float, str) or isinstance(data, Tensor)


@settings(max_examples=25)
@given(
    gate=st.sampled_from(GATES),
    guidance=st.sampled_from(sorted(GUIDANCE)),
    target=st.sampled_from(["blocks.*.attn", "blocks[0:2]"]),
    release=st.sampled_from(["when_done", "finalize"]),
    stops=st.sets(st.integers(0, STEPS), min_size=1, max_size=2).map(sorted),
)
def test_stop_and_resume_equals_never_stopped(
    gate: str, guidance: str, target: str, release: Any, stops: list[int]
) -> None:
    model, fade = begin(gate, guidance, target, release)
    optimizer = adamw(fade)
    fade.attach(optimizer)
    train(model, fade, optimizer, 0, STEPS)

    resumed, again = begin(gate, guidance, target, release)
    moved = adamw(again)
    again.attach(moved)
    at = 0
    for stop in stops:
        train(resumed, again, moved, at, stop)
        assert is_plain(again.state_dict())
        saved = round_trip({"model": resumed.state_dict(), "optimizer": moved.state_dict(), "fade": again.state_dict()})
        # A new process: base model, plan, optimizer, and only then the states.
        resumed, again = begin(gate, guidance, target, release)
        moved = adamw(again)
        resumed.load_state_dict(saved["model"])
        moved.load_state_dict(saved["optimizer"])
        again.load_state_dict(saved["fade"])
        again.attach(moved)
        assert again.step_count == stop
        at = stop
    train(resumed, again, moved, at, STEPS)
    assert difference(dict(model.state_dict()), dict(resumed.state_dict())) == []
    assert equal(fade.state_dict(), again.state_dict())
    assert [site.blend.teacher is None for site in again.sites] == [site.blend.teacher is None for site in fade.sites]
    ids, _ = batch()
    assert equal(again.finalize(probe=ids)(ids), fade.finalize(probe=ids)(ids))


def saved_at(step: int, gate: str = "deterministic", guidance: str = "relative") -> dict[str, Any]:
    model, fade = begin(gate, guidance, "blocks.*.attn", "finalize")
    optimizer = adamw(fade)
    fade.attach(optimizer)
    train(model, fade, optimizer, 0, step)
    return fade.state_dict()


def test_another_length_warns_and_the_saved_one_wins() -> None:
    saved = saved_at(2)
    _, fade = begin("deterministic", "relative", "blocks.*.attn", "finalize", total=2 * STEPS)
    with pytest.warns(crossfade.CrossfadeWarning, match="total_steps"):
        fade.load_state_dict(saved)
    assert (fade.step_count, fade.total_steps) == (2, STEPS)
    _, same = begin("deterministic", "relative", "blocks.*.attn", "finalize")
    same.load_state_dict(saved)
    assert [s.alpha for s in fade.sites] == [s.alpha for s in same.sites]


def test_rescale_keeps_the_new_length_and_stretches_the_schedule() -> None:
    _, fade = begin("deterministic", "relative", "blocks.*.attn", "finalize", total=2 * STEPS)
    fade.load_state_dict(saved_at(2), rescale=True)
    assert (fade.step_count, fade.total_steps) == (2, 2 * STEPS)
    assert fade.sites[0].alpha == crossfade.schedules.linear(until=0.6)(2 / (2 * STEPS))


def refused(fade: crossfade.Fade, saved: Any) -> None:
    """It is refused, and the fade is as it was."""
    before = fade.state_dict()
    with pytest.raises(crossfade.CrossfadeError):
        fade.load_state_dict(saved)
    assert equal(fade.state_dict(), before)


@pytest.mark.parametrize(
    ("gate", "guidance", "target"),
    [
        ("gumbel", "relative", "blocks.*.attn"),
        ("deterministic", "none", "blocks.*.attn"),
        ("deterministic", "relative", "blocks.0.attn"),
        ("deterministic", "relative", "blocks[0:2]"),
    ],
)
def test_the_state_of_another_plan_is_refused(gate: str, guidance: str, target: str) -> None:
    _, fade = begin(gate, guidance, target, "finalize")
    refused(fade, saved_at(2))


def test_the_state_on_another_base_is_refused() -> None:
    saved = saved_at(2)
    model = net(layers=3, seed=1)
    chosen = plan(gates()["deterministic"](), GUIDANCE["relative"], trains=("embed", "head"), seed=3)
    refused(crossfade.install(model, chosen, total_steps=STEPS), saved)


def _without(saved: dict[str, Any], *keys: str) -> dict[str, Any]:
    result = copy.deepcopy(saved)
    inner = result
    for key in keys[:-1]:
        inner = inner[key]
    del inner[keys[-1]]
    return result


@pytest.mark.parametrize(
    "keys",
    [
        ("version",),
        ("step",),
        ("plan",),
        ("sites", "blocks.1.attn"),
        ("sites", "blocks.2.attn", "power"),
        ("sites", "blocks.2.attn", "controller"),
        ("sites", "blocks.2.attn", "teacher_hash"),
    ],
)
def test_a_damaged_state_is_refused_as_a_whole(keys: tuple[str, ...]) -> None:
    saved = saved_at(2, gate="adaptive")
    _, fade = begin("adaptive", "relative", "blocks.*.attn", "finalize")
    refused(fade, _without(saved, *keys))


def test_a_plain_checkpoint_goes_to_the_teachers() -> None:
    base, other = net(), net(seed=5)
    fade = crossfade.install(base, plan(), total_steps=STEPS)
    students = copy.deepcopy(fade.sites[0].blend.student.state_dict())
    base.load_state_dict(other.state_dict())
    assert equal(base(batch()[0]), other(batch()[0]))
    assert difference(dict(students), dict(fade.sites[0].blend.student.state_dict())) == []


@dataclass
class Output:
    hidden: Tensor
    extra: Tensor | None = None


class Structured(nn.Module):
    """Returns a class of its own, which no plain data can tell."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Output:
        return Output(self.linear(x))


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Structured()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).hidden


def test_a_bare_student_keeps_answering_in_the_callers_structure_after_resume() -> None:
    def begin_structured() -> tuple[nn.Module, crossfade.Fade]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = Reader()
        chosen = plan(targets="inner", student=lambda teacher, site: nn.Linear(WIDTH, WIDTH), output="hidden")
        return model, crossfade.install(model, chosen, total_steps=2)

    x = torch.ones(1, WIDTH)
    model, fade = begin_structured()
    for _ in range(2):
        model(x).sum().backward()
        fade.step()
    resumed, again = begin_structured()
    resumed.load_state_dict(model.state_dict())
    again.load_state_dict(fade.state_dict())
    assert equal(resumed(x), model(x))
    assert equal(again.finalize(probe=x)(x), model(x))
