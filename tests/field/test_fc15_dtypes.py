"""FC-15: the student had another dtype than the teacher.

Fresh modules were float32 inside a bfloat16 model: matmul dtype errors, or a blend that promoted the residual stream
to float32. crossfade builds students in the teacher's dtype unless they ask to keep their own, and what leaves a site
has the teacher's dtype at every alpha, also at 0 and after the fade.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import crossfade
from crossfade.errors import OutputError

from .models import WIDTH, Mixer, Net, data, net, plan

HALF = [torch.bfloat16, torch.float16]
ALPHAS = [1.0, 0.7, 0.0]
STUDENTS: dict[str, Any] = {
    "default build": lambda teacher, site: Mixer(),
    "copy": crossfade.students.Copy(),
    "reinit": crossfade.students.Reinit("reset_parameters"),
    "normal": crossfade.students.Reinit(crossfade.students.Normal(0.1)),
    "built in float64": lambda teacher, site: Mixer().double(),
}


def watch(model: Net) -> list[torch.dtype]:
    """The dtypes that leave the sites."""
    seen: list[torch.dtype] = []
    for block in model.blocks:
        block.attn.register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    return seen


def faded(dtype: torch.dtype, student: Any, alpha: float, **more: Any) -> tuple[Net, crossfade.Fade]:
    model = net().to(dtype)
    settings = {"student": student, "gate": crossfade.Deterministic(alpha)} | more
    return model, crossfade.install(model, plan(**settings), total_steps=10, release="finalize")


@pytest.mark.parametrize("name", STUDENTS)
@pytest.mark.parametrize("dtype", [*HALF, torch.float32, torch.float64])
def test_the_student_comes_in_the_teachers_dtype(dtype: torch.dtype, name: str) -> None:
    _, fade = faded(dtype, STUDENTS[name], 0.5)
    for site in fade.sites:
        assert {t.dtype for t in site.blend.student.state_dict().values()} == {dtype}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("guided", [True, False])
@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("dtype", [*HALF, torch.float64])
def test_nothing_is_promoted_at_any_alpha(dtype: torch.dtype, alpha: float, guided: bool, training: bool) -> None:
    guidance = crossfade.DeepFeatureGuidance() if guided else None
    model, fade = faded(dtype, STUDENTS["default build"], alpha, guidance=guidance)
    seen = watch(model)
    out = model.train(training)(data()[0].to(dtype))
    assert set(seen) == {dtype}
    assert out.dtype == dtype
    if training and guided:
        assert fade.guidance().dtype in (torch.float32, torch.float64)


@pytest.mark.parametrize("gate", [crossfade.Bernoulli(0.5), crossfade.Bernoulli(0.5, "skip"), crossfade.Gumbel(0.5)])
def test_no_gate_promotes(gate: Any) -> None:
    model, fade = faded(torch.bfloat16, STUDENTS["default build"], 0.5, gate=gate)
    seen = watch(model)
    for step in range(4):
        fade.seek(step)
        model(data()[0].bfloat16()).sum().backward()
    assert set(seen) == {torch.bfloat16}


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
def test_under_autocast_a_step_runs_and_gradients_have_the_parameters_dtype(weights: Any, alpha: float) -> None:
    model, fade = faded(weights, STUDENTS["default build"], alpha, guidance=crossfade.DeepFeatureGuidance())
    x, y = data()
    with torch.autocast("cpu", torch.bfloat16):
        loss = cross_entropy(model(x.to(weights)), y) + fade.guidance()
    loss.backward()
    for site in fade.sites:
        assert {p.grad.dtype for p in site.blend.student.parameters()} == {weights}
        assert all(bool(p.grad.isfinite().all()) for p in site.blend.student.parameters())


class Masters(nn.Module):
    """Keeps float32 weights in a half-precision model; casts its output back, or forgets to."""

    crossfade_keep_dtype = True

    def __init__(self, back: bool) -> None:
        super().__init__()
        self.inner, self.back = Mixer(), back

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        out = self.inner(x.float())
        return out.to(x.dtype) if self.back else out


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("dtype", HALF)
def test_float32_master_weights_are_an_option(dtype: torch.dtype, alpha: float) -> None:
    model, fade = faded(dtype, lambda t, s: Masters(back=True), alpha, guidance=crossfade.DeepFeatureGuidance())
    for site in fade.sites:
        assert {p.dtype for p in site.blend.student.parameters()} == {torch.float32}
    seen = watch(model)
    (model(data()[0].to(dtype)).sum() + fade.guidance()).backward()
    assert set(seen) == {dtype}
    assert all(p.grad.dtype == torch.float32 for s in fade.sites for p in s.blend.student.parameters())


@pytest.mark.parametrize("alpha", ALPHAS)
def test_a_student_that_forgets_to_cast_back_cannot_promote_the_residual_stream(alpha: float) -> None:
    # While the teacher leads, the blend hides it; it would come out at alpha 0, long after install.
    x = data()[0].bfloat16()
    model = net().bfloat16()
    settings = plan(student=lambda t, s: Masters(back=False), gate=crossfade.Deterministic(alpha))
    refused = None
    try:
        fade = crossfade.install(model, settings, total_steps=10, release="finalize", probe=x)
    except OutputError as error:
        refused = str(error)
    if refused is not None:  # At once and by name: right as well.
        assert "blocks.0.attn" in refused
        assert "float32" in refused
        return
    seen = watch(model)
    model(x)
    fade.finalize(force=True)(x)
    assert set(seen) == {torch.bfloat16}


@pytest.mark.parametrize("alpha", ALPHAS)
def test_a_schedule_that_gives_a_tensor_of_one_element_does_not_promote(alpha: float) -> None:
    schedule = lambda t: torch.tensor([alpha])  # noqa: E731 - a user's schedule
    model, fade = faded(torch.bfloat16, STUDENTS["default build"], alpha, gate=crossfade.Deterministic(schedule))
    seen = watch(model)
    model(data()[0].bfloat16())
    assert set(seen) == {torch.bfloat16}
    assert fade.sites[0].alpha == pytest.approx(alpha)


@pytest.mark.parametrize("dtype", HALF)
def test_half_precision_blends_are_rounded_from_the_float32_value(dtype: torch.dtype) -> None:
    model, fade = faded(dtype, STUDENTS["default build"], 0.7)
    blend = model.blocks[0].attn
    x = torch.randn(4, 5, WIDTH).to(dtype)
    t, s = blend.teacher(x).float(), blend.student(x).float()
    exact = 0.7 * t + 0.3 * s
    torch.testing.assert_close(blend(x).float(), exact, rtol=0.0, atol=2 * torch.finfo(dtype).eps)
    assert fade.sites[0].alpha == 0.7
