"""What a measuring verb writes beside its figures: versions, threads, the command; and the table that it prints."""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

__all__ = ["command", "score_table", "surroundings", "versions", "write_json"]


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


def score_table(title: str, rows: Sequence[tuple[str, float, float | None, int | str | None]]) -> Table:
    """Rows of (name, cosine, seconds, optimizer steps); None where there was no training."""
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("model")
    for name in ("cosine", "training", "steps"):
        table.add_column(name, justify="right")
    for name, value, seconds, steps in rows:
        cells = ("-" if seconds is None else f"{seconds:.1f} s", "-" if steps is None else str(steps))
        table.add_row(name, f"{value:.4f}", *cells, style="bold" if name.startswith("crossfade") else "")
    return table
