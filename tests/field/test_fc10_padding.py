"""FC-10: alignment losses and metrics counted padded positions.

L2 and cosine terms averaged over padding; ablations then ranked methods wrongly, and one early return skipped the
mask for one loss only. In crossfade every loss, metric, calibration and alignment counts real positions alone,
whatever stands in the padding; without a mask all positions count; with nothing but padding there is nothing to
learn: 0, not NaN.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad

import crossfade
from crossfade import metrics
from crossfade.errors import OutputError

from .models import CLASSES, WIDTH, Net, logits, net, plan, tiny_bert, tiny_vit, tokens

REDUCTIONS = ("relative", "mean", "sum", "cosine")
LENGTHS = (5, 8)


def mask_of(total: int, lengths: tuple[int, ...] = LENGTHS) -> Tensor:
    return (torch.arange(total)[None, :] < torch.tensor(lengths)[:, None]).long()


def padded(total: int, fill: float = 0.0) -> Tensor:
    """The same real tokens in a batch of another length."""
    dice = torch.Generator().manual_seed(3)
    real = torch.randn(len(LENGTHS), max(LENGTHS), WIDTH, generator=dice)
    x = torch.full((len(LENGTHS), total, WIDTH), fill)
    for row, length in enumerate(LENGTHS):
        x[row, :length] = real[row, :length]
    return x


class Astray(nn.Module):
    """Right on real tokens (like the teacher beside it), wild on padding. The mask comes with the call."""

    def __init__(self, teacher: nn.Module) -> None:
        super().__init__()
        import copy

        self.inner = copy.deepcopy(teacher)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        out = self.inner(x, mask)
        if mask is None:
            return out
        noise = torch.linspace(-50.0, 70.0, out.numel()).reshape(out.shape)
        return torch.where(mask.bool().unsqueeze(-1), out, noise)


def faded(reduction: str, student: Any = None, **more: Any) -> tuple[Net, crossfade.Fade]:
    model = net()
    guidance = crossfade.DeepFeatureGuidance(reduction=reduction, **more)
    settings = {"gate": crossfade.Deterministic(1.0), "guidance": guidance}
    if student is not None:
        settings["student"] = student
    return model, crossfade.install(model, plan(**settings), total_steps=10, metrics_every=1)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_a_student_that_is_wrong_on_padding_alone_is_perfect(reduction: str) -> None:
    model, fade = faded(reduction, lambda teacher, site: Astray(teacher))
    optimizer = torch.optim.SGD(fade.parameter_groups(), lr=0.0)
    fade.attach(optimizer)
    model(padded(8), mask_of(8))
    loss = fade.guidance()
    assert float(loss.detach()) == pytest.approx(0.0, abs=1e-5)
    loss.backward()
    optimizer.step()
    log = fade.log()
    assert log["cosine"] == pytest.approx(1.0, abs=1e-5)
    assert log["error"] == pytest.approx(0.0, abs=1e-9)


def test_cka_and_the_other_metrics_leave_padding_out() -> None:
    mask = mask_of(8).bool()
    teacher = torch.randn(2, 8, 6)
    student = torch.where(mask.unsqueeze(-1), teacher, 100.0 * torch.randn(2, 8, 6))
    for metric in (metrics.cka, metrics.cosine):
        assert float(metric(student, teacher, mask)) == pytest.approx(1.0, abs=1e-5)
        assert float(metric(student, teacher, None)) < 0.9
    assert float(metrics.relative_error(student, teacher, mask)) == 0.0
    student[~mask] = float("nan")
    assert float(metrics.cosine(student, teacher, mask)) == pytest.approx(1.0, abs=1e-5)
    assert float(metrics.cka(student, teacher, mask)) == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("fill", [0.0, 1e4])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_more_padding_changes_neither_loss_nor_gradient(reduction: str, fill: float) -> None:
    seen = []
    for total in (8, 16):
        model, fade = faded(reduction)
        model(padded(total, fill), mask_of(total))
        loss = fade.guidance()
        loss.backward()
        grads = [p.grad for site in fade.sites for p in site.blend.student.parameters()]
        seen.append((loss.detach(), torch.cat([g.flatten() for g in grads])))
    torch.testing.assert_close(seen[0], seen[1])
    assert float(seen[0][0]) > 0.0


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_without_a_mask_every_position_counts(reduction: str) -> None:
    model, fade = faded(reduction)
    x = torch.randn(2, 6, WIDTH)
    model(x)
    bare = fade.guidance()
    model(x, torch.ones(2, 6))
    torch.testing.assert_close(fade.guidance(), bare)


FORMS = {
    "long": lambda m: m,
    "bool": lambda m: m.bool(),
    "float": lambda m: m.float(),
    "additive": lambda m: (1 - m).float() * -1e9,
    "additive, infinite": lambda m: torch.zeros(m.shape).masked_fill(m == 0, -torch.inf),
    "additive, smallest": lambda m: torch.zeros(m.shape).masked_fill(m == 0, torch.finfo(torch.float32).min),
    "per query, bool": lambda m: m.bool()[:, None, :].expand(-1, m.shape[1], -1),
    "per head and query, bool": lambda m: m.bool()[:, None, None, :].expand(-1, 1, m.shape[1], -1),
    "per head and query, additive": lambda m: ((1 - m).float() * -1e9)[:, None, None, :].expand(-1, 1, m.shape[1], -1),
    "causal and padding, additive": lambda m: torch.where(
        m.bool()[:, None, None, :] & torch.ones(m.shape[1], m.shape[1]).tril().bool(), 0.0, -1e9
    ),
}


class MaskedNet(Net):
    """Takes any form of mask, and uses none: what is tested is what the guidance makes of it."""

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return super().forward(x)


@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_mask_leaves_out_the_same_positions(form: str, explicit: bool) -> None:
    def value(mask: Tensor) -> Tensor:
        model = net()
        model.__class__ = MaskedNet
        fade = crossfade.install(model, plan(guidance=crossfade.DeepFeatureGuidance()), total_steps=10)
        x = padded(8, 5.0)
        if explicit:
            with fade.mask(mask):
                model(x)
        else:
            model(x, attention_mask=mask)
        return fade.guidance().detach()

    mask = FORMS[form](mask_of(8))
    if explicit and mask.dim() > 2:
        with pytest.raises(OutputError, match="does not fit"):
            value(mask)
        return
    right = value(mask_of(8))
    assert not torch.equal(right, value(torch.ones(2, 8)))
    torch.testing.assert_close(value(mask), right)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_nothing_but_padding_gives_zero_with_a_zero_gradient(reduction: str) -> None:
    model, fade = faded(reduction)
    model(torch.randn(2, 6, WIDTH), torch.zeros(2, 6))
    loss = fade.guidance()
    assert float(loss.detach()) == 0.0
    loss.backward()
    for site in fade.sites:
        assert all(float(p.grad.abs().sum()) == 0.0 for p in site.blend.student.parameters())


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_a_first_step_of_nothing_but_padding_does_not_spoil_the_next(reduction: str) -> None:
    # The relative reduction is calibrated in the first step: an empty one must not fix a power of 0.
    def second(first_is_empty: bool) -> float:
        model, fade = faded(reduction)
        optimizer = torch.optim.SGD(fade.parameter_groups(), lr=0.0)
        fade.attach(optimizer)
        x = padded(8)
        for empty in (first_is_empty, False):
            model(x, torch.zeros(2, 8) if empty else mask_of(8))
            loss = fade.guidance()
            loss.backward()
            optimizer.step()
        return float(loss.detach())

    assert second(True) == pytest.approx(second(False), rel=1e-5)


@pytest.mark.parametrize("loss", REDUCTIONS)
def test_alignment_leaves_padding_out(loss: Any) -> None:
    model, fade = faded("mean", lambda teacher, site: Astray(teacher))
    batches = [{"x": padded(8), "attention_mask": mask_of(8)} for _ in range(4)]
    report = fade.align(batches, steps=2, lr=1e-9, loss=crossfade.DeepFeatureGuidance(reduction=loss))
    for site in report.sites:
        assert site.error_before == pytest.approx(0.0, abs=1e-5)
        assert site.cosine == pytest.approx(1.0, abs=1e-5)
    del model


def test_calibration_leaves_padding_out() -> None:
    powers = []
    for total, fill in ((8, 0.0), (16, 100.0)):
        _, fade = faded("relative")
        powers.append(fade.calibrate([{"x": padded(total, fill), "attention_mask": mask_of(total)}]))
    assert powers[0] == pytest.approx(powers[1], rel=1e-5)


def test_one_position_per_sample_counts_for_one_whatever_the_length_of_the_batch() -> None:
    # A mean over micro-batches of unequal length is right only if it is taken over positions.
    model, fade = faded("mean")
    x, mask = padded(8), mask_of(8)
    total = int(mask.sum())
    losses = []
    for row in range(2):
        model(x[row : row + 1], mask[row : row + 1])
        losses.append(fade.guidance(num_items=total).detach())
    model(x, mask)
    torch.testing.assert_close(losses[0] + losses[1], fade.guidance().detach())


def test_counting_every_position_is_an_option_with_a_name() -> None:
    model, fade = faded("mean", lambda teacher, site: Astray(teacher), mask=False)
    model(padded(8), mask_of(8))
    assert float(fade.guidance().detach()) > 1.0


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("targets", ["bert.encoder.layer.*.attention", "bert.encoder.layer.*"])
def test_bert_with_more_padding_gives_the_same_loss_and_gradient(targets: str, implementation: str) -> None:
    seen = []
    for total in (5, 12):
        model = tiny_bert(attn_implementation=implementation)
        fade = crossfade.install(
            model,
            crossfade.Plan(
                targets=targets, gate=crossfade.Deterministic(0.5), guidance=crossfade.DeepFeatureGuidance()
            ),
            total_steps=10,
        )
        model.train()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        loss = cross_entropy(logits(model(**tokens(total=total))), torch.arange(2) % CLASSES) + fade.guidance()
        loss.backward()
        grads = [p.grad for s in fade.sites for p in s.blend.student.parameters() if p.grad is not None]
        seen.append((loss.detach(), torch.cat([g.flatten() for g in grads])))
    torch.testing.assert_close(seen[0], seen[1], rtol=1e-4, atol=1e-6)


def test_a_mask_in_the_call_of_the_site_is_found_when_the_model_takes_none() -> None:
    class Encoder(nn.Module):  # Builds its padding mask from the ids, as many models do.
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(10, WIDTH, padding_idx=0)
            self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True)

        def forward(self, ids: Tensor) -> Tensor:
            return self.layer(self.embed(ids), src_key_padding_mask=ids == 0)

    losses = []
    ids = torch.tensor([[4, 3, 2, 0, 0], [1, 2, 3, 4, 5]])
    from .models import seeded

    for extra in (0, 6):
        model = seeded(Encoder)
        fade = crossfade.install(
            model,
            crossfade.Plan(
                targets="layer",
                student=crossfade.students.Reinit("reset_parameters"),
                gate=crossfade.Deterministic(1.0),
                guidance=crossfade.DeepFeatureGuidance(),
            ),
            total_steps=10,
        )
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        for site in fade.sites:
            site.blend.student.self_attn.dropout = 0.0
        model(pad(ids, (0, extra)))
        losses.append(fade.guidance().detach())
    torch.testing.assert_close(losses[0], losses[1])


def test_a_vision_transformer_has_no_mask_and_counts_every_patch() -> None:
    model = tiny_vit()
    guidance = crossfade.DeepFeatureGuidance(reduction="mean")
    fade = crossfade.install(
        model,
        crossfade.Plan(targets="blocks.*.attn", gate=crossfade.Deterministic(1.0), guidance=guidance),
        total_steps=10,
    )
    calls: list[Tensor] = []
    blend = fade.sites[0].blend
    blend.teacher.register_forward_hook(lambda m, args, out: calls.append(out))
    blend.student.register_forward_hook(lambda m, args, out: calls.append(out))
    model(torch.randn(2, 3, 16, 16))
    fade.guidance()
    expected = (calls[0] - calls[1].detach()).square().mean()
    assert fade.log()["guidance/blocks.0.attn"] == pytest.approx(float(expected), rel=1e-5)


def test_a_mask_that_does_not_fit_the_site_is_an_error_that_says_what_to_do() -> None:
    from crossfade.errors import OutputError

    model, fade = faded("mean")
    with fade.mask(torch.ones(2, 7)), pytest.raises(OutputError, match=r"(?s)blocks\.0\.attn.*fade\.mask"):
        model(torch.randn(2, 6, WIDTH))
