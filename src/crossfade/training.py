"""What trains: freezing, parameter groups, the audit of optimizers, and the table that tells it all."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from .changes import Changes
from .errors import SelectionError, StateError
from .plan import Trains
from .site import Site

__all__ = ["audit", "freeze", "no_decay_names", "opened", "parameter_groups", "summary"]


def students_of(sites: Iterable[Site]) -> dict[int, str]:
    """Parameter id -> name below the site's path, of every student."""
    return {id(p): f"{s.path}.{name}" for s in sites for name, p in s.blend.student.named_parameters()}


def teachers_of(sites: Iterable[Site]) -> dict[int, str]:
    """Parameter id -> name below the site's path, of every teacher that is still there."""
    found: dict[int, str] = {}
    for site in sites:
        if site.blend.teacher is not None:
            found |= {id(p): f"{site.path}.{name}" for name, p in site.blend.teacher.named_parameters()}
    return found


def backbone(model: nn.Module, sites: list[Site]) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters that are neither a teacher's nor a student's."""
    ours = students_of(sites) | teachers_of(sites)
    for name, parameter in model.named_parameters():
        if id(parameter) not in ours:
            yield name, parameter


def freeze(changes: Changes, model: nn.Module, sites: list[Site], trains: Trains) -> None:
    """Set `requires_grad`: teachers never, students always, the backbone as `trains` says.

    Raises:
        SelectionError: A glob matches no backbone parameter.
    """
    for site in sites:
        if site.blend.teacher is not None:
            for parameter in site.blend.teacher.parameters():
                changes.train_flag(parameter, False)
    named = list(backbone(model, sites))
    if trains == "all":
        return  # As the user set it.
    patterns = () if trains == "students" else trains
    hit = {pattern: [name for name, _ in named if matches(pattern, name)] for pattern in patterns}
    for pattern, names in hit.items():
        if not names:
            raise SelectionError(
                f"trains: the pattern {pattern!r} matches no parameter of the backbone.",
                expected="a glob on parameter or module paths, such as '*norm*' or 'head'",
                got=f"{len(named)} backbone parameters, e.g. {', '.join(name for name, _ in named[:3])}",
            )
    chosen = {name for names in hit.values() for name in names}
    for name, parameter in named:
        if parameter.is_floating_point():
            changes.train_flag(parameter, name in chosen)


def matches(pattern: str, name: str) -> bool:
    """Whether a glob names a parameter, or a module above it. `*` also crosses dots."""
    return fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(name, pattern + ".*")


def frozen_statistics(model: nn.Module, sites: list[Site]) -> list[nn.Module]:
    """Backbone modules with running statistics (BatchNorm) of which nothing trains: they stay in eval."""
    inside = {id(m) for site in sites for m in site.blend.modules()}
    return [
        m
        for m in model.modules()
        if id(m) not in inside
        and getattr(m, "track_running_stats", False)
        and not any(p.requires_grad for p in m.parameters())
    ]


def keep_in_eval(sites: list[Site], statistics: list[tuple[nn.Module, bool]]) -> None:
    """Teachers and frozen statistics, also after a loop over all modules that set them to train."""
    for site in sites:
        for module in site.blend.teacher.modules() if site.blend.teacher is not None else ():
            if module.training:
                module.eval()
    for frozen, _ in statistics:
        if frozen.training:
            frozen.eval()


def no_decay_names(model: nn.Module) -> set[str]:
    """Names of parameters that weight decay must leave alone; for loops that make their own groups.

    Vectors, scalars and biases; what `no_weight_decay()` of the model or of a module in it names (timm's convention);
    and parameters marked with `_no_weight_decay = True`. Scales and gate logits are small in number whatever their
    shape, and decaying them towards 0 is a bug; a student says so of its own by one of the two.

    Example:
        >>> sorted(no_decay_names(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))))
        ['0.bias', '1.bias', '1.weight']
    """
    named = {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        for name in getattr(module, "no_weight_decay", set)()
    }
    return {
        name
        for name, p in model.named_parameters()
        if p.dim() < 2 or name.endswith("bias") or name in named or getattr(p, "_no_weight_decay", False)
    }


def parameter_groups(
    model: nn.Module,
    sites: list[Site],
    *,
    weight_decay: float,
    lr: float | None,
    student_lr: float | None,
    no_decay: Iterable[str],
    rates: Mapping[str, float],
) -> list[dict[str, Any]]:
    """See `Fade.parameter_groups`."""
    students = students_of(sites)
    exempt = no_decay_names(model)
    patterns = (no_decay,) if isinstance(no_decay, str) else tuple(no_decay)
    used: set[str] = set()
    groups: dict[str, dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        by_user = [pattern for pattern in patterns if matches(pattern, name)]
        own = [pattern for pattern in rates if matches(pattern, name)][:1]
        used.update((*by_user, *own))
        decays = not by_user and name not in exempt
        is_student = id(parameter) in students
        key = "/".join(["students" if is_student else "backbone", "decay" if decays else "no_decay", *own])
        group = groups.setdefault(key, {"params": [], "name": key, "weight_decay": weight_decay if decays else 0.0})
        rate = rates[own[0]] if own else student_lr if is_student and student_lr is not None else lr
        if rate is not None:
            group["lr"] = rate
        group["params"].append(parameter)
    for argument, pattern in [*(("no_decay", p) for p in patterns), *(("rates", p) for p in rates)]:
        if pattern not in used:
            raise SelectionError(
                f"{argument}: the pattern {pattern!r} matches no trainable parameter.",
                expected="a glob on parameter or module paths, such as '*norm*' or 'head'",
            )
    return list(groups.values())


def opened(optimizer: Any) -> Optimizer:
    """The torch optimizer inside wrappers such as Accelerate's."""
    inner = getattr(optimizer, "optimizer", None)
    while isinstance(inner, Optimizer):
        optimizer, inner = inner, getattr(inner, "optimizer", None)
    if not isinstance(optimizer, Optimizer):
        raise StateError("this is not an optimizer.", expected="a torch.optim.Optimizer", got=type(optimizer).__name__)
    return optimizer


def audit(model: nn.Module, sites: list[Site], optimizers: Iterable[Optimizer]) -> None:
    """Whether the optimizers hold what trains and nothing of the teachers.

    Raises:
        StateError: Students are missing (the optimizer was built before install), or teachers are present.
    """
    held = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    wrong = [name for key, name in teachers_of(sites).items() if key in held]
    if wrong:
        raise StateError(
            "the optimizer holds parameters of a teacher.",
            where=_some(wrong),
            expected="no teacher parameter: teachers are frozen",
            do="build the optimizer from fade.parameter_groups() after install",
        )
    missing = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in held]
    if missing:
        raise StateError(
            f"{len(missing)} trainable parameters are in no parameter group, so they would never move.",
            where=_some(missing),
            do="build the optimizer from fade.parameter_groups() after install",
        )


def summary(model: nn.Module, sites: list[Site]) -> str:
    """A table of what trains: part, tensors, parameters, trainable parameters."""
    students, teachers = students_of(sites), teachers_of(sites)
    parts: dict[str, list[int]] = {"students": [0, 0, 0], "teachers": [0, 0, 0], "backbone": [0, 0, 0]}
    moving: list[str] = []
    for name, p in model.named_parameters():
        part = "students" if id(p) in students else "teachers" if id(p) in teachers else "backbone"
        row = parts[part]
        row[0] += 1
        row[1] += p.numel()
        row[2] += p.numel() if p.requires_grad else 0
        if part == "backbone" and p.requires_grad:
            moving.append(name)
    lines = [f"{'part':<10}{'tensors':>9}{'parameters':>14}{'trainable':>14}"]
    lines += [f"{part:<10}{row[0]:>9}{row[1]:>14,}{row[2]:>14,}" for part, row in parts.items()]
    lines += [f"  {s.path}: {s.teacher_class} -> {type(s.blend.student).__name__}, {s.phase}" for s in sites]
    if moving:
        lines.append(f"backbone parameters that train: {_some(moving, 8)}")
    return "\n".join(lines)


def _some(names: list[str], n: int = 3) -> str:
    return ", ".join(names[:n]) + (f" and {len(names) - n} more" if len(names) > n else "")
