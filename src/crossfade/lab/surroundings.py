"""What is written beside figures: versions, machine, threads, the command."""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

__all__ = ["command", "surroundings", "versions", "write_json"]


def versions(*packages: str) -> dict[str, str]:
    """Versions of Python and of the packages that are installed."""
    found = {"python": platform.python_version()}
    for name in ("crossfade", "torch", *packages):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def surroundings() -> dict[str, Any]:
    """What speed depends on: machine type, cores, threads, and how busy the machine is."""
    return {
        "platform": platform.platform(),
        "processor": platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_average": [round(value, 2) for value in os.getloadavg()] if hasattr(os, "getloadavg") else None,
    }


def command() -> str:
    """The command line of this process, as it can be typed again."""
    return shlex.join(["crossfade", *sys.argv[1:]])


def write_json(data: Mapping[str, Any], path: Path) -> None:
    """Strict JSON: a value that is not finite is an error here rather than for the reader of the file."""
    path.write_text(json.dumps(data, indent=2, allow_nan=False) + "\n", encoding="utf-8")
