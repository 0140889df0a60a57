"""The one wrapper: what reaches the output in each phase, and what the rest of PyTorch sees of it."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections import namedtuple
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from crossfade.blend import Blend, Route, blends, is_blend
from crossfade.errors import CrossfadeWarning, OutputError, StateError
from crossfade.guidance import DeepFeatureGuidance
from crossfade.ledger import Ledger
from tests.models import MLP, Attention, equal

Pair = namedtuple("Pair", "hidden weights")


@dataclasses.dataclass
class Record:
    hidden_states: Tensor
    weights: Tensor | None = None


class Returns(nn.Module):
    """A linear layer that answers in some structure."""

    def __init__(self, wrap: Any = lambda y: y) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.wrap = wrap
        self.calls = 0

    def forward(self, x: Tensor, **kwargs: Any) -> Any:
        self.calls += 1
        return self.wrap(self.linear(x))


STRUCTURES = {
    "tensor": lambda y: y,
    "tuple": lambda y: (y, y.sum(), None),
    "list": lambda y: [y, 3],
    "namedtuple": lambda y: Pair(y, y.sum()),
    "dict": lambda y: {"weights": y.sum(), "hidden_states": y},
    "dataclass": lambda y: Record(y, y.sum()),
}


def blend_of(teacher: nn.Module, student: nn.Module, **more: Any) -> Blend:
    return Blend(teacher.requires_grad_(False), student, path="a.b", ledger=Ledger(), **more)


def linear_blend(**more: Any) -> Blend:
    return blend_of(Returns(), Returns(), **more)


def main(out: Any) -> Tensor:
    if isinstance(out, Tensor):
        return out
    if isinstance(out, dict):
        return out["hidden_states"]
    return out.hidden_states if isinstance(out, Record) else out[0]


X = torch.linspace(-1, 1, 24).reshape(2, 3, 4)


# ---- routes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("bare", [False, True])
@pytest.mark.parametrize("weight", [0.0, 0.25, 1.0])
def test_that_the_output_is_the_formula_in_the_teachers_structure(structure, bare, weight):
    wrap = STRUCTURES[structure]
    teacher, student = Returns(wrap), Returns(STRUCTURES["tensor"] if bare else wrap)
    blend = blend_of(teacher, student)
    blend(X)  # The structure is learned from the teacher before it is gone from the path.
    blend.set_gate(alpha=weight, weight=weight, hard=False)
    for mode in (True, False):
        out = blend.train(mode)(X)
        assert type(out) is type(teacher(X))
        t, s = teacher.linear(X), student.linear(X)
        expected = torch.lerp(s, t, torch.tensor(weight)) if 0 < weight < 1 else t if weight else s
        assert torch.equal(main(out), expected)


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("weight", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("hard", [False, True])
@pytest.mark.parametrize("skip", [False, True])
def test_the_routes(alpha, weight, hard, skip):
    if hard and weight == 0.4:
        return
    blend = linear_blend()
    blend.set_gate(alpha=alpha, weight=weight, hard=hard, skip=skip)
    ends = {0.0: Route.STUDENT, 1.0: Route.TEACHER}
    assert blend.eval_route is ends.get(alpha, Route.MIX)
    selects = hard and not skip and alpha not in ends
    assert blend.train_route is (Route.SELECT if selects else ends.get(weight, Route.MIX))
    assert blend.gate_alpha.item() == pytest.approx(alpha)
    assert blend.gate_weight.item() == pytest.approx(weight)


def test_that_tensors_are_written_in_place():
    blend = linear_blend()
    places = blend.gate_alpha.data_ptr(), blend.gate_weight.data_ptr()
    blend.set_gate(alpha=0.5, weight=0.25, hard=False)
    assert (blend.gate_alpha.data_ptr(), blend.gate_weight.data_ptr()) == places


@pytest.mark.parametrize(
    ("alpha", "weight", "hard", "skip", "teacher", "student"),
    [
        (1.0, 1.0, False, False, 1, 0),
        (0.5, 0.5, False, False, 1, 1),
        (0.0, 0.0, False, False, 0, 1),
        (0.5, 1.0, True, False, 1, 1),
        (0.5, 0.0, True, False, 1, 1),
        (0.5, 1.0, True, True, 1, 0),
        (0.5, 0.0, True, True, 0, 1),
    ],
)
def test_that_only_what_is_needed_runs(alpha, weight, hard, skip, teacher, student):
    blend = linear_blend()
    blend(X)  # The structure is known from here on.
    blend.teacher.calls = blend.student.calls = 0
    blend.set_gate(alpha=alpha, weight=weight, hard=hard, skip=skip)
    blend(X)
    assert (blend.teacher.calls, blend.student.calls) == (teacher, student)


def test_that_selection_keeps_a_broken_branch_out_of_the_output_but_not_out_of_the_watch():
    blend = linear_blend()
    nn.init.constant_(blend.student.linear.weight, float("nan"))
    blend.set_gate(alpha=0.5, weight=1.0, hard=True)
    assert torch.equal(blend(X), blend.teacher(X))
    assert not bool(blend.ledger.finite["a.b"])


# ---- guidance --------------------------------------------------------------------------------------------------------


def guided(blend: Blend, weight: float, **settings: Any) -> Blend:
    blend.set_gate(alpha=weight, weight=weight, hard=False)
    blend.guidance_error = DeepFeatureGuidance(reduction="sum", **settings).error
    blend.guided = True
    return blend


@pytest.mark.parametrize("weight", [0.0, 0.25, 1.0])
def test_that_guidance_leaves_one_term_and_the_output_as_it_was(weight):
    blend = linear_blend()
    blend(X)
    blend.set_gate(alpha=weight, weight=weight, hard=False)
    before = blend(X)
    out = guided(blend, weight)(X)
    assert torch.equal(out, before)
    (term,) = blend.ledger.terms["a.b"]
    expected = (blend.student(X) - blend.teacher(X)).square().sum()
    assert term.error.item() == pytest.approx(expected.item(), rel=1e-5)
    assert term.positions.item() == 6.0
    assert term.error.requires_grad


def test_that_eval_and_no_grad_leave_nothing():
    blend = guided(linear_blend(), 0.5)
    blend.observing = True
    blend.eval()(X)
    assert not blend.ledger.terms
    assert not blend.ledger.similarities
    blend.train()
    with torch.no_grad():
        blend(X)
    assert not blend.ledger.terms


def test_that_the_target_gives_no_gradient_and_the_input_does():
    x = X.clone().requires_grad_()
    blend = guided(linear_blend(), 0.0)
    blend(x)
    blend.ledger.terms["a.b"][0].error.backward()
    reference = X.clone().requires_grad_()
    (blend.student(reference) - blend.teacher(reference).detach()).square().sum().backward()
    torch.testing.assert_close(x.grad, reference.grad)


@pytest.mark.parametrize("weight", [0.0, 0.25, 1.0])
def test_that_detach_input_stops_the_guidance_gradient_at_the_site(weight):
    x = X.clone().requires_grad_()
    blend = guided(linear_blend(), weight)
    blend.detach_input = True
    out = blend(x)
    error = blend.ledger.terms["a.b"][0].error
    (through,) = torch.autograd.grad(error, x, retain_graph=True, allow_unused=True)
    assert through is None
    assert all(g is not None for g in torch.autograd.grad(error, list(blend.student.parameters()), retain_graph=True))
    (task,) = torch.autograd.grad(out.sum(), x)
    ones = X.clone().requires_grad_()
    t, s = blend.teacher(ones), blend.student(ones)
    (naive,) = torch.autograd.grad((weight * t + (1 - weight) * s).sum(), ones)
    torch.testing.assert_close(task, naive)


def test_that_padding_is_left_out_unless_asked_for():
    blend = guided(linear_blend(), 1.0)
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    blend.ledger.mask = mask
    blend(X)
    blend.use_mask = False
    blend(X)
    masked, whole = blend.ledger.terms["a.b"]
    assert masked.positions.item() == 3.0
    assert whole.positions.item() == 6.0
    difference = (blend.student(X) - blend.teacher(X)).square().sum(-1)
    assert masked.error.item() == pytest.approx((difference * mask).sum().item(), rel=1e-5)


def test_that_a_mask_in_the_sites_own_call_counts_when_the_forward_shows_none():
    blend = guided(linear_blend(), 1.0)
    blend(X, attention_mask=torch.tensor([[1, 1, 0], [1, 0, 0]]))
    assert blend.ledger.terms["a.b"][0].positions.item() == 3.0


def test_that_metrics_are_recorded_when_observed():
    blend = linear_blend()
    blend.observing = True
    blend(X)
    (values,) = blend.ledger.similarities["a.b"]
    t, s = blend.teacher(X), blend.student(X)
    cosine = nn.functional.cosine_similarity(s, t, dim=-1).sum()
    expected = [cosine.item(), (s - t).square().sum().item(), t.square().sum().item(), 6.0]
    assert values.tolist() == pytest.approx(expected, rel=1e-4)
    assert not values.requires_grad


def test_that_a_residual_site_compares_output_minus_input():
    blend = linear_blend(residual=True)
    blend.observing = True
    blend(X)
    (values,) = blend.ledger.similarities["a.b"]
    t, s = blend.teacher(X) - X, blend.student(X) - X
    assert values[0].item() == pytest.approx(nn.functional.cosine_similarity(s, t, dim=-1).sum().item(), rel=1e-4)
    assert values[2].item() == pytest.approx(t.square().sum().item(), rel=1e-4)


# ---- gradients -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weight", [0.0, 0.25, 1.0])
def test_that_gradients_carry_the_weights_through_both(weight):
    x = X.clone().requires_grad_()
    blend = linear_blend()
    blend.set_gate(alpha=weight, weight=weight, hard=False)
    blend(x).square().sum().backward()
    y = X.clone().requires_grad_()
    student = copy.deepcopy(blend.student)
    student.zero_grad()
    (weight * blend.teacher(y) + (1 - weight) * student(y)).square().sum().backward()
    torch.testing.assert_close(x.grad, y.grad)
    for mine, theirs in zip(blend.student.parameters(), student.parameters(), strict=True):
        torch.testing.assert_close(torch.zeros_like(mine) if mine.grad is None else mine.grad, theirs.grad)


def test_that_teacher_gradient_false_cuts_the_teachers_path_alone():
    x = X.clone().requires_grad_()
    blend = linear_blend(teacher_gradient=False)
    blend.set_gate(alpha=0.25, weight=0.25, hard=False)
    blend(x).sum().backward()
    y = X.clone().requires_grad_()
    (0.75 * blend.student(y)).sum().backward()
    torch.testing.assert_close(x.grad, y.grad)


def test_that_a_loss_on_the_teacher_alone_has_a_graph_with_a_gradient_of_nothing():
    blend = linear_blend()
    out = blend(X)
    assert out.requires_grad
    out.sum().backward()
    assert all(p.grad is None or not p.grad.any() for p in blend.student.parameters())
    with torch.no_grad():
        assert not blend(X).requires_grad
    assert not blend.eval()(X).requires_grad


# ---- structure -------------------------------------------------------------------------------------------------------


class Wrong(nn.Module):
    def __init__(self, fn: Any) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, x: Tensor) -> Any:
        return self.fn(x)


@pytest.mark.parametrize(
    ("teacher", "student", "match"),
    [
        (lambda x: x, lambda x: x[..., :2], "another shape"),
        (lambda x: x, lambda x: x[:, :1], "another shape"),
        (lambda x: (x, x), lambda x: (x,), "another structure"),
        (lambda x: (x, x), lambda x: [x, x], "another structure"),
        (lambda x: x, lambda x: (x,), "another structure"),
        (lambda x: {"hidden_states": x}, Record, "another structure"),
        (lambda x: None, lambda x: x, "cannot tell"),
        (lambda x: {"a": x, "b": x}, lambda x: x, "output=KEY"),
    ],
)
def test_that_outputs_which_do_not_agree_name_the_site(teacher, student, match):
    blend = blend_of(Wrong(teacher), Wrong(student))
    blend.set_gate(alpha=0.5, weight=0.5, hard=False)
    with pytest.raises(OutputError, match=match) as caught:
        blend(X)
    assert "a.b" in str(caught.value)


@pytest.mark.parametrize("place", [1, -1])
def test_that_a_declared_output_is_the_one_that_is_blended(place):
    teacher, student = Returns(lambda y: (y.sum(), y)), Returns(lambda y: (y.sum(), y))
    blend = blend_of(teacher, student, output=place)
    blend.set_gate(alpha=0.25, weight=0.25, hard=False)
    out = blend(X)
    expected = torch.lerp(student.linear(X), teacher.linear(X), torch.tensor(0.25))
    assert torch.equal(out[1], expected)
    assert torch.equal(out[0], teacher.linear(X).sum())


class WritesInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.active = True

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.mul_(2.0) if self.active else x * 2.0)


@pytest.mark.parametrize("side", ["teacher", "student"])
def test_that_a_module_which_writes_into_its_input_does_not_reach_the_other(side):
    writer, other = WritesInput(), Returns()
    blend = blend_of(writer, other) if side == "teacher" else blend_of(other, writer)
    blend.set_gate(alpha=0.5, weight=0.5, hard=False)
    for _ in range(3):
        out = blend(X.clone())
        expected = 0.5 * writer.linear(2 * X) + 0.5 * other.linear(X)
        torch.testing.assert_close(out, expected)


def test_that_a_write_after_the_first_call_is_an_error():
    writer = WritesInput()
    writer.active = False
    blend = blend_of(writer, Returns())
    blend.set_gate(alpha=0.5, weight=0.5, hard=False)
    blend(X.clone())
    writer.active = True
    with pytest.raises(OutputError, match="in-place"):
        blend(X.clone())


def test_that_a_cache_never_reaches_both():
    class Cache:
        pass

    blend = linear_blend()
    blend.set_gate(alpha=0.5, weight=0.5, hard=False)
    with pytest.raises(StateError, match=r"a\.b"):
        blend(X, past=Cache())
    for weight in (0.0, 1.0):
        blend.set_gate(alpha=weight, weight=weight, hard=False)
        blend(X, past=Cache())


def test_that_check_call_runs_once_before_the_student():
    seen = []
    blend = linear_blend()
    blend.check_call = lambda args, kwargs: seen.append((len(args), list(kwargs)))
    blend(X)
    assert not seen
    blend.set_gate(alpha=0.5, weight=0.5, hard=False)
    for _ in range(2):
        blend(X, flag=1)
    assert seen == [(1, ["flag"])]


# ---- what PyTorch sees -----------------------------------------------------------------------------------------------


def test_that_the_teacher_stays_in_eval():
    blend = blend_of(MLP(dropout=0.5), MLP(dropout=0.5))
    for mode in (True, False, True):
        blend.train(mode)
        assert not any(m.training for m in blend.teacher.modules())
        assert all(m.training is mode for m in blend.student.modules())
        assert blend.training is mode


def test_that_the_state_holds_the_student_alone():
    blend = nn.Sequential(linear_blend())
    assert list(blend.state_dict()) == ["0.student.linear.weight", "0.student.linear.bias"]
    assert list(blend[0].state_dict()) == ["student.linear.weight", "student.linear.bias"]


@pytest.mark.parametrize("released", [False, True])
def test_that_a_mid_fade_state_loads_strictly_before_and_after_release(released):
    source, target = nn.Sequential(linear_blend()), nn.Sequential(linear_blend())
    teacher = copy.deepcopy(target[0].teacher.state_dict())
    if released:
        target[0].release_teacher()
    target.load_state_dict(source.state_dict(), strict=True)
    assert equal(target[0].student.state_dict(), source[0].student.state_dict())
    if not released:
        assert equal(target[0].teacher.state_dict(), teacher)


def test_that_a_plain_state_goes_to_the_teacher():
    plain, target = nn.Sequential(Returns()), nn.Sequential(linear_blend())
    student = copy.deepcopy(target[0].student.state_dict())
    target.load_state_dict(plain.state_dict(), strict=True)
    assert equal(target[0].teacher.state_dict(), plain[0].state_dict())
    assert equal(target[0].student.state_dict(), student)


def test_that_a_foreign_state_is_refused():
    target = nn.Sequential(linear_blend())
    with pytest.raises(RuntimeError, match="none of the 1 keys"):
        target.load_state_dict({"0.other.weight": torch.zeros(1)})
    with pytest.raises(RuntimeError, match="none of the 0 keys"):
        target.load_state_dict({})
    partial = {"0.student.linear.weight": torch.zeros(4, 4)}
    with pytest.raises(RuntimeError, match=r"student\.linear\.bias"):
        target.load_state_dict(partial, strict=True)


def test_that_alpha_follows_devices_and_never_casts():
    blend = linear_blend()
    blend.set_gate(alpha=0.3, weight=0.7, hard=False)
    blend.to(torch.bfloat16)
    assert blend.student.linear.weight.dtype == torch.bfloat16
    assert (blend.gate_alpha.dtype, blend.gate_weight.dtype) == (torch.float32, torch.float32)
    assert blend.gate_alpha.item() == pytest.approx(0.3)
    assert not any(name in ("alpha", "weight") for name, _ in (*blend.named_buffers(), *blend.named_parameters()))


def test_that_public_attributes_come_from_the_teacher_and_tensors_are_reported_once():
    blend = blend_of(Attention(), Attention())
    assert blend.heads == 2
    with pytest.raises(AttributeError):
        blend.no_such_thing  # noqa: B018 - reading it is the test
    with pytest.raises(AttributeError):
        blend._no_such_thing  # noqa: B018 - reading it is the test
    teacher = nn.Linear(4, 4)
    reader = blend_of(teacher, nn.Linear(4, 4))
    with pytest.warns(CrossfadeWarning, match=r"a\.b.*'bias'"):
        assert reader.bias is teacher.bias
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert reader.bias is teacher.bias


def test_that_attributes_come_from_the_student_when_the_teacher_is_gone():
    teacher, student = Attention(), Attention()
    teacher.mark, student.mark = "teacher", "student"
    blend = blend_of(teacher, student)
    assert blend.mark == "teacher"
    blend.release_teacher()
    assert blend.mark == "student"


def test_that_a_released_teacher_is_missed_by_name():
    blend = linear_blend()
    blend.release_teacher()
    with pytest.raises(StateError, match="release=") as caught:
        blend(X)
    assert "a.b" in str(caught.value)
    blend.set_gate(alpha=0.0, weight=0.0, hard=False)
    assert torch.equal(blend(X), blend.student(X))


def test_that_a_copy_has_weights_and_ledger_of_its_own():
    model = nn.Sequential(linear_blend(), linear_blend())
    model[1].ledger = model[0].ledger
    other = copy.deepcopy(model)
    other[0].set_gate(alpha=0.0, weight=0.0, hard=False)
    assert model[0].gate_alpha.item() == 1.0
    assert other[0].ledger is other[1].ledger
    assert other[0].ledger is not model[0].ledger


def test_that_blends_are_found_also_under_another_class():
    model = nn.Sequential(linear_blend(), nn.Linear(4, 4))
    assert list(blends(model)) == ["0"]
    model[0].__class__ = type("FSDPBlend", (Blend,), {})
    assert is_blend(model[0])
    assert not is_blend(model[1])
    assert blends(model) == {"0": model[0]}


def test_that_it_prints_its_path_and_route():
    blend = linear_blend()
    assert "path='a.b', route=teacher" in repr(blend)


def test_that_try_call_leaves_no_trace():
    blend = linear_blend().eval()
    blend.try_call((X,), {})
    assert blend.eval_route is Route.TEACHER
    assert not blend.ledger.terms
    with pytest.raises(OutputError):
        blend_of(Wrong(lambda x: x), Wrong(lambda x: x[..., :1])).eval().try_call((X,), {})
