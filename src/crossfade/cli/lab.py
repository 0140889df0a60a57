"""`crossfade run`, `list`, `report` and `tune`: the lab from the shell."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from ..errors import CrossfadeError
from ..lab.base import checked
from ..lab.experiment import Experiment, override, read
from ..lab.inputs import InputError
from ..lab.methods import METHODS
from ..lab.recipes import RECIPES
from ..lab.report import write_report
from ..lab.surroundings import command
from ..lab.sweep import Outcome, default_jobs, missing, prepare, sweep
from ..lab.tasks import TASKS
from ..lab.tuning import apply, choose, equal_seconds, grid
from ..lab.tuning import tuned as write_tuned

__all__ = ["listing", "report", "resolve", "run", "tune"]


def resolve(
    source: str, *, methods: str | None = None, seeds: str | None = None, changes: Sequence[str] = ()
) -> Experiment:
    """The experiment of a recipe's name or a file, with methods, seeds and overrides applied.

    Raises:
        InputError: Unknown recipe, bad file, unknown method, bad seed, bad override.
    """
    path = Path(source)
    if source in RECIPES:
        experiment = RECIPES[source]()
    elif path.suffix in (".yaml", ".yml") or path.exists():
        experiment = read(path / "experiment.yaml" if path.is_dir() else path)
    else:
        experiment = RECIPES[source]()  # Says what exists.
    if methods is not None:
        labels = [label for label in methods.split(",") if label]
        if labels == ["all"]:
            labels = METHODS.names()
        known = dict(experiment.methods)
        for label in labels:
            if label not in known:
                METHODS[label]
        chosen = {label: known.get(label, {}) for label in labels}
        reference = experiment.reference if experiment.reference in chosen else None
        experiment = _with(experiment, methods=chosen, reference=reference)
    if seeds is not None:
        experiment = _with(experiment, seeds=_numbers(seeds))
    return override(experiment, changes)


def _with(experiment: Experiment, **fields: Any) -> Experiment:
    data = experiment.model_dump(mode="json") | fields
    return checked(Experiment, data, "")


def _numbers(text: str) -> list[int]:
    """`0,1,2` or `0-4`."""
    try:
        found: list[int] = []
        for part in text.split(","):
            first, dash, last = part.partition("-")
            found += range(int(first), int(last) + 1) if dash else [int(first)]
            if dash and int(last) < int(first):
                raise ValueError
    except ValueError:
        raise InputError(f"--seeds {text}: these are not seeds", expected="such as 0,1,2 or 0-4") from None
    return found


def run(
    source: str,
    *,
    methods: str | None,
    seeds: str | None,
    changes: Sequence[str],
    tuned: Path | None,
    as_long_as: Path | None,
    jobs: int | None,
    out: Path | None,
) -> int:
    """Run what is missing of an experiment, then write its report.

    Returns:
        The exit code: 0, or 1 if a run failed.

    Raises:
        InputError: Bad input; nothing is written then.
    """
    quiet = os.environ.get("RANK", "0") != "0"  # Of several processes, the first one speaks.
    console = Console(quiet=quiet, highlight=False, soft_wrap=True)
    experiment = resolve(source, methods=methods, seeds=seeds, changes=changes)
    if tuned is not None:
        experiment = apply(experiment, tuned)
    if as_long_as is not None:
        experiment = equal_seconds(experiment, as_long_as)
    folder = out if out is not None else Path(f"crossfade-{experiment.name}")
    fresh = not folder.exists()
    experiment = prepare(experiment, folder)
    try:
        outcome = _sweep(console, experiment, folder, jobs)
    except CrossfadeError:
        if fresh and not list((folder / "cells").iterdir()):
            shutil.rmtree(folder)  # Bad input writes nothing.
        raise
    if os.environ.get("RANK", "0") != "0":
        return 0
    return _end(console, experiment, folder, outcome)


def _sweep(console: Console, experiment: Experiment, folder: Path, jobs: int | None) -> Outcome:
    todo = missing(experiment, folder)
    total = len(experiment.methods) * len(experiment.seeds)
    console.print(
        f"{experiment.name}: {len(experiment.methods)} methods x {len(experiment.seeds)} seeds in {folder}"
        + (f"; {total - len(todo)} of {total} runs are there already" if len(todo) < total else "")
    )
    jobs = jobs or default_jobs(experiment)
    try:
        with _terminating(), _Show(console, len(todo)) as show:
            return sweep(experiment, folder, jobs=jobs, tell=show.tell)
    except KeyboardInterrupt:
        left = len(missing(experiment, folder))
        # The same command goes on: what is finished is not run again.
        console.print(f"stopped; {total - left} of {total} runs are done. To go on: {command()}", markup=False)
        sys.exit(130)


@contextmanager
def _terminating() -> Iterator[None]:
    """SIGTERM, as clusters send it, ends a sweep as Ctrl-C does."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _end(console: Console, experiment: Experiment, folder: Path, outcome: Outcome) -> int:
    for label, seed, message in outcome.failed:
        print(f"crossfade: {label}, seed {seed}: {message}", file=sys.stderr)  # noqa: T201 - this is how a command speaks
    if len(missing(experiment, folder)) == len(experiment.methods) * len(experiment.seeds):
        return 1
    report(folder, console)
    return 1 if outcome.failed else 0


class _Show:
    """Bars in a terminal, a line per run elsewhere; both with the time left."""

    def __init__(self, console: Console, total: int) -> None:
        self.console, self.total, self.finished = console, total, 0
        self.begin = time.monotonic()
        columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), TextColumn("{task.fields[facts]}"))
        self.progress = Progress(*columns, console=console, disable=not console.is_terminal)
        self.bars: dict[int, Any] = {}

    def __enter__(self) -> _Show:
        self.progress.start()
        self.all = self.progress.add_task("all runs", total=self.total, facts="")
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def left(self) -> str:
        """Time left, from the runs that are finished."""
        if not self.finished:
            return ""
        seconds = (time.monotonic() - self.begin) / self.finished * (self.total - self.finished)
        return f"{seconds / 60:.0f} min left" if seconds > 90 else f"{seconds:.0f} s left"

    def tell(self, news: dict[str, Any]) -> None:
        """One piece of news from a worker."""
        kind, number = news["kind"], news["worker"]
        if number not in self.bars:
            self.bars[number] = self.progress.add_task(f"process {number}", total=1.0, facts="loads model and data")
        if kind == "news":
            share = news["step"] / news["steps"] if "steps" in news else None
            score = f"  score {news['score']:.4g}" if "score" in news else ""
            facts = f"{news['label']}, seed {news['seed']}: {news['stage']}{score}"
            self.progress.update(self.bars[number], completed=share, facts=facts)
        elif kind in ("done", "failed"):
            self.finished += 1
            self.progress.update(self.all, completed=self.finished, facts=self.left())
            end = f"test {news['final']['test']:.4g}, {news['seconds']['total']:.1f} s" if kind == "done" else "failed"
            self.console.print(
                f"[{self.finished}/{self.total}] {news['label']}, seed {news['seed']}: {end}  {self.left()}",
                markup=False,
            )


def report(folder: Path, console: Console | None = None) -> None:
    """Write the report of a run directory again, and print its table.

    Raises:
        InputError: The folder holds no results, or a file in it cannot be read.
    """
    console = console or Console(highlight=False, soft_wrap=True)
    written = write_report(folder)
    rows = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    console.print(_table(rows))
    console.print("\n".join(str(path) for path in written if path.suffix in (".html", ".csv", ".json")))


def _table(results: dict[str, Any]) -> Table:
    """The final test score of every method, and its difference to the reference."""
    table = Table(title=f"{results['experiment']['name']}: {results['metric']}, test", title_justify="left")
    table.add_column("method")
    for name in ("test", "seconds", f"against {results['experiment']['reference'] or 'the first'}"):
        table.add_column(name, justify="right")
    original = results["original"]["test"]
    table.add_row("original", _mean(original), "-", "-", style="dim")
    for label, row in results["methods"].items():
        pair = row["against_reference"]
        against = "-" if pair is None else _interval(pair)
        table.add_row(label, _mean(row["test"]), f"{row['seconds']['mean']:.1f}", against)
    return table


def _mean(spread: dict[str, Any] | None) -> str:
    if spread is None:
        return "-"
    return f"{spread['mean']:.4g}" + (f" ± {spread['std']:.2g}" if spread["std"] is not None else "")


def _interval(pair: dict[str, Any]) -> str:
    low, high = pair["interval_95"] or (None, None)
    return f"{pair['mean']:+.3g}" + (f" [{low:+.3g}, {high:+.3g}]" if low is not None else "")


def listing() -> str:
    """Recipes, methods and tasks, one line each."""
    lines = ["recipes (crossfade run NAME):"]
    lines += [f"  {name:<20} {(RECIPES[name].__doc__ or '').strip().splitlines()[0]}" for name in RECIPES.names()]
    lines += ["", "methods (--methods a,b,c; all):"]
    lines += [f"  {name:<20} {METHODS[name].title}; {METHODS[name].source}" for name in METHODS.names()]
    lines += ["", "tasks (task.kind in a file):"]
    lines += [f"  {name:<20} {(TASKS[name].__doc__ or '').strip().splitlines()[0]}" for name in TASKS.names()]
    return "\n".join(lines)


def tune(
    source: str,
    *,
    methods: str | None,
    seeds: str,
    rates: str,
    changes: Sequence[str],
    jobs: int | None,
    out: Path | None,
) -> int:
    """Try every method at the same rates on the same seeds; write the best rate of each by validation score.

    Raises:
        InputError: Bad input.
    """
    console = Console(highlight=False, soft_wrap=True)
    base = resolve(source, methods=methods, seeds=seeds, changes=changes)
    try:
        values = [float(text) for text in rates.split(",")]
    except ValueError:
        raise InputError(f"--rates {rates}: these are not rates", expected="such as 1e-3,3e-3,1e-2") from None
    folder = out if out is not None else Path(f"crossfade-{base.name}-tuning")
    experiment = prepare(grid(base, values), folder)
    outcome = _sweep(console, experiment, folder, jobs)
    chosen = choose(folder)
    write_tuned(chosen, folder / "tuned.json")
    for label, row in chosen.items():
        console.print(f"{label:<20} {row['field']} = {row['value']:g}  validation {row['score']:.4g}", markup=False)
    console.print(f"apply with: crossfade run {source} --tuned {folder / 'tuned.json'}", markup=False)
    return 1 if outcome.failed else 0
