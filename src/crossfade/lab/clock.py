"""Seconds of training, without the pauses: measuring is not training."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

__all__ = ["Clock"]


class Clock:
    """Counts from its making on.

    Args:
        kind: Seconds of the wall, or of the process on the CPU.

    Example:
        >>> clock = Clock()
        >>> with clock.paused():
        ...     before = clock.seconds
        ...     after = clock.seconds
        >>> before == after
        True
    """

    def __init__(self, kind: Literal["wall", "cpu"] = "wall") -> None:
        self._now = time.perf_counter if kind == "wall" else time.process_time
        self._spent = 0.0
        self._since: float | None = self._now()

    @property
    def seconds(self) -> float:
        """Seconds so far."""
        return self._spent + (0.0 if self._since is None else self._now() - self._since)

    def start_at(self, seconds: float) -> None:
        """Go on from an earlier run's seconds."""
        self._spent, self._since = seconds, self._now()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What happens inside does not count."""
        self._spent, self._since = self.seconds, None
        try:
            yield
        finally:
            self._since = self._now()
