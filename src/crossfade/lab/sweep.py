"""All runs of an experiment: methods x seeds, in processes side by side; what is finished is not run again."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .experiment import Experiment, read, write
from .inputs import InputError
from .surroundings import command, surroundings, versions
from .worker import cell_path, write_record

__all__ = ["Outcome", "default_jobs", "missing", "prepare", "several_processes", "sweep"]

News = Callable[[dict[str, Any]], None]


@dataclass
class Outcome:
    """How a sweep ended.

    Attributes:
        done: Runs finished by this call.
        failed: Label, seed and message of each run that could not be finished.
    """

    done: int = 0
    failed: list[tuple[str, int, str]] = field(default_factory=list)


def default_jobs(experiment: Experiment) -> int:
    """As many processes as the cores have room for; one where an accelerator does the work."""
    if experiment.training.device != "cpu":
        return 1
    return max(1, (os.cpu_count() or 1) // experiment.training.threads)


def prepare(experiment: Experiment, folder: Path) -> Experiment:
    """Make the folder of a sweep, or take up the one that is there.

    Returns:
        The experiment, with the methods and seeds that the folder already holds.

    Raises:
        InputError: The folder holds another experiment, or cannot be written.
    """
    file = folder / "experiment.yaml"
    if file.exists():
        experiment = _merged(experiment, read(file), folder)
    elif folder.exists() and not folder.is_dir():
        raise InputError("the output folder is a file.", where=folder, do="another --out")
    elif folder.exists() and any(folder.iterdir()):
        raise InputError("the output folder holds something else.", where=folder, do="another --out")
    if os.environ.get("RANK", "0") != "0":
        return experiment  # One process of several writes.
    try:
        (folder / "cells").mkdir(parents=True, exist_ok=True)
        staged = folder / f".experiment.{os.getpid()}.yaml"
        write(experiment, staged)
        staged.replace(file)
        _write_environment(experiment, folder)
    except OSError as error:
        raise InputError(
            "the output folder cannot be written.", where=folder, got=error.strerror or error, do="another --out"
        ) from None
    return experiment


def _merged(new: Experiment, old: Experiment, folder: Path) -> Experiment:
    """Old and new, if they differ in what is run only, not in how."""
    ours, theirs = new.model_dump(mode="json"), old.model_dump(mode="json")
    for key in ours:
        if key not in ("methods", "seeds", "reference", "notes") and ours[key] != theirs[key]:
            raise InputError(
                f"the output folder holds the results of another experiment: {key} differs.",
                where=folder,
                expected=theirs[key],
                got=ours[key],
                do="another --out",
            )
    for label in set(ours["methods"]) & set(theirs["methods"]):
        if new.method(label) != old.method(label):
            raise InputError(
                f"the output folder holds results of {label!r} with other settings.",
                where=folder,
                expected=theirs["methods"][label],
                got=ours["methods"][label],
                do='another --out, or a label of its own: {"method": ..., ...}',
            )
    merged = {
        **ours,
        "methods": theirs["methods"] | ours["methods"],
        "seeds": sorted({*theirs["seeds"], *ours["seeds"]}),
        "notes": theirs["notes"] | ours["notes"],
    }
    return Experiment.model_validate(merged)


def _write_environment(experiment: Experiment, folder: Path) -> None:
    path = folder / "environment.json"
    found = {
        "versions": versions("accelerate", "numpy", "safetensors", "timm", "transformers"),
        **surroundings(),
        "threads": experiment.training.threads,  # Of the processes that do the runs.
        "git": _git(),
        "command": command(),
    }
    staged = folder / f".environment.{os.getpid()}.json"
    staged.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    staged.replace(path)


def _git() -> str | None:
    """Commit of the source that runs, with a mark if it was changed; None outside a checkout."""
    git = shutil.which("git")
    home = Path(__file__).parent
    if git is None:
        return None

    def ask(*words: str) -> str:
        done = subprocess.run([git, "-C", str(home), *words], capture_output=True, text=True, check=False)  # noqa: S603 - fixed words
        return done.stdout.strip() if done.returncode == 0 else ""

    commit = ask("rev-parse", "HEAD")
    if not commit:
        return None
    return commit + (" with changes" if ask("status", "--porcelain", "--untracked-files=no") else "")


def missing(experiment: Experiment, folder: Path) -> list[tuple[str, int]]:
    """Label and seed of each run that is still to be done, seeds outermost.

    Raises:
        InputError: A finished run has other settings than the experiment, or its file cannot be read.
    """
    result = []
    for seed in experiment.seeds:
        for label in experiment.methods:
            path = cell_path(folder, label, seed)
            if not path.exists():
                result.append((label, seed))
                continue
            try:
                key = json.loads(path.read_text(encoding="utf-8"))["key"]
            except (OSError, ValueError, KeyError, TypeError):
                raise InputError("a result file cannot be read.", where=path, do="delete it to run it again") from None
            if key != experiment.key(label, seed):
                raise InputError(
                    "a result was made with other settings.", where=path, do="another --out, or delete the file"
                )
    return result


class _Worker:
    """A worker process and the thread that listens to it."""

    def __init__(self, number: int, experiment: Experiment, folder: Path, news: queue.Queue[Any]) -> None:
        self.number = number
        threads = str(experiment.training.threads)
        environment = os.environ | {
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
            "TOKENIZERS_PARALLELISM": "false",
        }
        (folder / "logs").mkdir(exist_ok=True)
        self.log = (folder / "logs" / f"worker-{number}.txt").open("w", encoding="utf-8")
        # A session of its own: Ctrl-C reaches the sweep alone, which then ends its workers.
        self.process = subprocess.Popen(
            [sys.executable, "-m", "crossfade.lab.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            env=environment,
            start_new_session=True,
        )
        self.send(experiment=str(folder / "experiment.yaml"), folder=str(folder))
        self._ear = threading.Thread(target=self._listen, args=(news,), daemon=True)
        self._ear.start()

    def _listen(self, news: queue.Queue[Any]) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            news.put((self, json.loads(line)))
        news.put((self, {"kind": "gone"}))

    def send(self, **job: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()

    def end(self) -> None:
        """Stop it at once; a finished run's file is whole whatever happens to its process."""
        if self.process.stdin is not None:
            with contextlib.suppress(OSError):
                self.process.stdin.close()
        self.process.kill()
        self.process.wait()
        self._ear.join()
        if self.process.stdout is not None:
            self.process.stdout.close()
        self.log.close()


def sweep(experiment: Experiment, folder: Path, *, jobs: int, tell: News | None = None) -> Outcome:
    """Do what `missing` lists.

    Args:
        experiment: As `prepare` returned it.
        folder: As `prepare` made it.
        jobs: Processes side by side; the figures do not depend on it.
        tell: Called with each piece of news: `kind` is ready, news, done or failed.

    Raises:
        InputError: The task cannot be loaded; another sweep works in the folder.
        KeyboardInterrupt: Passed on, after the workers are gone.
    """
    if several_processes():
        return _together(experiment, folder, tell or (lambda _: None))
    with _locked(folder):
        todo = missing(experiment, folder)
        outcome = Outcome()
        if todo:
            _serve(experiment, folder, todo, min(jobs, len(todo)), outcome, tell or (lambda _: None))
    return outcome


def several_processes() -> bool:
    """Whether torchrun or `accelerate launch` started this process as one of several."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def _together(experiment: Experiment, folder: Path, tell: News) -> Outcome:
    """All processes of a launcher work on each run in turn; the first one writes."""
    from .experiment import task_of
    from .loop import run

    first = os.environ.get("RANK", "0") == "0"
    loaded = task_of(experiment.task).load()
    outcome = Outcome()
    for label, seed in missing(experiment, folder):
        checkpoint = folder / "checkpoints" / f"{label}-s{seed}"
        record = run(experiment, label, seed, loaded=loaded, folder=checkpoint)
        outcome.done += 1
        if first:
            write_record(record, cell_path(folder, label, seed))
            tell(
                {
                    "worker": 0,
                    "kind": "done",
                    **{key: record[key] for key in ("final", "seconds", "seed")},
                    "label": label,
                }
            )
    return outcome


def _serve(
    experiment: Experiment, folder: Path, todo: list[tuple[str, int]], jobs: int, outcome: Outcome, tell: News
) -> None:
    news: queue.Queue[Any] = queue.Queue()
    waiting = list(todo)
    doing: dict[int, tuple[str, int]] = {}
    workers: list[_Worker] = []
    left = len(todo)
    try:
        # The first one makes what all need (a teacher, a cache); the others come when it is ready.
        workers.append(_Worker(0, experiment, folder, news))
        while left:
            worker, said = news.get()
            tell({"worker": worker.number, **said})
            if said["kind"] == "unready":
                raise InputError(said["message"])
            if said["kind"] == "gone":
                label, seed = doing.pop(worker.number, ("", -1))
                log = folder / "logs" / f"worker-{worker.number}.txt"
                if not label:
                    raise InputError("a worker process ended before it began.", where=log, got=_tail(log))
                outcome.failed.append((label, seed, f"the process ended ({worker.process.poll()}): {_tail(log)}"))
                left -= 1
                worker.end()
                workers[workers.index(worker)] = _Worker(worker.number, experiment, folder, news)
                continue
            if said["kind"] == "news":
                continue
            if said["kind"] == "ready" and worker.number == 0 and len(workers) < jobs:
                workers += [_Worker(number, experiment, folder, news) for number in range(1, jobs)]
            if said["kind"] in ("done", "failed"):
                del doing[worker.number]
                left -= 1
                outcome.done += said["kind"] == "done"
                if said["kind"] == "failed":
                    outcome.failed.append((said["label"], said["seed"], said["message"]))
            if waiting:
                doing[worker.number] = label, seed = waiting.pop(0)
                worker.send(label=label, seed=seed)
    finally:
        for worker in workers:
            worker.end()


def _tail(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1] if lines else "no output"


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One sweep at a time in a folder; the lock ends with the process, however that ends."""
    try:
        import fcntl
    except ImportError:  # Windows has no such lock; two sweeps would only do the same work twice.
        yield
        return
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise InputError("another sweep works in this folder.", where=folder, do="wait, or another --out") from None
        yield
