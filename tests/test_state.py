"""What a fade remembers: hashes, calibration, and a state that belongs to one plan on one base model."""

from __future__ import annotations

import contextlib
import copy
import json
import warnings

import pytest
import torch
from torch import nn

import crossfade
from crossfade import Adaptive, DeepFeatureGuidance, Deterministic, Plan, students
from crossfade.errors import PersistError, StateError
from crossfade.state import hash_of, observed, release
from crossfade.students import Reinit
from tests.models import MLP, Attention, adamw, batch, net, padding, train

IDS, LABELS = batch()


def plan(**more) -> Plan:
    settings = {
        "targets": "blocks.*.attn",
        "student": Reinit("reset_parameters"),
        "gate": Deterministic("linear"),
        "guidance": DeepFeatureGuidance(),
    }
    return Plan(**(settings | more))


def started(the_plan: Plan | None = None, *, total: int = 10, steps: int = 0, seed: int = 0, **more) -> crossfade.Fade:
    model = net(seed=seed)
    fade = crossfade.install(model, the_plan or plan(), total_steps=total, **more)
    if steps:
        optimizer = adamw(fade)
        fade.attach(optimizer)
        train(model, fade, optimizer, 0, steps)
        fade.detach()
    return fade


# ---- hashes ----------------------------------------------------------------------------------------------------------


def test_that_the_hash_is_of_names_dtypes_shapes_and_bytes():
    base = Attention()
    again = copy.deepcopy(base)
    assert hash_of(base) == hash_of(again)
    assert hash_of(base) == hash_of(again.requires_grad_(False).eval())
    hashes = {hash_of(base)}
    for change in (
        lambda m: m.q.weight.data[0, 0].add_(1e-3),
        lambda m: m.to(torch.bfloat16),
        lambda m: m.register_buffer("extra", torch.zeros(1)),
        lambda m: setattr(m, "q", nn.Linear(8, 8)),
    ):
        other = copy.deepcopy(base)
        change(other)
        hashes.add(hash_of(other))
    assert len(hashes) == 5


def test_that_the_hash_sees_through_strides_and_takes_every_dtype():
    module = nn.Linear(3, 2)
    turned = copy.deepcopy(module)
    turned.weight = nn.Parameter(module.weight.detach().T.contiguous().T)
    assert hash_of(module) == hash_of(turned)
    for dtype in (torch.bfloat16, torch.float16, torch.float64, torch.complex64):
        hash_of(
            nn.Linear(2, 2).to(dtype) if dtype != torch.complex64 else nn.ParameterList([torch.zeros(2, dtype=dtype)])
        )
    hash_of(nn.Identity())
    empty = nn.Module()
    empty.register_buffer("none", torch.zeros(0, 3))
    hash_of(empty)


# ---- release ---------------------------------------------------------------------------------------------------------


def test_that_release_keeps_the_hash_and_what_is_carried():
    fade = started(plan(carry=["heads"], guidance=None))
    site = fade.sites[0]
    expected = hash_of(site.blend.teacher)
    release(site)
    assert site.blend.teacher is None
    assert site.teacher_hash == expected
    assert site.carried == {"heads": 2}
    release(site)  # Nothing happens twice.
    assert site.carried == {"heads": 2}


def test_that_a_released_teacher_leaves_memory():
    import gc
    import weakref

    fade = started(plan(targets="blocks[0:2]", student=students.Copy(), guidance=None), total=2)
    held = [weakref.ref(m) for m in fade.sites[0].blend.teacher.modules()]
    for _ in range(2):
        fade.model(IDS).sum().backward()
        fade.step()
    gc.collect()
    assert fade.sites[0].blend.teacher is None
    assert [r for r in held if r() is not None] == []


# ---- calibration -----------------------------------------------------------------------------------------------------


def naive_power(model: nn.Module, path: str, ids, mask=None) -> float:
    seen = []
    hook = model.get_submodule(path).register_forward_hook(lambda m, a, out: seen.append(out[0].detach().double()))
    with torch.no_grad():
        model.eval()(ids) if mask is None else model.eval()(ids, attention_mask=mask)
    hook.remove()
    valid = seen[0].reshape(-1, 8) if mask is None else seen[0][mask.bool()]
    return float(valid.square().mean())


@pytest.mark.parametrize("masked", [False, True])
def test_that_calibrate_measures_the_teachers_power(masked):
    mask = padding([5, 3, 1, 4], 5) if masked else None
    reference = net()
    fade = started()
    given = {"ids": IDS} | ({"attention_mask": mask} if masked else {})
    result = fade.calibrate([given])
    for path, power in result.items():
        assert power == pytest.approx(naive_power(reference, path, IDS, mask), rel=1e-5)
    assert list(result) == ["blocks.0.attn", "blocks.1.attn"]


def test_that_calibrate_averages_over_batches_by_position_and_changes_nothing_else():
    fade = started()
    fade.model.train()
    fade.model.blocks[0].mlp.eval()
    modes = [m.training for m in fade.model.modules()]
    other = batch(1, size=2, length=3)[0]
    result = fade.calibrate([IDS, other])
    expected = [naive_power(net(), "blocks.0.attn", x) for x in (IDS, other)]
    assert result["blocks.0.attn"] == pytest.approx((20 * expected[0] + 6 * expected[1]) / 26, rel=1e-5)
    assert [m.training for m in fade.model.modules()] == modes
    assert not fade.ledger.terms
    assert fade.calibrate([IDS])["blocks.0.attn"] == pytest.approx(expected[0], rel=1e-5)  # Again, from the start.


def test_that_calibration_needs_a_position():
    fade = started()
    for batches in ([], [{"ids": IDS, "attention_mask": torch.zeros(4, 5, dtype=torch.long)}]):
        with pytest.raises(StateError, match="no valid position"):
            fade.calibrate(batches)


def test_that_the_first_step_fixes_the_power_from_all_micro_batches():
    fade = started()
    optimizer = adamw(fade)
    fade.attach(optimizer)
    reference = net()
    parts = [batch(k, size=size)[0] for k, size in enumerate((4, 2))]
    for ids in parts:
        fade.model(ids)
        (fade.guidance() / 2).backward()
        assert not fade.sites[0].power.fixed
    optimizer.step()
    powers = [naive_power(reference, "blocks.0.attn", ids) for ids in parts]
    assert fade.sites[0].power.fixed
    assert fade.sites[0].power.value == pytest.approx((20 * powers[0] + 10 * powers[1]) / 30, rel=1e-5)


def test_observed():
    fade = started(metrics_every=1)
    fade.model(IDS)
    fade.guidance()
    result = observed(fade.sites, fade.ledger.similarities)
    assert set(result) == set(fade.sites)
    cosine, error = result[fade.sites[0]]
    assert -1.0 <= cosine <= 1.0
    assert error > 0.0
    assert observed(fade.sites, {}) == {}


def test_that_recalibration_renews_the_students_statistics_alone():
    class Host(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)
            self.site = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))

        def forward(self, x):
            return self.site(self.norm(x))

    model = Host().eval()
    fade = crossfade.install(
        model, Plan(targets="site", student=students.Copy(), gate=Deterministic(0.0)), total_steps=1
    )
    fade.seek(1)
    x = torch.randn(64, 4) * 3 + 1
    before = model.norm.running_mean.clone()
    model = fade.finalize(recalibrate=[x])
    assert torch.equal(model.norm.running_mean, before)
    hidden = model.site[0](model.norm(x))
    torch.testing.assert_close(model.site[1].running_mean, 0.1 * hidden.mean(0).detach())
    assert not model.training
    assert not model.site[1].training


# ---- saving and loading ----------------------------------------------------------------------------------------------


def test_that_the_state_is_json_and_resumes_exactly():
    fade = started(plan(gate=Deterministic(Adaptive(low=-1.0, smoothing=0.5))), steps=4, metrics_every=1)
    saved = json.loads(json.dumps(fade.state_dict(), allow_nan=False))
    other = started(plan(gate=Deterministic(Adaptive(low=-1.0, smoothing=0.5))), metrics_every=1)
    other.model.load_state_dict(fade.model.state_dict(), strict=True)
    other.load_state_dict(saved)
    assert other.step_count == 4
    for mine, theirs in zip(other.sites, fade.sites, strict=True):
        assert (mine.alpha, mine.weight, mine.lam) == (theirs.alpha, theirs.weight, theirs.lam)
        assert vars(mine.power) == vars(theirs.power)
        assert mine.driver.state_dict() == theirs.driver.state_dict()
    assert other.state_dict() == fade.state_dict()
    assert torch.equal(other.model.eval()(IDS), fade.model.eval()(IDS))


def test_that_a_state_taken_after_release_loads_into_a_fresh_fade_and_back():
    quick = plan(guidance=None, gate=Deterministic(crossfade.schedules.linear(until=0.3)))
    fade = started(quick, steps=5)
    assert all(site.blend.teacher is None for site in fade.sites)
    other = started(quick)
    other.model.load_state_dict(fade.model.state_dict(), strict=True)
    other.load_state_dict(fade.state_dict())
    assert all(site.blend.teacher is None for site in other.sites)
    assert torch.equal(other.model.eval()(IDS), fade.model.eval()(IDS))
    other.load_state_dict(fade.state_dict())


@pytest.mark.parametrize(
    ("other", "match"),
    [
        (lambda: started(plan(gate=Deterministic("aggr20"))), "another plan"),
        (lambda: started(plan(targets="blocks.0.attn")), "another plan"),
        (lambda: started(seed=5), "hash"),
    ],
)
def test_that_a_state_of_something_else_is_refused_and_nothing_moves(other, match):
    saved = started(steps=3).state_dict()
    target = other()
    before = target.state_dict()
    with pytest.raises(PersistError, match=match):
        target.load_state_dict(saved)
    assert target.state_dict() == before
    assert target.step_count == 0


def test_that_another_length_warns_or_stretches():
    saved = started(steps=4).state_dict()
    target = started(total=20)
    with pytest.warns(UserWarning, match="total_steps=10"):
        target.load_state_dict(saved)
    assert target.total_steps == 10
    stretched = started(total=20)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stretched.load_state_dict(saved, rescale=True)
    assert stretched.total_steps == 20
    assert stretched.sites[0].alpha == 0.8


def _leaves(value, path=()):
    yield path
    if isinstance(value, dict):
        for key in value:
            yield from _leaves(value[key], (*path, key))
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from _leaves(item, (*path, i))


SAVED = started(plan(gate=Deterministic(Adaptive())), steps=2).state_dict()


@pytest.mark.parametrize("path", [p for p in _leaves(SAVED) if p], ids=str)
@pytest.mark.parametrize("garbage", ["gone", None, "text", -1, []], ids=repr)
def test_that_a_damaged_state_is_a_persist_error(path, garbage):
    damaged = copy.deepcopy(SAVED)
    place = damaged
    for key in path[:-1]:
        place = place[key]
    if garbage == "gone":
        del place[path[-1]]
    else:
        place[path[-1]] = garbage
    target = started(plan(gate=Deterministic(Adaptive())))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with contextlib.suppress(PersistError):
            target.load_state_dict(damaged)
            return
    assert target.step_count == 0


@pytest.mark.parametrize("saved", [{}, None, 3, [], {"version": 1}, {"version": 1, "sites": 3, "step": 0}], ids=repr)
def test_that_what_is_no_state_is_a_persist_error(saved):
    with pytest.raises(PersistError, match="not the state"):
        started().load_state_dict(saved)


def test_that_the_learned_structure_travels():
    def bare(teacher, site):
        return MLP()  # Takes no mask and returns a bare tensor.

    the_plan = plan(
        student=bare, drop=["mask"], gate=Deterministic(crossfade.schedules.linear(until=0.2)), guidance=None
    )
    fade = started(the_plan, steps=4)
    other = started(the_plan)
    other.model.load_state_dict(fade.model.state_dict())
    other.load_state_dict(fade.state_dict())
    assert torch.equal(other.model.eval()(IDS), fade.model.eval()(IDS))
