"""Tables that a verb prints."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

__all__ = ["score_table"]


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
