"""FC-07: the module returns something else than a tensor, and its replacement does not.

A parent unpacked two values where the replacement gave one; a distiller took element 0 of a tuple as its target
without a word. crossfade keeps the teacher's structure whatever the student gives, blends the declared main tensor
and nothing else, passes the teacher's extras on while it speaks and the student's (or None) afterwards, and refuses a
structure in which the main tensor is not clear.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import crossfade
from crossfade.errors import OutputError

from .models import Holder

Pair = namedtuple("Pair", ["hidden", "weights"])


@dataclass
class Output:
    hidden_states: Tensor
    weights: Tensor | None = None


@dataclass(frozen=True)
class Frozen:
    sample: Tensor
    extra: Any = None


def model_output(x: Tensor, w: Tensor) -> Any:
    from transformers.modeling_outputs import BaseModelOutput

    return BaseModelOutput(last_hidden_state=x, attentions=(w,))


@dataclass
class Case:
    """How a module packs its result, how the parent reads it, and which extra it finds."""

    pack: Callable[[Tensor, Tensor], Any]
    main: Callable[[Any], Tensor]
    extra: Callable[[Any], Any]
    output: Any = "auto"
    has_extra: bool = True


CASES = {
    "tensor": Case(lambda x, w: x, lambda o: o, lambda o: None, has_extra=False),
    "tuple with None": Case(lambda x, w: (x, None), lambda o: o[0], lambda o: o[1], has_extra=False),
    "tuple with weights": Case(lambda x, w: (x, w), lambda o: o[0], lambda o: o[1]),
    "single tuple": Case(lambda x, w: (x,), lambda o: o[0], lambda o: None, has_extra=False),
    "list": Case(lambda x, w: [x, w], lambda o: o[0], lambda o: o[1]),
    "tuple, second": Case(lambda x, w: (w, x), lambda o: o[1], lambda o: o[0], output=1),
    "tuple, last": Case(lambda x, w: (w, x), lambda o: o[-1], lambda o: o[0], output=-1),
    "list, last": Case(lambda x, w: [w, x], lambda o: o[-1], lambda o: o[0], output=-1),
    "named tuple": Case(Pair, lambda o: o.hidden, lambda o: o.weights),
    "named tuple by name": Case(Pair, lambda o: o.hidden, lambda o: o.weights, output="hidden"),
    "dict": Case(lambda x, w: {"hidden_states": x, "w": w}, lambda o: o["hidden_states"], lambda o: o["w"]),
    "dict by key": Case(lambda x, w: {"a": x, "b": w}, lambda o: o["a"], lambda o: o["b"], output="a"),
    "dataclass": Case(Output, lambda o: o.hidden_states, lambda o: o.weights),
    "dataclass by field": Case(
        lambda x, w: Output(w, x), lambda o: o.weights, lambda o: o.hidden_states, output="weights"
    ),
    "frozen dataclass": Case(Frozen, lambda o: o.sample, lambda o: o.extra),
    "transformers output": Case(model_output, lambda o: o.last_hidden_state, lambda o: o.attentions),
}


class Packs(nn.Module):
    """Returns its result as `pack` says; `mark` tells whose extra it is."""

    def __init__(self, pack: Callable[[Tensor, Tensor], Any], mark: float) -> None:
        super().__init__()
        self.fc, self.pack, self.mark = nn.Linear(4, 4), pack, mark

    def forward(self, x: Tensor) -> Any:
        return self.pack(self.fc(x), torch.full(x.shape, self.mark))


def install(case: Case, student: Callable[[Tensor, Tensor], Any], alpha: Any, **more: Any) -> tuple[nn.Module, Any]:
    model = Holder(Packs(case.pack, 1.0))
    plan = crossfade.Plan(
        targets="fc",
        student=lambda teacher, site: Packs(student, 2.0),
        gate=crossfade.Deterministic(alpha),
        output=case.output,
        guidance=more.pop("guidance", None),
    )
    return model, crossfade.install(model, plan, total_steps=4, **more)


def bare(x: Tensor, w: Tensor) -> Tensor:
    return x


def mark_of(extra: Any) -> float:
    tensor = extra[0] if isinstance(extra, tuple) else extra
    return float(tensor.flatten()[0])


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("alpha", [1.0, 0.7, 0.0])
@pytest.mark.parametrize("own", [True, False], ids=["same structure", "bare tensor"])
@pytest.mark.parametrize("name", CASES)
def test_the_caller_gets_the_teachers_structure_and_only_the_main_tensor_is_blended(
    name: str, own: bool, alpha: float, training: bool
) -> None:
    case = CASES[name]
    x = torch.randn(2, 4)
    model, fade = install(case, case.pack if own else bare, alpha, release="finalize", probe=x)
    teacher, student = model.fc.teacher.fc(x), model.fc.student.fc(x)
    out = model.train(training)(x)
    assert type(out) is type(case.pack(x, x))
    torch.testing.assert_close(case.main(out), alpha * teacher + (1 - alpha) * student)
    if case.has_extra:
        extra = case.extra(out)
        if alpha > 0.0:
            assert mark_of(extra) == 1.0
        elif own:
            assert mark_of(extra) == 2.0
        else:
            assert extra is None
    else:
        assert case.extra(out) is None
    fade.seek(4)
    plain = fade.finalize(probe=x, force=True)
    torch.testing.assert_close(case.main(plain(x)), student)
    assert type(plain(x)) is type(out)


@pytest.mark.parametrize("own", [True, False], ids=["same structure", "bare tensor"])
@pytest.mark.parametrize("name", CASES)
def test_guidance_and_alignment_compare_the_main_tensor(name: str, own: bool) -> None:
    case = CASES[name]
    x = torch.randn(8, 4)
    guidance = crossfade.DeepFeatureGuidance(reduction="mean")
    model, fade = install(case, case.pack if own else bare, 1.0, guidance=guidance)
    model(x)
    expected = (model.fc.teacher.fc(x) - model.fc.student.fc(x)).square().mean()
    torch.testing.assert_close(fade.guidance(), expected)
    report = fade.align([x], steps=40, lr=3e-2, check_every=20)
    assert report.sites[0].error < report.sites[0].error_before


@pytest.mark.parametrize("how", ["alpha 0", "gate", "view", "eval", "guide, then student"])
@pytest.mark.parametrize("name", CASES)
def test_a_bare_student_that_speaks_before_its_teacher_ever_did_keeps_the_structure(name: str, how: str) -> None:
    # Without a probe nobody has seen the teacher's structure yet.
    case, x = CASES[name], torch.randn(2, 4)
    model = Holder(Packs(case.pack, 1.0))
    alpha = 0.0 if how in ("alpha 0", "guide, then student") else 0.5
    plan = crossfade.Plan(
        targets="fc",
        student=lambda teacher, site: Packs(bare, 2.0),
        gate=crossfade.Bernoulli(0.0, "skip") if how == "gate" else crossfade.Deterministic(alpha),
        guidance=crossfade.DeepFeatureGuidance() if how == "guide, then student" else None,
        output=case.output,
    )
    fade = crossfade.install(model, plan, total_steps=4, release="finalize")
    model.train(how != "eval")
    with fade.view("student"):
        out = model(x) if how in ("view", "eval") else None
    out = model(x) if out is None else out
    assert type(out) is type(case.pack(x, x))
    torch.testing.assert_close(case.main(out), model.fc.student.fc(x))


UNCLEAR = {
    "nested": lambda x, w: ((x, w), w),
    "two unknown keys": lambda x, w: {"a": x, "b": w},
    "no tensor": lambda x, w: {"a": 1, "b": None},
    "string first": lambda x, w: ("name", x),
    "nothing": lambda x, w: None,
}


@pytest.mark.parametrize("name", UNCLEAR)
def test_an_unclear_structure_is_refused_at_install_and_changes_nothing(name: str) -> None:
    model = Holder(Packs(UNCLEAR[name], 1.0))
    teacher = model.fc
    plan = crossfade.Plan(targets="fc", student=lambda t, s: Packs(UNCLEAR[name], 2.0))
    with pytest.raises(OutputError, match=r"(?s)which tensor.*where: fc.*what to do: .*output="):
        crossfade.install(model, plan, total_steps=4, probe=torch.randn(2, 4))
    assert model.fc is teacher


WRONG = {
    "a tuple for a tensor": (CASES["tensor"], lambda x, w: (x, w)),
    "three for two": (CASES["tuple with weights"], lambda x, w: (x, w, w)),
    "a list for a tuple": (CASES["tuple with weights"], lambda x, w: [x, w]),
    "a tuple for a dict": (CASES["dict"], lambda x, w: (x, w)),
    "another dataclass": (CASES["dataclass"], Frozen),
}


@pytest.mark.parametrize("probed", [True, False])
@pytest.mark.parametrize("name", WRONG)
def test_a_student_with_another_structure_is_an_error_that_shows_both(name: str, probed: bool) -> None:
    case, student = WRONG[name]
    x = torch.randn(2, 4)
    message = r"(?s)another structure.*where: fc.*expected: .*got: .*what to do: "
    if probed:
        with pytest.raises(OutputError, match=message):
            install(case, student, 0.5, probe=x)
    else:
        model, _ = install(case, student, 0.5)
        with pytest.raises(OutputError, match=message):
            model(x)


def test_a_student_that_returns_nothing_is_named() -> None:
    with pytest.raises(OutputError, match=r"(?s)where: fc.*got: None"):
        install(CASES["tensor"], lambda x, w: None, 0.5, probe=torch.randn(2, 4))


@pytest.mark.parametrize("place", [5, "missing"])
def test_a_declared_place_that_is_not_there_is_an_error(place: Any) -> None:
    case = Case(CASES["dict" if place == "missing" else "tuple with weights"].pack, bare, bare, output=place)
    with pytest.raises(OutputError, match=rf"(?s)no tensor to blend.*where: fc.*{place!r}"):
        install(case, case.pack, 0.5, probe=torch.randn(2, 4))


def test_another_shape_is_an_error_and_not_broadcast() -> None:
    case = CASES["tensor"]
    with pytest.raises(OutputError, match=r"(?s)another shape.*where: fc.*\[2, 4\].*\[2, 1\]"):
        install(case, lambda x, w: x[:, :1], 0.5, probe=torch.randn(2, 4))
