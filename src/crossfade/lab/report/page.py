"""The page: one file that holds everything, for a desk and for a phone, on a light and on a dark screen."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from .cells import Cell
from .figures import Figure, colour_of, svg
from .stats import mean
from .style import css, recolour
from .summary import Difference, MethodSummary, Spread, Summary

__all__ = ["page"]

NONE = "–"


def page(summary: Summary, figures: Sequence[Figure]) -> str:
    """The report as one HTML file that fetches nothing."""
    name = escape(summary.run.experiment.name)
    sections = [
        _opening(summary),
        _section("Results", _main_table(summary), _pairs_table(summary)),
        *(_figure(figure) for figure in figures),
        _section("Cost per phase", _costs(summary)),
        _section("Every seed", _seeds(summary), _settings(summary)),
        _section("What was run", _what(summary)),
        _section("Repeat it", _command(summary)),
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<link rel="icon" href="data:,">\n'
        f"<title>{name}: report</title>\n<style>\n{css()}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(section for section in sections if section)
        + "\n</main>\n</body>\n</html>\n"
    )


# Numbers


def _digits(summary: Summary) -> int:
    """Decimals for scores and their differences: two for percentages, more for scores near one."""
    size = abs(summary.original.mean)  # What the others are measured by; a floor may lie far away.
    return 2 if size >= 10 else 3 if size >= 2 else 4


def _number(value: float | None, digits: int, *, sign: bool = False) -> str:
    if value is None:
        return NONE
    text = f"{value:{'+' if sign else ''}.{digits}f}"
    if not float(text):
        text = text.lstrip("+-")  # A zero has no sign.
    return text.replace("-", "−")


def _spread(spread: Spread | None, digits: int) -> str:
    if spread is None:
        return NONE
    text = _number(spread.mean, digits)
    return text if spread.std is None else f"{text} ± {_number(spread.std, digits)}"


def _time(seconds: float | None) -> str:
    """Seconds with three significant digits or none after the point."""
    if seconds is None:
        return NONE
    digits = 0 if seconds >= 100 else 1 if seconds >= 10 else 2 if seconds >= 0.1 or seconds == 0 else 4
    return f"{seconds:.{digits}f}"


def _bytes(count: float | None) -> str:
    if count is None:
        return NONE
    step = min(int(math.log(count, 1024)), 3) if count >= 1 else 0
    return f"{count / 1024**step:.{1 if step else 0}f} {('B', 'KiB', 'MiB', 'GiB')[step]}"


# Pieces


def _section(title: str, *parts: str) -> str:
    body = "\n".join(part for part in parts if part)
    return f"<section>\n<h2>{escape(title)}</h2>\n{body}\n</section>" if body else ""


def _cell(text: str, kind: str = "", *, tag: str = "td") -> str:
    return f'<{tag} class="{kind}">{text}</{tag}>' if kind else f"<{tag}>{text}</{tag}>"


def _table(head: str, rows: Iterable[str], label: str) -> str:
    """A table in a box of its own that scrolls; the box can be reached with the keyboard."""
    body = "\n".join(rows)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(label)}">\n'
        f"<table>\n<thead>{head}</thead>\n<tbody>\n{body}\n</tbody>\n</table>\n</div>"
    )


def _row(*cells: str, fixed: bool = False) -> str:
    return f'<tr class="fixed">{"".join(cells)}</tr>' if fixed else f"<tr>{''.join(cells)}</tr>"


def _head(*names: str, text: int = 1) -> str:
    """One row of column names, of which the first `text` stand above words."""
    return _row(*(_cell(escape(name), "text" if i < text else "", tag="th") for i, name in enumerate(names)))


def _name(summary: Summary, method: MethodSummary, *, source: bool = False) -> str:
    chip = f'<span class="chip" style="background:{recolour(colour_of(summary, method.label)[0])}"></span>'
    label = f"{method.label} · {method.cells[0].source}" if method.cells[0].source else method.label
    below = f'<span class="source">{escape(label)}</span>' if source else ""
    return _cell(f"{chip}{escape(method.title)}{below}", "text wrap", tag="th")


# Sections


def _opening(summary: Summary) -> str:
    first, experiment = summary.first, summary.run.experiment
    seeds = sorted({cell.seed for cell in summary.run.cells})
    better = "higher" if first.higher_is_better else "lower"
    notes = "".join(f"<li>{escape(note)}</li>" for note in summary.notes)
    return (
        f"<header>\n<h1>{escape(experiment.name)}</h1>\n"
        f'<p class="lead">{len(summary.methods)} methods, {len(seeds)} seeds, {len(summary.run.cells)} finished runs. '
        f"Metric: {escape(first.metric)}, {better} is better.</p>\n"
        f'<p class="verdict">{escape(summary.verdict)}</p>\n'
        + (f'<ul class="notes small">{notes}</ul>\n' if notes else "")
        + "</header>"
    )


def _main_table(summary: Summary) -> str:
    digits, experiment = _digits(summary), summary.run.experiment
    targets = experiment.evaluation.targets
    clock = "CPU s" if summary.first.clock == "cpu" else "wall s"
    reference = next((method.title for method in summary.methods if method.label == experiment.reference), None)
    names = ["Method", "Seeds", "Test, mean ± std", "Behind the original"]
    names += [f"Against {reference}", "95 % interval"] if reference else []
    top = "".join(
        f'<th rowspan="2" class="{"text" if name == "Method" else "head"}">{escape(name)}</th>' for name in names
    )
    top += "".join(f'<th class="group" colspan="3">Within {distance:g} of the original</th>' for distance in targets)
    top += f'<th rowspan="2" class="head">Total {clock}</th>'
    below = f"<th>steps</th><th>{clock}</th><th>reached</th>" * len(targets)
    blank = [_cell(NONE)] * (len(names) - 4 + 3 * len(targets) + 1)
    rows = [
        _row(
            _cell("Original", "text", tag="th"),
            _cell(str(summary.original.n)),
            _cell(_spread(summary.original, digits)),
            _cell(NONE),
            *blank,
            fixed=True,
        )
    ]
    rows += [_main_row(summary, method, digits, compared=reference is not None) for method in _ranked(summary)]
    if not any(method.is_floor for method in summary.methods) and summary.floor is not None:
        rows.append(
            _row(
                _cell('Floor<span class="source">before training, validation curve</span>', "text wrap", tag="th"),
                _cell(str(summary.floor.n)),
                _cell(_spread(summary.floor, digits)),
                _cell(NONE),
                *blank,
                fixed=True,
            )
        )
    text = "Seconds leave evaluation out. Targets are read off the validation curve of the students alone, between two "
    text += "measurements by a straight line, and averaged over the seeds that came so close. "
    if reference:
        text += f"“Against {reference}” pairs the seeds: positive is better than it; the interval is a bootstrap over "
        text += "the paired differences."
    return (
        _table(_row(top) + (_row(below) if targets else ""), rows, "Results of every method")
        + f'\n<p class="small">{escape(text)}</p>'
    )


def _ranked(summary: Summary) -> list[MethodSummary]:
    """The order of the experiment, the floor last: an order by score would look like a ranking."""
    return sorted(summary.methods, key=lambda method: method.is_floor)


def _main_row(summary: Summary, method: MethodSummary, digits: int, *, compared: bool) -> str:
    cells = [
        _name(summary, method, source=True),
        _cell(str(method.test.n)),
        _cell(_spread(method.test, digits)),
        _cell(_spread(method.behind, digits)),
    ]
    if compared:
        cells += _against(summary, method, digits)
    for target in method.targets:
        cells += [
            _cell(NONE if target.steps is None else f"{target.steps.mean:.0f}"),
            _cell(_time(target.seconds.mean if target.seconds else None)),
            _cell(f"{target.reached} of {len(target.per_seed)}"),
        ]
    cells.append(_cell(_time(method.seconds.mean)))
    return _row(*cells, fixed=method.is_floor)


def _against(summary: Summary, method: MethodSummary, digits: int) -> list[str]:
    if method.label == summary.run.experiment.reference:
        return [_cell("reference"), _cell(NONE)]
    if method.against is None:
        return [_cell(NONE), _cell(NONE)]
    return [_cell(_number(method.against.mean, digits, sign=True)), _cell(_interval(method.against, digits))]


def _interval(pair: Difference, digits: int) -> str:
    """The interval and what it says; an interval that is not there says why."""
    if pair.interval is None:
        return "needs more seeds"
    low, high = (_number(bound, digits, sign=True) for bound in pair.interval)
    says = "better" if pair.better else "worse" if pair.separated else "not separated"
    return f'{low} to {high}<span class="source">{says}</span>'


def _pairs_table(summary: Summary) -> str:
    """Every method against every other, folded in: it is large, and only the verdict needs it."""
    if len(summary.trained) < 3:
        return ""
    digits = _digits(summary)
    titles = {method.label: method.title for method in summary.methods}
    rows = [
        _row(
            _cell(escape(titles[pair.method]), "text"),
            _cell(escape(titles[pair.other]), "text"),
            _cell(str(len(pair.per_seed))),
            _cell(_number(pair.mean, digits, sign=True)),
            _cell(_interval(pair, digits)),
        )
        for place, pair in enumerate(summary.pairs)
        if not any((other.method, other.other) == (pair.other, pair.method) for other in summary.pairs[:place])
    ]
    head = _head("Method", "against", "Common seeds", "Difference (positive is better)", "95 % interval", text=2)
    return f"<details><summary>Every pair of methods</summary>\n{_table(head, rows, 'Pairs of methods')}\n</details>"


def _figure(figure: Figure) -> str:
    drawing = svg(figure)
    drawing = drawing[drawing.index("<svg") :]
    # The page sets the size; names of other documents and rules for the whole page do not belong here.
    box = re.search(r'viewBox="[^"]*"', drawing)
    label = escape(figure.title)
    opening = f'<svg {box[0] if box else ""} role="img" aria-label="{label}" id="figure-{figure.name}">'
    drawing = re.sub(r"^<svg[^>]*>", lambda _: opening, drawing)
    drawing = re.sub(r"<style.*?</style>", "", drawing, flags=re.DOTALL).replace("xlink:href", "href")
    return _section(
        figure.title,
        f'<figure>\n<div class="scroll" tabindex="0" role="region" aria-label="{label}">{recolour(drawing)}</div>\n'
        f"<figcaption>{escape(figure.caption)}</figcaption>\n</figure>",
    )


def _costs(summary: Summary) -> str:
    rows = []
    clock = "CPU time" if summary.first.clock == "cpu" else "wall time"
    for method in summary.methods:
        costs = [cost for cell in method.cells for cost in cell.costs]
        for phase in dict.fromkeys(cost.phase for cost in costs):
            own = [cost for cost in costs if cost.phase == phase]
            saved = [float(cost.saved_bytes) for cost in own if cost.saved_bytes is not None]
            rows.append(
                _row(
                    _name(summary, method),
                    _cell(escape(phase), "text"),
                    _cell(f"{mean([cost.steps for cost in own]):.0f}"),
                    _cell(f"{1000 * mean([cost.seconds_per_step for cost in own]):.1f}"),
                    _cell(_bytes(mean(saved) if saved else None)),
                )
            )
    if not rows:
        return ""
    head = _head("Method", "Phase", "Steps", f"ms per step ({clock})", "Kept for backward", text=2)
    return _table(head, rows, "Cost per phase") + (
        '\n<p class="small">Means over seeds. The last column is the memory that automatic differentiation keeps '
        "between the forward and the backward pass.</p>"
    )


def _seeds(summary: Summary) -> str:
    digits = _digits(summary)
    targets = summary.run.experiment.evaluation.targets
    stages = list(dict.fromkeys(name for cell in summary.run.cells for name in cell.seconds if name != "total"))
    names = [
        "Method",
        "Seed",
        "Test",
        "Validation",
        "Curve subset",
        "Original test",
        "Original validation",
        "Original curve subset",
        "Better than reference",
    ]
    for distance in targets:
        names += [f"Steps to {distance:g}", f"Seconds to {distance:g}"]
    names += ["Total s", *(f"{name} s" for name in stages), "Key"]
    rows = []
    for method in _ranked(summary):
        for cell in method.cells:
            scores = (
                cell.final.test,
                cell.final.validation,
                cell.final.validation_curve,
                cell.original.test,
                cell.original.validation,
                cell.original.validation_curve,
            )
            difference = method.against.per_seed.get(cell.seed) if method.against else None
            crossings = []
            for target in method.targets:
                crossing = target.per_seed[cell.seed]
                crossings += [
                    NONE if crossing is None else f"{crossing.steps:.1f}",
                    _time(crossing.seconds if crossing else None),
                ]
            times = [_time(cell.seconds.get(name)) for name in ("total", *stages)]
            rows.append(
                _row(
                    _name(summary, method),
                    _cell(str(cell.seed)),
                    *(_cell(_number(score, digits)) for score in scores),
                    _cell(_number(difference, digits, sign=True)),
                    *(_cell(text) for text in (*crossings, *times)),
                    _cell(f"<code>{escape(cell.key) or NONE}</code>"),
                )
            )
    return _table(_head(*names), rows, "Every seed")


def _settings(summary: Summary) -> str:
    parts = []
    for method in summary.methods:
        cell = method.cells[0]
        if cell.settings or cell.stages:
            text = json.dumps({"settings": cell.settings, "stages": cell.stages}, indent=2, ensure_ascii=False)
            varies = " (of the first seed; others differ)" if _varies(method.cells) else ""
            parts.append(
                f"<details><summary>Settings of {escape(method.title)}{varies}</summary>\n"
                f"<pre>{escape(text)}</pre>\n</details>"
            )
    return "\n".join(parts)


def _varies(cells: Sequence[Cell]) -> bool:
    return any((cell.settings, cell.stages) != (cells[0].settings, cells[0].stages) for cell in cells)


def _what(summary: Summary) -> str:
    experiment, environment = summary.run.experiment, summary.run.environment
    facts: dict[str, Any] = {
        "experiment": experiment.name,
        "methods": ", ".join(experiment.methods),
        "reference": experiment.reference,
        "seeds": ", ".join(map(str, experiment.seeds)),
        "targets": ", ".join(f"within {distance:g}" for distance in experiment.evaluation.targets),
        "task": summary.first.facts,
        "training": experiment.training,
        **{key: value for key, value in environment.items() if key != "command"},
    }
    rows = [
        _row(_cell(escape(str(name).replace("_", " ")), "text", tag="th"), _cell(escape(_plain(value)), "text long"))
        for name, value in facts.items()
        if value not in (None, "", {}, [])
    ]
    return _table("", rows, "What was run")


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_plain(inner)}" for key, inner in value.items())
    if isinstance(value, list):
        return ", ".join(_plain(inner) for inner in value)
    return str(value)


def _command(summary: Summary) -> str:
    command = summary.run.environment.get("command")
    return f"<pre><code>{escape(str(command))}</code></pre>" if command else ""
