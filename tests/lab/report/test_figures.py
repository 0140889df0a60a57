"""What the figures promise: colours for every eye, names that do not touch, a second panel only where it helps."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest

from crossfade.lab.report.cells import load_run
from crossfade.lab.report.figures import MUTED, SERIES, _apart, _lens, colour_of, draw, svg
from crossfade.lab.report.summary import Summary, summarise
from tests.lab.report import runs

# Linear RGB as eyes without red or green cones see it (Machado, Oliveira and Fernandes, 2009), and to CIE XYZ.
NORMAL = ((1, 0, 0), (0, 1, 0), (0, 0, 1))
PROTANOPIA = ((0.1523, 1.0526, -0.2049), (0.1145, 0.7863, 0.0992), (-0.0039, -0.0481, 1.0520))
DEUTERANOPIA = ((0.3673, 0.8606, -0.2280), (0.2801, 0.6725, 0.0474), (-0.0118, 0.0429, 0.9689))
XYZ = ((0.4124, 0.3576, 0.1805), (0.2126, 0.7152, 0.0722), (0.0193, 0.1192, 0.9505))


def linear(colour: str) -> list[float]:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]


def times(matrix: Any, vector: list[float]) -> list[float]:
    return [sum(a * b for a, b in zip(row, vector, strict=True)) for row in matrix]


def lab(colour: str, eye: Any) -> list[float]:
    seen = [min(1.0, max(0.0, part)) for part in times(eye, linear(colour))]
    x, y, z = (
        t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116
        for t in (value / white for value, white in zip(times(XYZ, seen), (0.9505, 1.0, 1.089), strict=True))
    )
    return [116 * y - 16, 500 * (x - y), 200 * (y - z)]


def contrast(one: str, other: str) -> float:
    low, high = sorted(times(XYZ, linear(colour))[1] for colour in (one, other))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("eye", [NORMAL, PROTANOPIA, DEUTERANOPIA])
@pytest.mark.parametrize("page", [0, 1])
def test_any_two_colours_differ_for_every_eye(eye: Any, page: int) -> None:
    colours = [pair[page] for pair in SERIES]
    distances = [math.dist(lab(a, eye), lab(b, eye)) for a, b in itertools.combinations(colours, 2)]
    assert min(distances) > 20


def test_every_colour_stands_out_from_its_page() -> None:
    assert min(contrast(light, "#ffffff") for light, _ in SERIES) > 3
    assert min(contrast(dark, "#15181c") for _, dark in SERIES) > 3


def test_names_do_not_touch_and_stay_inside() -> None:
    places = _apart([1.0, 1.0, 0.5, 0.99, 0.0], 0.1, 0.0, 1.0)
    assert places == pytest.approx([1.0, 0.9, 0.5, 0.8, 0.0])
    crowded = sorted(_apart([0.0] * 5, 0.2, 0.0, 1.0))
    assert all(b - a == pytest.approx(0.2) for a, b in itertools.pairwise(crowded))


def summary_of(folder: Path, rows: list[dict[str, Any]]) -> Summary:
    return summarise(load_run(runs.write_run(folder, rows)))


def test_the_second_panel_comes_where_the_floor_hides_the_end(tmp_path: Path) -> None:
    summary = summary_of(tmp_path / "far", runs.cells())
    lens = _lens(summary, summary.methods)
    assert lens is not None
    # From the worst end (86.5, which is also the target) to the original (90.5), and a tenth more on each side.
    assert lens == pytest.approx((86.1, 90.9))
    near = [
        row | {"curve": [point | {"score": max(point["score"], 85.0)} for point in row["curve"]]}
        for row in runs.cells()
    ]
    summary = summary_of(tmp_path / "near", near)
    assert _lens(summary, summary.methods) is None


def test_a_method_keeps_its_colour_and_the_floor_is_grey(tmp_path: Path) -> None:
    floor = runs.cell("kd", 0, method="floor", base="floor")
    summary = summary_of(tmp_path, [floor, *runs.cells()])
    assert [colour_of(summary, label) for label in runs.TEST] == list(SERIES[:3])
    assert colour_of(summary, "floor")[0] == MUTED


def test_a_drawing_has_a_size_no_bitmap_and_ids_of_its_own(tmp_path: Path) -> None:
    for figure in draw(summary_of(tmp_path, runs.cells())):
        text = svg(figure)
        assert "<image" not in text
        assert f'id="{figure.name}-0"' in text
        assert figure.caption.endswith(".")
