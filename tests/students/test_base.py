"""How a student is built, checked and called, without touching the model or the global random state."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from torch import nn

from crossfade import registry, students
from crossfade.errors import CrossfadeError, PlanError, StudentError
from crossfade.students import Adapter, SiteInfo, build, check_call
from crossfade.students.base import deepcopy_of, isolated_random, site_seed
from tests.models import Attention, equal, net, portrait, random_states


def site(model: nn.Module, path: str = "blocks.0.attn", n: int = 1, seed: int = 1) -> SiteInfo:
    return SiteInfo(path, 0, n, model, seed)


def attention(teacher: nn.Module, info: SiteInfo) -> nn.Module:
    return Attention()


def make(like, model=None, **more):
    model = model or net()
    return build(like, model.blocks[0].attn, site(model, **more))


# ---- what may be a student -------------------------------------------------------------------------------------------


def test_that_a_student_may_be_a_factory_a_name_a_module_or_modules_by_path(monkeypatch):
    entries = {kind: dict(known) for kind, known in registry._entries.items()}
    monkeypatch.setattr(registry, "_entries", entries)
    registry.register("student", "mine")(attention)
    own = Attention()
    for like in (attention, "mine", "Copy", students.Copy(), own, {"blocks.0.attn": own}):
        assert type(make(like)) is Attention
    assert make(own) is own


@pytest.mark.parametrize(
    ("like", "n", "match"),
    [
        (lambda teacher, info: None, 1, "no module"),
        (lambda teacher, info: teacher.q.weight, 1, "no module"),
        (Attention(), 2, "factory"),
        ({"other": Attention()}, 1, "one per path"),
        (3, 1, "not a student"),
        (None, 1, "not a student"),
        ("no such name", 1, "registered"),
    ],
)
def test_that_anything_else_is_an_error(like, n, match):
    with pytest.raises(CrossfadeError, match=match) as caught:
        make(like, n=n)
    if not isinstance(caught.value, PlanError):
        assert "blocks.0.attn" in str(caught.value)


def test_that_the_factory_sees_teacher_and_site():
    model = net()
    seen = []

    def spy(teacher, info):
        seen.append((teacher, info))
        return Attention()

    info = site(model)
    build(spy, model.blocks[0].attn, info)
    assert seen[0][0] is model.blocks[0].attn
    assert seen[0][1] is info


# ---- placing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_that_a_student_comes_in_the_teachers_dtype(dtype):
    model = net().to(dtype)
    student = make(attention, model)
    assert {p.dtype for p in student.parameters()} == {dtype}


def test_that_a_student_may_keep_its_own_dtype():
    class Precise(Attention):
        crossfade_keep_dtype = True

    student = make(lambda teacher, info: Precise(), net().to(torch.bfloat16))
    assert {p.dtype for p in student.parameters()} == {torch.float32}


def test_that_the_dtype_of_a_mixed_teacher_is_that_of_its_first_floating_tensor():
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.codes = nn.Parameter(torch.zeros(3, dtype=torch.int8), requires_grad=False)
            self.scale = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))

    model = nn.Sequential(Mixed())
    student = build(lambda teacher, info: nn.Linear(2, 2), model[0], site(model, "0"))
    assert student.weight.dtype == torch.bfloat16


def test_that_a_quantized_teacher_without_floating_tensors_gets_a_floating_student():
    class Quantized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.codes = nn.Parameter(torch.zeros(3, dtype=torch.int8), requires_grad=False)

    model = nn.Sequential(Quantized(), nn.Linear(2, 2).to(torch.bfloat16))
    student = build(lambda teacher, info: nn.Linear(2, 2), model[0], site(model, "0"))
    assert student.weight.is_floating_point()


def test_that_a_teacher_without_tensors_lends_the_models_dtype():
    model = nn.Sequential(nn.Identity(), nn.Linear(2, 2)).to(torch.bfloat16)
    student = build(lambda teacher, info: nn.Linear(2, 2), model[0], site(model, "0"))
    assert student.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("training", [True, False])
def test_that_mode_and_trainability_are_set(training):
    model = net()
    model.train(training)

    def frozen(teacher, info):
        return Attention().requires_grad_(False).train(not training)

    student = make(frozen, model)
    assert student.training is training
    assert all(p.requires_grad for p in student.parameters())


# ---- isolation -------------------------------------------------------------------------------------------------------


def test_that_building_leaves_the_model_and_the_random_states_alone():
    model = net()
    before, states = portrait(model), random_states()
    for like in (attention, students.Copy(), students.Reinit("reset_parameters")):
        make(like, model)
    assert equal(portrait(model), before)
    assert equal(random_states(), states)


def test_that_a_failing_factory_leaves_the_random_states_alone():
    def bad(teacher, info):
        torch.rand(3)
        random.random()
        raise ZeroDivisionError

    states = random_states()
    with pytest.raises(ZeroDivisionError):
        make(bad)
    assert equal(random_states(), states)


def test_that_a_student_depends_on_the_sites_seed_alone():
    torch.manual_seed(5)
    one = make(attention)
    torch.manual_seed(6)
    random.seed(6)
    two, other = make(attention), make(attention, seed=2)
    assert equal(one.state_dict(), two.state_dict())
    assert not torch.equal(one.q.weight, other.q.weight)


def test_that_seeds_differ_by_path_and_seed():
    seeds = {site_seed(seed, path) for seed in range(5) for path in ("a", "b", "a.0")}
    assert len(seeds) == 15
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert site_seed(1, "1") != site_seed(11, "")


def test_isolated_random_seeds_inside_and_restores():
    states = random_states()
    with isolated_random(3, torch.device("cpu")):
        one = torch.rand(2), random.random()
    with isolated_random(3, torch.device("cpu")):
        two = torch.rand(2), random.random()
    assert torch.equal(one[0], two[0])
    assert one[1] == two[1]
    assert equal(random_states(), states)


# ---- refused ---------------------------------------------------------------------------------------------------------


def _reuse_tensor(teacher, info):
    student = Attention()
    student.q.weight = teacher.q.weight
    return student


def _reuse_view(teacher, info):
    student = Attention()
    student.q.weight = nn.Parameter(teacher.q.weight.detach()[:])
    return student


def _reuse_backbone(teacher, info):
    student = Attention()
    student.register_buffer("table", info.model.embed.weight.detach())
    return student


def _reuse_module(teacher, info):
    student = Attention()
    student.q = teacher.q
    return student


@pytest.mark.parametrize(
    ("factory", "match"),
    [
        (lambda teacher, info: teacher, "module of the model"),
        (_reuse_module, "module of the model"),
        (_reuse_tensor, "shares its memory"),
        (_reuse_view, "shares its memory"),
        (_reuse_backbone, "shares its memory"),
    ],
)
def test_that_a_student_which_shares_with_the_model_is_refused(factory, match):
    with pytest.raises(StudentError, match=match) as caught:
        make(factory)
    assert "blocks.0.attn" in str(caught.value)
    assert "what to do" in str(caught.value)


def test_that_meta_tensors_are_refused_on_both_sides():
    def on_meta(teacher, info):
        with torch.device("meta"):
            return Attention()

    with pytest.raises(StudentError, match="meta"):
        make(on_meta)
    with torch.device("meta"):
        model = net()
    with pytest.raises(StudentError, match=r"blocks\.0\.attn\.q\.weight"):
        make(students.Copy(), model)


# ---- copies ----------------------------------------------------------------------------------------------------------


def test_that_a_copy_carries_no_hooks_and_no_marks():
    teacher = Attention()
    teacher.q.register_forward_hook(lambda *_: None)
    teacher.register_forward_pre_hook(lambda *_: None)
    teacher._is_hf_initialized = True
    teacher.q.weight._is_hf_initialized = True
    result = deepcopy_of(teacher)
    assert not result.q._forward_hooks
    assert not result._forward_pre_hooks
    assert not hasattr(result, "_is_hf_initialized")
    assert not hasattr(result.q.weight, "_is_hf_initialized")
    assert teacher.q._forward_hooks
    assert teacher.q.weight._is_hf_initialized


def test_that_the_kwargs_flags_of_hooks_go_with_the_hooks():
    teacher = Attention()
    teacher.register_forward_pre_hook(lambda m, a, k: None, with_kwargs=True)
    teacher.register_forward_hook(lambda m, a, k, o: None, with_kwargs=True)
    result = deepcopy_of(teacher)
    result.register_forward_pre_hook(lambda m, a: None)
    result.register_forward_hook(lambda m, a, o: None)
    result(torch.zeros(1, 2, 8))


# ---- the adapter -----------------------------------------------------------------------------------------------------


def test_that_an_adapter_drops_and_answers_in_structure():
    inner = nn.Linear(2, 2)
    adapter = Adapter(inner, drop=("mask", "gone"), where=0, structure=(None, None, 3))
    out = adapter(torch.ones(1, 2), mask=object())
    assert torch.equal(out[0], inner(torch.ones(1, 2)))
    assert out[1:] == (None, 3)
    assert list(adapter.state_dict()) == ["module.weight", "module.bias"]


def test_that_an_adapter_leaves_full_outputs_alone():
    inner = Attention()
    x = torch.randn(1, 3, 8)
    out = Adapter(inner, drop=("flag",), where=0, structure=(None, None))(x, flag=1)
    assert len(out) == 2
    assert torch.equal(out[1], inner(x)[1])


# ---- check_call ------------------------------------------------------------------------------------------------------


class Narrow(nn.Module):
    def forward(self, x, scale=1.0):
        return x


def test_that_check_call_passes_what_fits():
    x = torch.zeros(1)
    for args, kwargs in (((x,), {}), ((), {"x": x}), ((x, 2.0), {}), ((x,), {"scale": 2.0})):
        check_call(Narrow(), "Attention", "a.b", args, kwargs)
    check_call(Adapter(Narrow(), drop=("mask",)), "Attention", "a.b", (x,), {"mask": 1})
    check_call(nn.Linear(1, 1), "Attention", "a.b", (x,), {})


@pytest.mark.parametrize("wrapped", [False, True])
def test_that_check_call_names_the_keyword_the_classes_and_the_remedy(wrapped):
    student = Adapter(Narrow(), drop=("other",)) if wrapped else Narrow()
    with pytest.raises(StudentError) as caught:
        check_call(student, "Attention", "a.b", (torch.zeros(1),), {"mask": None, "scale": 1.0, "head": 2})
    text = str(caught.value)
    for part in ("a.b", "Narrow", "Attention", "mask", "drop=['mask', 'head']", "(x, scale)"):
        assert part in text


def test_that_check_call_tells_too_many_positions():
    with pytest.raises(StudentError, match="change its forward"):
        check_call(Narrow(), "Attention", "a.b", (1, 2, 3), {})
    with pytest.raises(StudentError, match=r"missing|required"):
        check_call(Narrow(), "Attention", "a.b", (), {})


def test_that_copying_an_installed_student_keeps_its_class():
    assert type(copy.deepcopy(Adapter(Narrow()))) is Adapter
