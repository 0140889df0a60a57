"""How a verb shows that it works: a live line in a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

__all__ = ["Meter", "meter"]

EVERY = 10.0  # seconds of training between two plain lines


class Meter:
    """The line of one arm: alpha, losses, interface cosine, time left.

    Args:
        progress: What draws the live line.
        name: Of the arm.
        budget: Seconds of training that the arm may take.
    """

    def __init__(self, progress: Progress, name: str, budget: float) -> None:
        self._progress, self._name, self._budget = progress, name, budget
        self._task = progress.add_task(name, total=budget, facts="", left="")
        self._values: dict[str, float] = {}
        self._next_line = 0.0

    def show(self, spent: float, phase: str, **values: float | None) -> None:
        """Draw the line again.

        Args:
            spent: Seconds of training so far.
            phase: What the arm does now.
            values: What is known now; what was known before stays, and None takes it away.
        """
        for name, value in values.items():
            if value is None:
                self._values.pop(name, None)
            else:
                self._values[name] = value
        facts = "  ".join([phase, *(f"{name} {value:.3f}" for name, value in self._values.items())])
        left = f"{max(0.0, self._budget - spent):.0f} s left"
        self._progress.update(self._task, completed=min(spent, self._budget), facts=facts, left=left)
        if not self._progress.console.is_terminal and spent >= self._next_line:
            self._next_line = spent + EVERY
            self._progress.console.print(
                f"{self._name}: {spent:.0f} s  {facts}  ({left})", highlight=False, soft_wrap=True
            )

    def done(self, spent: float, text: str) -> None:
        """Say how it ended."""
        self._progress.update(self._task, completed=self._budget, facts=text, left=f"{spent:.0f} s")
        if not self._progress.console.is_terminal:
            self._progress.console.print(f"{self._name}: {spent:.0f} s  {text}", highlight=False, soft_wrap=True)


@contextmanager
def meter(console: Console, name: str, budget: float) -> Iterator[Meter]:
    """A meter that stays on the screen as long as the block runs, and its last line afterwards."""
    columns: tuple[Any, ...] = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[facts]}"),
        TextColumn("{task.fields[left]}", style="dim"),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        yield Meter(progress, name, budget)
