"""FC-44: scales and gate logits of a student are not decayed, and may have a learning rate of their own."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import crossfade
from crossfade.errors import SelectionError
from crossfade.training import no_decay_names
from tests.models import net


class Gated(nn.Module):
    """A student with learnable gates of several shapes; `how` is the way in which it says that they are no matrices."""

    def __init__(self, width: int, how: str) -> None:
        super().__init__()
        self.mix = nn.Linear(width, width)
        self.scalar = nn.Parameter(torch.zeros(()))
        self.heads = nn.Parameter(torch.zeros(4))
        self.pairs = nn.Parameter(torch.zeros(4, 2))
        self.names: set[str] = {"pairs"} if how == "method" else set()
        if how == "mark":
            self.pairs._no_weight_decay = True

    def no_weight_decay(self) -> set[str]:
        return self.names

    def forward(self, x: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        scale = self.scalar.sigmoid() + self.heads.sigmoid().mean() + self.pairs.sigmoid().mean()
        return self.mix(x) * scale


GATES = ("scalar", "heads", "pairs")


def installed(how: str) -> crossfade.Fade:
    def student(teacher: nn.Module, site: object) -> nn.Module:
        return Gated(teacher.q.in_features, how)

    return crossfade.install(net(), crossfade.Plan(targets="blocks.*.attn", student=student), total_steps=10)


def decayed(groups: list[dict], model: nn.Module) -> set[str]:
    names = {id(p): name for name, p in model.named_parameters()}
    return {names[id(p)] for group in groups if group["weight_decay"] > 0 for p in group["params"]}


@pytest.mark.parametrize("how", ["method", "mark", "glob"])
def test_no_gate_is_decayed(how: str) -> None:
    fade = installed(how)
    groups = fade.parameter_groups(weight_decay=0.1, no_decay=["*.pairs"] if how == "glob" else [])
    found = decayed(groups, fade.model)
    assert sum(name.endswith("student.mix.weight") for name in found) == 2
    assert not [name for name in found if name.endswith(GATES)]


@pytest.mark.parametrize("how", ["method", "mark"])
def test_other_loops_get_the_names_to_leave_out(how: str) -> None:
    optim = pytest.importorskip("timm.optim", reason="the extra 'timm' is not installed")
    fade = installed(how)
    names = no_decay_names(fade.model)
    assert {f"blocks.{i}.attn.student.{gate}" for i in range(2) for gate in GATES} <= names
    alone = optim.param_groups_weight_decay(fade.model, 0.1)
    assert any(name.endswith("pairs") for name in decayed(alone, fade.model)), "timm has learnt it by itself"
    told = optim.param_groups_weight_decay(fade.model, 0.1, no_weight_decay_list=names)
    assert not [name for name in decayed(told, fade.model) if name.endswith(GATES)]


def test_gates_may_have_a_rate_of_their_own() -> None:
    fade = installed("method")
    groups = fade.parameter_groups(lr=1e-3, student_lr=1e-2, rates={"*.pairs": 0.5, "*.scalar": 0.25})
    rates = {id(p): group["lr"] for group in groups for p in group["params"]}
    student = fade.sites[0].blend.student
    assert rates[id(student.pairs)] == 0.5
    assert rates[id(student.scalar)] == 0.25
    assert rates[id(student.heads)] == rates[id(student.mix.weight)] == 1e-2
    assert len(rates) == sum(p.requires_grad for p in fade.model.parameters())
    with pytest.raises(SelectionError, match="rates: the pattern"):
        fade.parameter_groups(rates={"*.nothing": 1.0})
