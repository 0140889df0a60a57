"""Finalize: prove that only the students speak, take everything of the blend away, write a receipt."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from . import outputs
from .blend import Blend, Route
from .changes import Changes
from .errors import CrossfadeError, OutputError, PlanError, StateError
from .plan import Plan
from .runs import shorten
from .site import Site
from .students import Adapter

__all__ = ["Receipt", "receipt_of", "strip"]


@dataclass(frozen=True)
class Receipt:
    """What `finalize` did and what it proved.

    Attributes:
        sites: Path -> class of the teacher and of the student, and parameters before and after.
        step: Optimizer step at which it happened, of `total_steps`.
        forced: Whether some teacher still had weight.
        probed: Whether a batch was given; then the student view before and the plain model after were bit-equal.
        gap: Largest absolute difference between blend and student view on the probe batch (0 unless forced); None
            without a probe.
        plan: The plan as data, or None if it holds unregistered parts.
    """

    sites: dict[str, dict[str, Any]]
    step: int
    total_steps: int | None
    forced: bool
    probed: bool
    gap: float | None
    plan: dict[str, Any] | None

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; a gap that is not finite is None."""
        gap = None if self.gap is None or not math.isfinite(self.gap) else self.gap
        return asdict(self) | {"gap": gap}


# A finalized model carries nothing of ours, so what it was made from is kept beside it, as long as it lives.
_receipts: weakref.WeakKeyDictionary[nn.Module, Receipt] = weakref.WeakKeyDictionary()


def receipt_of(model: nn.Module) -> Receipt | None:
    """The receipt of a model that `finalize` returned, or None."""
    return _receipts.get(model)


def remember(model: nn.Module, receipt: Receipt) -> None:
    """Keep the receipt for `receipt_of` and `save`."""
    _receipts[model] = receipt


def check_over(sites: Iterable[Site], step: int, total: int | None, force: bool) -> bool:
    """Whether force was needed.

    Raises:
        StateError: A teacher has weight or guidance goes on, and `force` is False.
    """
    left = [
        f"{s.path} (alpha {s.alpha:.3g}, lambda {s.lam:.3g})" for s in sites if s.alpha > 0 or s.weight > 0 or s.lam > 0
    ]
    if left and not force:
        raise StateError(
            "the fade is not over.",
            where="; ".join(left[:4]) + (f" and {len(left) - 4} more" if len(left) > 4 else ""),
            expected="alpha 0 and lambda 0 at every site",
            got=f"step {step} of {total}",
            do="train to the end, or finalize(force=True), which drops what the teachers still add",
        )
    return bool(left)


@torch.no_grad()
def look(model: nn.Module, batch: Any) -> Any:
    """The model's output on a batch in eval mode; training flags are put back."""
    flags = [(m, m.training) for m in model.modules()]
    fused = torch.backends.mha.get_fastpath_enabled()
    try:
        model.eval()
        torch.backends.mha.set_fastpath_enabled(False)  # It may come back with the plain model, and rounds otherwise.
        return outputs.feed(model, batch)
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
        for module, flag in flags:
            module.training = flag


def largest_difference(a: Any, b: Any) -> float:
    """Largest absolute difference between two outputs; infinite if they differ in structure, 0 if bit-equal."""
    left, right = list(outputs.tensors(a)), list(outputs.tensors(b))
    if len(left) != len(right) or any(
        x.shape != y.shape or x.dtype != y.dtype for x, y in zip(left, right, strict=False)
    ):
        return math.inf
    worst = 0.0
    for x, y in zip(left, right, strict=True):
        if not torch.equal(x, y) and x.numel() > 0:
            gap = (x.double() - y.double()).abs()
            worst = max(worst, math.inf if bool(gap.isnan().any()) else float(gap.max()))
    return worst


def final_student(blend: Blend) -> nn.Module:
    """The module that will stand in the model: the student, adapted if it returns less than the caller expects."""
    student = blend.student
    where = None if blend.main_place == "auto" else blend.main_place
    bare = blend.bare_student and where is not None
    if not bare and blend.cast is None:
        return student
    adapter = student if isinstance(student, Adapter) else Adapter(student).train(student.training)
    adapter.where, adapter.dtype = where, blend.cast
    adapter.structure = blend.teacher_structure if bare else None
    return adapter


def carry(
    changes: Changes,
    student: nn.Module,
    names: Iterable[str],
    kept: Mapping[str, Any],
    teacher: nn.Module | None,
    path: str,
) -> None:
    """Copy declared attributes from the teacher, unless the student defines them itself.

    Raises:
        StateError: An attribute is neither kept nor found.
    """
    inner = student.module if isinstance(student, Adapter) else student
    for name in names:
        if hasattr(inner, name):
            if inner is not student:
                changes.set(student, name, getattr(inner, name))
        elif name in kept:
            changes.set(student, name, kept[name])
        elif teacher is not None and hasattr(teacher, name):
            changes.set(student, name, getattr(teacher, name))
        else:
            raise StateError(
                "an attribute to carry is nowhere.",
                where=f"{path}.{name}",
                expected="an attribute of the teacher or of the student",
                do="leave it out of carry=, or define it on the student",
            )


def strip(changes: Changes, model: nn.Module, sites: Iterable[Site]) -> None:
    """Put the students in the blends' places; shorten the containers of runs.

    Runs come last and from the back: shortening renumbers what follows in the container.
    """
    for site in sorted(sites, key=lambda site: -1 if site.run is None else 1 / (1 + site.run.start)):
        student = final_student(site.blend)
        carry(changes, student, site.swap.carry, site.carried, site.blend.teacher, site.path)
        if site.run is None:
            changes.put(model, site.paths, student)
        else:
            shorten(changes, model, site.run, student)


def prove(model: nn.Module, sites: list[Site], before: Any, batch: Any) -> None:
    """Compare the plain model with the student view taken before.

    Raises:
        CrossfadeError: They are not bit-equal (the model is then put back as it was).
    """
    gap = largest_difference(before, look(model, batch))
    if any(not bool(t.isfinite().all()) for t in outputs.tensors(before) if t.is_floating_point()):
        raise CrossfadeError(
            "the students answer the probe with values that are not finite.",
            where=", ".join(site.path for site in sites),
            do="look for NaN in the students' weights and in the probe; finalize() without a probe proves nothing",
        )
    if gap != 0.0:
        raise CrossfadeError(
            "the finalized model does not answer as the student view did.",
            where=", ".join(site.path for site in sites),
            expected="bit-equal outputs in eval mode",
            got=f"largest difference {gap:.3g}",
            do="the model was put back; a module that changes on every call is the usual cause",
        )


def put_teacher_back(changes: Changes, model: nn.Module, site: Site) -> None:
    """Let the teacher stand at the site again, in the model's mode."""
    teacher = site.blend.teacher
    if teacher is None:
        raise StateError("the teacher is gone.", where=site.path, do='install with release="finalize"')
    if site.run is None:
        changes.put(model, site.paths, teacher)
    else:
        for offset, module in enumerate(teacher.children()):
            changes.put(model, [f"{site.run.container}.{site.run.start + offset}".lstrip(".")], module)
    changes.mode(teacher, model.training)


def write_receipt(
    plan: Plan, sites: list[Site], step: int, total: int | None, *, forced: bool, probed: bool, gap: float | None
) -> Receipt:
    """The receipt of these sites."""
    rows = {
        site.path: {
            "paths": list(site.paths),
            "run": None if site.run is None else [site.run.container, site.run.start, site.run.stop],
            "swap": plan.swaps.index(site.swap),
            "index": site.index,
            "n": site.n,
            "teacher": site.teacher_class,
            "student": type(site.blend.student).__name__,
            "parameters_before": site.parameters,
            "adapter": _adapter(site),
            "carry": list(site.swap.carry),
            "parameters_after": sum(p.numel() for p in site.blend.student.parameters()),
        }
        for site in sites
    }
    try:
        data = plan.to_dict()
    except PlanError:
        data = None
    return Receipt(rows, step, total, forced, probed, gap, data)


def _adapter(site: Site) -> dict[str, Any] | None:
    """What `load` needs to adapt the student again; None when it answers as it is."""
    student = final_student(site.blend)
    if not isinstance(student, Adapter):
        return None
    try:
        structure = outputs.pack(student.structure)
    except OutputError:
        structure = None  # A class of its own: loading it needs a student that returns it.
    dtype = None if student.dtype is None else str(student.dtype).removeprefix("torch.")
    return {"drop": list(student.drop), "where": student.where, "structure": structure, "dtype": dtype}


def route_all(sites: Iterable[Site], route: Route) -> None:
    """Let every blend answer with one side, whatever its alpha."""
    for site in sites:
        site.blend.train_route = site.blend.eval_route = route
        site.blend.guided = site.blend.observing = False
