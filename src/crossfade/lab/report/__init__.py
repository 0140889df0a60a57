"""The report of a run folder: a page, tables and figures, all made from the files of the run alone."""

from __future__ import annotations

from pathlib import Path

from .cells import load_run
from .figures import draw, png, svg
from .files import csv_text, json_text, write
from .page import page
from .summary import summarise

__all__ = ["write_report"]


def write_report(folder: Path) -> list[Path]:
    """Write `report.html`, `results.csv`, `results.json` and `figures/` into a run folder.

    Everything is made before the first file is written, so that a broken cell leaves an earlier report as it was. The
    same cells give the same bytes.

    Args:
        folder: A folder with `experiment.yaml` and `cells/`.

    Returns:
        The files, the page first.

    Raises:
        InputError: A file of the run is missing, broken or of another schema, an extra is not installed, or the
            folder cannot be written to.
    """
    summary = summarise(load_run(folder))
    figures = draw(summary)
    contents: dict[Path, str | bytes] = {
        folder / "report.html": page(summary, figures),
        folder / "results.csv": csv_text(summary),
        folder / "results.json": json_text(summary),
    }
    for figure in figures:
        contents[folder / "figures" / f"{figure.name}.png"] = png(figure)
        contents[folder / "figures" / f"{figure.name}.svg"] = svg(figure)
    for path, content in contents.items():
        write(path, content)
    return list(contents)
