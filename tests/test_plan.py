"""Plans are values that say at once what is wrong with them."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import crossfade
from crossfade import Bernoulli, DeepFeatureGuidance, Deterministic, Plan, Swap, students
from crossfade.errors import PlanError


def test_the_defaults():
    plan = Plan(targets="blocks.*.attn")
    (swap,) = plan.swaps
    assert swap == Swap(targets="blocks.*.attn")
    assert swap.student == students.Reinit()
    assert swap.gate == Deterministic("aggr20")
    assert swap.guidance is None
    assert (swap.output, swap.residual, swap.teacher_gradient, swap.drop, swap.carry) == ("auto", None, True, (), ())
    assert (plan.trains, plan.seed, plan.version) == ("students", 0, 1)


def test_that_one_swap_may_be_written_in_three_ways():
    one = Plan(targets="a", gate=Bernoulli("linear"))
    assert one == Plan(Swap(targets="a", gate=Bernoulli("linear")))
    assert one == Plan([Swap(targets="a", gate=Bernoulli("linear"))])
    assert one == Plan(swaps=iter((Swap(targets="a", gate=Bernoulli("linear")),)))


def test_that_sequences_become_tuples():
    plan = Plan(targets=["a", "b"], drop=["x"], carry=["y"], trains=["norm*"])
    assert plan.swaps[0].targets == ("a", "b")
    assert plan.swaps[0].drop == ("x",)
    assert plan.swaps[0].carry == ("y",)
    assert plan.trains == ("norm*",)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (Plan, "targets"),
        (lambda: Plan(()), "targets"),
        (lambda: Plan(gate=Deterministic()), "targets"),
        (lambda: Plan(Swap(targets="a"), targets="b"), "either"),
        (lambda: Plan(target="a"), "did you mean 'targets'"),
        (lambda: Plan(targets="a", gates=1), "did you mean 'gate'"),
        (lambda: Plan(targets="a", version=2), "format"),
        (lambda: Plan(targets="a", seed=1.0), "whole number"),
        (lambda: Plan(targets="a", seed=True), "whole number"),
        (lambda: Plan(targets="a", trains="head"), r"\['head'\]"),
        (lambda: Plan(targets="a", drop="mask"), r"\['mask'\]"),
        (lambda: Plan(targets="a", carry="mask"), r"\['mask'\]"),
        (lambda: Plan(targets="a", gate="linear"), "not a gate"),
        (lambda: Plan(targets="a", gate=None), "not a gate"),
        (lambda: Plan(targets="a", gate=Deterministic), "instance"),
        (lambda: Plan(targets="a", guidance=1.0), "not a guidance"),
        (lambda: Plan(targets="a", guidance=DeepFeatureGuidance), "instance"),
        (lambda: Plan((3,)), "swap"),
        (lambda: Plan(["blocks.*.attn"]), "swap"),
        (lambda: Plan("blocks.*.attn"), "targets"),
    ],
)
def test_that_a_wrong_plan_is_a_plan_error(make, match):
    with pytest.raises(PlanError, match=match):
        make()


def test_that_a_plan_cannot_be_changed():
    plan = Plan(targets="a")
    with pytest.raises(AttributeError):
        plan.seed = 3
    with pytest.raises(AttributeError):
        plan.swaps[0].drop = ()


def test_that_an_unregistered_part_says_where_it_is():
    for name, part in {
        "student": lambda teacher, site: nn.Identity(),
        "gate": Deterministic(lambda t: 1.0 - t),
        "guidance": DeepFeatureGuidance(schedule=lambda t: 1.0),
        "targets": lambda path, module: True,
    }.items():
        plan = Plan(**({"targets": "a"} | {name: part}))
        with pytest.raises(PlanError, match=rf"plan\.swaps\[0\]\.{name}"):
            plan.to_dict()


def test_that_to_dict_is_json_and_short():
    data = Plan(targets="a", guidance=DeepFeatureGuidance(schedule="alpha")).to_dict()
    assert data["kind"] == "plan:Plan"
    assert data["swaps"][0]["gate"] == {"kind": "gate:Deterministic", "alpha": {"kind": "schedule:aggr20"}}
    json.dumps(data, allow_nan=False)


@pytest.mark.parametrize(
    "change",
    [
        {"targets": "b"},
        {"student": "Copy"},
        {"gate": Deterministic("linear")},
        {"guidance": DeepFeatureGuidance()},
        {"seed": 1},
        {"trains": "all"},
        {"drop": ["x"]},
        {"residual": True},
        {"teacher_gradient": False},
    ],
    ids=str,
)
def test_that_the_fingerprint_tells_plans_apart(change):
    base = {"targets": "a"}
    assert Plan(**base).fingerprint() == Plan(**base).fingerprint()
    assert Plan(**(base | change)).fingerprint() != Plan(**base).fingerprint()


@pytest.mark.parametrize(
    "change",
    [
        {"targets": "b"},
        {"gate": Deterministic("linear")},
        {"guidance": DeepFeatureGuidance()},
        {"seed": 1},
        {"trains": "all"},
        {"drop": ["x"]},
        {"residual": True},
        {"teacher_gradient": False},
        {"output": 1},
    ],
    ids=str,
)
def test_that_the_fingerprint_of_an_unregistered_student_tells_plans_apart_too(change):
    def make(teacher, site):
        return nn.Identity()

    base = {"targets": "a", "student": make}
    assert Plan(**base).fingerprint() == Plan(**base).fingerprint()
    assert Plan(**(base | change)).fingerprint() != Plan(**base).fingerprint()


def test_that_the_fingerprint_of_a_module_does_not_depend_on_the_process():
    one, two = (Plan(targets="a", student=nn.Linear(2, 2)).fingerprint() for _ in range(2))
    assert one == two
    by_path = (Plan(targets="a", student={"a": nn.Linear(2, 2)}).fingerprint() for _ in range(2))
    assert len(set(by_path)) == 1


def test_that_the_fingerprint_of_a_predicate_does_not_hold_an_address():
    def make():
        return lambda path, module: path == "a"

    assert Plan(targets=make()).fingerprint() == Plan(targets=make()).fingerprint()


def test_that_a_plan_outlives_its_use():
    plan = Plan(targets="0", student=students.Reinit("reset_parameters"), gate=Deterministic(crossfade.Adaptive()))
    before = plan.to_dict()
    for _ in range(2):
        model = nn.Sequential(nn.Linear(2, 2))
        fade = crossfade.install(model, plan, total_steps=2)
        model(torch.ones(1, 2)).sum().backward()
        fade.step()
        fade.revert()
    assert plan.to_dict() == before
