"""What trains: freezing, groups, and the audit of optimizers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import crossfade
from crossfade import Deterministic, Plan, students
from crossfade.changes import Changes
from crossfade.errors import SelectionError, StateError
from crossfade.students import Reinit
from crossfade.training import backbone, freeze, matches
from tests.models import Net, adamw, batch, net, portrait

IDS, LABELS = batch()


def installed(model: nn.Module | None = None, **more) -> crossfade.Fade:
    settings = {"targets": "blocks.*.attn", "student": Reinit("reset_parameters"), "gate": Deterministic("linear")}
    return crossfade.install(model or net(), Plan(**(settings | more)), total_steps=4)


def names(fade: crossfade.Fade, groups=None) -> dict[str, list[str]]:
    """Group name -> parameter names."""
    by_id = {id(p): name for name, p in fade.model.named_parameters()}
    groups = fade.parameter_groups() if groups is None else groups
    return {group["name"]: [by_id[id(p)] for p in group["params"]] for group in groups}


# ---- freezing --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("trains", "moving"),
    [
        ("students", lambda name: False),
        ("all", lambda name: True),
        (["head"], lambda name: name.startswith("head.")),
        (["*norm*", "embed.weight"], lambda name: "norm" in name or name == "embed.weight"),
        (["blocks.1"], lambda name: name.startswith("blocks.1.")),
    ],
    ids=str,
)
def test_what_trains(trains, moving):
    fade = installed(trains=trains)
    for name, p in fade.model.named_parameters():
        expected = ".student." in name or (".teacher." not in name and moving(name))
        assert p.requires_grad is expected, name


def test_that_all_leaves_the_backbone_as_the_user_set_it():
    model = net()
    model.embed.weight.requires_grad_(False)
    fade = installed(model, trains="all")
    assert not fade.model.embed.weight.requires_grad
    assert fade.model.head.weight.requires_grad


@pytest.mark.parametrize("pattern", ["nothing", "blocks.0.attn", "head.", ""])
def test_that_a_pattern_which_hits_no_backbone_parameter_is_an_error_and_changes_nothing(pattern):
    model = net()
    before = portrait(model)
    with pytest.raises(SelectionError, match=r"e\.g\. embed"):
        installed(model, trains=[pattern])
    after = portrait(model)
    assert [k for k in before if k.endswith("tensor") and before[k][:3] != after[k][:3]] == []
    assert not hasattr(model, "_crossfade")


def test_matches():
    assert matches("head", "head.weight")
    assert matches("head.weight", "head.weight")
    assert matches("blocks.*.norm?", "blocks.0.norm1.bias")
    assert not matches("head", "header.weight")
    assert not matches("Head", "head.weight")


def test_that_the_backbone_is_neither_teacher_nor_student():
    fade = installed()
    found = {name for name, _ in backbone(fade.model, fade.sites)}
    assert found == {name for name, _ in net().named_parameters() if ".attn." not in name}


def test_that_freeze_can_be_undone():
    fade = installed()
    before = [p.requires_grad for p in fade.model.parameters()]
    changes = Changes()
    freeze(changes, fade.model, fade.sites, ("head",))
    assert [p.requires_grad for p in fade.model.parameters()] != before
    changes.undo()
    assert [p.requires_grad for p in fade.model.parameters()] == before


def test_that_statistics_of_the_frozen_backbone_stay():
    class WithNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)
            self.site = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))

        def forward(self, x):
            return self.site(self.norm(x))

    for trains, moves in (("students", False), (["norm"], True)):
        model = WithNorm()
        plan = Plan(targets="site", student=students.Copy(), gate=Deterministic(0.5), trains=trains)
        fade = crossfade.install(model, plan, total_steps=3)
        model.train()
        model(torch.randn(8, 4) + 5)
        assert model.norm.training is moves
        assert (model.norm.num_batches_tracked.item() > 0) is moves
        site = fade.sites[0].blend
        assert site.teacher[1].num_batches_tracked.item() == 0
        assert site.student[1].num_batches_tracked.item() == 1


# ---- groups ----------------------------------------------------------------------------------------------------------


def test_that_the_groups_hold_what_trains_once():
    fade = installed(trains="all")
    groups = fade.parameter_groups()
    given = [id(p) for g in groups for p in g["params"]]
    assert len(given) == len(set(given))
    assert set(given) == {id(p) for p in fade.model.parameters() if p.requires_grad}
    assert [g["name"] for g in groups] == ["backbone/decay", "students/decay", "students/no_decay", "backbone/no_decay"]


def test_that_vectors_and_biases_do_not_decay():
    fade = installed(trains="all")
    by_name = names(fade)
    assert {g["name"]: g["weight_decay"] for g in fade.parameter_groups(weight_decay=0.2)} == {
        "students/decay": 0.2,
        "backbone/decay": 0.2,
        "students/no_decay": 0.0,
        "backbone/no_decay": 0.0,
    }
    params = dict(fade.model.named_parameters())
    for group, members in by_name.items():
        for name in members:
            assert group.endswith("/no_decay") is (params[name].dim() < 2 or name.endswith("bias")), name
            assert group.startswith("students/") is (".student." in name), name


def test_the_rates():
    def rates(**more):
        return {g["name"].split("/")[0]: g.get("lr") for g in installed(trains="all").parameter_groups(**more)}

    assert rates() == {"students": None, "backbone": None}
    assert rates(lr=0.1) == {"students": 0.1, "backbone": 0.1}
    assert rates(lr=0.1, student_lr=0.5) == {"students": 0.5, "backbone": 0.1}
    assert rates(student_lr=0.5) == {"students": 0.5, "backbone": None}
    assert rates(lr=0.0, student_lr=0.0) == {"students": 0.0, "backbone": 0.0}


def test_that_no_decay_takes_globs_and_the_models_own_list():
    class Named(Net):
        def no_weight_decay(self):
            return {"embed.weight"}

    fade = installed(Named(2), trains="all")
    assert "embed.weight" in names(fade)["backbone/no_decay"]
    groups = names(fade, fade.parameter_groups(no_decay=["head", "*.mlp.up.weight"]))
    for name in ("embed.weight", "head.weight", "blocks.0.mlp.up.weight"):
        assert name in groups["backbone/no_decay"]
    with pytest.raises(SelectionError, match="nothing"):
        fade.parameter_groups(no_decay=["nothing"])


def test_that_a_string_for_no_decay_is_one_pattern():
    fade = installed(trains="all")
    groups = names(fade, fade.parameter_groups(no_decay="head*"))
    assert "head.weight" in groups["backbone/no_decay"]
    assert "blocks.0.mlp.up.weight" in groups["backbone/decay"]


def test_that_a_tied_parameter_comes_once():
    model = net()
    model.tied = nn.Embedding(11, 8)
    model.tied.weight = model.embed.weight
    fade = installed(model, trains="all")
    given = [id(p) for g in fade.parameter_groups() for p in g["params"]]
    assert given.count(id(model.embed.weight)) == 1


# ---- the audit -------------------------------------------------------------------------------------------------------


def test_that_the_groups_pass_the_audit_in_one_or_two_optimizers():
    fade = installed(trains="all")
    groups = fade.parameter_groups()
    fade.attach(torch.optim.SGD(groups[:2], lr=0.1), torch.optim.Adam(groups[2:], lr=0.1))
    other = installed()
    other.attach(adamw(other))


def test_that_an_optimizer_built_before_install_is_refused():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fade = installed(model)
    with pytest.raises(StateError, match="teacher") as caught:
        fade.attach(optimizer)
    assert "blocks.0.attn.q.weight" in str(caught.value)
    assert "fade.parameter_groups()" in str(caught.value)
    fade.attach(adamw(fade))  # A refused one is not half attached.


def test_that_a_missing_student_is_refused():
    fade = installed()
    optimizer = torch.optim.SGD(fade.sites[0].blend.student.parameters(), lr=0.1)
    with pytest.raises(StateError, match="8 trainable parameters") as caught:
        fade.attach(optimizer)
    assert "blocks.1.attn.student" in str(caught.value)


def test_that_a_teacher_beside_the_students_is_refused():
    fade = installed()
    groups = [*fade.parameter_groups(), {"params": list(fade.sites[1].blend.teacher.parameters())}]
    with pytest.raises(StateError, match=r"blocks\.1\.attn\.q\.weight"):
        fade.attach(torch.optim.SGD(groups, lr=0.1))


def test_that_frozen_backbone_parameters_may_be_in_the_optimizer():
    fade = installed()
    groups = [*fade.parameter_groups(), {"params": list(fade.model.head.parameters())}]
    fade.attach(torch.optim.SGD(groups, lr=0.1))


# ---- the table -------------------------------------------------------------------------------------------------------


def test_the_summary():
    fade = installed(trains=["head"])
    text = fade.summary()
    lines = text.splitlines()
    students_row = next(line for line in lines if line.startswith("students"))
    attention = sum(p.numel() for p in fade.sites[0].blend.student.parameters())
    assert students_row.split() == ["students", "16", f"{2 * attention:,}", f"{2 * attention:,}"]
    assert next(line for line in lines if line.startswith("teachers")).split()[-1] == "0"
    assert "  blocks.0.attn: Attention -> Attention, align" in lines
    assert "backbone parameters that train: head.weight, head.bias" in lines
