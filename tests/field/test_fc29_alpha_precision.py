"""FC-29: a model cast rounded alpha; and what averages a model averaged alpha too.

Float32 buffers were cast with the model and lost digits: bfloat16 kept 507 of 1001 values, and accumulating 0.001
stopped at 0.5. In crossfade alpha is a float32 value outside parameters and buffers, set from the formula at every
step: casts, checkpoints, DDP and averaged copies cannot touch it, and an averaged copy follows by
`handle(copy).follow(fade)`.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import crossfade
from crossfade.errors import CrossfadeWarning
from crossfade.students import Reinit

from .models import Holder, Net, adamw, data, net, plan, train

CASTS: dict[str, Callable[[nn.Module], Any]] = {
    "to bfloat16": lambda m: m.to(torch.bfloat16),
    "bfloat16()": lambda m: m.bfloat16(),
    "half()": lambda m: m.half(),
    "double()": lambda m: m.double(),
    "to device and dtype": lambda m: m.to("cpu", torch.float16),
    "there and back": lambda m: m.half().float(),
    "type()": lambda m: m.type(torch.bfloat16),
    "to like": lambda m: m.to(torch.zeros(1, dtype=torch.bfloat16)),
    "each module": lambda m: [child.to(torch.bfloat16) for child in m.modules()],
    "deepcopy": lambda m: copy.deepcopy(m).half(),
}


def faded(steps: int = 1000, gate: Any = None) -> tuple[Net, crossfade.Fade]:
    model = net()
    plan_ = plan(gate=gate or crossfade.Deterministic("linear"))
    return model, crossfade.install(model, plan_, total_steps=steps, release="finalize")


@pytest.mark.parametrize("name", CASTS)
def test_a_cast_leaves_1001_distinct_values(name: str) -> None:
    model, fade = faded()
    CASTS[name](model)
    seen = set()
    blend = fade.sites[0].blend
    for step in range(1001):
        fade.seek(step)
        assert blend.gate_alpha.dtype == torch.float32
        assert blend.gate_alpha.shape == ()
        assert float(blend.gate_alpha) == pytest.approx(1.0 - step / 1000, abs=1e-7)
        seen.add(float(blend.gate_alpha))
    assert len(seen) == 1001
    assert (max(seen), min(seen)) == (1.0, 0.0)


@pytest.mark.parametrize("name", CASTS)
def test_a_cast_in_the_middle_does_not_move_alpha(name: str) -> None:
    model, fade = faded()
    fade.seek(333)
    before = [(s.alpha, float(s.blend.gate_alpha)) for s in fade.sites]
    CASTS[name](model)
    assert [(s.alpha, float(s.blend.gate_alpha)) for s in fade.sites] == before


def test_alpha_is_set_from_the_formula_and_never_accumulated() -> None:
    _, fade = faded()
    for _ in range(1000):
        fade.step()
    assert float(fade.sites[0].blend.gate_alpha) == 0.0
    _, jumped = faded()
    jumped.seek(777)
    _, walked = faded()
    for _ in range(777):
        walked.step()
    assert float(jumped.sites[0].blend.gate_alpha) == float(walked.sites[0].blend.gate_alpha)


@pytest.mark.parametrize("gate", [crossfade.Deterministic("linear"), crossfade.Gumbel("linear")])
def test_alpha_and_gate_are_in_no_checkpoint_and_no_parameter_list(gate: Any) -> None:
    model, fade = faded(gate=gate)
    fade.seek(400)
    scalars = [n for n, t in [*model.named_parameters(), *model.named_buffers()] if t.dim() == 0]
    assert scalars == []
    assert not any(value.dim() == 0 for value in model.state_dict().values())
    before = float(fade.sites[0].blend.gate_alpha)
    other, _ = faded(gate=gate)
    model.load_state_dict(other.state_dict())
    assert float(fade.sites[0].blend.gate_alpha) == before


def test_another_default_dtype_does_not_change_alpha() -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = net()
        fade = crossfade.install(model, plan(), total_steps=1000)
        fade.seek(1)
        assert fade.sites[0].blend.gate_alpha.dtype == torch.float32
        assert float(fade.sites[0].blend.gate_alpha) == pytest.approx(0.999, abs=1e-7)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_full_half_precision_evaluation_uses_the_same_alpha(dtype: torch.dtype) -> None:
    model, fade = faded()
    fade.seek(501)
    x, _ = data()
    wide = model.eval()(x)
    narrow = model.to(dtype)(x.to(dtype)).float()
    torch.testing.assert_close(narrow, wide, rtol=0.1, atol=0.05)
    assert float(fade.sites[0].blend.gate_alpha) == pytest.approx(0.499, abs=1e-7)


# ---- averaged copies ------------------------------------------------------------------------------------------------


def average(model: nn.Module) -> nn.Module:
    return AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))


def average_buffers(model: nn.Module) -> nn.Module:
    return AveragedModel(model, avg_fn=lambda a, b, n: 0.5 * a + 0.5 * b, use_buffers=True)


def ema(model: nn.Module) -> nn.Module:
    from timm.utils import ModelEmaV3

    return ModelEmaV3(model, decay=0.5)


AVERAGES: dict[str, tuple[Callable[[nn.Module], nn.Module], str]] = {
    "torch": (average, "update_parameters"),
    "torch with buffers": (average_buffers, "update_parameters"),
    "timm": (ema, "update"),
}


def trained(
    name: str, release: Any, follow_first: bool, steps: int = 6
) -> tuple[Net, nn.Module, dict[str, torch.Tensor]]:
    """A fade over `steps` with an average of decay 1/2 beside it, and the average computed by hand."""
    make, update = AVERAGES[name]
    model = net()
    fade = crossfade.install(model, plan(), total_steps=steps, release=release)
    optimizer = adamw(fade)
    averaged = make(model)
    twin = crossfade.handle(averaged.module)
    expected = {k: v.clone() for k, v in model.state_dict().items()}
    for step in range(steps):
        train(model, fade, optimizer, [step])
        if follow_first:
            twin.follow(fade)
        getattr(averaged, update)(model)
        twin.follow(fade)
        now = model.state_dict()
        # Torch's copies the parameters at its first update.
        share = 0.0 if step == 0 and name != "timm" else 0.5
        expected = {key: share * expected[key] + (1 - share) * now[key] for key in expected}
    return model, averaged, expected


def test_an_average_updated_too_early_is_told_of() -> None:
    # Torch's average pairs parameters by position, and the original's have moved up where a teacher was released.
    # Mostly shapes then differ and torch raises; where the site comes last, nothing but the warning tells.
    model = Holder(nn.Linear(4, 4), lambda fc, x: fc(x))
    plan = crossfade.Plan(targets="fc", student=Reinit("reset_parameters", seed=0))
    fade = crossfade.install(model, plan, total_steps=2)
    optimizer = torch.optim.SGD(fade.parameter_groups(), lr=0.1)
    fade.attach(optimizer)
    averaged = average(model)
    twin = crossfade.handle(averaged.module)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()  # Of two steps: the blend is over, and the teacher goes.
    averaged.update_parameters(model)
    with pytest.warns(CrossfadeWarning, match="before `follow`"):
        twin.follow(fade)
    twin.follow(fade)  # Once is enough.


@pytest.mark.parametrize(("release", "follow_first"), [("when_done", True), ("finalize", True), ("finalize", False)])
@pytest.mark.parametrize("name", AVERAGES)
def test_an_averaged_copy_averages_the_students_and_follows_alpha(name: str, release: str, follow_first: bool) -> None:
    # `when_done` lets teachers go during the run: an average that pairs parameters by position must not slip.
    model, averaged, expected = trained(name, release, follow_first)
    twin = crossfade.handle(averaged.module)
    for key, value in averaged.module.state_dict().items():
        torch.testing.assert_close(value, expected[key], msg=lambda text, key=key: f"{key}: {text}")
    assert twin.step_count == 6
    assert [site.alpha for site in twin.sites] == [0.0, 0.0]
    assert [float(site.blend.gate_alpha) for site in twin.sites] == [0.0, 0.0]
    plain = twin.finalize(probe=data()[0])
    assert not any("crossfade" in type(module).__module__ for module in plain.modules())
    assert "_crossfade" in vars(model)


def test_an_average_made_in_the_middle_has_the_alpha_of_its_original() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model, fade = faded(10)
        fade.seek(4)
        for make in (average, ema):
            copied = make(model).module
            assert [site.alpha for site in crossfade.handle(copied).sites] == [0.6, 0.6]
            x, _ = data()
            assert torch.equal(copied.eval()(x), model.eval()(x))
            fade.seek(5)
            assert [site.alpha for site in crossfade.handle(copied).sites] == [0.6, 0.6]
            crossfade.handle(copied).follow(fade)
            assert torch.equal(copied(x), model(x))
            fade.seek(4)
