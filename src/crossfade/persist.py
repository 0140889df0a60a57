"""Save a finalized model and load it again: `crossfade.safetensors` and `crossfade.json`, nothing else.

Loading imports nothing: students are rebuilt by registered names, or by what the caller passes. The weights file has a
name of its own, so that a plain `from_pretrained` stops instead of inventing weights for modules that it does not know.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from .changes import Changes
from .errors import CrossfadeError, PersistError
from .finalize import Receipt, carry, receipt_of, remember
from .outputs import unpack
from .plan import Plan, Swap
from .runs import Chain, shorten
from .students import Adapter, SiteInfo, StudentLike, build
from .students.base import site_seed
from .targets import Run, resolve

__all__ = ["load", "save"]

FORMAT = 1
WEIGHTS, RECIPE = "crossfade.safetensors", "crossfade.json"


def save(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    notes: Mapping[str, Any] | None = None,
    receipt: Receipt | None = None,
) -> Path:
    """Write a finalized model to a folder.

    Args:
        model: What `fade.finalize()` (or `load`) returned.
        folder: Created if missing. Files are written under a temporary name and renamed.
        notes: Plain data to keep in the recipe (metrics, data, licence).
        receipt: `fade.receipt`, for a copy of the finalized model (an average, the best so far).

    Returns:
        The folder.

    Raises:
        PersistError: The model is still blended, or was not made by crossfade.
    """
    if "_crossfade" in model.__dict__:
        raise PersistError(
            "the model is still fading.",
            got="a model with an installed plan",
            do="finalize it first; in mid-fade save model.state_dict() and fade.state_dict()",
        )
    receipt = receipt or receipt_of(model)
    if receipt is None:
        raise PersistError(
            "this model was not finalized by crossfade in this process.",
            got=type(model).__name__,
            do="for a copy of a finalized model pass receipt=fade.receipt",
        )
    told = _plain(notes)
    tensors, aliases = _untied(model)
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    temporary = target / f".{WEIGHTS}.part"
    temporary.touch()  # safetensors makes its files readable by their owner alone; the mode is to be the usual one.
    mode = temporary.stat().st_mode
    save_file(tensors, temporary, metadata={"format": "pt"})
    temporary.chmod(mode)
    recipe = {
        "format": FORMAT,
        "versions": {"crossfade": version("crossfade"), "torch": torch.__version__},
        "base": {"class": f"{type(model).__module__}.{type(model).__qualname__}"},
        "weights": {"file": WEIGHTS, "sha256": _sha256(temporary), "aliases": aliases},
        "receipt": receipt.to_dict(),
        "notes": told,
    }
    text = json.dumps(recipe, indent=2, sort_keys=True, allow_nan=False)
    temporary.replace(target / WEIGHTS)
    part = target / f".{RECIPE}.part"
    part.write_text(text + "\n", encoding="utf-8")
    part.replace(target / RECIPE)
    return target


def load(
    folder: str | os.PathLike[str],
    *,
    base: nn.Module | Callable[[], nn.Module],
    students: StudentLike | None = None,
) -> nn.Module:
    """Read a folder that `save` wrote.

    Args:
        folder: The folder.
        base: The original architecture, as a model or a function that builds one. Its weights are overwritten, all of
            them, so they may be random; its dtype must be that of the saved weights.
        students: For students that the recipe cannot name: a factory, a module, or modules by path (as in a plan).

    Returns:
        The finalized model, in the base's training mode.

    Raises:
        PersistError: The folder is incomplete or damaged, the base has another architecture, or a student cannot be
            named.
    """
    recipe = _read(Path(folder))
    tensors = _read_weights(Path(folder), recipe)
    receipt = _receipt(recipe)
    plan = _plan(receipt, needed=students is None)
    model: object = base() if callable(base) and not isinstance(base, nn.Module) else base
    if not isinstance(model, nn.Module):
        raise PersistError(
            "base is no model.", expected="a module, or a function that builds one", got=type(model).__name__
        )
    with Changes() as changes:
        # Runs last and from the back, as in finalize: shortening renumbers what follows in the container.
        for path in sorted(receipt.sites, key=lambda p: _order(receipt.sites[p])):
            try:
                _rebuild(changes, model, path, receipt.sites[path], plan, students)
            except (CrossfadeError, LookupError, TypeError, ValueError, AttributeError) as error:
                raise PersistError(
                    "a site of the recipe cannot be rebuilt.",
                    where=path,
                    got=str(error).split("\n  what to do")[0],
                    do="pass students=, or the right base",
                ) from error
        _fill(model, tensors)
    remember(model, receipt)
    return model


def _plan(receipt: Receipt, needed: bool) -> Plan | None:
    """The recipe's plan. One that names unknown things is not needed when the caller gives the students."""
    if receipt.plan is None:
        return None
    try:
        return Plan.from_dict(receipt.plan)
    except (CrossfadeError, LookupError, TypeError, ValueError, AttributeError) as error:
        if not needed:
            return None
        raise PersistError(
            "the plan in the recipe cannot be read.",
            where=RECIPE,
            got=str(error).split("\n  what to do")[0],
            do="register what it names before loading, or pass students=",
        ) from error


def _order(row: Mapping[str, Any]) -> float:
    return -1.0 if row["run"] is None else 1.0 / (1 + row["run"][1])


def _rebuild(
    changes: Changes,
    model: nn.Module,
    path: str,
    row: Mapping[str, Any],
    plan: Plan | None,
    students: StudentLike | None,
) -> None:
    run = None if row["run"] is None else Run(*row["run"])
    swap: Swap | None = None if plan is None else plan.swaps[row["swap"]]
    spec = students if students is not None else None if swap is None else swap.student
    if spec is None:
        raise PersistError("the recipe could not name its students.", do="pass students= (the factory that was used)")
    if run is None:
        teacher = first = resolve(model, row["paths"][0])
    else:
        places = [f"{run.container}.{i}".lstrip(".") for i in range(run.start, run.stop)]
        modules = tuple(resolve(model, place) for place in places)
        first, teacher = modules[0], Chain(modules)
    seed = site_seed(0 if plan is None else plan.seed, path)
    student = build(spec, first, SiteInfo(path, row["index"], row["n"], model, seed))
    if row["adapter"] is not None:
        adapter = row["adapter"]
        student = Adapter(
            student,
            drop=tuple(adapter["drop"]),
            where=adapter["where"],
            structure=unpack(adapter["structure"]),
            dtype=_dtype(adapter["dtype"]),
        ).train(student.training)
    carry(changes, student, row["carry"], {}, teacher, path)
    if run is None:
        changes.put(model, row["paths"], student)
    else:
        shorten(changes, model, run, student)


def _plain(notes: Mapping[str, Any] | None) -> dict[str, Any]:
    """Notes as JSON would give them back.

    Raises:
        PersistError: They hold something that is no plain data.
    """
    try:
        return dict(json.loads(json.dumps(dict(notes or {}), allow_nan=False)))
    except (TypeError, ValueError) as error:
        raise PersistError(
            "the notes cannot be written as JSON.",
            where="notes",
            expected="strings, finite numbers, lists, dicts",
            got=str(error),
        ) from None


def _dtype(name: str | None) -> torch.dtype | None:
    """A torch dtype by name; anything else of that name is refused."""
    if name is None:
        return None
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise PersistError("unknown dtype.", expected="the name of a torch dtype", got=repr(name))
    return dtype


def _fill(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Copy the weights in, strictly: names, shapes and dtypes must agree."""
    own = model.state_dict()
    missing, unexpected = sorted(set(own) - set(tensors)), sorted(set(tensors) - set(own))
    if missing or unexpected:
        raise PersistError(
            "the weights do not belong to this architecture.",
            expected=f"{len(own)} tensors; missing: {', '.join(missing[:3]) or 'none'}",
            got=f"{len(tensors)} tensors; unexpected: {', '.join(unexpected[:3]) or 'none'}",
            do="build the base with the configuration of the saved model",
        )
    for name, tensor in tensors.items():
        if own[name].shape != tensor.shape or own[name].dtype != tensor.dtype:
            raise PersistError(
                "a tensor of the base has another shape or dtype.",
                where=name,
                expected=f"{list(tensor.shape)} {tensor.dtype}",
                got=f"{list(own[name].shape)} {own[name].dtype}",
                do="build the base with the saved model's configuration and dtype",
            )
    model.load_state_dict(tensors, strict=False)  # Names were compared above; torch stumbles over dots in names.


def _untied(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The state with each shared tensor once, and the other names that it has."""
    kept: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    names: dict[tuple[Any, ...], str] = {}
    for name, tensor in model.state_dict().items():
        key = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if tensor.numel() > 0 and key in names:
            aliases[name] = names[key]
            continue
        names[key] = name
        kept[name] = tensor.detach().clone(memory_format=torch.contiguous_format)
    return kept, aliases


def _read(folder: Path) -> dict[str, Any]:
    try:
        recipe = json.loads((folder / RECIPE).read_text(encoding="utf-8"))
        found = recipe["format"]
        recipe["weights"]["sha256"], recipe["weights"]["aliases"], recipe["receipt"]["sites"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise PersistError(
            "this folder holds no readable recipe.",
            where=folder / RECIPE,
            got=repr(error),
            expected="what crossfade.save wrote",
        ) from None
    if found != FORMAT:
        raise PersistError("the folder has another format.", where=folder / RECIPE, expected=FORMAT, got=found)
    return dict(recipe)


def _read_weights(folder: Path, recipe: Mapping[str, Any]) -> dict[str, Tensor]:
    path = folder / WEIGHTS
    try:
        digest = _sha256(path)
        if digest != recipe["weights"]["sha256"]:
            raise PersistError(
                "the weights are not those of the recipe.", where=path, expected=recipe["weights"]["sha256"], got=digest
            )
        tensors = load_file(path)
        return tensors | {name: tensors[kept] for name, kept in recipe["weights"]["aliases"].items()}
    except (OSError, SafetensorError, KeyError, AttributeError, TypeError) as error:
        raise PersistError("the weights cannot be read.", where=path, got=repr(error)) from None


def _receipt(recipe: Mapping[str, Any]) -> Receipt:
    try:
        receipt = Receipt(**dict(recipe["receipt"]))
        for row in receipt.sites.values():
            missing = {"run", "paths", "swap", "index", "n", "adapter", "carry"} - set(row)
            if missing or not row["paths"]:
                raise KeyError(*sorted(missing))
            _order(row)
        return receipt
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise PersistError(
            "the receipt cannot be read.", where=RECIPE, got=repr(error), expected="what save wrote"
        ) from None


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
