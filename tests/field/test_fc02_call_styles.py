"""FC-02: libraries call their modules by position, by keyword only, or both, and rename keywords from time to time.

Wrappers and hooks that looked at positional arguments saw an empty tuple or only part of the call (seen with current
transformers, whose self-attention gets everything by keyword). crossfade hands teacher and student exactly the call
that came, finds the tensor that the module transforms however it is named, and never drops a keyword that was not
declared droppable: it names the keyword and both classes instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import crossfade
from crossfade.errors import StudentError
from crossfade.students import Reinit

from .models import Holder, logits, tiny_bert, tiny_llama, tiny_vit, tokens

# An additive mask is a floating-point tensor too: it must not pass for the input.
BIAS = torch.full((1, 5, 1), 0.25)

STYLES: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "positional": lambda f, x: f(x, BIAS, 2.0),
    "keywords": lambda f, x: f(x=x, bias=BIAS, scale=2.0),
    "keywords in another order": lambda f, x: f(bias=BIAS, scale=2.0, x=x),
    "first positional": lambda f, x: f(x, bias=BIAS, scale=2.0),
}


class Listener(nn.Module):
    """A module that remembers what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.heard = nn.Linear(4, 4), []

    def forward(self, x: Tensor, bias: Tensor | None = None, scale: float = 1.0) -> Tensor:
        self.heard.append((x.detach().clone(), bias, scale))
        return self.fc(x) * scale + bias


class Greedy(Listener):
    """As above, with an open signature."""

    def forward(self, x: Tensor, **rest: Any) -> Tensor:
        return super().forward(x, **rest)


class Deaf(nn.Module):
    """A student that takes the input alone."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x)


def install(
    style: str, student: type[nn.Module] = Listener, alpha: float = 0.5, **more: Any
) -> tuple[nn.Module, crossfade.Fade]:
    model = Holder(Listener(), STYLES[style])
    settings = {"targets": "fc", "student": lambda teacher, site: student(), "gate": crossfade.Deterministic(alpha)}
    probe = more.pop("probe", None)
    fade = crossfade.install(model, crossfade.Plan(**(settings | more)), total_steps=4, probe=probe, release="finalize")
    return model, fade


@pytest.mark.parametrize("alpha", [1.0, 0.5, 0.0])
@pytest.mark.parametrize("style", STYLES)
def test_teacher_and_student_hear_the_same_however_they_are_called(style: str, alpha: float) -> None:
    model, fade = install(style, alpha=alpha, guidance=crossfade.DeepFeatureGuidance())
    x = torch.randn(2, 5, 4)
    for _ in range(2):  # The first call of a blend copies its input, later ones need not.
        model(x)
    blend = model.fc
    assert len(blend.teacher.heard) == len(blend.student.heard) == 2
    for heard in (*blend.teacher.heard, *blend.student.heard):
        assert torch.equal(heard[0], x)
        assert torch.equal(heard[1], BIAS)
        assert heard[2] == 2.0
    assert float(fade.guidance().detach()) > 0.0


@pytest.mark.parametrize("style", STYLES)
def test_alignment_finds_the_input_however_it_is_passed(style: str) -> None:
    _, fade = install(style, alpha=1.0)
    batches = [torch.randn(6, 5, 4) for _ in range(4)]
    report = fade.align(batches, steps=60, lr=3e-2, check_every=20, patience=None)
    assert report.samples == 24  # Cut along the batch of the input, not of the mask.
    assert report.sites[0].error < 0.5 * report.sites[0].error_before


@pytest.mark.parametrize("style", STYLES)
def test_the_residual_is_measured_against_the_input_however_it_is_passed(style: str) -> None:
    model, fade = install(style, alpha=1.0, residual=True)
    x = torch.randn(2, 5, 4)
    teacher = model.fc.teacher
    with torch.no_grad():
        expected = (teacher(x, BIAS, 2.0) - x).square().mean()
    assert fade.calibrate([x])["fc"] == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize("style", STYLES)
def test_a_keyword_that_the_student_lacks_is_named_before_anything_changes(style: str) -> None:
    with pytest.raises(StudentError, match=r"(?s)where: fc.*Deaf\.forward.*Listener") as caught:
        install(style, Deaf, probe=torch.randn(2, 5, 4))
    if style != "positional":
        assert "bias" in str(caught.value)
        assert "drop=" in str(caught.value)


def test_without_a_probe_the_keyword_is_named_at_the_first_call_of_the_student() -> None:
    model, _ = install("keywords", Deaf)
    with pytest.raises(StudentError, match=r"(?s)where: fc.*Deaf.*Listener.*bias.*drop=\['bias', 'scale'\]"):
        model(torch.randn(2, 5, 4))


@pytest.mark.parametrize("style", [style for style in STYLES if style != "positional"])
def test_declared_keywords_are_dropped_for_the_student_alone_and_stay_so_after_finalize(style: str) -> None:
    x = torch.randn(2, 5, 4)
    model, fade = install(style, Deaf, drop=("bias", "scale"), probe=x)
    model(x)
    assert model.fc.teacher.heard[-1][2] == 2.0
    plain = fade.finalize(probe=x, force=True)
    assert plain(x).shape == x.shape


def test_dropping_one_keyword_does_not_drop_another() -> None:
    with pytest.raises(StudentError, match=r"(?s)where: fc.*scale"):
        install("keywords", Deaf, drop=("bias",), probe=torch.randn(2, 5, 4))


@pytest.mark.parametrize("style", ["keywords", "keywords in another order", "first positional"])
def test_an_unknown_extra_keyword_reaches_an_open_signature(style: str) -> None:
    model, _ = install(style, Greedy)
    model(torch.randn(2, 5, 4))
    assert torch.equal(model.fc.student.heard[-1][1], BIAS)


REAL: dict[str, tuple[Callable[..., nn.Module], Any, str]] = {
    "bert": (tiny_bert, tokens(), "bert.encoder.layer.*.attention"),
    "bert, whole layers": (tiny_bert, tokens(), "bert.encoder.layer.*"),
    "llama": (tiny_llama, tokens(), "model.layers.*.self_attn"),
    "llama, whole layers": (tiny_llama, tokens(), "model.layers.*"),
    "llama, mlp": (tiny_llama, tokens(), "model.layers.*.mlp"),
    "vit": (tiny_vit, torch.randn(2, 3, 16, 16), "blocks.*.attn"),
    "vit, whole blocks": (tiny_vit, torch.randn(2, 3, 16, 16), "blocks.*"),
}


@pytest.mark.parametrize("name", REAL)
def test_real_modules_fade_align_and_finalize_with_the_calls_of_their_library(name: str) -> None:
    make, batch, targets = REAL[name]
    model = make()
    feed = (lambda: logits(model(**batch))) if isinstance(batch, dict) else (lambda: logits(model(batch)))
    model.eval()
    before = feed()
    fade = crossfade.install(
        model,
        crossfade.Plan(
            targets=targets,
            student=Reinit(),
            gate=crossfade.Deterministic("linear"),
            guidance=crossfade.DeepFeatureGuidance(),
        ),
        total_steps=3,
        probe=batch,
    )
    assert torch.equal(feed(), before)
    report = fade.align([batch] * 2, steps=3)
    assert report.samples == 4
    optimizer = torch.optim.AdamW(fade.parameter_groups(), lr=1e-2)
    fade.attach(optimizer)
    for _ in range(3):
        model.train()
        (feed().square().mean() + fade.guidance()).backward()
        assert all(p.grad is not None for site in fade.sites for p in site.blend.student.parameters())
        optimizer.step()
        optimizer.zero_grad()
    model = fade.finalize(probe=batch)
    assert not any("crossfade" in type(module).__module__ for module in model.modules())
