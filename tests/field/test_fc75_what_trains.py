"""FC-75: nobody knew what was trained.

Whether MLPs and norms around the new module train differed between scripts; teacher parameters sat in the optimizer.
crossfade trains the students alone unless the plan says otherwise, prints a table of what trains, names the parameter
groups by part and decay, refuses a pattern that matches nothing, and has stages (align, fade, fine-tune) as plans.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import crossfade
from crossfade.errors import SelectionError, StateError

from .models import Net, data, net, plan

ATTN = 2 * (8 * 8 + 8)


def faded(**settings: Any) -> tuple[Net, crossfade.Fade]:
    model = net()
    return model, crossfade.install(model, plan(**settings), total_steps=4, release="finalize")


def table(fade: crossfade.Fade) -> dict[str, tuple[int, int, int]]:
    """Tensors, parameters and trainable parameters by part, as printed."""
    rows = re.findall(r"^(students|teachers|backbone) +(\S+) +(\S+) +(\S+)$", fade.summary(), re.MULTILINE)
    return {part: tuple(int(n.replace(",", "")) for n in numbers) for part, *numbers in rows}


def test_by_default_the_students_train_and_nothing_else() -> None:
    model, _ = faded()
    trainable = {n for n, p in model.named_parameters() if p.requires_grad}
    assert trainable == {n for n, _ in model.named_parameters() if ".student." in n}
    assert crossfade.Plan(targets="head").trains == "students"
    assert "backbone is frozen" in crossfade.Plan.__doc__


TRAINS: dict[str, tuple[Any, Any]] = {
    "students": ("students", lambda name: False),
    "all": ("all", lambda name: True),
    "norms": (("*norm*",), lambda name: "norm" in name),
    "norms and head": (("*norm*", "head"), lambda name: "norm" in name or name.startswith("head")),
    "one block": (("blocks.1",), lambda name: name.startswith("blocks.1")),
    "one tensor": (("head.bias",), lambda name: name == "head.bias"),
}


@pytest.mark.parametrize("name", TRAINS)
def test_the_table_tells_what_trains(name: str) -> None:
    trains, chosen = TRAINS[name]
    model, fade = faded(trains=trains)
    parts: dict[str, list[int]] = {"students": [0, 0, 0], "teachers": [0, 0, 0], "backbone": [0, 0, 0]}
    for path, p in model.named_parameters():
        part = "students" if ".student." in path else "teachers" if ".teacher." in path else "backbone"
        right = part == "students" or (part == "backbone" and chosen(path))
        assert p.requires_grad is right, path
        parts[part][0] += 1
        parts[part][1] += p.numel()
        parts[part][2] += p.numel() if right else 0
    assert table(fade) == {part: tuple(row) for part, row in parts.items()}
    text = fade.summary()
    assert "blocks.0.attn: Mixer -> Mixer, align" in text
    moving = [n for n, p in model.named_parameters() if p.requires_grad and ".student." not in n]
    assert all(n in text for n in moving[:8])
    assert ("backbone parameters that train" in text) is bool(moving)


def test_the_table_follows_the_phases_and_the_release_of_teachers() -> None:
    model = net()
    fade = crossfade.install(model, plan(), total_steps=4, probe=data()[0])
    assert table(fade)["teachers"] == (8, 2 * ATTN, 0)
    for step, phase in ((0, "align"), (2, "blend"), (4, "student")):
        fade.seek(step)
        assert f"blocks.1.attn: Mixer -> Mixer, {phase}" in fade.summary()
    assert table(fade)["teachers"] == (0, 0, 0)
    assert table(fade)["students"] == (8, 2 * ATTN, 2 * ATTN)


@pytest.mark.parametrize("name", TRAINS)
def test_groups_hold_everything_that_trains_once_and_say_what_decays(name: str) -> None:
    model, fade = faded(trains=TRAINS[name][0])
    groups = {group["name"]: group for group in fade.parameter_groups(weight_decay=0.1, lr=1e-3, student_lr=1e-2)}
    names = {id(p): n for n, p in model.named_parameters()}
    held = [names[id(p)] for group in groups.values() for p in group["params"]]
    assert sorted(held) == sorted(n for n, p in model.named_parameters() if p.requires_grad)
    for key, group in groups.items():
        part, decay = key.split("/")
        assert group["lr"] == (1e-2 if part == "students" else 1e-3)
        assert group["weight_decay"] == (0.1 if decay == "decay" else 0.0)
        for p in group["params"]:
            assert (".student." in names[id(p)]) is (part == "students")
            assert (p.dim() >= 2) is (decay == "decay")


def test_exempting_from_decay_is_by_pattern_and_a_pattern_without_a_match_is_an_error() -> None:
    model, fade = faded()
    groups = {g["name"]: g for g in fade.parameter_groups(no_decay=["*.q.weight"])}
    exempt = {id(p) for p in groups["students/no_decay"]["params"]}
    assert all(id(block.attn.student.q.weight) in exempt for block in model.blocks)
    with pytest.raises(SelectionError, match=r"no_decay: the pattern '\*gamma' matches no trainable"):
        fade.parameter_groups(no_decay=["*gamma"])


@pytest.mark.parametrize("pattern", ["heads", "*gamma*", "blocks.7", "blocks.0.attn.*"])
def test_a_pattern_of_what_trains_that_matches_nothing_is_an_error_and_changes_nothing(pattern: str) -> None:
    # The last one is a site: its student trains anyway, its teacher never does.
    model = net()
    before = [(n, p.requires_grad) for n, p in model.named_parameters()]
    with pytest.raises(
        SelectionError, match=rf"(?s)trains: the pattern {re.escape(repr(pattern))} matches no parameter"
    ):
        crossfade.install(model, plan(trains=(pattern,)), total_steps=4)
    assert [(n, p.requires_grad) for n, p in model.named_parameters()] == before


def test_one_string_is_not_split_into_characters() -> None:
    with pytest.raises(crossfade.CrossfadeError, match=r"(?s)trains.*\['head'\]"):
        plan(trains="head")


@pytest.mark.parametrize("which", ["one tensor", "all of them"])
def test_teacher_parameters_in_the_optimizer_are_an_error(which: str) -> None:
    model, fade = faded()
    teacher = list(model.blocks[0].attn.teacher.parameters())
    chosen = teacher[:1] if which == "one tensor" else teacher
    optimizer = torch.optim.AdamW([*(p for p in model.parameters() if p.requires_grad), *chosen], lr=0.1)
    with pytest.raises(StateError, match=r"(?s)parameters of a teacher.*where: blocks\.0\.attn\.q\.weight"):
        fade.attach(optimizer)


def test_a_model_that_was_partly_frozen_stays_so_when_all_train() -> None:
    model = net()
    model.stem.requires_grad_(False)
    fade = crossfade.install(model, plan(trains="all"), total_steps=4)
    assert not any(p.requires_grad for p in model.stem.parameters())
    assert all(p.requires_grad for p in model.head.parameters())
    held = {id(p) for g in fade.parameter_groups() for p in g["params"]}
    assert not held & {id(p) for p in model.stem.parameters()}


def test_stages_align_fade_and_fine_tune_and_each_says_what_trains() -> None:
    model = net()
    guidance = crossfade.DeepFeatureGuidance()
    stages = (
        (plan(gate=crossfade.Deterministic(1.0), guidance=guidance), 2),
        (plan(gate=crossfade.Deterministic("linear"), trains=("*norm*",)), 3),
        (plan(gate=crossfade.Deterministic(0.0), trains="all"), 2),
    )
    seen = []
    for fade in crossfade.stages(model, *stages):
        moving = {n for n, p in model.named_parameters() if p.requires_grad and ".student." not in n}
        seen.append((fade.sites[0].phase, len(moving), table(fade)["students"][2]))
        optimizer = torch.optim.AdamW(fade.parameter_groups(), lr=1e-3)
        fade.attach(optimizer)
        for step in range(fade.total_steps):
            x, y = data(step)
            (cross_entropy(model(x), y) + fade.guidance()).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert seen == [("align", 0, 2 * ATTN), ("align", 4, 2 * ATTN), ("student", 8, 2 * ATTN)]
    assert type(fade.finalize(probe=data()[0])).__name__ == "Net"


def test_a_student_with_frozen_parts_says_so() -> None:
    # Every floating parameter of a student trains; what shall not is a buffer.
    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 8).requires_grad_(False)
            self.register_buffer("scale", torch.ones(8))

        def forward(self, x: torch.Tensor, mask: Any = None) -> torch.Tensor:
            return self.fc(x) * self.scale

    model, fade = faded(student=lambda t, s: Part())
    assert all(p.requires_grad for p in model.blocks[0].attn.student.parameters())
    assert table(fade)["students"] == (4, 2 * 72, 2 * 72)
