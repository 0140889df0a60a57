"""Synthetic run folders with values that can be checked by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

# The final test scores per method and seed. The original has 90.
TEST = {
    "kd": [85.0, 86.0, 87.0],
    "dcr": [86.0, 88.0, 87.0],
    "align": [89.0, 89.5, 90.0],
}
TITLES = {"kd": "Distillation", "dcr": "DCR + DFG", "align": "Alignment"}
EARLY = {"kd": 60.0, "dcr": 70.0, "align": 88.0}


def cell(method: str, seed: int, /, **changes: Any) -> dict[str, Any]:
    """A cell with a curve of three points: 10 at step 0, then a value at 100, then a value at 200."""
    test = TEST[method][seed]
    speed = {"kd": 0.1, "dcr": 0.2, "align": 0.05}[method]
    rows = ((0, 10.0), (100, EARLY[method]), (200, test + 0.5))
    return {
        "schema": 1,
        "method": method,
        "base": method,
        "title": TITLES[method],
        "source": "a paper",
        "seed": seed,
        "key": f"{seed:016x}",
        "metric": "accuracy (%)",
        "higher_is_better": True,
        "clock": "cpu",
        "facts": {"model": "a small ViT"},
        "original": {"validation": 90.2, "test": 90.0, "validation_curve": 90.5},
        "settings": {"weight": 1.0},
        "stages": [{"name": "fade", "steps": 200, "lr": 0.003}],
        "curve": [
            {"step": step, "epoch": step / 50, "seconds": step * speed, "stage": "fade", "alpha": 0.0, "score": score}
            for step, score in rows
        ],
        "interface": [
            {
                "step": step,
                "seconds": step * speed,
                "sites": {
                    f"blocks.{i}.attn": {"cosine": step / 220 + 0.01 * i, "error": 1.0, "cka": 0.3} for i in range(4)
                },
            }
            for step in (0, 100, 200)
        ],
        "final": {"validation": test + 0.25, "test": test, "validation_curve": test + 0.5},
        "seconds": {"total": 200 * speed, "fade": 200 * speed, "wall": 250 * speed},
        "costs": [
            {"phase": "student", "steps": 60, "seconds_per_step": 0.05, "saved_bytes": 2**20},
            {"phase": "blend", "steps": 140, "seconds_per_step": 0.09, "saved_bytes": None},
        ],
        "variance": [
            {
                "step": step,
                "alpha": 0.5,
                "gate": 0.0 if method == "dcr" else 1e-3 * step,
                "data": 0.03,
                "share": 0.0 if method == "dcr" else 0.1,
                "squared_mean": 0.5,
            }
            for step in (10, 100)
        ],
        "curvature": [],
    } | changes


def experiment(**changes: Any) -> dict[str, Any]:
    return {
        "name": "three methods",
        "methods": {"kd": {"kind": "kd"}, "dcr": {"kind": "dcr"}, "align": {"kind": "align"}},
        "reference": "kd",
        "seeds": [0, 1, 2],
        "evaluation": {"targets": [4.0, 1.0], "every": 100},
        "training": {"steps": 200, "batch_size": 16, "lr": 0.003},
    } | changes


ENVIRONMENT = {
    "versions": {"python": "3.12.1", "crossfade": "0.1", "torch": "2.14.1"},
    "git": "0123abc",
    "platform": "Linux-6.1-x86_64",
    "cores": 2,
    "threads": 1,
    "jobs": 1,
    "command": "crossfade run small.yaml --out 'my run'",
}


def cells() -> list[dict[str, Any]]:
    return [cell(method, seed) for method in TEST for seed in range(3)]


def write_run(
    folder: Path,
    rows: list[dict[str, Any]] | None = None,
    *,
    asked: dict[str, Any] | None = None,
    environment: dict[str, Any] | None = ENVIRONMENT,
) -> Path:
    """A run folder on disk."""
    (folder / "cells").mkdir(parents=True, exist_ok=True)
    (folder / "experiment.yaml").write_text(yaml.safe_dump(asked or experiment(), sort_keys=False), encoding="utf-8")
    if environment is not None:
        (folder / "environment.json").write_text(json.dumps(environment), encoding="utf-8")
    for place, row in enumerate(cells() if rows is None else rows):
        (folder / "cells" / f"{place:02d}-s{row['seed']}.json").write_text(json.dumps(row), encoding="utf-8")
    return folder
