"""Names and the codec: everything registered survives a round trip, and garbage is a PlanError."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import crossfade
from crossfade import registry, schedules, students
from crossfade.errors import PlanError
from crossfade.registry import KINDS, decode, encode, lookup, nearest, register, registered_name
from crossfade.targets import Run, Targets


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch):
    """What a test registers is gone after it."""
    monkeypatch.setattr(registry, "_entries", {kind: dict(known) for kind, known in registry._entries.items()})


# ---- names -----------------------------------------------------------------------------------------------------------


def test_register_returns_its_argument_and_lookup_finds_it():
    def mine(t: float) -> float:
        return t

    assert register("schedule", "mine")(mine) is mine
    assert lookup("schedule", "mine") is mine
    assert registered_name(mine) == ("schedule", "mine")


def test_that_a_name_is_taken_once_but_the_same_thing_may_come_again():
    register("schedule", "mine")(abs)
    register("schedule", "mine")(abs)
    with pytest.raises(PlanError, match="taken"):
        register("schedule", "mine")(max)
    assert lookup("schedule", "mine") is abs


def test_that_kinds_have_separate_names():
    register("schedule", "mine")(abs)
    register("student", "mine")(max)
    assert lookup("schedule", "mine") is abs
    assert lookup("student", "mine") is max


def test_that_an_unknown_kind_is_refused_when_it_is_asked_for_not_when_it_is_used():
    with pytest.raises(PlanError, match="schedule"):
        register("shedule", "x")


def test_that_lookup_names_what_exists_and_what_was_meant():
    with pytest.raises(PlanError, match="did you mean 'aggr20'"):
        lookup("schedule", "agr20")
    with pytest.raises(PlanError, match=r"crossfade\.register"):
        lookup("schedule", "zzzzzz")
    with pytest.raises(PlanError, match="nothing is registered"):
        lookup("no such kind", "x")


def test_nearest():
    assert nearest("linaer", ["linear", "aggr20"]) == "did you mean 'linear'?"
    assert nearest("zzz", ["linear", "aggr20"]) is None


def test_that_equality_is_not_identity():
    # Two equal frozen dataclasses are one value; only the registered *object* has a name.
    assert registered_name(schedules.linear()) is None
    assert registered_name(lookup("schedule", "linear")) == ("schedule", "linear")


# ---- round trips -----------------------------------------------------------------------------------------------------

unit = st.floats(0.0, 1.0)
names = st.text("abc.*_", min_size=1, max_size=8)


def _piecewise(values: list[float]) -> schedules.Piecewise:
    return schedules.Piecewise(tuple((i / 10, value) for i, value in enumerate(values)))


simple = st.one_of(
    st.lists(unit, min_size=1, max_size=4).map(_piecewise),
    st.tuples(unit, unit).map(lambda pair: schedules.Cosine(*pair)),
    st.sampled_from(["aggr20", "linear", "cosine"]).map(lambda name: lookup("schedule", name)),
)
joined = st.tuples(simple, simple).map(lambda pair: schedules.Join(((0.5, pair[0]), (1.0, pair[1]))))
in_steps = st.tuples(simple, st.integers(1, 50)).map(lambda pair: schedules.InSteps(*pair))
any_schedule = st.one_of(simple, joined, in_steps)
resolvers = st.one_of(
    st.tuples(simple, st.sampled_from(["front_to_back", "back_to_front"]), unit).map(
        lambda x: schedules.Staggered(schedule=x[0], order=x[1], overlap=x[2])
    ),
    st.lists(simple, min_size=1, max_size=3).map(lambda items: schedules.PerSite(tuple(items))),
)
alphas = st.one_of(any_schedule, resolvers, st.just(crossfade.Adaptive()))
gates = st.one_of(
    alphas.map(crossfade.Deterministic),
    st.tuples(alphas, st.sampled_from(["both", "skip"])).map(lambda x: crossfade.Bernoulli(*x)),
    st.tuples(alphas, st.floats(0.1, 5.0)).map(lambda x: crossfade.Gumbel(*x)),
)
guidance = st.one_of(
    st.none(),
    st.builds(
        crossfade.DeepFeatureGuidance,
        weight=st.floats(0.0, 10.0),
        schedule=st.one_of(st.just("alpha"), any_schedule),
        reduction=st.sampled_from(["relative", "mean", "sum", "cosine"]),
        site_weights=st.dictionaries(names, st.floats(0.0, 2.0), max_size=2),
        detach_input=st.booleans(),
        mask=st.booleans(),
    ),
)
student_specs = st.one_of(
    st.just("Copy"),
    st.just(students.Copy()),
    st.builds(
        students.Reinit,
        init=st.one_of(st.sampled_from(["model", "reset_parameters"]), st.floats(0.01, 1.0).map(students.Normal)),
        seed=st.integers(0, 9),
        keep=st.lists(names, max_size=2).map(tuple),
    ),
)
targets = st.one_of(
    st.sampled_from(["blocks.*.attn", "blocks[1:3]"]),
    st.just(("a", "b")),
    st.tuples(names, st.integers(0, 3), st.integers(4, 6)).map(lambda x: Run(*x)),
    st.integers(1, 3).map(lambda n: Targets("blocks.*.attn", first=n)),
)
swaps = st.builds(
    crossfade.Swap,
    targets=targets,
    student=student_specs,
    gate=gates,
    guidance=guidance,
    output=st.one_of(st.just("auto"), st.integers(0, 2), names),
    residual=st.sampled_from([None, True, False]),
    teacher_gradient=st.booleans(),
    drop=st.lists(names, max_size=2).map(tuple),
    carry=st.lists(names, max_size=2).map(tuple),
)
plans = st.builds(
    crossfade.Plan,
    st.lists(swaps, min_size=1, max_size=2).map(tuple),
    trains=st.one_of(st.sampled_from(["students", "all"]), st.lists(names, min_size=1, max_size=2).map(tuple)),
    seed=st.integers(-5, 2**62),
)


@given(plans)
def test_that_every_registered_plan_survives_json(plan):
    data = json.loads(json.dumps(plan.to_dict(), allow_nan=False))
    again = crossfade.Plan.from_dict(data)
    assert again == plan
    assert again.fingerprint() == plan.fingerprint()
    assert json.loads(json.dumps(again.to_dict())) == data


@pytest.mark.parametrize("flags", [0, re.IGNORECASE, re.IGNORECASE | re.DOTALL])
def test_that_a_pattern_survives_with_its_flags(flags):
    pattern = re.compile(r"blocks\.\d+\.ATTN", flags)
    again = decode(json.loads(json.dumps(encode(pattern))))
    assert again.pattern == pattern.pattern
    assert again.flags == pattern.flags


def test_that_a_pattern_over_bytes_is_refused():
    with pytest.raises(PlanError):
        encode(re.compile(b"x"))


def test_that_lists_come_back_as_tuples():
    assert decode(encode({"a": [1, [2, (3,)]], "b": None, "c": 1.5, "d": True})) == {
        "a": (1, (2, (3,))),
        "b": None,
        "c": 1.5,
        "d": True,
    }


@given(st.dictionaries(st.sampled_from(["kind", "a"]), st.one_of(unit, st.text(max_size=4)), max_size=2))
def test_that_a_mapping_comes_back_or_is_refused_when_it_is_written(mapping):
    # "kind" is the codec's own key; a user's mapping that holds it must not turn into something else on loading.
    try:
        data = encode(mapping)
    except PlanError:
        return
    assert decode(data) == mapping


def test_that_an_unregistered_value_is_refused_with_its_place():
    for value in (object(), lambda t: t, nn.Linear(1, 1), {1, 2}, 1j, b"x"):
        with pytest.raises(PlanError, match=r"plan\.a\[1\]"):
            encode({"a": [1, value]})


def test_that_a_field_which_init_does_not_take_is_not_written():
    assert "hard" not in encode(crossfade.Bernoulli("linear"))


def test_that_a_registered_function_is_its_name_alone():
    register("schedule", "mine")(abs)
    assert encode(abs) == {"kind": "schedule:mine"}
    assert decode({"kind": "schedule:mine"}) is abs
    with pytest.raises(PlanError, match="takes no fields"):
        decode({"kind": "schedule:mine", "x": 1})


def test_that_a_registered_module_class_takes_no_fields_either():
    @register("student", "mine")
    class Mine(nn.Linear):
        pass

    assert decode({"kind": "student:mine"}) is Mine
    with pytest.raises(PlanError):
        decode({"kind": "student:mine", "in_features": 3})


def test_that_a_registered_dataclass_of_the_user_is_written_with_its_fields():
    @register("schedule", "mine")
    @dataclasses.dataclass(frozen=True)
    class Mine:
        power: float = 2.0

        def __call__(self, t: float) -> float:
            return (1.0 - t) ** self.power

    plan = crossfade.Plan(targets="x", gate=crossfade.Deterministic(Mine(3.0)))
    assert encode(Mine(3.0)) == {"kind": "schedule:mine", "power": 3.0}
    assert crossfade.Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan


# ---- garbage ---------------------------------------------------------------------------------------------------------

scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.just(10**400), st.just("linear")
)
known_kinds = [f"{kind}:{name}" for kind in KINDS for name in registry._entries[kind]]
kinds = st.one_of(
    st.sampled_from(known_kinds), st.sampled_from(["target:regex", "", ":", "plan:", "student:nn.Linear"]), scalars
)
fields = sorted(
    {
        f.name
        for known in registry._entries.values()
        for e in known.values()
        if isinstance(e, type) and dataclasses.is_dataclass(e)
        for f in dataclasses.fields(e)
        if f.init
    }
    | {"pattern"}
)
garbage = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from([*fields, "x"]), inner, max_size=3),
        st.tuples(kinds, st.dictionaries(st.sampled_from(fields), inner, max_size=3)).map(
            lambda pair: {"kind": pair[0]} | pair[1]
        ),
    ),
    max_leaves=8,
)


def is_refused_or_built(data: Any) -> None:
    """Loading never ends in anything but a value or crossfade's own error."""
    with contextlib.suppress(PlanError):
        decode(data)


@given(garbage)
def test_that_decode_of_garbage_is_a_plan_error(data):
    is_refused_or_built(data)


@given(st.sampled_from(known_kinds), st.data())
def test_that_each_kind_with_wrong_fields_is_a_plan_error(kind, data):
    entry = lookup(*kind.split(":"))
    if not isinstance(entry, type):
        return
    own = [f.name for f in dataclasses.fields(entry) if f.init]
    chosen = data.draw(st.dictionaries(st.sampled_from(own), garbage, max_size=4)) if own else {}
    is_refused_or_built({"kind": kind} | chosen)


@pytest.mark.parametrize(
    "data",
    [
        {"kind": "schedule:Piecewise", "points": [["a", 1.0]]},
        {"kind": "schedule:Piecewise", "points": [[0.0, 1.0, 2.0]]},
        {"kind": "schedule:Piecewise", "points": [[0, 10**400]]},
        {"kind": "schedule:Join", "parts": [["x", 1.0]]},
        {"kind": "schedule:Cosine", "begin": "0"},
        {"kind": "gate:Deterministic", "alpha": {"kind": "schedule:Cosine", "start": "a"}},
        {"kind": "gate:Deterministic", "alpha": {"kind": "resolver:PerSite", "choose": None}},
        {"kind": "guidance:DeepFeatureGuidance", "site_weights": [1]},
        {"kind": "target:Run", "container": 3, "start": "a", "stop": None},
        {"kind": "target:Targets", "match": 3},
        {"kind": "target:regex", "pattern": "("},
        {"kind": "target:regex", "pattern": None},
        {"kind": "target:regex"},
        {"kind": ["plan", "Plan"]},
        {"kind": "plan:Plan"},
        {"kind": "plan:Plan", "swaps": 3},
        {"kind": "plan:Plan", "swaps": [3]},
        {"kind": "plan:Plan", "swaps": [{"kind": "plan:Swap"}]},
        {"kind": "plan:Swap", "targets": "a", "drop": 5},
        {"kind": "student:Reinit", "keep": 5},
    ],
    ids=str,
)
def test_that_this_garbage_is_a_plan_error(data):
    with pytest.raises(PlanError):
        decode(data)


def test_that_decode_imports_nothing():
    for name in ("student:os.system", "student:torch.nn.Linear", "schedule:__import__"):
        with pytest.raises(PlanError, match="registered"):
            decode({"kind": name})


@given(garbage)
def test_that_from_dict_of_garbage_is_a_plan_error(data):
    try:
        plan = crossfade.Plan.from_dict(data)
    except PlanError:
        return
    assert isinstance(plan, crossfade.Plan)


def test_that_from_dict_refuses_what_is_no_plan():
    for data in (None, 3, [], {}, encode(schedules.linear())):
        with pytest.raises(PlanError, match="not a plan"):
            crossfade.Plan.from_dict(data)
