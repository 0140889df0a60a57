"""FC-27: torch's encoder layer has a fused fast path that reads the weights and never calls the new module.

In eval without gradients `nn.TransformerEncoderLayer` calls one kernel on its children's weights; hooks and the
children's `forward` are skipped. With a wrapper that forwards attributes, evaluation silently used the old weights.
In crossfade the blend keeps the fast path off wherever it stands inside such a layer, for single layers and stacks,
with padding (nested tensors) and without; and after finalize torch may use it again, on the students.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import crossfade
from crossfade.students import Reinit

from .models import seeded

# Where torch still takes its nested tensors it says that they are a prototype; that is not ours to silence or to fix.
pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")

D, L = 8, 6
TARGETS = {
    "attention": "**.self_attn",
    "first linear": "**.linear1",
    "second linear": "**.linear2",
    "norm": "**.norm1",
    "whole layers": "**.layers.*",
    "first layer": "**.layers.0",
    "last layer": "**.layers.1",
    "attention of the last": "**.layers.1.self_attn",
}


class Encoder(nn.Module):
    def __init__(self, *, nested: bool = True, norm_first: bool = False, batch_first: bool = True) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(D, 2, 16, dropout=0.0, batch_first=batch_first, norm_first=norm_first)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested and not norm_first and batch_first)
        self.batch_first = batch_first

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        x = x if self.batch_first else x.transpose(0, 1)
        out = self.encoder(x, src_key_padding_mask=padding)
        return out if self.batch_first else out.transpose(0, 1)


PADDING = torch.arange(L)[None, :] >= torch.tensor([6, 4, 3])[:, None]
KINDS: dict[str, dict[str, bool]] = {
    "post-norm": {},
    "no nested tensors": {"nested": False},
    "pre-norm": {"norm_first": True},
    "sequence first": {"batch_first": False},
}


def faded(kind: str, target: str, alpha: float, **more: Any) -> tuple[Encoder, crossfade.Fade]:
    model = seeded(lambda: Encoder(**KINDS[kind]))
    plan = crossfade.Plan(
        targets=TARGETS[target],
        student=Reinit(crossfade.students.Normal(0.3)),
        gate=crossfade.Deterministic(alpha),
        **more,
    )
    fade = crossfade.install(model, plan, total_steps=4, release="finalize", probe=lambda m: m(torch.randn(3, L, D)))
    for site in fade.sites:  # A norm at its initial value would equal its teacher.
        for p in site.blend.student.parameters():
            if p.dim() == 1:
                nn.init.normal_(p)
    return model, fade


def valid(out: Tensor, padding: Tensor | None) -> Tensor:
    return out if padding is None else out[~padding]


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kind", KINDS)
def test_evaluation_without_gradients_says_what_training_says(
    kind: str, target: str, alpha: float, padded: bool
) -> None:
    model, _ = faded(kind, target, alpha)
    x, padding = torch.randn(3, L, D), PADDING if padded else None
    train = valid(model.train()(x, padding), padding).detach()
    model.eval()
    with torch.no_grad():
        fast = valid(model(x, padding), padding)
    with torch.inference_mode():
        faster = valid(model(x, padding), padding)
    torch.testing.assert_close(fast, train)
    torch.testing.assert_close(faster, train)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_three_views_differ_in_fast_evaluation_as_in_training(kind: str, target: str) -> None:
    model, fade = faded(kind, target, 0.5)
    x = torch.randn(3, L, D)
    model.eval()
    seen = {}
    with torch.no_grad():
        for view in ("student", "teacher", "blend"):
            with fade.view(view):
                seen[view] = model(x, PADDING)[~PADDING]
        plain = seeded(lambda: Encoder(**KINDS[kind])).eval()
        original = plain(x, PADDING)
        original = original[~PADDING]
    torch.testing.assert_close(seen["teacher"], original, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(seen["student"], seen["teacher"], atol=1e-3)
    assert not torch.allclose(seen["blend"], seen["teacher"], atol=1e-3)


@pytest.mark.parametrize("probed", [False, True])
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kind", KINDS)
def test_finalize_gives_a_plain_encoder_that_answers_as_its_students_did(kind: str, target: str, probed: bool) -> None:
    # The probe runs in eval without gradients, where torch takes the fused kernel again once the blends are gone.
    model, fade = faded(kind, target, 0.0)
    x = torch.randn(3, L, D)
    model.eval()
    with torch.no_grad():
        before = model(x, PADDING)[~PADDING]
    plain = fade.finalize(probe=(lambda m: m(x, PADDING)) if probed else None)
    with torch.no_grad():
        after = plain(x, PADDING)[~PADDING]
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-5)
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in plain.modules())


@pytest.mark.parametrize("target", ["attention", "first linear", "whole layers"])
def test_revert_gives_the_fast_path_back(target: str) -> None:
    model, fade = faded("post-norm", target, 0.5)
    fade.revert()
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
    x = torch.randn(3, L, D)
    with torch.no_grad():
        assert torch.equal(model.eval()(x), seeded(Encoder).eval()(x))


def test_a_single_layer_that_is_the_model_keeps_off_the_fast_path() -> None:
    model = seeded(lambda: nn.TransformerEncoderLayer(D, 2, 16, dropout=0.0, batch_first=True))
    plan = crossfade.Plan(
        targets="self_attn", student=Reinit(crossfade.students.Normal(0.3)), gate=crossfade.Deterministic(0.0)
    )
    crossfade.install(model, plan, total_steps=4, release="finalize")
    x = torch.randn(3, L, D)
    train = model.train()(x).detach()
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(x), train)


def test_a_copy_keeps_off_the_fast_path_too() -> None:
    import copy

    model, _ = faded("post-norm", "attention", 0.0)
    twin = copy.deepcopy(model)
    x = torch.randn(3, L, D)
    train = twin.train()(x).detach()
    with torch.no_grad():
        torch.testing.assert_close(twin.eval()(x), train)


class Tanh(nn.Module):
    """An attention of another kind, with none of torch's attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(D, D)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, **rest: Any) -> tuple[Tensor, None]:
        return torch.tanh(self.fc(value)), None


@pytest.mark.parametrize("release", ["when_done", "finalize"])
def test_an_attention_of_another_kind_lives_in_torchs_layer_with_declared_attributes(release: Any) -> None:
    # torch's layer asks its attention for these before it decides on the fast path.
    names = ("batch_first", "_qkv_same_embed_dim", "num_heads", "in_proj_bias")
    model = seeded(lambda: Encoder(nested=False))
    plan = crossfade.Plan(
        targets="**.self_attn", student=lambda t, s: Tanh(), gate=crossfade.Deterministic("linear"), carry=names
    )
    x = torch.randn(3, L, D)
    fade = crossfade.install(model, plan, total_steps=2, release=release, probe=x)
    for step in range(3):
        fade.seek(step)
        train = model.train()(x).detach()
        with torch.no_grad():
            torch.testing.assert_close(model.eval()(x), train)


def test_alignment_and_calibration_reach_the_sites() -> None:
    for target in ("attention", "first linear"):
        _, fade = faded("post-norm", target, 1.0)
        batch = torch.randn(3, L, D)
        assert all(power > 0.0 for power in fade.calibrate([batch]).values())
        report = fade.align([batch, batch], steps=3)
        assert report.samples == 6
