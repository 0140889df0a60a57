"""Alignment: captured inputs, one student at a time, nothing else moves."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

import crossfade
from crossfade import DeepFeatureGuidance, Deterministic, Plan
from crossfade.align import AlignReport, Settings
from crossfade.capture import capture, parse_bytes
from crossfade.errors import CrossfadeError, NonFiniteError, OutputError, PlanError, StateError
from crossfade.students import Copy, Reinit
from tests.models import Attention, backbone, batch, equal, net, padding, plan, random_states

BATCHES = [batch(k, size=8)[0] for k in range(4)]


def installed(model: nn.Module | None = None, **more) -> crossfade.Fade:
    return crossfade.install(model or net(), plan(**more), total_steps=10)


# ---- what it does ----------------------------------------------------------------------------------------------------


def test_that_alignment_brings_students_closer_and_reports_it():
    fade = installed()
    report = fade.align(BATCHES, steps=60, lr=2e-2, patience=None, check_every=20)
    assert isinstance(report, AlignReport)
    assert [s.path for s in report.sites] == ["blocks.0.attn", "blocks.1.attn"]
    assert report.samples == 32
    assert report.complete
    for site in report.sites:
        assert site.error < 0.5 * site.error_before
        assert site.cosine > 0.6
        assert site.steps == 60
        assert [step for step, _ in site.history] == [0, 20, 40, 60]
        assert min(e for _, e in site.history) == pytest.approx(site.error)
    text = str(report)
    assert "blocks.0.attn" in text
    assert "32 samples" in text


def test_that_the_reported_error_is_that_of_the_student_it_leaves():
    fade = installed()
    report = fade.align(BATCHES, steps=60, patience=None, check_every=20, holdout=0.99)
    # With nearly everything held out, the held-out error is that of a fresh forward.
    errors = {}
    for site in fade.sites:
        site.blend.register_forward_pre_hook(
            lambda m, args, kwargs: errors.update({m.site_path: relative(m, args, kwargs)}), with_kwargs=True
        )
    with fade.view("teacher"), torch.no_grad():
        fade.model.eval()(torch.cat(BATCHES))
    for row in report.sites:
        assert row.error == pytest.approx(errors[row.path], rel=0.15)


def relative(blend, args, kwargs) -> float:
    t, s = blend.teacher(*args, **kwargs)[0], blend.student(*args, **kwargs)[0]
    return float((s - t).square().sum() / t.square().sum())


def test_that_nothing_but_the_students_moves():
    model = net()
    model.train()
    model.blocks[0].mlp.eval()
    fade = installed(model)
    kept = {n: t.clone() for n, t in backbone(model).items()}
    teachers = copy.deepcopy([site.blend.teacher.state_dict() for site in fade.sites])
    flags = {n: p.requires_grad for n, p in model.named_parameters()}
    modes = {n: m.training for n, m in model.named_modules()}
    hooks = [len(site.blend._forward_pre_hooks) for site in fade.sites]
    states = random_states()
    fade.align(BATCHES, steps=5)
    assert equal({n: t.detach() for n, t in backbone(model).items()}, {n: t.detach() for n, t in kept.items()})
    assert equal([site.blend.teacher.state_dict() for site in fade.sites], teachers)
    assert {n: p.requires_grad for n, p in model.named_parameters()} == flags
    assert {n: m.training for n, m in model.named_modules()} == modes
    assert [len(site.blend._forward_pre_hooks) for site in fade.sites] == hooks
    assert equal(random_states(), states)
    assert all(p.grad is None for p in model.parameters())
    assert fade.step_count == 0
    assert not fade.ledger.terms
    assert [site.phase for site in fade.sites] == ["align", "align"]


def test_that_the_same_seed_gives_the_same_students():
    results = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        fade = installed()
        fade.align(BATCHES, steps=6, lr=1e-3)
        results.append(copy.deepcopy(fade.sites[1].blend.student.state_dict()))
    assert equal(*results)


def test_that_sites_are_trained_each_on_the_teachers_inputs():
    # The second site sees what the *teachers* before it give, whatever the first student does.
    one, two = installed(), installed(targets="blocks.1.attn")
    one.align(BATCHES, steps=6)
    two.align(BATCHES, steps=6)
    a, b = one.sites[1].blend.student, two.sites[0].blend.student
    assert equal(a.state_dict(), b.state_dict())


def test_that_a_copy_has_nothing_to_learn():
    report = installed(student=Copy()).align(BATCHES, steps=3)
    for site in report.sites:
        assert site.error_before == pytest.approx(0.0, abs=1e-9)
        assert site.error <= site.error_before
        assert site.cosine == pytest.approx(1.0, abs=1e-5)


def test_that_the_best_student_is_kept():
    fade = installed()
    report = fade.align(BATCHES, steps=40, lr=10.0, check_every=5, patience=None)
    for row in report.sites:
        assert row.error == pytest.approx(min([row.error_before, *(e for _, e in row.history)]))


class Noting(nn.Linear):
    """A student that notes which samples it is trained on and which it is only measured on."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.trained: set[float] = set()
        self.measured: set[float] = set()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        (self.trained if torch.is_grad_enabled() else self.measured).update(x[:, 0].tolist())
        return super().forward(x)


def test_that_no_sample_is_both_learnt_from_and_held_out():
    model = nn.Sequential(nn.Linear(4, 4))
    fade = crossfade.install(model, Plan(targets="0", student=lambda teacher, site: Noting()), total_steps=10)
    samples = torch.arange(80, dtype=torch.float32).view(20, 4)
    fade.align([samples], steps=60, batch_size=4, holdout=0.25, check_every=30)
    student = fade.sites[0].blend.student
    assert len(student.measured) == 5
    assert len(student.trained) == 15
    assert not student.measured & student.trained


def test_that_patience_stops_a_site():
    report = installed(student=Copy()).align(BATCHES, steps=100, check_every=2, patience=2)
    assert all(site.steps == 4 for site in report.sites)


def test_that_progress_is_called_and_can_stop_a_site():
    calls = []

    def progress(path, step, loss):
        calls.append((path, step))
        assert math.isfinite(loss)
        return path == "blocks.0.attn" and step == 2

    report = installed().align(BATCHES, steps=4, progress=progress)
    assert [site.steps for site in report.sites] == [2, 4]
    assert calls == [("blocks.0.attn", s) for s in (1, 2)] + [("blocks.1.attn", s) for s in (1, 2, 3, 4)]


def test_that_dropout_acts_only_when_asked():
    def make(teacher, site):
        return nn.Sequential(nn.Dropout(0.5), nn.Linear(8, 8))

    report = {}
    for dropout in (False, True):
        fade = installed(student=make, drop=["mask"], targets="blocks.0.attn")
        report[dropout] = fade.align(BATCHES, steps=3, dropout=dropout).sites[0].history
        assert fade.sites[0].blend.student.training
    assert report[False] != report[True]


def test_that_align_fixes_the_power_and_the_loss_may_be_any():
    fade = installed()
    fade.align(BATCHES, steps=1)
    assert all(site.power.fixed for site in fade.sites)
    for reduction in ("mean", "sum", "cosine"):
        loss = DeepFeatureGuidance(reduction=reduction)
        row = installed().align(BATCHES, steps=30, lr=1e-3, loss=loss).sites[0]
        assert row.error < row.error_before


def test_that_padding_is_left_out():
    masks = [padding([5, 2, 3, 4, 1, 5, 5, 2], 5)] * 2
    batches = [{"ids": ids, "attention_mask": mask} for ids, mask in zip(BATCHES, masks, strict=False)]
    changed = [dict(b, ids=torch.where(b["attention_mask"].bool(), b["ids"], 7)) for b in batches]
    results = []
    for given in (batches, changed):
        fade = installed(targets="blocks.0.attn")
        row = fade.align(given, steps=5).sites[0]
        results.append((row.error_before, row.error, fade.sites[0].power.value))
    assert results[0] == pytest.approx(results[1], rel=1e-4)


def test_that_batches_of_other_lengths_and_a_forward_of_ones_own_work():
    short = [batch(9, size=6, length=3)[0]]
    fade = installed()
    report = fade.align(
        [{"x": ids} for ids in (*BATCHES, *short)], steps=3, forward=lambda model, item: model(item["x"])
    )
    assert report.samples == 38


def test_that_a_run_of_blocks_aligns():
    model = net(layers=4)
    fade = crossfade.install(
        model,
        Plan(targets="blocks[1:3]", student=Copy(), gate=Deterministic("linear")),
        total_steps=5,
        probe=BATCHES[0],
    )
    row = fade.align(BATCHES, steps=80, patience=None).sites[0]
    assert row.error < row.error_before


def test_that_an_aligned_fade_goes_on():
    fade = installed(guidance=DeepFeatureGuidance())
    fade.align(BATCHES, steps=3)
    optimizer = torch.optim.SGD(fade.parameter_groups(), lr=0.1)
    fade.attach(optimizer)
    (fade.model(BATCHES[0]).sum() + fade.guidance()).backward()
    optimizer.step()
    assert fade.step_count == 1


# ---- the budget ------------------------------------------------------------------------------------------------------


def test_that_the_memory_budget_ends_the_capture():
    per_batch = 2 * 8 * 5 * 8 * 4  # sites x samples x length x width x bytes
    report = installed().align(BATCHES, steps=2, memory_budget=2 * per_batch + 10)
    assert not report.complete
    assert report.samples == 16
    assert report.bytes <= 2 * per_batch
    assert "budget was reached" in str(report)
    with pytest.raises(PlanError, match="memory_budget of at least"):
        installed().align(BATCHES, steps=2, memory_budget=per_batch - 1)


def test_that_no_room_for_targets_changes_nothing_but_time():
    rows = []
    per_batch = 2 * 8 * 5 * 8 * 4
    for budget in (4 * per_batch, "1GiB"):
        fade = installed()
        rows.append([(s.error, s.cosine) for s in fade.align(BATCHES, steps=4, memory_budget=budget).sites])
    for mine, theirs in zip(*rows, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (5, 5),
        ("5B", 5),
        ("2KB", 2000),
        ("2KiB", 2048),
        ("1.5MiB", 1572864),
        (" 1 GB ", 10**9),
        ("1gib", 2**30),
        ("2TiB", 2**41),
    ],
)
def test_parse_bytes(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "5", "MiB", "-5B", 0, -5, 1.5, None, "1e3MB", "5XB"])
def test_that_what_is_no_amount_is_refused(text):
    with pytest.raises(PlanError, match="512MB"):
        parse_bytes(text)


def test_that_the_capture_copies_and_cleans_up():
    fade = installed()
    with fade.view("teacher"):
        taken, complete = capture(fade.model, fade.sites, fade.ledger, BATCHES, 10**9, None)
    assert complete
    assert {path: sum(len(g) for g in groups) for path, groups in taken.groups.items()} == {
        "blocks.0.attn": 32,
        "blocks.1.attn": 32,
    }
    assert not any(t.requires_grad for g in taken.groups["blocks.0.attn"] for c in g.chunks for t in c.args)
    assert not fade.sites[0].blend._forward_pre_hooks


# ---- refused ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [
        {"steps": 0},
        {"lr": 0.0},
        {"lr": math.nan},
        {"batch_size": 0},
        {"weight_decay": -1.0},
        {"clip": 0.0},
        {"holdout": 0.0},
        {"holdout": 1.0},
        {"check_every": 0},
        {"patience": 0},
    ],
    ids=str,
)
def test_that_a_setting_out_of_range_is_a_plan_error(wrong):
    (name,) = wrong
    with pytest.raises(PlanError, match=name):
        Settings(**wrong)
    with pytest.raises(PlanError, match=name):
        installed().align(BATCHES, **wrong)


def test_that_an_unknown_setting_is_named():
    with pytest.raises(CrossfadeError, match="stepz"):
        installed().align(BATCHES, stepz=3)


def test_that_no_batches_no_site_and_no_teacher_are_state_errors():
    with pytest.raises(StateError, match=r"blocks\.0\.attn"):
        installed().align([], steps=1)
    with pytest.raises(StateError, match=r"blocks\.0\.attn"):
        installed().align(BATCHES, steps=1, forward=lambda model, ids: model.embed(ids))
    fade = installed()
    fade.sites[0].blend.release_teacher()
    with pytest.raises(StateError):
        fade.align(BATCHES, steps=1)


def test_that_too_few_samples_are_refused():
    with pytest.raises(PlanError, match=r"blocks\.0\.attn"):
        installed().align([BATCHES[0][:1]], steps=1)


def test_that_a_value_which_is_not_finite_names_the_site_and_leaves_the_gradients_empty():
    fade = installed()
    nn.init.constant_(fade.sites[1].blend.student.q.weight, math.nan)
    with pytest.raises(NonFiniteError, match=r"blocks\.1\.attn"):
        fade.align(BATCHES, steps=2)
    assert all(p.grad is None for p in fade.model.parameters())
    assert fade.model.training
    assert [site.phase for site in fade.sites] == ["align", "align"]


def test_that_a_student_without_parameters_is_refused():
    class Fixed(nn.Module):
        def forward(self, x, mask=None):
            return x, None

    with pytest.raises(StateError, match="no trainable parameter"):
        installed(student=lambda teacher, site: Fixed()).align(BATCHES, steps=1)


def test_that_a_site_whose_samples_depend_on_each_other_is_refused():
    class Mixing(Attention):
        def forward(self, x, mask=None):
            y, weights = super().forward(x, mask)
            return y + x.mean(0, keepdim=True), weights

    model = net()
    model.blocks[0].attn = Mixing()
    fade = installed(model, student=Reinit("reset_parameters"), targets="blocks.0.attn")
    with pytest.raises(OutputError, match=r"blocks\.0\.attn"):
        fade.align(BATCHES, steps=1)
