"""Outputs and calls: whatever a library returns keeps its structure, and only the main tensor changes."""

from __future__ import annotations

import dataclasses
import json
from collections import OrderedDict, namedtuple
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from crossfade import outputs
from crossfade.errors import OutputError, StateError

Pair = namedtuple("Pair", "hidden weights")


class Typed(NamedTuple):
    hidden_states: Tensor
    weights: Tensor | None = None


@dataclasses.dataclass
class Record:
    sample: Tensor
    note: str = "kept"


@dataclasses.dataclass(frozen=True)
class Frozen:
    logits: Tensor
    extra: Tensor | None = None


def model_output(x: Tensor, y: Tensor) -> Any:
    modeling = pytest.importorskip("transformers.modeling_outputs")
    return modeling.BaseModelOutput(last_hidden_state=x, attentions=(y,))


X, Y = torch.arange(6.0).reshape(1, 3, 2), torch.ones(2, 2)

# name -> (an output with main tensor X, the place that is found)
KINDS = {
    "tensor": (lambda: X, None),
    "tuple": (lambda: (X, Y, None), 0),
    "one_tuple": (lambda: (X,), 0),
    "list": (lambda: [X, Y], 0),
    "namedtuple": (lambda: Pair(X, Y), 0),
    "typed_namedtuple": (lambda: Typed(X, Y), 0),
    "dict_one": (lambda: {"out": X, "note": "a"}, "out"),
    "dict": (lambda: {"weights": Y, "hidden_states": X}, "hidden_states"),
    "dict_numbers": (lambda: {3: X}, 3),
    "ordered": (lambda: OrderedDict(logits=X, extra=Y), "logits"),
    "dataclass": (lambda: Record(X), "sample"),
    "frozen": (lambda: Frozen(X, Y), "logits"),
    "model_output": (lambda: model_output(X, Y), "last_hidden_state"),
}
kinds = pytest.mark.parametrize("kind", KINDS)


def same(a: Any, b: Any) -> bool:
    """The same class and structure, with the very same objects at the leaves."""
    if type(a) is not type(b):
        return False
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if dataclasses.is_dataclass(a):
        return all(same(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))
    return a is b or a == b if not isinstance(a, Tensor) else a is b


# ---- the main tensor -------------------------------------------------------------------------------------------------


@kinds
def test_that_the_main_tensor_is_found_and_replaced(kind):
    make, place = KINDS[kind]
    output, new = make(), X + 1
    assert outputs.find_main(output) == place
    assert outputs.main(output, place) is X
    changed = outputs.set_main(output, place, new)
    assert outputs.main(changed, place) is new
    assert same(output, make())  # The old one is never written to.
    assert same(outputs.set_main(changed, place, X), output)


@kinds
def test_that_the_rest_is_passed_on_as_it_is(kind):
    make, place = KINDS[kind]
    rest = [t for t in outputs.tensors(make()) if t is not X]
    changed = outputs.set_main(make(), place, X + 1)
    assert all(a is b for a, b in zip(rest, [t for t in outputs.tensors(changed) if t.shape != X.shape], strict=True))


@pytest.mark.parametrize(
    ("output", "place"),
    [
        (lambda: (Y, X), 1),
        (lambda: (Y, X), -1),
        (lambda: [Y, X], -1),
        (lambda: Pair(Y, X), "weights"),
        (lambda: Pair(Y, X), 1),
        (lambda: {"a": Y, "b": X}, "b"),
        (lambda: Record(X), "sample"),
        (lambda: Frozen(Y, X), "extra"),
    ],
    ids=[
        "tuple",
        "tuple from the end",
        "list from the end",
        "namedtuple by name",
        "namedtuple",
        "dict",
        "dataclass",
        "frozen",
    ],
)
def test_that_a_declared_place_is_replaced(output, place):
    new = X + 1
    assert outputs.find_main(output(), place) == place
    assert outputs.main(output(), place) is X
    changed = outputs.set_main(output(), place, new)
    assert outputs.main(changed, place) is new
    assert type(changed) is type(output())


def test_that_a_declared_index_into_a_model_output_is_replaced():
    new = X + 1
    output = model_output(X, Y)
    assert outputs.main(output, 0) is X
    assert outputs.main(outputs.set_main(output, 0, new), 0) is new


@pytest.mark.parametrize(
    "output", [None, "a", 3, (), [], (None, X), {}, {"a": X, "b": Y}, {"a": 3}, object(), ((X,),)], ids=repr
)
def test_that_an_unclear_output_is_an_error_that_says_how_to_choose(output):
    with pytest.raises(OutputError, match="output=INDEX") as caught:
        outputs.find_main(output, site="blocks.0")
    assert "blocks.0" in str(caught.value)


@pytest.mark.parametrize(
    ("output", "place"),
    [
        ((X,), 1),
        ((X, None), 1),
        ({"a": X}, "b"),
        (X, "a"),
        (None, None),
        ("text", 0),
        (Record(X), "note"),
        (3, 0),
        ({"a": X}, 0),
        ((X,), "a"),
    ],
)
def test_that_a_place_without_tensor_is_an_error(output, place):
    with pytest.raises(OutputError, match="no tensor"):
        outputs.main(output, place, "blocks.0")


# ---- skeletons -------------------------------------------------------------------------------------------------------


@kinds
def test_that_a_skeleton_keeps_the_structure_and_holds_no_tensor(kind):
    make, place = KINDS[kind]
    output = make()
    bones = outputs.skeleton(output)
    assert not list(outputs.tensors(bones))
    assert same(output, make())
    if place is None:
        assert bones is None
        return
    assert type(bones) is type(output)
    filled = outputs.conform(X, place, bones)
    assert type(filled) is type(output)
    assert outputs.main(filled, place) is X
    assert not list(outputs.tensors(bones))  # Filling it leaves it empty for the next call.


def test_that_a_skeleton_keeps_scalars():
    assert outputs.skeleton((X, None, 3, "a", True, (Y,))) == (None, None, 3, "a", True, None)
    assert outputs.skeleton(Record(X, "b")).note == "b"


def test_that_conform_leaves_a_full_output_alone():
    output = (X, Y)
    assert outputs.conform(output, 0, (None, None)) is output
    assert outputs.conform(X, None, None) is X


plain = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=3)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.lists(inner, max_size=3).map(tuple), st.dictionaries(st.text(max_size=3), inner)
    ),
    max_leaves=6,
)


@given(plain)
def test_that_pack_survives_json(value):
    assert outputs.unpack(json.loads(json.dumps(outputs.pack(value)))) == value


@given(plain)
def test_that_pack_keeps_tuples_and_lists_apart(value):
    again = outputs.unpack(json.loads(json.dumps(outputs.pack(value))))
    assert repr(again) == repr(value)


@pytest.mark.parametrize("make", [lambda: Record(X), lambda: Pair(X, Y), lambda: OrderedDict(a=X)])
def test_that_pack_refuses_a_class_of_its_own(make):
    with pytest.raises(OutputError, match="written to a file"):
        outputs.pack(outputs.skeleton(make()))


@kinds
def test_same_structure(kind):
    output = KINDS[kind][0]()
    assert outputs.same_structure(output, output)
    assert outputs.same_structure(X, output)  # A bare tensor can be adapted.
    if kind not in ("tensor", "tuple", "one_tuple"):
        assert not outputs.same_structure((X, Y, Y, Y), output)
    assert not outputs.same_structure({"z": object()}, (X,))
    assert not outputs.same_structure((X,), (X, Y))
    assert not outputs.same_structure((X,), X)


# ---- mixing ----------------------------------------------------------------------------------------------------------

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
EPS = {torch.float32: 6e-8, torch.float16: 5e-4, torch.bfloat16: 4e-3, torch.float64: 6e-8}


@dtypes
@pytest.mark.parametrize("weight", [0.0, 1.0])
def test_that_mix_is_exact_at_its_ends(dtype, weight):
    for scale in (1e-6, 1.0, 1e4):
        t, s = (torch.randn(1000) * scale).to(dtype), (torch.randn(1000) * scale).to(dtype)
        mixed = outputs.mix(t, s, torch.tensor(weight))
        assert mixed.dtype == dtype
        assert torch.equal(mixed, t if weight else s)


@dtypes
@given(weight=st.floats(0.0, 1.0, width=32))
def test_that_mix_is_the_formula(dtype, weight):
    t, s = torch.randn(50).to(dtype), torch.randn(50).to(dtype)
    w = torch.tensor(weight, dtype=torch.float32)
    naive = weight * t.double() + (1.0 - weight) * s.double()
    mixed = outputs.mix(t, s, w)
    assert mixed.dtype == dtype
    bound = 4 * EPS[dtype] * (t.double().abs() + s.double().abs()) + 1e-7
    assert bool(((mixed.double() - naive).abs() <= bound).all())


@dtypes
def test_that_a_student_in_another_dtype_comes_out_in_the_teachers(dtype):
    t, s = torch.randn(5).to(dtype), torch.randn(5, dtype=torch.float32 if dtype != torch.float32 else torch.bfloat16)
    for weight in (0.0, 0.25, 1.0):
        assert outputs.mix(t, s, torch.tensor(weight)).dtype == dtype
        assert outputs.select_exact(t, s, torch.tensor(weight)).dtype == dtype
    assert torch.equal(outputs.mix(t, s, torch.tensor(0.0)), s.to(dtype))


@dtypes
def test_that_the_gradients_of_mix_carry_the_weights(dtype):
    t, s = torch.randn(9).to(dtype).requires_grad_(), torch.randn(9).to(dtype).requires_grad_()
    outputs.mix(t, s, torch.tensor(0.25)).sum().backward()
    assert torch.equal(t.grad, torch.full_like(t, 0.25))
    assert torch.equal(s.grad, torch.full_like(s, 0.75))


@dtypes
def test_that_selection_keeps_nan_of_the_other_branch_out(dtype):
    good, bad = torch.randn(7).to(dtype), torch.full((7,), float("nan")).to(dtype)
    assert torch.equal(outputs.select_exact(good, bad, torch.tensor(1.0)), good)
    assert torch.equal(outputs.select_exact(bad, good, torch.tensor(0.0)), good)


def test_that_selection_passes_its_whole_gradient_to_the_chosen_branch():
    for weight in (0.0, 1.0):
        t, s = torch.randn(9, requires_grad=True), torch.randn(9, requires_grad=True)
        outputs.select_exact(t, s, torch.tensor(weight)).sum().backward()
        assert torch.equal(t.grad, torch.full_like(t, weight))
        assert torch.equal(s.grad, torch.full_like(s, 1.0 - weight))


# ---- nested values ---------------------------------------------------------------------------------------------------


@kinds
def test_that_map_tensors_rebuilds_and_keeps_objects(kind):
    output = KINDS[kind][0]()
    doubled = outputs.map_tensors(output, lambda t: t * 2)
    assert type(doubled) is type(output)
    assert [bool(torch.equal(a, 2 * b)) for a, b in zip(outputs.tensors(doubled), outputs.tensors(output), strict=True)]
    assert same(output, KINDS[kind][0]())
    assert same(outputs.map_tensors(output, lambda t: t), output)


def test_that_map_tensors_goes_deep_and_passes_other_objects_on():
    marker = object()
    value = {"a": [(X, {"b": Y}), marker], "c": None}
    mapped = outputs.map_tensors(value, lambda t: t + 1)
    assert mapped["a"][1] is marker
    assert torch.equal(mapped["a"][0][1]["b"], Y + 1)
    assert mapped["c"] is None
    assert [id(t) for t in outputs.tensors(value)] == [id(X), id(Y)]


def test_detach():
    x = torch.ones(2, requires_grad=True)
    detached = outputs.detach((x * 2, [x], Record(x)))
    assert not any(t.requires_grad for t in outputs.tensors(detached))
    assert x.requires_grad


def test_that_feed_calls_as_the_batch_says():
    def model(*args: Any, **kwargs: Any) -> Any:
        return args, kwargs

    assert outputs.feed(model, X) == ((X,), {})
    assert outputs.feed(model, (1, 2)) == ((1, 2), {})
    assert outputs.feed(model, [1, 2]) == ((1, 2), {})
    assert outputs.feed(model, {"a": 1}) == ((), {"a": 1})
    assert outputs.feed(model, OrderedDict(a=1)) == ((), {"a": 1})
    assert outputs.feed(model, lambda m: m("called", b=2)) == (("called",), {"b": 2})


def test_that_a_cache_is_found_by_type_wherever_it_hides():
    class Cache:
        pass

    class Mine(Cache):
        pass

    for value in (Mine(), (1, Mine()), [[Cache()]], {"a": {"b": Mine()}}):
        with pytest.raises(StateError, match="use_cache = False") as caught:
            outputs.refuse_caches(((X, value), {}), "blocks.0")
        assert "blocks.0" in str(caught.value)
    outputs.refuse_caches(((X, None, 3, "cache", object()), {"cache": (X,)}), "blocks.0")


def test_that_the_caches_of_transformers_are_found():
    transformers = pytest.importorskip("transformers")
    with pytest.raises(StateError):
        outputs.refuse_caches({"past_key_values": transformers.DynamicCache()}, "blocks.0")


# ---- calls -----------------------------------------------------------------------------------------------------------


def test_that_the_main_input_is_found():
    ids = torch.zeros(2, dtype=torch.long)
    assert outputs.main_input((X, Y), {}) is X
    assert outputs.main_input((ids, X), {"other": Y}) is X
    assert outputs.main_input((Y,), {"hidden_states": X}) is X
    assert outputs.main_input((None,), {"mask": ids, "x": X}) is X
    assert outputs.main_input((X,), {"hidden_states": None}) is X
    with pytest.raises(OutputError, match=r"blocks\.0"):
        outputs.main_input((ids, None, (X,)), {}, "blocks.0")


def test_that_the_main_input_is_replaced_once():
    new = X + 1
    args, kwargs = outputs.set_main_input((Y.long(), X), {"x": X}, new)
    assert args[1] is new
    assert kwargs["x"] is X
    args, kwargs = outputs.set_main_input((Y,), {"hidden_states": X, "b": 2}, new)
    assert args[0] is Y
    assert kwargs["hidden_states"] is new
    assert kwargs["b"] == 2
    args, kwargs = outputs.set_main_input((), {"x": X}, new)
    assert kwargs["x"] is new


# ---- masks -----------------------------------------------------------------------------------------------------------

B, L, D = 2, 4, 3
LIKE = torch.zeros(B, L, D)
REAL = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]])
TRUTH = REAL.bool()


def additive(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
    """[B, 1, L, L] with `value` at padded keys."""
    return torch.where(TRUTH, 0.0, value).to(dtype)[:, None, None, :].expand(B, 1, L, L).clone()


def causal() -> Tensor:
    return torch.ones(L, L, dtype=torch.bool).tril()


FORMS = {
    "key_padding_mask": {"key_padding_mask": ~TRUTH},
    "src_key_padding_mask": {"src_key_padding_mask": ~TRUTH},
    "float key_padding_mask": {"key_padding_mask": torch.where(TRUTH, 0.0, float("-inf"))},
    "2-D int": {"attention_mask": REAL},
    "2-D bool": {"attention_mask": TRUTH},
    "2-D float": {"attention_mask": REAL.float()},
    "4-D bool": {"attention_mask": TRUTH[:, None, None, :].expand(B, 1, L, L)},
    "4-D bool, one query": {"attention_mask": TRUTH[:, None, None, :]},
    "4-D bool, causal": {"attention_mask": TRUTH[:, None, None, :] & causal()},
    "4-D bool, heads": {"attention_mask": (TRUTH[:, None, None, :] & causal()).expand(B, 5, L, L)},
    "4-D int": {"attention_mask": REAL[:, None, None, :]},
    "4-D additive": {"attention_mask": additive(torch.finfo(torch.float32).min)},
    "4-D additive, -inf": {"attention_mask": additive(float("-inf"))},
    "4-D additive, bf16": {"attention_mask": additive(torch.finfo(torch.bfloat16).min, torch.bfloat16)},
    "4-D additive, fp16": {"attention_mask": additive(torch.finfo(torch.float16).min, torch.float16)},
    "4-D additive, -1e9": {"attention_mask": additive(-1e9)},
    "4-D additive, -10000": {"attention_mask": additive(-10000.0)},
    "4-D additive, causal": {
        "attention_mask": additive(torch.finfo(torch.float32).min).masked_fill(
            ~causal(), torch.finfo(torch.float32).min
        )
    },
    "3-D bool": {"attention_mask": TRUTH[:, None, :].expand(B, L, L)},
}


@pytest.mark.parametrize("form", FORMS)
def test_that_padding_is_read_from_every_form(form):
    found = outputs.padding_mask(FORMS[form], LIKE)
    assert found is not None
    assert found.shape == (B, L)
    assert torch.equal(outputs.valid_positions(found, LIKE), TRUTH)


@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"attention_mask": None},
        {"attention_mask": "flash"},
        {"attention_mask": torch.ones(B, L + 1)},
        {"attention_mask": torch.ones(B + 1, L)},
        {"attention_mask": torch.ones(B, 1, L, 2 * L, dtype=torch.bool)},
        {"key_padding_mask": torch.ones(B, L + 1, dtype=torch.bool)},
        {"mask": REAL},
    ],
    ids=["none", "None", "no tensor", "other length", "other batch", "keys of elsewhere", "other keys", "other name"],
)
def test_that_what_does_not_fit_is_no_padding_mask(kwargs):
    assert outputs.padding_mask(kwargs, LIKE) is None


def test_that_one_mask_for_all_samples_is_spread():
    found = outputs.padding_mask({"attention_mask": causal()[None, None]}, LIKE)
    assert torch.equal(found, torch.ones(B, L, dtype=torch.bool))


def test_that_an_output_without_positions_has_no_padding():
    assert outputs.padding_mask({"attention_mask": REAL}, torch.zeros(B, D)) is None


def test_mask_argument():
    names = ("input_ids", "attention_mask", "x")
    assert outputs.mask_argument(names, (X, REAL), {}) is REAL
    assert outputs.mask_argument(names, (X,), {"attention_mask": REAL}) is REAL
    assert outputs.mask_argument(names, (X,), {}) is None
    assert outputs.mask_argument(names, (X, None), {}) is None
    assert outputs.mask_argument(names, (X, torch.ones(B)), {}) is None
    assert outputs.mask_argument((), (X, REAL, 1, 2), {}) is None
    torch_names = ("src", "mask", "src_key_padding_mask")
    assert torch.equal(outputs.mask_argument(torch_names, (X,), {"src_key_padding_mask": ~TRUTH}), TRUTH)
    assert torch.equal(outputs.mask_argument(torch_names, (X, None, ~TRUTH), {}), TRUTH)


@pytest.mark.parametrize("dtype", [torch.bool, torch.long, torch.float32, torch.int32])
def test_that_valid_positions_are_bool(dtype):
    found = outputs.valid_positions(REAL.to(dtype), LIKE)
    assert found.dtype == torch.bool
    assert torch.equal(found, TRUTH)
    assert outputs.valid_positions(None, LIKE) is None


@pytest.mark.parametrize(
    ("mask", "like"),
    [
        (torch.ones(B, L + 1), LIKE),
        (torch.ones(L, B), LIKE),
        (torch.ones(()), LIKE),
        (torch.ones(B, L), torch.zeros(B, D)),
        (torch.ones(B, L), torch.zeros(B, L)),
        (torch.ones(B, L, D), LIKE),
    ],
    ids=["longer", "turned", "scalar", "pooled output", "pooled output as wide as long", "by channel"],
)
def test_that_a_mask_which_does_not_fit_is_an_error(mask, like):
    with pytest.raises(OutputError, match="mask=False") as caught:
        outputs.valid_positions(mask, like, "blocks.0")
    assert "blocks.0" in str(caught.value)


def test_describe():
    text = outputs.describe((X, [None, 3], {"a": Y.bfloat16()}, Record(X), object()))
    assert text == (
        "tuple(Tensor[1, 3, 2]:float32, list(None, 3), dict(a=Tensor[2, 2]:bfloat16), "
        "Record(sample=Tensor[1, 3, 2]:float32, note='kept'), object)"
    )
