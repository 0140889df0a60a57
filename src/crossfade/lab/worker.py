"""A process that does the runs of a sweep, one after another: `python -m crossfade.lab.worker`.

It reads JSON lines: first the experiment file and the folder of the sweep, then a label and a seed for each run. It
writes JSON lines: `ready`, news while a run goes on, and `done` or `failed` at its end. What others print to standard
output goes to standard error, so that nothing disturbs the lines.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

__all__ = ["cell_path", "main", "write_record"]

NEWS_EVERY = 0.5  # seconds


def cell_path(folder: Path, label: str, seed: int) -> Path:
    """The file of one run's record."""
    return folder / "cells" / f"{label}-s{seed}.json"


def write_record(record: dict[str, Any], path: Path) -> None:
    """Write a record so that the file is either whole or not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    staged = path.with_name(f".{path.name}.{os.getpid()}")
    with staged.open("w", encoding="utf-8") as file:
        json.dump(record, file, indent=1, allow_nan=False)
        file.flush()
        os.fsync(file.fileno())
    staged.replace(path)


def main() -> None:
    """Serve until standard input ends."""
    lines = sys.stdout
    sys.stdout = sys.stderr

    def say(**news: Any) -> None:
        lines.write(json.dumps(news) + "\n")
        lines.flush()

    task = json.loads(sys.stdin.readline())
    try:
        _serve(Path(task["experiment"]), Path(task["folder"]), say)
    except BrokenPipeError:
        sys.exit(1)  # The sweep is gone.


def _serve(file: Path, folder: Path, say: Any) -> None:
    import torch

    from ..errors import CrossfadeError
    from ..targets import select
    from .experiment import read, task_of
    from .loop import run

    try:
        experiment = read(file)
        torch.set_num_threads(experiment.training.threads)
        loaded = task_of(experiment.task).load()
        select(loaded.model, experiment.targets or loaded.targets)
    except CrossfadeError as error:
        say(kind="unready", message=str(error))
        return
    say(kind="ready")
    for line in sys.stdin:
        job = json.loads(line)
        label, seed = job["label"], job["seed"]
        last = 0.0

        def tell(news: dict[str, Any], label: str = label, seed: int = seed) -> None:
            nonlocal last
            if time.monotonic() - last > NEWS_EVERY or "score" in news:
                last = time.monotonic()
                say(kind="news", label=label, seed=seed, **news)

        checkpoint = folder / "checkpoints" / f"{label}-s{seed}"
        try:
            record = run(experiment, label, seed, loaded=loaded, folder=checkpoint, tell=tell)
        except CrossfadeError as error:
            say(kind="failed", label=label, seed=seed, message=str(error))
            continue
        write_record(record, cell_path(folder, label, seed))
        say(kind="done", label=label, seed=seed, final=record["final"], seconds=record["seconds"])


if __name__ == "__main__":
    main()
