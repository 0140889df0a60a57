"""The figures, drawn once for both uses: files for a paper, and the page, which recolours them for a dark screen."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..inputs import need
from .stats import mean
from .summary import MethodSummary, Summary

__all__ = ["COLOURS", "SERIES", "Figure", "colour_of", "draw", "png", "svg"]

# Any two differ clearly for normal sight, protanopia and deuteranopia (tests/lab/report/test_figures.py). The
# second of each pair stands for the first on a dark page.
SERIES = (
    ("#0b62a4", "#5aa6ea"),
    ("#d1600f", "#f58b45"),
    ("#00624c", "#2cdb95"),
    ("#bf7ea3", "#ca6b98"),
    ("#570300", "#bb6445"),
    ("#2e97f6", "#87e1ff"),
    ("#20172c", "#e6fff1"),
    ("#919864", "#feed4c"),
)
INK, MUTED, GRID, PAPER = "#1f2329", "#63676d", "#e1e4e8", "#fefefe"
COLOURS = {
    **dict(SERIES),
    INK: "#e6e8eb",
    MUTED: "#a0a5ac",
    GRID: "#33383f",
    PAPER: "#15181c",
}
MARKERS = "os^DvPX*"
DASHES = ("-", (0, (5, 1.5)), (0, (1.5, 1.2)))
WIDTH = 7.0
LONGEST = 26


@dataclass(frozen=True)
class Figure:
    """A drawn figure.

    Args:
        name: The name of its files.
        title: What it shows, in a few words.
        caption: How to read it.
        drawing: The matplotlib figure.
    """

    name: str
    title: str
    caption: str
    drawing: Any


def colour_of(summary: Summary, label: str) -> tuple[str, str]:
    """The colours of a method on white and on a dark page: one per method in all figures, grey for the floor."""
    trained = [method.label for method in summary.trained]
    return SERIES[trained.index(label) % len(SERIES)] if label in trained else (MUTED, COLOURS[MUTED])


def draw(summary: Summary) -> list[Figure]:
    """Every figure for which there are data."""
    found = []
    if any(len(method.curve.step) > 1 for method in summary.methods):
        found += [_curves(summary, "steps"), _curves(summary, "seconds")]
    if any(cell.interface for method in summary.methods for cell in method.cells):
        found.append(_interface(summary))
    if any(cell.variance for method in summary.methods for cell in method.cells):
        found.append(_variance(summary))
    return found


def png(figure: Figure) -> bytes:
    """The figure on white, 200 dots per inch."""
    target = io.BytesIO()
    figure.drawing.savefig(target, format="png", dpi=200, facecolor="white", metadata={"Software": None})
    return target.getvalue()


def svg(figure: Figure) -> str:
    """The figure without a background; the same figure gives the same text always."""
    target = io.StringIO()
    nothing = {"Date": None, "Creator": None, "Format": None, "Type": None}
    figure.drawing.savefig(target, format="svg", transparent=True, metadata=nothing)
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", target.getvalue(), flags=re.DOTALL)
    # Matplotlib salts its ids, and two figures of one page must not share any.
    new = {old: f"{figure.name}-{i}" for i, old in enumerate(dict.fromkeys(re.findall(r'\bid="([^"]+)"', text)))}
    return re.sub(r'(\bid="|href="#|url\(#)([^")]+)', lambda found: found[1] + new.get(found[2], found[2]), text)


def _new(height: float, *, rows: int = 1, columns: int = 1, ratios: tuple[float, ...] | None = None) -> tuple[Any, Any]:
    """A figure of its own, without pyplot: no global state, no window."""
    figure = need("matplotlib.figure", "cli").Figure(figsize=(WIDTH, height), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False, width_ratios=ratios)
    for axes in grid.flat:
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(MUTED)
        axes.tick_params(colors=MUTED, labelcolor=INK, labelsize=8)
        axes.set_facecolor("none")
        axes.set_axisbelow(True)
    return figure, grid


def _label(axes: Any, *, x: str = "", y: str = "", title: str = "") -> None:
    """Texts in ink, taken literally: a dollar sign in a title is no formula."""
    axes.set_xlabel(x, color=INK, fontsize=9, parse_math=False)
    axes.set_ylabel(y, color=INK, fontsize=9, parse_math=False)
    axes.set_title(title, color=INK, fontsize=9.5, loc="left", parse_math=False)


def _short(title: str) -> str:
    return title if len(title) <= LONGEST else f"{title[: LONGEST - 1].rstrip()}…"


def _style(summary: Summary, method: MethodSummary) -> dict[str, Any]:
    """Colour, marker and dashes: the colours repeat after eight methods, the three together after many."""
    place = [other.label for other in summary.trained].index(method.label) if not method.is_floor else 0
    return {
        "color": colour_of(summary, method.label)[0],
        "marker": MARKERS[place % len(MARKERS)],
        "linestyle": DASHES[(place // len(SERIES)) % len(DASHES)],
        "linewidth": 1.7,
        "markersize": 3.6,
        "markeredgewidth": 0.0,
    }


def _curves(summary: Summary, against: str) -> Figure:
    """The mean validation score of the students alone, with a band from the lowest to the highest seed."""
    drawn = [method for method in summary.methods if len(method.curve.step) > 1]
    lens = _lens(summary, drawn)
    height = 2.9 + 0.14 * max(0, len(drawn) - 8)
    figure, grid = _new(height, columns=1 if lens is None else 2, ratios=None if lens is None else (1.0, 1.75))
    clock = "CPU" if summary.first.clock == "cpu" else "wall"
    unit = "training steps" if against == "steps" else f"training seconds ({clock} time)"
    for axes in grid.flat:
        _curve_lines(axes, summary, drawn, against)
        _label(axes, x=unit)
    axes = grid[0, -1]
    if lens is not None:
        axes.set_ylim(*lens)
        _label(grid[0, 0], x=unit, title="whole range")
        _label(axes, x=unit, title="near the original")
    grid[0, 0].set_ylabel(f"validation {summary.first.metric}", color=INK, fontsize=9, parse_math=False)
    _names(axes, summary, drawn)
    seeds = max(len(method.cells) for method in drawn)
    targets = summary.run.experiment.evaluation.targets
    caption = f"The students alone on a subset of the validation part; mean over up to {seeds} seeds"
    caption += ", band from the lowest to the highest seed. " if seeds > 1 else ". "
    caption += "Dashed: the original."
    if targets:
        caption += f" Dotted: within {' and '.join(f'{distance:g}' for distance in targets)} of it."
    if against == "seconds":
        caption += " Seconds leave evaluation out; each point is drawn at the mean time of its step."
    return Figure(f"curves-{against}", f"Validation score against {against}", caption, figure)


def _curve_lines(axes: Any, summary: Summary, drawn: Sequence[MethodSummary], against: str) -> None:
    """Bands, means, the original and the targets."""
    axes.grid(axis="y", color=GRID, linewidth=0.7)
    right = 0.0
    for method in drawn:
        x = method.curve.step if against == "steps" else method.curve.seconds
        style = _style(summary, method)
        right = max(right, x[-1])
        axes.fill_between(x, method.curve.low, method.curve.high, color=style["color"], alpha=0.16, linewidth=0)
        # A marker at each of many points would hide the line.
        axes.plot(x, method.curve.mean, markevery=max(1, len(x) // 8), **style)
    original, sign = _original(summary), 1.0 if summary.first.higher_is_better else -1.0
    axes.axhline(original, color=MUTED, linewidth=1.0, linestyle=(0, (5, 3)))
    for distance in summary.run.experiment.evaluation.targets:
        axes.axhline(original - sign * distance, color=MUTED, linewidth=0.8, linestyle=(0, (1, 2)))
    axes.set_xlim(0, right)
    axes.margins(y=0.04)


def _original(summary: Summary) -> float:
    return mean([cell.original.validation_curve for cell in summary.run.cells])


def _lens(summary: Summary, drawn: Sequence[MethodSummary]) -> tuple[float, float] | None:
    """Limits of a second panel near the original, where a curve from the floor hides what matters; None if needless.

    A method that ends far away does not widen it; the panel of the whole range shows that one.
    """
    sign = 1.0 if summary.first.higher_is_better else -1.0
    original = _original(summary)
    # Behind the original, so that one direction serves both kinds of metric.
    behind = [sign * (original - value) for method in drawn for value in (*method.curve.low, *method.curve.high)]
    whole = max(*behind, 0.0) - min(*behind, 0.0)
    ends = [sign * (original - method.curve.mean[-1]) for method in drawn]
    near = [end for end in ends if end <= 0.35 * whole]
    worst = max([*near, *summary.run.experiment.evaluation.targets, 0.0])
    best = min(*behind, 0.0)
    if not near or worst - best > 0.4 * whole or worst == best:
        return None
    pad = 0.1 * (worst - best)
    limits = original - sign * (worst + pad), original - sign * (best - pad)
    return min(limits), max(limits)


def _names(axes: Any, summary: Summary, drawn: Sequence[MethodSummary]) -> None:
    """The names at the right, each beside the end of its line as far as they do not touch, with a sample of it."""
    dashed = {"color": MUTED, "linewidth": 1.0, "linestyle": (0, (5, 3))}
    rows = [(_original(summary), "original", dashed)]
    rows += [(method.curve.mean[-1], _short(method.title), _style(summary, method)) for method in drawn]
    low, high = axes.get_ylim()
    gap = (high - low) * min(0.078, 1.0 / len(rows))
    beside = axes.get_yaxis_transform()
    for at, (_, label, style) in zip(_apart([row[0] for row in rows], gap, low, high), rows, strict=True):
        axes.plot([1.02, 1.05, 1.08], [at] * 3, transform=beside, clip_on=False, markevery=[1], **style)
        axes.text(1.1, at, label, transform=beside, va="center", fontsize=8, color=INK, parse_math=False)


def _apart(values: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Heights near the values, at least `gap` from each other, inside the axes where they fit."""
    order = sorted(range(len(values)), key=lambda i: -values[i])
    places = [0.0] * len(values)
    ceiling = high
    for i in order:
        places[i] = min(values[i], ceiling)
        ceiling = places[i] - gap
    floor = low
    for i in reversed(order):
        places[i] = max(places[i], floor)
        floor = places[i] + gap
    return places


def _interface(summary: Summary) -> Figure:
    """One panel per method: sites down, measurements to the right, the mean cosine as colour."""
    panels = [(method, *_cosines(method)) for method in summary.methods if any(cell.interface for cell in method.cells)]
    # A single measurement, such as the floor's, has no course to show.
    panels = [panel for panel in panels if len(panel[2]) > 1] or panels
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    most = max(len(sites) for _, sites, _, _ in panels)
    figure, grid = _new(rows * (0.85 + 0.17 * min(max(most, 3), 14)) + 0.2, rows=rows, columns=columns)
    values = [value for _, _, _, table in panels for row in table for value in row if math.isfinite(value)]
    lowest = min([0.0, *values])
    image = None
    for place, axes in enumerate(grid.flat):
        if place >= len(panels):
            axes.set_visible(False)
            continue
        method, sites, steps, table = panels[place]
        image = axes.pcolormesh(
            range(len(steps) + 1),
            range(len(sites) + 1),
            table,
            cmap="viridis",
            vmin=lowest,
            vmax=1.0,
            edgecolors=PAPER,
            linewidth=0.4,
        )
        axes.invert_yaxis()
        axes.spines[["left", "bottom"]].set_visible(False)
        axes.tick_params(length=0, labelsize=7)
        axes.set_yticks(*_ticks(_site_names(sites), 14), parse_math=False)
        axes.set_xticks(*_ticks([f"{step:g}" for step in steps], 6))
        _label(axes, x="step" if place >= len(panels) - columns else "", title=_short(method.title))
    bar = figure.colorbar(image, ax=grid.ravel().tolist(), shrink=0.9, pad=0.02, aspect=30)
    bar.solids.set(edgecolor="face", rasterized=False)  # Matplotlib would embed a bitmap.
    bar.outline.set_visible(False)
    bar.ax.tick_params(colors=MUTED, labelcolor=INK, labelsize=7)
    bar.set_label("interface cosine", color=INK, fontsize=9)
    shared = _common(panels[0][1])
    caption = "Cosine of student and teacher on the student's own inputs, mean over seeds; 1 is a perfect copy. "
    caption += f"One row per site{f' ({shared})' if shared else ''}, one column per measurement."
    return Figure("interface", "Interface cosine per site over time", caption, figure)


def _cosines(method: MethodSummary) -> tuple[list[str], list[int], list[list[float]]]:
    """Sites, steps, and the mean over the seeds that have a value there (NaN, drawn empty, where none has)."""
    rows = [row for cell in method.cells for row in cell.interface]
    sites = list(dict.fromkeys(site for row in rows for site in row.sites))
    steps = sorted({row.step for row in rows})
    found: dict[tuple[str, int], list[float]] = {}
    for row in rows:
        for site, scores in row.sites.items():
            if scores.cosine is not None:
                found.setdefault((site, row.step), []).append(scores.cosine)
    missing = [float("nan")]
    return sites, steps, [[mean(found.get((site, step), missing)) for step in steps] for site in sites]


def _ticks(names: Sequence[str], most: int) -> tuple[list[float], list[str]]:
    """Places in the middle of the tiles and their names, thinned out to at most `most`."""
    every = -(-len(names) // most)
    chosen = list(range(0, len(names), every))
    return [i + 0.5 for i in chosen], [names[i] for i in chosen]


def _differing(sites: Sequence[str]) -> list[int]:
    """The segments in which paths of one length differ; empty where the lengths differ."""
    split = [site.split(".") for site in sites]
    if len({len(parts) for parts in split}) != 1:
        return []
    return [i for i in range(len(split[0])) if len({parts[i] for parts in split}) > 1]


def _site_names(sites: Sequence[str]) -> list[str]:
    """Only what differs between the paths: the layer numbers of a usual model."""
    differing = _differing(sites)
    return [".".join(site.split(".")[i] for i in differing) if differing else site for site in sites]


def _common(sites: Sequence[str]) -> str:
    """What the paths share, with a star where they differ; empty where they share no pattern."""
    differing = _differing(sites)
    parts = sites[0].split(".")
    return ".".join("*" if i in differing else part for i, part in enumerate(parts)) if differing else ""


def _variance(summary: Summary) -> Figure:
    """The variance that the gates add to the gradient: as it is, and as a share of the whole."""
    drawn = [method for method in summary.methods if any(cell.variance for cell in method.cells)]
    figure, grid = _new(2.9, columns=2)
    smallest: list[float] = []
    largest = 0.0
    for method in drawn:
        rows = [row for cell in method.cells for row in cell.variance]
        steps = sorted({row.step for row in rows})
        gate = [mean([row.gate for row in rows if row.step == step]) for step in steps]
        share = [mean([row.share for row in rows if row.step == step]) for step in steps]
        smallest += [value for value in gate if value > 0]
        largest = max(largest, *gate)
        for axes, values in ((grid[0, 0], gate), (grid[0, 1], share)):
            axes.plot(steps, values, label=_short(method.title), clip_on=False, **_style(summary, method))
    for axes, title in zip(grid.flat, ("variance caused by the gates", "its share of the whole variance"), strict=True):
        axes.grid(axis="y", color=GRID, linewidth=0.7)
        axes.set_xlim(left=0)
        axes.ticklabel_format(axis="y", scilimits=(-3, 4))
        axes.yaxis.get_offset_text().set(color=INK, fontsize=8)
        _label(axes, x="training steps", title=title)
    if smallest and largest > 30 * min(smallest):
        # A deterministic gate adds exactly zero, which a logarithmic axis cannot show.
        grid[0, 0].set_yscale("symlog", linthresh=min(smallest))
    grid[0, 0].set_ylim(bottom=0)
    grid[0, 1].set_ylim(bottom=0)
    figure.legend(
        *grid[0, 0].get_legend_handles_labels(),
        loc="outside lower center",
        ncols=min(3, len(drawn)),
        frameon=False,
        fontsize=8,
        labelcolor=INK,
    )
    caption = (
        "The variance of the gradient over draws of the gates on a fixed batch, and its share of that and the variance "
    )
    caption += "over batches together; mean over seeds. A deterministic gate adds none."
    return Figure("variance", "Gradient variance caused by the gates", caption, figure)
