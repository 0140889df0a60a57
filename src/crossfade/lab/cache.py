"""Teachers that the lab trains itself, kept by the hash of all that they depend on."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from .inputs import InputError

__all__ = ["cache_folder", "content_hash", "remembered"]


def cache_folder() -> Path:
    """`$XDG_CACHE_HOME/crossfade`, by default `~/.cache/crossfade`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "crossfade"


def content_hash(*parts: Any) -> str:
    """16 hex digits of plain data, tensors and bytes."""
    digest = hashlib.sha256()
    for part in parts:
        if isinstance(part, Tensor):
            digest.update(f"{part.dtype} {tuple(part.shape)}".encode())
            digest.update(part.contiguous().numpy().tobytes())
        elif isinstance(part, bytes):
            digest.update(part)
        else:
            digest.update(json.dumps(part, sort_keys=True, default=str).encode())
        digest.update(b"\0")
    return digest.hexdigest()[:16]


def remembered(model: nn.Module, name: str, key: str, train: Callable[[nn.Module], Mapping[str, float]]) -> Path:
    """Load the model's weights from the cache, or train it and put them there.

    Args:
        model: With its initial weights; afterwards with the trained ones, in eval mode.
        name: Of the file, for people.
        key: Hash of everything that the weights depend on.
        train: Trains the model in place and returns figures, which are kept in the file's metadata.

    Returns:
        The file.

    Raises:
        InputError: The cached file cannot be read.
    """
    path = cache_folder() / "teachers" / f"{name}-{key}.safetensors"
    if not path.is_file():
        facts = train(model)
        path.parent.mkdir(parents=True, exist_ok=True)
        staged = path.with_name(f".{path.name}.{os.getpid()}")
        tensors = {key: value.detach().contiguous() for key, value in model.state_dict().items()}
        save_file(tensors, staged, metadata={"facts": json.dumps(dict(facts))})
        staged.replace(path)
    # Also what was trained just now is read from the file, so that the first run equals all later ones.
    try:
        with safe_open(path, framework="pt") as file:
            model.load_state_dict({key: file.get_tensor(key) for key in file.keys()})  # noqa: SIM118 - no mapping
    except (SafetensorError, RuntimeError, OSError) as error:
        raise InputError(
            "a cached teacher cannot be read.", where=path, got=str(error).splitlines()[0], do="delete the file"
        ) from None
    model.eval()
    return path
