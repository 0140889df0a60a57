"""Selection: what each kind of target hits, how it is narrowed, what stands in the way; nothing is ever changed."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from crossfade.blend import Blend
from crossfade.errors import CrossfadeError, SelectionError
from crossfade.ledger import Ledger
from crossfade.targets import Match, Run, Selection, Targets, parent_of, resolve, select
from tests.models import Attention, difference, net, portrait, random_states

ATTENTIONS = tuple(f"blocks.{i}.attn" for i in range(4))


def linear() -> nn.Linear:
    return nn.Linear(2, 2)


def tree(**children: nn.Module) -> nn.ModuleDict:
    return nn.ModuleDict(children)


def adopt(parent: nn.Module, name: str, child: nn.Module) -> nn.Module:
    """Registers a child under a name that `add_module` refuses."""
    parent._modules[name] = child
    return parent


# ---- kinds of target -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "paths"),
    [
        ("blocks.*.attn", ATTENTIONS),
        ("blocks.[!0-1].attn", ATTENTIONS[2:]),
        ("blocks.{0,3}.attn", ATTENTIONS[::3]),
        ("**.attn", ATTENTIONS),
        ("blocks.1", ("blocks.1",)),
        ("h??d", ("head",)),
        (["blocks.3.attn", "blocks.0.attn", "blocks.3.attn"], ATTENTIONS[::3]),  # the order of the model, each once
        (("blocks[2:4]", "head"), ("blocks[2:4]", "head")),
        (re.compile(r"blocks\.[12]\.attn"), ATTENTIONS[1:3]),
        (Attention, ATTENTIONS),
        (nn.LayerNorm, tuple(f"blocks.{i}.norm{j}" for i in range(4) for j in (1, 2))),
        (lambda path, module: path.endswith("attn") and module.heads == 2, ATTENTIONS),
        (Run("blocks", 0, 2), ("blocks[0:2]",)),
        (Run("blocks", -2, 4), ("blocks[2:4]",)),
        ("blocks[1:3]", ("blocks[1:3]",)),
        ("blocks[:-1]", ("blocks[0:3]",)),
        ("blocks[3:]", ("blocks[3:4]",)),
        ("b*s[:]", ("blocks[0:4]",)),
        (Targets("blocks.*.attn", last=1), ATTENTIONS[3:]),
        (Targets(Targets("blocks.*.attn", every=2), first=1), ATTENTIONS[:1]),
    ],
)
def test_each_kind_of_target(target: Any, paths: tuple[str, ...]) -> None:
    assert select(net(layers=4), target).paths == paths


def test_index_1_is_not_index_10() -> None:
    model = net(layers=12)
    assert select(model, "blocks.1.attn").paths == ("blocks.1.attn",)
    assert select(model, "blocks.1*.attn").paths == ("blocks.1.attn", "blocks.10.attn", "blocks.11.attn")


def test_a_string_is_not_a_suffix_and_a_list_is_not_a_pattern() -> None:
    model = net(layers=2)
    with pytest.raises(SelectionError, match='pattern "attn" matched 0 of'):
        select(model, "attn")
    with pytest.raises(SelectionError, match=r'path "blocks\.\*\.attn" matched 0 of(?s:.*)a pattern as a string'):
        select(model, ["blocks.*.attn"])


def test_without_a_target_every_module_but_the_model_is_selected() -> None:
    model = net(layers=2)
    assert select(model).paths == tuple(path for path, _ in model.named_modules() if path)


def test_a_class_or_predicate_that_hits_the_model_too_takes_only_what_is_inside() -> None:
    inner = nn.Sequential(linear())
    assert select(nn.Sequential(inner), nn.Sequential).paths == ("0",)
    seen: list[str] = []
    select(net(layers=1), lambda path, module: not seen.append(path))
    assert "" not in seen


def test_a_run_of_the_model_itself() -> None:
    model = nn.Sequential(linear(), nn.ReLU(), linear())
    (match,) = select(model, "[0:2]")
    assert (match.path, match.modules, match.run) == ("[0:2]", (model[0], model[1]), Run("", 0, 2))


def test_what_a_match_says() -> None:
    model = net(layers=2)
    (attn, run) = select(model, ("blocks.1.attn", "blocks[0:2]"))[::-1]
    whole = sum(p.numel() for p in model.parameters())
    size = sum(p.numel() for p in model.blocks[1].attn.parameters())
    assert attn == Match(
        "blocks.1.attn", ("blocks.1.attn",), model.blocks[1].attn, (model.blocks[1].attn,), size, size / whole
    )
    assert attn.run is None
    assert attn.class_name == "Attention"
    assert run.run == Run("blocks", 0, 2)
    assert run.module is model.blocks[0]
    assert run.modules == tuple(model.blocks)
    assert run.class_name == "2 x Block"
    assert select(nn.Sequential(linear(), nn.ReLU(), linear()), "[:]")[0].class_name == "Linear + ReLU + Linear"


def test_parameters_count_each_tensor_once_and_lazy_ones_not_at_all() -> None:
    a, b = linear(), linear()
    b.weight = a.weight
    found = select(nn.Sequential(nn.Sequential(a, b), nn.LazyLinear(3)), "*")
    assert [match.parameters for match in found] == [4 + 2 + 2, 0]
    assert [match.share for match in found] == [1.0, 0.0]
    assert select(nn.Sequential(nn.ReLU()), "0")[0].share == 0.0  # not a division by zero


# ---- nothing is silent -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (
            "blocks.*.atn",
            r'target pattern "blocks\.\*\.atn" matched 0 of 51 modules(?s:.*)"blocks.0.attn" \(and 3 like it\)',
        ),
        ("layers.0.attn", r'nearest paths: "blocks.0.attn" \(and 3 like it\)(?s:.*)print\(crossfade.select\(model\)\)'),
        (["blocks.0.attn", "blocks.0.atn"], r'path "blocks.0.atn" matched 0 of(?s:.*)nearest paths: "blocks.0.attn"'),
        (re.compile(r"blocks\.\d\.atn"), r"regex 'blocks(?s:.*)matched 0 of(?s:.*)nearest paths: \"blocks"),
        (nn.Conv1d, "class Conv1d matched 0 of(?s:.*)nearest classes: "),
        (lambda path, module: False, "predicate '<lambda>' matched 0 of(?s:.*)look at the paths"),
        ("block[0:2]", r'no module stands at "block"(?s:.*)nearest paths: "blocks"'),
        (Run("block", 0, 2), r'no module stands at "block"(?s:.*)nearest paths: "blocks"'),
        (["blocks[0:2]", "block[2:4]"], r'no module stands at "block"'),
        ("blocks[0:5]", r"run does not lie in its container(?s:.*)where: blocks(?s:.*)stop <= 4(?s:.*)\[0:5\]"),
        ("blocks[2:2]", r"run does not lie in its container(?s:.*)\[2:2\]"),
        ("blocks[-9:]", r"run does not lie in its container(?s:.*)\[-9:\]"),
        ("head[0:1]", "cut from a ModuleList or a Sequential(?s:.*)where: head(?s:.*)got: Linear"),
        ("[0:1]", "cut from a ModuleList or a Sequential(?s:.*)the model itself"),
        ("", "the model itself cannot be a site"),
        (["head", ""], "the model itself cannot be a site"),
        ("a{b", "braces of a glob do not close"),
        ("a{b[0:2]", "braces of a glob do not close"),
        (3, "this is no target(?s:.*)expected: a glob, a list(?s:.*)got: 3"),
        (None, "this is no target(?s:.*)got: None"),
        ([], r"this is no target(?s:.*)one or more paths(?s:.*)got: \[\]"),
        (["head", 3], r"this is no target(?s:.*)got: \['head', 3\]"),
        ({"head"}, r"this is no target(?s:.*)got: \{'head'\}"),
        (b"head", "this is no target(?s:.*)got: b'head'"),
        (dict, "this is no target(?s:.*)a module class(?s:.*)got: <class 'dict'>"),
        (nn.Linear(2, 2), "this is no target(?s:.*)got: Linear"),
        (Targets("head", exclude="blocks.0"), r'exclude pattern "blocks.0" hits none of the 1 match(?s:.*)elsewhere'),
    ],
)
def test_a_target_without_a_match_says_what_is_near(target: Any, message: str) -> None:
    with pytest.raises(SelectionError, match=message) as caught:
        select(net(layers=4), target)
    assert isinstance(caught.value, CrossfadeError)


def test_the_root_is_refused_by_its_class_too_and_a_leaf_has_nothing() -> None:
    with pytest.raises(SelectionError, match=r"the model itself cannot be a site(?s:.*)nn\.Sequential\(model\)"):
        select(net(), type(net()))
    with pytest.raises(SelectionError, match=r"0 of 0 modules(?s:.*)the model has no modules"):
        select(linear())
    with pytest.raises(SelectionError, match="the model itself cannot be a site"):
        select(linear(), nn.Linear)
    with pytest.raises(SelectionError, match=r"select needs a model(?s:.*)got: str"):
        select("model", "*")


def test_a_run_of_named_items_is_refused() -> None:
    named = nn.Sequential()
    named.add_module("conv", linear())
    named.add_module("act", nn.ReLU())
    with pytest.raises(SelectionError, match=r'items that are numbered from 0(?s:.*)"conv", "act"'):
        select(tree(body=named), "body[0:2]")


# ---- narrowing -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "kept"),
    [
        ({"first": 2}, [0, 1]),
        ({"last": 3}, [1, 2, 3]),
        ({"every": 3}, [0, 3]),
        ({"every": 9}, [0]),
        ({"indices": [-1, 0, 0]}, [0, 3]),
        ({"indices": range(1, 3)}, [1, 2]),
        ({"exclude": "blocks.1.*"}, [0, 2, 3]),
        ({"exclude": ["blocks.0.attn", "blocks.2.attn"]}, [1, 3]),
        ({"exclude": "blocks.0.*", "every": 2}, [1, 3]),
        ({"exclude": Run("blocks", 0, 1), "last": 1}, None),  # hits blocks.0, which is not among the matches
    ],
)
def test_arguments_data_and_methods_narrow_alike(how: dict[str, Any], kept: list[int] | None) -> None:
    model = net(layers=4)
    if kept is None:
        with pytest.raises(SelectionError, match=r"hits none of the 4 matches(?s:.*)blocks\[0:1\]"):
            select(model, "blocks.*.attn", **how)
        return
    found = select(model, "blocks.*.attn", **how)
    assert found.paths == tuple(ATTENTIONS[i] for i in kept)
    assert select(model, Targets("blocks.*.attn", **how)) == found
    chained = select(model, "blocks.*.attn")
    for way, value in how.items():
        chained = getattr(chained, {"indices": "at"}.get(way, way))(value)
    assert chained == found


def test_methods_chain_and_leave_the_selection_as_it_was() -> None:
    model = net(layers=4)
    found = select(model, "blocks.*.attn")
    assert found.first(3).every(2).paths == ATTENTIONS[:3:2]
    assert found.include(["blocks.1.attn", "head"]).paths == ATTENTIONS[1:2]
    assert found.where(lambda match: "2" in match.path).paths == ATTENTIONS[2:3]
    assert found[1:].paths == ATTENTIONS[1:]
    assert found[-1].path == ATTENTIONS[3]
    assert len(found[4:]) == 0
    assert [match.path for match in found] == list(found.paths) == list(ATTENTIONS)


def test_a_run_is_hit_when_one_of_its_modules_is() -> None:
    runs = select(net(layers=4), ["blocks[0:2]", "blocks[2:4]"])
    assert runs.exclude("blocks.1").paths == ("blocks[2:4]",)
    assert runs.include("blocks[1:2]").paths == ("blocks[0:2]",)


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda s: s.first(5), "first=5 asks for more than the 4 matches"),
        (lambda s: s.last(5), "last=5 asks for more than the 4 matches"),
        (lambda s: s.first(0), "first takes a whole number from 1(?s:.*)got: 0"),
        (lambda s: s.every(True), "every takes a whole number from 1(?s:.*)got: True"),
        (lambda s: s.every(1.5), "every takes a whole number from 1"),
        (lambda s: s.at([0, 4, -5]), r"out of range for 4 matches(?s:.*)-4 to 3(?s:.*)\[4, -5\]"),
        (lambda s: s.at([]), "indices takes one or more whole numbers"),
        (lambda s: s.at("12"), "indices takes one or more whole numbers"),
        (lambda s: s.at(2), "indices takes one or more whole numbers"),
        (
            lambda s: s.exclude("head"),
            r'exclude pattern "head" hits none of the 4 matches(?s:.*)1 match elsewhere: "head"',
        ),
        (lambda s: s.exclude("haed"), r'the exclude pattern "haed" matched 0 of(?s:.*)nearest paths: "head"'),
        (lambda s: s.exclude(7), "this is no exclude"),
        (lambda s: s.include("head"), 'include pattern "head" hits none'),
        (lambda s: s.exclude("**"), "exclude leaves none of the 4 matches"),
        (lambda s: s.where(lambda match: False), "where leaves none of the 4 matches"),
        (lambda s: s[4:].check(), r"the selection is empty(?s:.*)print\(crossfade"),
    ],
)
def test_narrowing_that_would_do_nothing_it_was_asked_for(use: Any, message: str) -> None:
    with pytest.raises(SelectionError, match=message):
        use(select(net(layers=4), "blocks.*.attn"))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"first": 1, "every": 2}, r"narrowed twice(?s:.*)got: first, every(?s:.*)chain them"),
        ({"last": 0}, "last takes a whole number from 1"),
        ({"indices": [0.5]}, "indices takes one or more whole numbers"),
        ({"exclude": ""}, "the model itself"),
        ({"exclude": 3}, "this is no exclude"),
    ],
)
def test_targets_validate_themselves(how: dict[str, Any], message: str) -> None:
    with pytest.raises(SelectionError, match=message):
        Targets("blocks.*", **how)


def test_targets_are_values() -> None:
    names, indices = ["a", "b"], [0, 1]
    targets = Targets(names, indices=indices)
    names.append("c")
    indices.append(2)
    assert targets == Targets(("a", "b"), indices=(0, 1))
    assert hash(targets) == hash(Targets(("a", "b"), indices=(0, 1)))
    assert eval(repr(targets)) == targets


# ---- shared modules --------------------------------------------------------------------------------------------------


def test_a_shared_module_is_one_match_with_all_its_paths() -> None:
    model = net("shared", layers=3)
    for target in ("blocks.*.attn", "blocks.2.attn", ["blocks.1.attn", "blocks.2.attn"], Attention):
        (match,) = select(model, target)
        assert match.path == "blocks.0.attn"
        assert match.paths == ATTENTIONS[:3]
    found = select(model, "blocks.*.attn")
    assert found.notes() == ('"blocks.0.attn" stands at 3 paths; all of them are replaced',)
    assert found.conflicts() == ()
    found.check()
    assert "blocks.0.attn (also at blocks.1.attn and 1 more)" in found.table()
    assert select(model, "blocks.*.{attn,mlp}", exclude="blocks.2.attn").paths == tuple(
        f"blocks.{i}.mlp" for i in range(3)
    )


def test_the_run_of_a_shared_container_has_a_path_for_each_place() -> None:
    layers = nn.ModuleList([linear(), linear()])
    model = tree(a=tree(layers=layers), b=tree(layers=layers))
    for target in ("a.layers[0:2]", "b.layers[:]", "*.layers[0:2]", Run("b.layers", 0, 2), ["b.layers[0:2]"]):
        found = select(model, target)
        assert [match.paths for match in found] == [("a.layers[0:2]", "b.layers[0:2]")]
        found.check()


def test_a_run_whose_module_stands_elsewhere_too_is_a_conflict() -> None:
    layers = nn.ModuleList([linear(), linear(), linear()])
    model = tree(layers=layers, tail=layers[1])
    assert select(model, "layers[1:3]").conflicts() == (
        '"layers[1:3]" has a module at more places ("layers.1", "tail"); a run would replace only one',
    )
    assert select(model, "layers.1").conflicts() == ()
    one = linear()
    assert len(select(nn.Sequential(one, nn.ReLU(), one), "[0:2]").conflicts()) == 1
    assert len(select(nn.Sequential(one, one), "[0:2]").conflicts()) == 1


def test_a_parameter_tied_to_the_outside_is_a_note() -> None:
    model = tree(embed=nn.Embedding(3, 2), body=nn.Sequential(linear()), head=nn.Linear(2, 3))
    model["head"].weight = model["embed"].weight
    note = '"head.weight" is tied to "embed.weight"; the student will not be'
    assert select(model, "head").notes() == (note,)
    assert note in select(model, "head").table()
    assert select(model, ["embed", "head"]).notes() == ()
    assert select(model, "body").notes() == ()


def test_a_part_shared_with_the_outside_is_a_note() -> None:
    norm = nn.LayerNorm(2)
    model = tree(
        a=nn.Sequential(linear(), norm), b=nn.Sequential(linear(), norm), layers=nn.ModuleList([norm, linear()])
    )
    assert '"a.1.weight" is tied to "b.1.weight"; the student will not be' in select(model, "a").notes()
    outer = tree(norm=norm, layers=nn.Sequential(nn.ReLU(), nn.Sequential(linear(), norm)))
    assert '"layers.1.1.bias" is tied to "norm.bias"; the student will not be' in select(outer, "layers[0:2]").notes()


# ---- conflicts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "sentences"),
    [
        (["blocks.0", "blocks.0.attn"], ['"blocks.0" contains "blocks.0.attn"']),
        (["blocks[0:2]", "blocks.1.mlp"], ['"blocks[0:2]" contains "blocks.1.mlp"']),
        (["blocks[0:2]", "blocks[1:3]"], ['"blocks[0:2]" and "blocks[1:3]" share a module']),
        (["blocks[0:2]", "blocks.0"], ['"blocks.0" and "blocks[0:2]" share a module']),
        (["blocks[0:2]", "blocks[2:4]"], []),
        (
            ["blocks", "blocks[0:2]"],
            [
                (
                    '"blocks" is a ModuleList without a forward; '
                    'name its items ("blocks.0", "blocks.1", "blocks.2" and 1 more)'
                ),
                '"blocks" contains "blocks[0:2]"',
            ],
        ),
    ],
)
def test_sites_that_cannot_all_be_replaced(target: list[str], sentences: list[str]) -> None:
    found = select(net(layers=4), target)
    assert list(found.conflicts()) == sentences
    if not sentences:
        found.check()
        return
    assert f"conflict: {sentences[0]}" in str(found)
    message = f"selected sites? cannot all be replaced(?s:.*){re.escape(sentences[0])}(?s:.*)narrow the selection"
    with pytest.raises(SelectionError, match=message):
        found.check()


def test_a_long_list_of_conflicts_is_cut() -> None:
    found = select(net(layers=4))
    assert len(found.conflicts()) > 7
    with pytest.raises(SelectionError, match=rf"51 selected sites(?s:.*)\.\.\. and {len(found.conflicts()) - 6} more"):
        found.check()
    assert f"conflict: ... and {len(found.conflicts()) - 6} more" in found.table()


class Layers(nn.ModuleList):
    """A list that can be called."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self:
            x = layer(x)
        return x


def test_a_container_is_a_conflict_unless_it_can_be_called() -> None:
    model = tree(a=tree(), b=nn.ParameterList(), c=nn.ModuleList([nn.ModuleList([linear()])]), d=Layers([linear()]))
    assert select(model, "[a-b]").conflicts() == (
        '"a" is a ModuleDict without a forward; name its items (none)',
        '"b" is a ParameterList without a forward; name its items (none)',
    )
    assert "without a forward" in select(model, "c[0:1]").conflicts()[0]
    select(model, "d").check()
    patched = nn.Module()
    patched.forward = lambda x: x
    select(tree(a=patched), "a").check()


def test_the_parts_of_a_fused_attention_are_a_conflict() -> None:
    model = nn.TransformerEncoderLayer(4, 2)
    assert select(model, "self_attn").conflicts() == ()
    assert select(model, "**.out_proj").conflicts() == (
        '"self_attn.out_proj" is read by its MultiheadAttention and never called; replace the whole attention',
    )
    assert "never called" in select(nn.MultiheadAttention(4, 2), "out_proj").conflicts()[0]

    class Called(nn.MultiheadAttention):  # as the quantizable one does
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out_proj(x)

    assert select(Called(4, 2), "out_proj").conflicts() == ()


def test_a_blend_is_a_conflict_and_its_inside_is_never_seen() -> None:
    model = net(layers=2)
    teacher, student = model.blocks[0].attn, Attention()
    model.blocks[0].attn = Blend(teacher, student, path="blocks.0.attn", ledger=Ledger())
    assert not [path for path in select(model).paths if "teacher" in path or "student" in path]
    assert select(model, Attention).paths == ("blocks.1.attn",)
    assert select(model, "blocks.0.attn").conflicts() == (
        '"blocks.0.attn" is already being replaced; finalize or revert first',
    )
    assert len(select(model, "blocks[0:2]").conflicts()) == 0  # the caller refuses; a block around a blend is plain
    with pytest.raises(SelectionError, match="matched 0 of"):
        select(model, "blocks.0.attn.*")
    with pytest.raises(SelectionError, match="matched 0 of"):
        select(model, "**.{teacher,student}{,.**}")
    assert resolve(model, "blocks.0.attn.teacher") is teacher  # by its exact path it is found


def test_a_selection_of_a_model_that_changed_since_is_a_conflict() -> None:
    model = nn.Sequential(nn.Sequential(linear()), linear())
    found = select(model, "0.0")
    model[0] = nn.Identity()
    assert found.notes() == ()
    with pytest.raises(SelectionError, match=r'"0.0" leads to another module: the model has changed'):
        found.check()


# ---- names with dots -------------------------------------------------------------------------------------------------


def test_a_name_with_a_dot_is_found() -> None:
    leaf = linear()
    model = tree(x=adopt(nn.Module(), "a.b", adopt(nn.Module(), "c.d", leaf)), y=linear())
    assert select(model, "x.a.b.c.d").paths == ("x.a.b.c.d",)
    assert select(model, "**.d").paths == ("x.a.b.c.d",)
    parent, name = parent_of(model, "x.a.b.c.d")
    assert parent is model["x"]._modules["a.b"]
    assert name == "c.d"
    assert resolve(model, "x.a.b.c.d") is leaf
    select(model, "x.a.b.c.d").check()


def test_parent_of_tries_every_split() -> None:
    # "a" leads into a dead end, "a.b" on to the leaf.
    leaf = linear()
    model = adopt(tree(a=tree(b=tree(z=linear()))), "a.b", tree(c=leaf))
    parent, name = parent_of(model, "a.b.c")
    assert parent is model._modules["a.b"]
    assert name == "c"
    assert resolve(model, "a.b.z") is model["a"]["b"]["z"]


@pytest.mark.parametrize("order", [False, True])
def test_two_modules_of_one_path_are_a_conflict(order: bool) -> None:
    model = nn.Module()
    for name in ("a", "a.b")[:: -1 if order else 1]:
        adopt(model, name, tree(b=linear()) if name == "a" else nn.ReLU())
    conflicts = select(model, nn.Linear).conflicts()
    assert len(conflicts) == 1
    assert '"a.b" leads to another module' in conflicts[0]
    assert len(select(model, "a.b")) == 2
    assert select(model, "a.b").conflicts()


@given(st.integers(0, 3), st.sampled_from(["attn", "mlp.up", "norm1"]))
def test_parent_of_and_resolve_agree_with_torch(index: int, part: str) -> None:
    model = net(layers=4)
    path = f"blocks.{index}.{part}"
    parent, name = parent_of(model, path)
    assert getattr(parent, name) is resolve(model, path) is model.get_submodule(path)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("blocks.9.attn", r'no module stands at "blocks.9.attn"(?s:.*)nearest paths: "blocks.0.attn"'),
        ("blocks[0:2]", r'"blocks\[0:2\]" is a run, not one module(?s:.*)match.run'),
        ("blocks.", 'no module stands at "blocks."'),
        ("embed.weight", 'no module stands at "embed.weight"'),
        ("gone", 'no module stands at "gone"'),
    ],
)
def test_parent_of_a_path_where_nothing_stands(path: str, message: str) -> None:
    model = net(layers=2)
    model.register_module("gone", None)
    with pytest.raises(SelectionError, match=message):
        parent_of(model, path)
    with pytest.raises(SelectionError, match=message):
        resolve(model, path)


def test_the_model_itself_has_no_parent() -> None:
    model = net()
    assert resolve(model, "") is model
    with pytest.raises(SelectionError, match="the model itself cannot be a site"):
        parent_of(model, "")


# ---- the table, and what stays ---------------------------------------------------------------------------------------


def test_the_table() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    assert str(select(model, ["0", "[1:3]"])) == "\n".join(
        [
            "index  path     class          parameters   share",
            "    0  0        Linear                 20   66.7%",
            "    1  [1:3]    ReLU + Linear          10   33.3%",
            "total  2 sites                         30  100.0%",
        ]
    )
    assert repr(select(model, "0")) == "<Selection: 1 site of Sequential>"


@given(st.sets(st.sampled_from([*ATTENTIONS, "blocks[1:3]", "blocks.2.mlp", "head", "embed"]), min_size=1))
def test_the_paths_of_a_selection_select_it_again_in_the_order_of_the_model(names: set[str]) -> None:
    model = net(layers=4)
    found = select(model, sorted(names, reverse=True))
    assert set(found.paths) == names
    assert select(model, found.paths) == found
    order = [path for path, _ in model.named_modules()]
    firsts = [order.index(path.replace("[1:3]", ".1")) for path in found.paths]
    assert firsts == sorted(firsts)


def test_selecting_changes_nothing() -> None:
    model = net("shared", layers=3)
    before, states = portrait(model), random_states()
    for found in (select(model), select(model, "blocks[0:2]"), select(model, Attention)):
        assert found.table()  # with notes and conflicts
    with pytest.raises(SelectionError):
        select(model, "nothing")
    resolve(model, "blocks.0.attn")
    assert difference(before, portrait(model)) == []
    assert difference(states, random_states()) == []


def test_a_model_without_memory_is_selected_like_any_other() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(10_000, 10_000), nn.ReLU())
    assert select(model, "0")[0].parameters == 10_000 * 10_001


def test_a_selection_is_a_value() -> None:
    model = net(layers=2)
    found = select(model, Attention)
    assert found == Selection(model, found.matches)
    assert found != found[:1]
    with pytest.raises(AttributeError):
        found.matches = ()
