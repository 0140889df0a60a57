"""Checkpoints of a run: safetensors and JSON in one folder, which appears whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.optim import Optimizer

from .inputs import InputError

__all__ = ["Checkpoint", "load", "restore", "save"]


@dataclass(frozen=True)
class Checkpoint:
    """A run after some optimizer steps of one of its stages.

    Attributes:
        key: Of the run, as `Experiment.key` gives it.
        stage: Number of the stage.
        step: Optimizer steps done in it.
        record: What has been measured so far.
        fade: From `Fade.state_dict`.
        seconds: On the clock.
    """

    key: str
    stage: int
    step: int
    record: dict[str, Any]
    fade: dict[str, Any]
    seconds: float


def save(folder: Path, checkpoint: Checkpoint, model: Mapping[str, Tensor], optimizer: Optimizer | None) -> None:
    """Write a checkpoint in the place of the one that is there."""
    staged = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(staged, ignore_errors=True)
    staged.mkdir(parents=True)
    # Tied tensors are written by name: safetensors refuses two names of one memory.
    save_file({key: value.detach().cpu().clone() for key, value in model.items()}, staged / "model.safetensors")
    if optimizer is not None:
        save_file(_flat(optimizer), staged / "optimizer.safetensors")
    (staged / "run.json").write_text(json.dumps(vars(checkpoint)), encoding="utf-8")
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    staged.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def load(folder: Path, key: str) -> tuple[Checkpoint, dict[str, Tensor], dict[str, Tensor]] | None:
    """The checkpoint of a run with this key: its data, the model's tensors, the optimizer's; None if there is none.

    Raises:
        InputError: It cannot be read.
    """
    old = folder.with_name(f".{folder.name}.old")
    if not folder.exists() and old.exists():  # Stopped between the two renames.
        old.rename(folder)
    if not folder.exists():
        return None
    try:
        found = Checkpoint(**json.loads((folder / "run.json").read_text(encoding="utf-8")))
        model = load_file(folder / "model.safetensors")
        path = folder / "optimizer.safetensors"
        optimizer = load_file(path) if path.exists() else {}
    except (OSError, ValueError, TypeError, SafetensorError) as error:
        raise InputError(
            "a checkpoint cannot be read.", where=folder, got=str(error).splitlines()[0], do="delete the folder"
        ) from None
    return (found, model, optimizer) if found.key == key else None


def _flat(optimizer: Optimizer) -> dict[str, Tensor]:
    """Adam's state by position of the parameter: `17.exp_avg`."""
    state = optimizer.state_dict()["state"]
    return {
        f"{i}.{name}": torch.as_tensor(value).cpu().clone() for i, row in state.items() for name, value in row.items()
    }


def restore(optimizer: Optimizer, flat: Mapping[str, Tensor]) -> None:
    """Give an optimizer the state that `_flat` took."""
    rows: dict[int, dict[str, Tensor]] = {}
    for key, value in flat.items():
        number, _, name = key.partition(".")
        rows.setdefault(int(number), {})[name] = value
    optimizer.load_state_dict({"state": rows, "param_groups": optimizer.state_dict()["param_groups"]})
