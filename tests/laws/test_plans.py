"""A plan survives its trip through a file, and its repr is Python that rebuilds it."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import crossfade
from crossfade import schedules
from crossfade.registry import lookup
from crossfade.students import Copy, Normal, Reinit
from crossfade.targets import Run
from tests.laws.test_schedules import simple
from tests.models import net

unit = st.floats(0.0, 1.0)
names = st.text("abcdefgh.*0123456789", min_size=1, max_size=12)
paths = st.lists(st.text("abc_0123", min_size=1, max_size=5), min_size=1, max_size=3).map(".".join)

alphas = st.one_of(
    st.sampled_from(["aggr20", "linear", "cosine", 1.0, 0]),
    simple(),
    st.builds(lambda s, u: schedules.hold(1.0, u, s), simple(), st.floats(0.01, 0.99)),
    st.builds(lambda s, o: schedules.staggered(s, overlap=o), simple(), unit),
    st.builds(lambda a, b: schedules.PerSite((a, b)), simple(), simple()),
    st.builds(lambda n: schedules.in_steps("linear", n), st.integers(1, 100)),
)
gates = st.one_of(
    st.builds(crossfade.Deterministic, alphas),
    st.builds(crossfade.Bernoulli, alphas, st.sampled_from(["both", "skip"]), st.sampled_from(["site", "shared"])),
    st.builds(crossfade.Gumbel, alphas, st.floats(0.1, 10.0), st.sampled_from(["site", "shared"])),
    st.builds(
        lambda low, width, s: crossfade.Deterministic(
            crossfade.Adaptive(low=low, high=min(1.0, low + width), smoothing=s)
        ),
        st.floats(-1.0, 0.5),
        st.floats(0.1, 1.0),
        st.floats(0.0, 0.99),
    ),
)
guidances = st.one_of(
    st.none(),
    st.builds(
        crossfade.DeepFeatureGuidance,
        weight=st.one_of(st.floats(0.0, 10.0), st.integers(0, 3)),
        schedule=st.one_of(st.just("alpha"), simple(), st.builds(schedules.staggered, simple())),
        reduction=st.sampled_from(["relative", "mean", "sum", "cosine"]),
        site_weights=st.dictionaries(paths, st.floats(0.0, 5.0), max_size=3),
        detach_input=st.booleans(),
        mask=st.booleans(),
    ),
)
targets = st.one_of(
    st.sampled_from(["blocks.*.attn", "encoder.layer[0:2]"]),
    st.lists(paths, min_size=1, max_size=3, unique=True).map(tuple),
    st.sampled_from([r"blocks\.\d+\.attn", "(a|b)+"]).map(re.compile),
    st.builds(Run, paths, st.integers(0, 3), st.integers(4, 9)),
    st.builds(crossfade.Targets, st.just("blocks.*.attn"), every=st.integers(1, 3)),
    st.builds(crossfade.Targets, st.just("blocks.*.attn"), exclude=st.just("blocks.0.attn"), indices=st.just((0, -1))),
)
students = st.one_of(
    st.just(Copy()),
    st.just("Copy"),
    st.builds(
        Reinit,
        st.one_of(st.sampled_from(["model", "reset_parameters"]), st.builds(Normal, st.floats(0.01, 1.0))),
        st.integers(-5, 5),
        st.lists(names, max_size=2).map(tuple),
    ),
)
swaps = st.builds(
    crossfade.Swap,
    targets=targets,
    student=students,
    gate=gates,
    guidance=guidances,
    output=st.sampled_from(["auto", None, 0, "logits"]),
    residual=st.sampled_from([None, True, False]),
    teacher_gradient=st.booleans(),
    drop=st.lists(names, max_size=2).map(tuple),
    carry=st.lists(names, max_size=2),
)
plans = st.builds(
    crossfade.Plan,
    st.lists(swaps, min_size=1, max_size=2),
    trains=st.one_of(st.sampled_from(["students", "all"]), st.lists(names, min_size=1, max_size=2)),
    seed=st.integers(-(2**40), 2**40),
)
NAMESPACE: dict[str, Any] = {
    **{name: getattr(crossfade, name) for name in crossfade.__all__},
    **{name: getattr(schedules, name) for name in schedules.__all__},
    "Copy": Copy,
    "Reinit": Reinit,
    "Normal": Normal,
    "Run": Run,
    "re": re,
}


@given(plans)
def test_a_plan_survives_json(plan: crossfade.Plan) -> None:
    data = plan.to_dict()
    text = json.dumps(data, allow_nan=False)
    again = crossfade.Plan.from_dict(json.loads(text))
    assert again == plan
    assert again.to_dict() == data
    assert again.fingerprint() == plan.fingerprint()


@given(plans)
def test_the_repr_of_a_plan_rebuilds_it(plan: crossfade.Plan) -> None:
    assert eval(repr(plan), dict(NAMESPACE)) == plan


@given(plans, plans)
def test_two_plans_have_one_fingerprint_only_if_they_are_equal(a: crossfade.Plan, b: crossfade.Plan) -> None:
    assert (a.fingerprint() == b.fingerprint()) == (a.to_dict() == b.to_dict())


@pytest.mark.parametrize("kind", ["target", "student", "schedule", "gate"])
def test_a_plan_with_something_unregistered_refuses_to_be_written_and_says_where(kind: str) -> None:
    parts: dict[str, Any] = {
        "target": {"targets": lambda path, module: True},
        "student": {"targets": "a", "student": lambda teacher, site: nn.Linear(2, 2)},
        "schedule": {"targets": "a", "gate": crossfade.Deterministic(lambda t: 1.0 - t)},
        "gate": {"targets": "a", "student": nn.Linear(2, 2)},
    }
    plan = crossfade.Plan(**parts[kind])
    with pytest.raises(crossfade.CrossfadeError, match=r"plan\.swaps\[0\]"):
        plan.to_dict()
    assert plan.fingerprint() == plan.fingerprint()


@pytest.mark.parametrize("path", ["kind", "a.kind"])
def test_a_module_may_be_called_kind(path: str) -> None:
    guidance = crossfade.DeepFeatureGuidance(site_weights={path: 2.0})
    plan = crossfade.Plan(targets=(path,), guidance=guidance)
    assert crossfade.Plan.from_dict(plan.to_dict()) == plan


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "plan:Nothing"},
        {"version": 99},
        {"surprise": 1},
        {"swaps": []},
        {"swaps": [{"kind": "os:system"}]},
        {"swaps": [{"kind": "plan:Swap", "targets": "a", "gate": {"kind": "gate:Determinstic"}}]},
    ],
)
def test_a_changed_file_is_refused(change: dict[str, Any]) -> None:
    data = crossfade.Plan(targets="a").to_dict() | change
    with pytest.raises(crossfade.CrossfadeError):
        crossfade.Plan.from_dict(data)


def test_a_plan_read_from_a_file_installs_the_same_run() -> None:
    plan = crossfade.Plan(targets="blocks.*.attn", student=Reinit("reset_parameters"), gate=crossfade.Bernoulli(0.5))
    runs = []
    for each in (plan, crossfade.Plan.from_dict(json.loads(json.dumps(plan.to_dict())))):
        fade = crossfade.install(net(), each, total_steps=20)
        weights = []
        for step in range(20):
            fade.seek(step)
            weights.append([site.weight for site in fade.sites])
        runs.append((weights, [p.sum().item() for p in fade.model.parameters()]))
    assert runs[0] == runs[1]
    assert lookup("plan", "Plan") is crossfade.Plan
