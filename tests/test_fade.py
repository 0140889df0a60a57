"""The handle: the clock, the loss, views, logs, resuming, stages, and the ways out."""

from __future__ import annotations

import copy
import json
import math
import pickle
import warnings
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import crossfade
from crossfade import Adaptive, Bernoulli, DeepFeatureGuidance, Deterministic, Plan, schedules, students
from crossfade.errors import CrossfadeError, NonFiniteError, PersistError, PlanError, StateError
from crossfade.fade import handle
from tests.models import GATES, MLP, adamw, batch, difference, equal, gates, net, padding, plan, portrait, train

IDS, LABELS = batch()


def installed(
    gate=None, guidance=None, *, total: int | None = 10, model=None, kind="pre_norm", **more
) -> crossfade.Fade:
    options = {k: more.pop(k) for k in ("probe", "release", "metrics_every", "snapshot") if k in more}
    return crossfade.install(model or net(kind), plan(gate, guidance, **more), total_steps=total, **options)


def loss_of(fade: crossfade.Fade) -> torch.Tensor:
    return cross_entropy(fade.model(IDS), LABELS)


# ---- the clock -------------------------------------------------------------------------------------------------------


def test_that_the_clock_counts_optimizer_steps():
    fade = installed()
    optimizer = adamw(fade)
    fade.attach(optimizer)
    for step in range(3):
        assert fade.step_count == step
        assert fade.progress == step / 10
        for _ in range(2):  # Two forwards and backwards are one step.
            loss_of(fade).backward()
        assert fade.step_count == step
        optimizer.step()
    assert fade.sites[0].alpha == pytest.approx(0.7)


def test_that_a_manual_step_equals_an_attached_one():
    logs = []
    for attached in (True, False):
        fade = installed(Bernoulli("linear"), DeepFeatureGuidance(), metrics_every=1)
        optimizer = adamw(fade)
        if attached:
            fade.attach(optimizer)
        for k in range(4):
            ids, labels = batch(k)
            (cross_entropy(fade.model(ids), labels) + fade.guidance()).backward()
            optimizer.step()
            optimizer.zero_grad()
            if not attached:
                fade.step()
        logs.append(fade.log())
    # The zero gradients that attach drops are the one difference, and only where the teacher alone had weight.
    assert list(logs[0]) == list(logs[1])
    assert logs[0]["step"] == logs[1]["step"] == 4.0
    assert {k: v for k, v in logs[0].items() if k.startswith(("alpha", "weight", "lambda"))} == {
        k: v for k, v in logs[1].items() if k.startswith(("alpha", "weight", "lambda"))
    }


def test_that_a_manual_step_after_attach_is_refused():
    fade = installed()
    fade.attach(adamw(fade))
    with pytest.raises(StateError, match="already counts"):
        fade.step()
    fade.detach()
    fade.step()
    assert fade.step_count == 1


def test_that_detach_stops_the_clock_and_attach_starts_it_again():
    fade = installed()
    optimizer = adamw(fade)
    fade.attach(optimizer)
    fade.detach()
    loss_of(fade).backward()
    optimizer.step()
    assert fade.step_count == 0
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    fade.attach(optimizer)
    optimizer.step()
    assert fade.step_count == 1


def test_what_attach_takes():
    fade = installed()
    with pytest.raises(StateError, match="attach"):
        fade.attach()
    with pytest.raises(StateError, match="str"):
        fade.attach("adam")
    optimizer = adamw(fade)

    class Wrapper:
        def __init__(self, inner):
            self.optimizer = inner

    fade.attach(Wrapper(optimizer))
    with pytest.raises(StateError, match="already attached"):
        fade.attach(optimizer)
    optimizer.step()
    assert fade.step_count == 1


def test_that_two_optimizers_are_one_step():
    fade = installed(trains="all")
    groups = fade.parameter_groups()
    one, two = torch.optim.SGD(groups[:2], lr=0.1), torch.optim.SGD(groups[2:], lr=0.1)
    fade.attach(one, two)
    loss_of(fade).backward()
    one.step()
    assert fade.step_count == 0
    two.step()
    assert fade.step_count == 1


def test_that_seek_goes_anywhere_and_back():
    fade = installed(Bernoulli("linear"), release="finalize")
    seen = {}
    for step in (3, 7, 0, 7, 3, 15):
        fade.seek(step)
        row = [(s.alpha, s.weight) for s in fade.sites]
        assert seen.setdefault(step, row) == row
    assert fade.progress == 1.0


def test_that_an_unknown_length_needs_schedules_in_steps():
    with pytest.raises(PlanError, match="total_steps"):
        installed(total=None)
    fade = installed(Deterministic(schedules.in_steps("linear", 4)), total=None)
    for _ in range(4):
        fade.step()
    assert fade.progress == 0.0
    assert fade.sites[0].alpha == 0.0
    fade.finalize(probe=IDS)
    with_guidance = Deterministic(schedules.in_steps("linear", 4))
    fade = installed(with_guidance, DeepFeatureGuidance(schedule=schedules.in_steps(schedules.linear(), 6)), total=None)
    fade.seek(6)
    assert fade.sites[0].phase == "student"


def test_that_students_without_part_in_the_step_do_not_move():
    fade = installed(Deterministic(1.0))
    optimizer = adamw(fade)  # Weight decay and momentum would move them even at gradient zero.
    fade.attach(optimizer)
    before = copy.deepcopy(fade.sites[0].blend.student.state_dict())
    for _ in range(2):
        loss_of(fade).backward()
        optimizer.step()
    assert equal(fade.sites[0].blend.student.state_dict(), before)
    assert fade.step_count == 2


# ---- guidance --------------------------------------------------------------------------------------------------------


def test_that_guidance_is_read_once_and_weighted():
    fade = installed(guidance=DeepFeatureGuidance(2.0, reduction="mean"))
    fade.model(IDS)
    value = fade.guidance()
    expected = sum(2.0 * float((a - b).square().mean()) for a, b in captured_pairs(fade))
    assert value.dtype == torch.float32
    assert value.dim() == 0
    assert value.requires_grad
    assert value.item() == pytest.approx(expected, rel=1e-4)
    with pytest.raises(StateError, match=r"blocks\.0\.attn, blocks\.1\.attn") as caught:
        fade.guidance()
    assert "model.train()" in str(caught.value)


def captured_pairs(fade: crossfade.Fade):
    """What student and teacher say at each site on the teachers' inputs (alpha is 1)."""
    calls = {}
    hooks = [
        s.blend.register_forward_pre_hook(lambda m, a, k: calls.update({m.site_path: (a, k)}), with_kwargs=True)
        for s in fade.sites
    ]
    with torch.no_grad(), fade.view("teacher"):
        fade.model(IDS)
    for hook in hooks:
        hook.remove()
    for site in fade.sites:
        args, kwargs = calls[site.path]
        with torch.no_grad():
            yield site.blend.student(*args, **kwargs)[0], site.blend.teacher(*args, **kwargs)[0]


def test_that_guidance_is_the_mean_over_calls():
    fade = installed(guidance=DeepFeatureGuidance(reduction="mean"))
    other = batch(1)[0]
    singles = []
    for ids in (IDS, other):
        fade.model(ids)
        singles.append(fade.guidance().item())
    fade.model(IDS)
    fade.model(other)
    assert fade.guidance().item() == pytest.approx(sum(singles) / 2, rel=1e-5)


def test_that_a_fade_without_guidance_gives_a_plain_zero():
    fade = installed()
    fade.model(IDS)
    value = fade.guidance()
    assert value.item() == 0.0
    assert not value.requires_grad
    late = installed(guidance=DeepFeatureGuidance(schedule=schedules.piecewise((0.0, 0.0), (0.5, 1.0))))
    assert late.guidance().item() == 0.0


@pytest.mark.parametrize("how", ["eval", "no_grad", "no forward"])
def test_that_nothing_recorded_is_an_error(how):
    fade = installed(guidance=DeepFeatureGuidance())
    if how == "eval":
        fade.model.eval()(IDS)
    elif how == "no_grad":
        with torch.no_grad():
            fade.model(IDS)
    with pytest.raises(StateError, match="no guidance was recorded"):
        fade.guidance()


@pytest.mark.parametrize("attached", [True, False])
def test_that_guidance_which_is_not_read_stops_the_step(attached):
    fade = installed(guidance=DeepFeatureGuidance())
    optimizer = adamw(fade)
    if attached:
        fade.attach(optimizer)
    loss_of(fade).backward()
    before = copy.deepcopy(fade.sites[0].blend.student.state_dict())
    with pytest.raises(StateError, match="not added to the loss") as caught:
        optimizer.step() if attached else fade.step()
    assert "blocks.0.attn" in str(caught.value)
    assert fade.step_count == 0
    assert equal(fade.sites[0].blend.student.state_dict(), before)


def test_that_a_value_which_is_not_finite_stops_the_step():
    fade = installed(guidance=DeepFeatureGuidance())
    optimizer = adamw(fade)
    fade.attach(optimizer)
    nn.init.constant_(fade.sites[1].blend.student.q.weight, float("nan"))
    (loss_of(fade) + fade.guidance()).backward()
    before = copy.deepcopy(fade.sites[0].blend.student.state_dict())
    with pytest.raises(NonFiniteError, match=r"blocks\.1\.attn"):
        optimizer.step()
    assert fade.step_count == 0
    assert equal(fade.sites[0].blend.student.state_dict(), before)


def test_that_num_items_makes_unequal_micro_batches_add_up():
    mask = padding([5, 1, 2, 4], 5)
    fade = installed(guidance=DeepFeatureGuidance(reduction="mean"))
    fade.model(IDS, attention_mask=mask)
    whole = fade.guidance().item()
    parts = 0.0
    for rows in (slice(0, 1), slice(1, 4)):
        fade.model(IDS[rows], attention_mask=mask[rows])
        parts += fade.guidance(num_items=int(mask.sum())).item()
    assert parts == pytest.approx(whole, rel=1e-5)


def test_that_site_weights_and_per_site_lambda_count():
    weights = {"blocks.1.attn": 0.0}
    fade = installed(guidance=DeepFeatureGuidance(3.0, reduction="mean", site_weights=weights))
    fade.model(IDS)
    fade.guidance()
    assert fade.log()["lambda/blocks.0.attn"] == 3.0
    assert fade.log()["lambda/blocks.1.attn"] == 0.0
    assert "guidance/blocks.1.attn" not in fade.log()
    with pytest.raises(PlanError, match=r"blocks\.7\.attn"):
        installed(guidance=DeepFeatureGuidance(site_weights={"blocks.7.attn": 1.0}))


def test_that_an_explicit_mask_wins_and_ends():
    mask = padding([1, 1, 1, 1], 5)
    fade = installed(guidance=DeepFeatureGuidance(reduction="mean"))
    fade.model(IDS)
    whole = fade.guidance().item()
    with fade.mask(mask):
        fade.model(IDS)
        inner = fade.guidance().item()
        with fade.mask(None):
            fade.model(IDS)
            assert fade.guidance().item() == pytest.approx(whole)
        fade.model(IDS)
        assert fade.guidance().item() == pytest.approx(inner)
    fade.model(IDS)
    assert fade.guidance().item() == pytest.approx(whole)
    assert inner != pytest.approx(whole)


def test_that_a_mask_which_does_not_fit_names_the_site():
    fade = installed(guidance=DeepFeatureGuidance())
    with fade.mask(torch.ones(4, 7)), pytest.raises(crossfade.errors.OutputError, match=r"blocks\.0\.attn"):
        fade.model(IDS)


# ---- views -----------------------------------------------------------------------------------------------------------


def views(fade: crossfade.Fade) -> dict[str, torch.Tensor]:
    result = {}
    with torch.no_grad():
        for which in ("student", "teacher", "blend"):
            with fade.view(which) as model:
                result[which] = model(IDS)
    return result


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("training", [True, False])
def test_that_views_answer_as_student_teacher_and_blend(gate, training):
    reference = net().eval()
    fade = installed(gates()[gate](), release="finalize")
    fade.seek(3)
    fade.model.train(training)
    seen = views(fade)
    assert torch.equal(seen["teacher"], reference(IDS))
    only = copy.deepcopy(fade)
    student = only.finalize(force=True).eval()
    assert torch.equal(seen["student"], student(IDS))
    with torch.no_grad():
        assert torch.equal(seen["blend"], fade.model(IDS))


def test_that_views_nest_and_end_even_after_an_exception():
    fade = installed(release="finalize")
    fade.seek(5)
    fade.model.eval()
    plain = fade.model(IDS)
    seen = views(fade)
    with fade.view("student"):
        with fade.view("teacher"):
            with fade.view("blend"):
                assert torch.equal(fade.model(IDS), seen["blend"])
            assert torch.equal(fade.model(IDS), seen["teacher"])
        assert torch.equal(fade.model(IDS), seen["student"])
        with pytest.raises(ZeroDivisionError), fade.view("teacher"):
            raise ZeroDivisionError
        assert torch.equal(fade.model(IDS), seen["student"])
    assert torch.equal(fade.model(IDS), plain)


def test_that_a_view_records_nothing():
    fade = installed(guidance=DeepFeatureGuidance(), metrics_every=1)
    for which in ("student", "teacher", "blend"):
        with fade.view(which):
            fade.model(IDS)
            assert fade.guidance().item() == 0.0
    assert not fade.ledger.terms
    assert not fade.ledger.similarities
    fade.model(IDS)
    assert fade.guidance().item() > 0.0


def test_that_a_seek_inside_a_view_leaves_the_view():
    fade = installed(release="finalize")
    fade.model.eval()
    with fade.view("student"):
        expected = fade.model(IDS)
        fade.seek(4)
        assert torch.equal(fade.model(IDS), expected)
    assert fade.sites[0].alpha == pytest.approx(0.6)


def test_which_views_are_refused():
    fade = installed(Deterministic(schedules.linear(until=0.3)), probe=IDS)
    with pytest.raises(StateError, match="student"), fade.view("both"):
        pass
    for _ in range(4):
        fade.step()
    with pytest.raises(StateError, match='release="finalize"'), fade.view("teacher"):
        pass
    with fade.view("student"):
        fade.model(IDS)


# ---- the log ---------------------------------------------------------------------------------------------------------


def test_the_log():
    fade = installed(guidance=DeepFeatureGuidance(0.5), metrics_every=2)
    paths = [site.path for site in fade.sites]
    first = {"step", "progress"} | {
        f"{n}{p}" for n in ("alpha", "weight", "lambda") for p in ("", *(f"/{x}" for x in paths))
    }
    assert set(fade.log()) == first
    optimizer = adamw(fade)
    fade.attach(optimizer)
    train(fade.model, fade, optimizer, 0, 1)
    log = fade.log()
    assert set(log) == first | {
        f"{n}{p}" for n in ("guidance", "cosine", "error") for p in ("", *(f"/{x}" for x in paths))
    }
    assert all(type(v) is float for v in log.values())
    assert log["step"] == 1.0
    assert log["progress"] == 0.1
    for name in ("alpha", "weight", "lambda", "guidance", "cosine", "error"):
        assert log[name] == pytest.approx(sum(log[f"{name}/{p}"] for p in paths) / 2)
    assert log["alpha"] == pytest.approx(0.9)
    assert log["lambda"] == 0.5


def test_that_metrics_can_be_left_out():
    fade = installed(metrics_every=0)
    optimizer = adamw(fade)
    fade.attach(optimizer)
    train(fade.model, fade, optimizer, 0, 2)
    assert not any(key.startswith(("cosine", "error")) for key in fade.log())


# ---- adaptive --------------------------------------------------------------------------------------------------------


def test_that_an_adaptive_gate_falls_as_students_agree():
    fade = installed(Deterministic(Adaptive(low=-1.0, high=0.99)), student=students.Copy(), total=20)
    optimizer = adamw(fade)
    fade.attach(optimizer)
    alphas = []
    for step in range(6):
        train(fade.model, fade, optimizer, step, step + 1)
        alphas.append([s.alpha for s in fade.sites])
    assert all(b <= a for xs, ys in pairwise(alphas) for a, b in zip(xs, ys, strict=True))
    assert max(alphas[0]) < 0.1


# ---- stages ----------------------------------------------------------------------------------------------------------


def test_that_begin_keeps_students_and_starts_the_clock():
    fade = installed(Deterministic(1.0), DeepFeatureGuidance(), release="finalize", total=2)
    optimizer = adamw(fade)
    fade.attach(optimizer)
    train(fade.model, fade, optimizer, 0, 2)
    trained = copy.deepcopy(fade.sites[0].blend.student.state_dict())
    power = fade.sites[0].power.value
    fade.begin(plan(trains=["head"]), 4)
    assert fade.step_count == 0
    assert fade.total_steps == 4
    assert fade.sites[0].lam == 0.0
    assert equal(fade.sites[0].blend.student.state_dict(), trained)
    assert fade.sites[0].power.value == power
    assert fade.model.head.weight.requires_grad
    assert not fade.model.embed.weight.requires_grad
    second = adamw(fade)
    fade.attach(second)
    optimizer.step()
    assert fade.step_count == 0  # The first stage's optimizer no longer counts.
    train(fade.model, fade, second, 0, 4)
    fade.finalize(probe=IDS)
    assert all(p.requires_grad for p in fade.model.parameters())


@pytest.mark.parametrize("other", [{"targets": "blocks.*.mlp"}, {"targets": "blocks.0.attn"}], ids=str)
def test_that_a_stage_with_other_sites_is_refused(other):
    fade = installed(release="finalize")
    with pytest.raises(StateError, match="sites"):
        fade.begin(plan(**other), 3)
    with pytest.raises(StateError, match="sites"):
        fade.begin(Plan([*plan().swaps, *plan(targets="blocks.*.mlp").swaps]), 3)


def test_that_a_stage_which_needs_a_gone_teacher_leaves_the_fade_as_it_is():
    fade = installed(Deterministic(0.0), trains=["head"], probe=IDS)
    for _ in range(2):
        fade.step()
    assert fade.sites[0].blend.teacher is None
    flags = [p.requires_grad for p in fade.model.parameters()]
    before = fade.log()
    with pytest.raises(StateError, match="gone"):
        fade.begin(plan(Deterministic("linear")), 3)
    assert fade.log() == before
    assert [p.requires_grad for p in fade.model.parameters()] == flags
    assert (fade.step_count, fade.total_steps) == (2, 10)
    assert fade.sites[0].phase == "student"
    fade.finalize(probe=IDS)


def test_stages():
    model = net()
    warm = plan(Deterministic(1.0), DeepFeatureGuidance())
    fades, seen = crossfade.stages(model, (warm, 2), (plan(), 3), probe=IDS), []
    for fade in fades:
        optimizer = adamw(fade)
        fade.attach(optimizer)
        train(model, fade, optimizer, 0, fade.total_steps)
        seen.append((id(fade), fade.total_steps, fade.sites[0].phase))
    assert [s[1:] for s in seen] == [(2, "align"), (3, "student")]
    assert seen[0][0] == seen[1][0]
    fade.finalize(probe=IDS)
    with pytest.raises(StateError, match="not over"):
        list(crossfade.stages(net(), (warm, 2), (plan(), 3)))
    with pytest.raises(PlanError, match="at least one"):
        list(crossfade.stages(net()))


# ---- copies ----------------------------------------------------------------------------------------------------------


def test_that_a_copy_follows():
    fade = installed(Bernoulli("linear"), DeepFeatureGuidance(), metrics_every=1)
    average = copy.deepcopy(fade.model)
    follower = handle(average)
    assert follower is not fade
    assert follower.model is average
    optimizer = adamw(fade)
    fade.attach(optimizer)
    train(fade.model, fade, optimizer, 0, 4)
    assert follower.step_count == 0
    follower.follow(fade)
    assert follower.step_count == 4
    assert [(s.alpha, s.weight, s.lam) for s in follower.sites] == [(s.alpha, s.weight, s.lam) for s in fade.sites]
    assert follower.sites[0].power.value == fade.sites[0].power.value
    follower.finalize(force=True, probe=IDS)
    assert handle(fade.model) is fade


def test_that_a_fading_model_can_be_pickled():
    fade = installed(guidance=DeepFeatureGuidance())
    fade.attach(adamw(fade))
    fade.model(IDS)
    again = pickle.loads(pickle.dumps(fade.model))
    assert torch.equal(again.eval()(IDS), fade.model.eval()(IDS))
    assert not handle(again).ledger.terms
    handle(again).step()
    assert fade.step_count == 0


def test_handle():
    fade = installed()
    assert handle(fade.model) is fade
    assert handle(nn.DataParallel(fade.model)) is fade
    assert handle(torch.compile(fade.model, backend="eager")) is fade
    with pytest.raises(StateError, match="no plan is installed"):
        handle(net())
    fade.revert()
    with pytest.raises(StateError, match="no plan is installed"):
        handle(fade.model)


# ---- revert ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["pre_norm", "post_norm", "shared"])
@pytest.mark.parametrize("mode", [True, False])
def test_that_revert_is_exact_when_only_students_trained(kind, mode):
    model = net(kind).train(mode)
    model.embed.weight.requires_grad_(False)
    model.blocks[0].attn.q.weight.requires_grad_(False)
    model.blocks[0].attn.eval()
    before = portrait(model)
    fade = installed(guidance=DeepFeatureGuidance(), model=model, release="finalize", probe=IDS)
    optimizer = adamw(fade)
    fade.attach(optimizer)
    model.train()
    train(model, fade, optimizer, 0, 3)
    model.train(mode)
    assert fade.revert() is model
    assert difference(portrait(model), before) == []
    assert not optimizer._optimizer_step_post_hooks


def test_that_a_trained_backbone_needs_a_snapshot():
    for snapshot in (False, True):
        model = net()
        before = copy.deepcopy(model.state_dict())
        fade = installed(model=model, trains="all", release="finalize", snapshot=snapshot)
        optimizer = adamw(fade)
        fade.attach(optimizer)
        train(model, fade, optimizer, 0, 2)
        if snapshot:
            fade.revert()
            assert equal(dict(model.state_dict()), dict(before))
        else:
            with pytest.raises(StateError, match="snapshot=True"):
                fade.revert()
            assert handle(model) is fade


def test_that_revert_needs_every_teacher():
    fade = installed(Deterministic(0.0), probe=IDS)
    for _ in range(2):
        fade.step()
    with pytest.raises(StateError, match='release="finalize"'):
        fade.revert()


def test_that_release_when_done_frees_teachers_and_finalize_keeps_them():
    early = Deterministic(schedules.staggered("linear", overlap=0.0))
    fade, kept = installed(early, probe=IDS), installed(early, probe=IDS, release="finalize")
    gone = []
    for _ in range(10):
        fade.step()
        kept.step()
        gone.append([s.blend.teacher is None for s in fade.sites])
    assert [True, False] in gone
    assert gone[-1] == [True, True]
    assert all(s.blend.teacher is not None for s in kept.sites)
    fade.finalize(probe=IDS)
    assert not kept.finalize(probe=IDS)._forward_pre_hooks


def test_that_a_failing_forward_leaves_a_usable_fade():
    fade = installed(guidance=DeepFeatureGuidance())
    with pytest.raises(Exception):  # noqa: B017, PT011 - whatever torch says about ids out of range
        fade.model(IDS + 1000)
    fade.model(IDS)
    assert fade.guidance().item() > 0.0


def test_that_a_run_is_silent():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fade = installed(Bernoulli("linear"), DeepFeatureGuidance(), student=lambda t, s: MLP(), drop=["mask"], total=3)
        optimizer = adamw(fade)
        fade.attach(optimizer)
        train(fade.model, fade, optimizer, 0, 3)
        fade.finalize(probe=IDS)


# ---- what a newcomer hands in ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("items", [0, -1, True, float("nan"), float("inf"), "x", torch.ones(2)])
def test_that_num_items_is_a_positive_number(items):
    fade = installed(guidance=crossfade.DeepFeatureGuidance())
    fade.model(IDS)
    with pytest.raises(StateError, match="num_items"):
        fade.guidance(num_items=items)


@pytest.mark.parametrize("step", [-1, 2.5, "a", None, True])
def test_that_a_bad_step_moves_nothing(step):
    fade = installed()
    fade.seek(1)
    alphas = [site.alpha for site in fade.sites]
    with pytest.raises(StateError, match="whole number"):
        fade.seek(step)
    assert fade.step_count == 1
    assert [site.alpha for site in fade.sites] == alphas


@pytest.mark.parametrize(
    "damage",
    [
        lambda state: state.update(step=-5),
        lambda state: state.update(step=1e300),
        lambda state: state.update(step=True),
        lambda state: next(iter(state["sites"].values()))["power"].__setitem__(0, -1.0),
        lambda state: next(iter(state["sites"].values()))["power"].__setitem__(0, math.nan),
        lambda state: next(iter(state["sites"].values()))["power"].__setitem__(1, math.inf),
    ],
)
def test_that_a_state_with_impossible_numbers_is_refused(damage):
    fade = installed()
    state = json.loads(json.dumps(fade.state_dict()))
    damage(state)
    with pytest.raises(PersistError):
        installed().load_state_dict(state)


def test_that_a_teacher_which_answers_0_is_named_before_the_step():
    fade = installed(guidance=crossfade.DeepFeatureGuidance(), gate=crossfade.Deterministic("linear"))
    for parameter in fade.sites[1].blend.teacher.parameters():
        nn.init.zeros_(parameter)
    optimizer = torch.optim.SGD(fade.parameter_groups(), lr=0.1)
    fade.attach(optimizer)
    before = [p.detach().clone() for p in fade.sites[1].blend.student.parameters()]
    fade.model(IDS)
    fade.guidance().backward()
    with pytest.raises(NonFiniteError, match=r"blocks\.1"):
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, fade.sites[1].blend.student.parameters(), strict=True))


def test_that_a_forward_before_the_alignment_does_not_reach_the_training_after_it():
    fade = installed(guidance=crossfade.DeepFeatureGuidance())
    fade.model(IDS)  # Its guidance is never read.
    fade.align([IDS], steps=3)
    fade.model(IDS)
    fade.guidance().backward()


def test_that_students_which_are_not_finite_are_said_to_be():
    fade = installed(gate=crossfade.Deterministic(0.0))
    for parameter in fade.sites[0].blend.student.parameters():
        nn.init.constant_(parameter, math.nan)
    with pytest.raises(CrossfadeError, match="not finite"):
        fade.finalize(probe=IDS)


def test_that_an_attribute_which_only_the_teacher_had_is_asked_to_be_carried():
    fade = installed(gate=crossfade.Deterministic(0.0))
    blend = fade.sites[0].blend
    blend.teacher.attention_type = "full"
    assert blend.attention_type == "full"
    blend.release_teacher()
    with pytest.raises(AttributeError, match=r"carry=\('attention_type',\)"):
        blend.attention_type  # noqa: B018 - reading it is the point
