"""The figures of the demo, drawn from its results alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..lab.inputs import need

__all__ = ["interface_figure", "learning_figure"]

BLUE, ORANGE, GREY = "#0b62a4", "#d1600f", "#6b6b6b"
PALE = "#eaf1f8"


def _axes(width: float, height: float) -> tuple[Any, Any]:
    """A figure of its own, without pyplot: no global state, no window."""
    figure = need("matplotlib.figure", "cli").Figure(figsize=(width, height), layout="constrained", dpi=150)
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e4e4e4", linewidth=0.8)
    axes.set_axisbelow(True)
    return figure, axes


def learning_figure(results: Mapping[str, Any], path: Path) -> None:
    """Cosine on the validation topics over seconds of training, both arms."""
    figure, axes = _axes(8.0, 4.4)
    end = max(point[0] for curve in results["curves"].values() for point in curve)
    align, fade = results["seconds"]["align"], results["seconds"]["fade"]
    axes.axvspan(0, align, color=PALE, linewidth=0)
    axes.axvline(align + fade, color="#c9d8e6", linewidth=1)
    for begin, length, stage in ((0.0, align, "align"), (align, fade, "fade")):
        axes.text(begin + length / 2, 1.035, stage, color=BLUE, ha="center", va="center", fontsize=9)
    labels = [
        (1.0, "original", GREY),
        (results["validation"]["baseline"], "constant embedding", GREY),
        (results["validation"]["floor"], "cold, untrained", GREY),
    ]
    for value, _, color in labels:
        axes.axhline(value, color=color, linewidth=1, linestyle=(0, (4, 3)))
    for name, label, color in (("crossfade", "crossfade", BLUE), ("student_only", "student-only", ORANGE)):
        x, y = zip(*[(point[0], point[1]) for point in results["curves"][name]], strict=True)
        axes.plot(x, y, color=color, linewidth=2, marker="o", markersize=4)
        labels.append((y[-1], label, color))
    bottom = min(0.0, results["validation"]["floor"])
    for at, (value, label, color) in _apart(labels, 0.055 * (1.07 - bottom)):
        weight = "normal" if color == GREY else "bold"
        where = {"xytext": (9, 0), "textcoords": "offset points", "va": "center", "annotation_clip": False}
        axes.annotate(f"{label}  {value:.3f}", (end, at), color=color, fontweight=weight, fontsize=9, **where)
    axes.set_xlim(0, end)
    axes.set_ylim(bottom, 1.07)
    axes.set_xlabel("seconds of training (capture included, measurements of the curve not)")
    axes.set_ylabel("cosine to the original embeddings")
    axes.set_title("All attentions replaced by cold ones: validation topics", loc="left", fontsize=11)
    figure.savefig(path)


def _apart(labels: list[tuple[float, str, str]], gap: float) -> list[tuple[float, tuple[float, str, str]]]:
    """Heights at which the labels do not touch: each at least `gap` below the next higher one."""
    placed: list[tuple[float, tuple[float, str, str]]] = []
    for label in sorted(labels, reverse=True):
        ceiling = placed[-1][0] - gap if placed else float("inf")
        placed.append((min(label[0], ceiling), label))
    return placed


def interface_figure(results: Mapping[str, Any], path: Path) -> None:
    """Cosine of student and teacher at each site, on the teacher's inputs, held-out text."""
    rows: Mapping[str, Mapping[str, float]] = results["interface"]
    sites = list(rows["floor"])
    figure, axes = _axes(max(5.5, 2.5 + 0.8 * len(sites)), 4.0)
    bars = (
        ("floor", "cold, untrained", "#bdbdbd"),
        ("student_only", "student-only", ORANGE),
        ("crossfade", "crossfade", BLUE),
    )
    width = 0.27
    for number, (name, label, color) in enumerate(bars):
        places = [i + (number - 1) * width for i in range(len(sites))]
        values = [rows[name][site] for site in sites]
        drawn = axes.bar(places, values, width * 0.94, color=color, label=label)
        if len(sites) <= 12 and name == "crossfade":
            axes.bar_label(drawn, fmt="%.2f", fontsize=8, color=color, padding=2)
    axes.axhline(0.0, color=GREY, linewidth=0.8)
    axes.set_xticks(range(len(sites)), _short(sites), rotation=0 if len(sites) <= 8 else 90)
    lowest = min(value for row in rows.values() for value in row.values())
    axes.set_ylim(min(0.0, lowest * 1.1), 1.08)
    axes.set_xlabel(f"site ({_common(sites)})" if len(sites) > 1 else "site")
    axes.set_ylabel("interface cosine")
    axes.set_title("Student and teacher on the same input, held-out topics", loc="left", fontsize=11, pad=24)
    axes.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=3, frameon=False, borderaxespad=0.2, fontsize=9)
    figure.savefig(path)


def _parts(sites: list[str]) -> tuple[list[str], list[int]]:
    """The segments of the first path, and which of them differ between the sites."""
    split = [site.split(".") for site in sites]
    same_length = len({len(parts) for parts in split}) == 1
    differing = [i for i in range(len(split[0])) if len({parts[i] for parts in split}) > 1] if same_length else []
    return split[0], differing


def _short(sites: list[str]) -> list[str]:
    """Only what differs between the paths: the layer numbers of a usual model."""
    _, differing = _parts(sites)
    return [".".join(site.split(".")[i] for i in differing) if differing else site for site in sites]


def _common(sites: list[str]) -> str:
    """What the paths share, with a star where they differ."""
    first, differing = _parts(sites)
    return ".".join("*" if i in differing else part for i, part in enumerate(first)) if differing else "path"
