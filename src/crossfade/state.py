"""What a fade remembers between steps and between processes: calibration, controllers, structures, teacher hashes."""

from __future__ import annotations

import copy
import ctypes
import hashlib
import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn

from . import outputs
from .errors import OutputError, PersistError, StateError
from .gates import Controller
from .guidance import Power
from .ledger import Term
from .metrics import count, power_sum
from .plan import Plan
from .site import Site

__all__ = ["calibrate", "hash_of", "load", "observed", "recalibrate", "release", "save"]

STATE_VERSION = 1
EARLY = (
    "this average was updated after a teacher of the original was released and before `follow`: torch's AveragedModel "
    "has then paired wrong parameters. Call handle(average).follow(fade) before the update."
)


def hash_of(module: nn.Module) -> str:
    """sha256 over names, dtypes, shapes and bytes of a module's parameters and buffers."""
    digest = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        flat = tensor.detach().to("cpu").contiguous()
        digest.update(f"{name} {flat.dtype} {tuple(flat.shape)}".encode())
        if flat.numel() > 0:
            digest.update(ctypes.string_at(flat.data_ptr(), flat.nbytes))
    return digest.hexdigest()


def release(site: Site) -> None:
    """Let a site's teacher go, and keep what is needed later: its hash and the attributes to carry."""
    teacher = site.blend.teacher
    if teacher is None:
        return
    site.teacher_hash = site.teacher_hash or hash_of(teacher)
    site.carried = {name: getattr(teacher, name) for name in site.swap.carry if hasattr(teacher, name)}
    site.blend.carried = site.carried
    site.teacher_flags, site.teacher_modes = [], []
    for filler in site.fillers:
        filler.held = (filler.held[0], None)
    site.blend.release_teacher()


def writes(model: nn.Module) -> int:
    """A count that grows with every write into a parameter."""
    return sum(p._version for p in model.parameters() if not p.is_inference())


def follow(sites: list[Site], others: list[Site]) -> None:
    """Take calibration, structures, controllers and releases of another fade of the same plan."""
    for mine, theirs in zip(sites, others, strict=True):
        mine.power = copy.copy(theirs.power)
        for name in ("main_place", "teacher_structure", "bare_student", "cast"):
            setattr(mine.blend, name, getattr(theirs.blend, name))
        if theirs.blend.teacher is None:  # Averaging pairs parameters by position: both have the same ones.
            release(mine)
        if isinstance(mine.driver, Controller) and isinstance(theirs.driver, Controller):
            mine.driver.load_state_dict(theirs.driver.state_dict())


def figures(
    sites: list[Site], guidance: Mapping[str, Tensor], metrics: Mapping[str, tuple[float, float]]
) -> dict[str, float]:
    """See `Fade.log`."""
    rows: dict[str, dict[str, float]] = {
        "alpha": {site.path: site.alpha for site in sites},
        "weight": {site.path: site.weight for site in sites},
        "lambda": {site.path: site.lam for site in sites},
        "guidance": {path: float(value) for path, value in guidance.items()},
        "cosine": {path: cosine for path, (cosine, _) in metrics.items()},
        "error": {path: error for path, (_, error) in metrics.items()},
    }
    result = {}
    for name, values in rows.items():
        if values:
            result[name] = sum(values.values()) / len(values)
            result |= {f"{name}/{path}": value for path, value in values.items()}
    return result


# ---- measurements ------------------------------------------------------------------------------------------------


def reduced(values: Tensor) -> list[float]:
    """Sums over all processes, as Python floats. Shapes: [n]."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        values = values.clone()
        torch.distributed.all_reduce(values)
    return [float(v) for v in values.cpu()]


def observed(sites: list[Site], similarities: Mapping[str, list[Tensor]]) -> dict[Site, tuple[float, float]]:
    """Interface cosine and relative error of the step by site, over all calls and processes."""
    chosen = [site for site in sites if site.blend.observing]
    if not chosen:
        return {}
    device = chosen[0].blend.gate_weight.device
    zero = torch.zeros(4, device=device)
    sums = [torch.stack(similarities[s.path]).sum(0).to(device) if similarities.get(s.path) else zero for s in chosen]
    flat = reduced(torch.stack(sums).double().flatten())
    result = {}
    for i, site in enumerate(chosen):
        cosine, error, power, positions = flat[4 * i : 4 * i + 4]
        if positions > 0:
            result[site] = (cosine / positions, error / max(power, torch.finfo(torch.float32).tiny))
    return result


def calibrate_first_step(sites: list[Site], seen: Mapping[str, list[Term]]) -> None:
    """Fix the teachers' power from all micro-batches and processes of the first step that had guidance."""
    chosen = [
        s for s in sites if seen.get(s.path) and not s.power.fixed and getattr(s.swap.guidance, "needs_power", False)
    ]
    if not chosen:
        return
    device = chosen[0].blend.gate_weight.device
    rows = []
    for site in chosen:
        pairs = [(t.power, t.positions) for t in seen[site.path] if t.power is not None]
        rows.append(torch.stack([torch.stack(pair).to(device) for pair in pairs]).sum(0))
    flat = reduced(torch.stack(rows).double().flatten())
    for i, site in enumerate(chosen):
        site.power.observe(flat[2 * i], flat[2 * i + 1])
        site.power.fixed = site.power.positions > 0  # A step of padding alone says nothing.


def calibrate(model: nn.Module, sites: list[Site], batches: Iterable[Any]) -> dict[str, float]:
    """See `Fade.calibrate`. The teachers must be on the main path."""
    sums = {site.path: torch.zeros(2, dtype=torch.float64) for site in sites}
    places = {id(site.blend): site for site in sites}

    def take(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        site = places[id(module)]
        main = site.blend.main_of(out).detach()
        mask = site.blend.mask_of(main, (args, kwargs))
        branch = main - site.blend.input_of(args, kwargs) if site.blend.holds_residual else main
        sums[site.path] += torch.stack((power_sum(branch, mask) / main.shape[-1], count(main, mask))).double().cpu()

    hooks = [site.blend.register_forward_hook(take, with_kwargs=True) for site in sites]
    modes = [(m, m.training) for m in model.modules()]
    try:
        model.eval()
        with torch.no_grad():
            for batch in batches:
                outputs.feed(model, batch)
    finally:
        for hook in hooks:
            hook.remove()
        for module, mode in modes:
            module.training = mode
    flat = reduced(torch.stack(list(sums.values())).flatten())
    for i, site in enumerate(sites):
        if flat[2 * i + 1] == 0:
            raise StateError(
                "calibration saw no valid position.",
                where=site.path,
                got="no batches, or all padding",
                do="give at least one batch with real tokens",
            )
        site.power.fixed, site.power.total, site.power.positions = True, flat[2 * i], flat[2 * i + 1]
    return {site.path: site.power.value for site in sites}


def recalibrate(model: nn.Module, sites: list[Site], batches: Iterable[Any]) -> None:
    """Renew the running statistics inside the students from the student view. Everything else stays in eval."""
    modes = [(m, m.training) for m in model.modules()]
    tracking = [m for s in sites for m in s.blend.student.modules() if getattr(m, "track_running_stats", False)]
    try:
        model.eval()
        for module in tracking:
            module.reset_running_stats()  # type: ignore[operator]  # torch types a module's attributes as tensors
            module.train()
        with torch.no_grad():
            for batch in batches:
                outputs.feed(model, batch)
    finally:
        for module, mode in modes:
            module.training = mode


# ---- saving and loading -------------------------------------------------------------------------------------------


def save(plan: Plan, sites: list[Site], step: int, total: int | None) -> dict[str, Any]:
    """See `Fade.state_dict`."""
    rows: dict[str, Any] = {}
    for site in sites:
        if site.blend.teacher is not None:  # Hashed afresh: other weights may have been loaded into it.
            site.teacher_hash = hash_of(site.blend.teacher)
        rows[site.path] = {
            "teacher_hash": site.teacher_hash,
            "power": [site.power.total, site.power.positions, site.power.fixed],
            "controller": site.driver.state_dict() if isinstance(site.driver, Controller) else None,
            "structure": _structure_out(site),
        }
    return {
        "version": STATE_VERSION,
        "plan": plan.fingerprint(),
        "step": step,
        "total_steps": total,
        "sites": rows,
    }


def load(saved: Mapping[str, Any], plan: Plan, sites: list[Site], own_total: int | None) -> tuple[int, int | None]:
    """Check everything, then restore; returns step and total."""
    try:
        version, rows = saved["version"], dict(saved["sites"])
        step, total = saved["step"], saved["total_steps"]
        if type(step) is not int or step < 0:
            raise TypeError(f"step {step!r}")
        right_length = (total is None and own_total is None) or (type(total) is int and total >= 1)
        if not right_length or not all(isinstance(r, Mapping) for r in rows.values()):
            raise TypeError("total_steps or the rows of the sites")
        fingerprint = saved["plan"]
    except (KeyError, TypeError, ValueError) as error:
        raise PersistError(
            "this is not the state of a fade.", got=repr(error), expected="what fade.state_dict() gave"
        ) from None
    if version != STATE_VERSION:
        raise PersistError("the state has another format.", expected=f"version {STATE_VERSION}", got=version)
    if fingerprint != plan.fingerprint():
        raise PersistError(
            "the state belongs to another plan.",
            expected=plan.fingerprint(),
            got=fingerprint,
            do="install the plan that was saved (targets, student, gate, guidance, trains, seed); "
            "in stages, go to its stage",
        )
    if set(rows) != {site.path for site in sites}:
        raise PersistError("the state has other sites.", expected=[s.path for s in sites], got=sorted(rows))
    for site in sites:
        own = hash_of(site.blend.teacher) if site.blend.teacher is not None else site.teacher_hash
        saved_hash = str(rows[site.path].get("teacher_hash"))
        if own != saved_hash:
            raise PersistError(
                "the teacher is not the one of the saved run.",
                where=site.path,
                expected=f"weights with hash {saved_hash[:16]}",
                got=own[:16],
                do="load the same base model before install",
            )
    for site, restored in zip(sites, [_parsed(site, rows[site.path]) for site in sites], strict=True):
        site.teacher_hash, site.power, controller, structure = restored
        if isinstance(site.driver, Controller):
            site.driver.load_state_dict(controller)
        if structure is not None:
            site.blend.main_place, site.blend.bare_student, site.blend.teacher_structure, site.blend.cast = structure
    return step, total


def whole_step(step: Any) -> int:
    """An optimizer step, checked.

    Raises:
        StateError: It is no whole number >= 0.
    """
    if type(step) is not int or step < 0:
        raise StateError("a step is a whole number of optimizer steps done.", expected=">= 0", got=repr(step))
    return step


def items_of(num_items: Any, device: torch.device) -> Tensor | None:
    """The number of valid positions of an accumulated batch, 0-dim float32; None stays None.

    Raises:
        StateError: It is no positive number. The value of a tensor is not looked at: that would wait for the device.
    """
    if num_items is None:
        return None
    number = type(num_items) in (int, float) and 0 < num_items < math.inf
    if not number and not (isinstance(num_items, Tensor) and num_items.numel() == 1):
        raise StateError(
            "num_items is the number of valid positions in the whole batch.",
            expected="a number > 0",
            got=repr(num_items),
        )
    return torch.as_tensor(num_items, dtype=torch.float32, device=device).reshape(())


def length_warning(own: int | None, saved: int | None) -> str:
    """What to say when a resumed run names another length."""
    return (
        f"the saved run has total_steps={saved}, this one was installed with {own}: going on with {saved}. "
        "Pass rescale=True to stretch the schedules to the new length."
    )


def _structure_out(site: Site) -> dict[str, Any] | None:
    """The learned output structure, when plain data can tell it (dataclasses are learned again from the teacher)."""
    blend = site.blend
    if blend.main_place == "auto":
        return None
    dtype = None if blend.cast is None else str(blend.cast).removeprefix("torch.")
    try:
        skeleton = outputs.pack(blend.teacher_structure)
        return {"where": blend.main_place, "bare": blend.bare_student, "skeleton": skeleton, "cast": dtype}
    except OutputError:
        return None


def _parsed(site: Site, row: Mapping[str, Any]) -> tuple[str, Power, dict[str, Any], tuple[Any, bool, Any, Any] | None]:
    """One site's row, read whole before anything of any site changes.

    Raises:
        PersistError: Something is missing or of the wrong kind.
    """
    try:
        power = Power()
        total, positions, fixed = row["power"]
        power.total, power.positions, power.fixed = float(total), float(positions), bool(fixed)
        if not (0.0 <= power.total < math.inf and 0.0 <= power.positions < math.inf):
            raise ValueError(f"power {row['power']}")
        controller = dict(row["controller"] or {})
        if isinstance(site.driver, Controller):
            Controller(site.driver.settings).load_state_dict(controller)
            if controller["similarity"] is not None:
                controller["similarity"] = float(controller["similarity"])
        kept = row["structure"]
        structure = None
        if kept is not None:
            cast = None if kept["cast"] is None else getattr(torch, kept["cast"])
            structure = (kept["where"], bool(kept["bare"]), outputs.unpack(kept["skeleton"]), cast)
        return str(row["teacher_hash"]), power, controller, structure
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise PersistError(
            "the saved state of a site is damaged.", where=site.path, expected="what state_dict gave", got=repr(error)
        ) from None
