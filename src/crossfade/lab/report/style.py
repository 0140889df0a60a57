"""The look of the page: one style sheet, dark and light, without anything to fetch."""

from __future__ import annotations

from .figures import COLOURS, GRID, INK, MUTED, PAPER

__all__ = ["css", "recolour"]

# The backgrounds of .scroll draw a shadow at each edge behind which more lies: two move with the content and cover it.
RULES = """
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 16px/1.55 system-ui, sans-serif; }
main { max-width: 76rem; margin: 0 auto; padding: 1.5rem 1rem 4rem; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 .3rem; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin: 2.6rem 0 .6rem; }
h3 { font-size: 1rem; margin: 1.4rem 0 .4rem; }
p { margin: .5rem 0; max-width: 46rem; }
figcaption { max-width: 52rem; }
.lead, .small, figcaption, .source { color: var(--muted); }
.small, figcaption { font-size: .86rem; }
.verdict { border-left: 4px solid var(--accent); background: var(--panel); padding: .7rem 1rem; margin: 1.2rem 0; }
.notes { padding-left: 1.2rem; max-width: 46rem; }
.scroll { overflow-x: auto; margin: .6rem 0; border: 1px solid var(--line); border-radius: 6px;
  background: linear-gradient(to right, var(--page) 40%, transparent) left / 2.5rem 100% no-repeat local,
    linear-gradient(to left, var(--page) 40%, transparent) right / 2.5rem 100% no-repeat local,
    linear-gradient(to right, var(--line), transparent) left / .9rem 100% no-repeat scroll,
    linear-gradient(to left, var(--line), transparent) right / .9rem 100% no-repeat scroll; }
table { border-collapse: collapse; width: 100%; font-size: .84rem; font-variant-numeric: tabular-nums; }
th, td { padding: .42rem .42rem; text-align: right; white-space: nowrap; vertical-align: top; }
th { font-weight: 600; border-bottom: 1px solid var(--line); vertical-align: bottom; }
thead { background: var(--panel); }
thead th.group { text-align: center; border-bottom: 0; padding-bottom: 0; }
tbody tr + tr > * { border-top: 1px solid var(--line); }
tbody th { font-weight: 600; border-bottom: 0; vertical-align: top; }
td.text, th.text { text-align: left; }
td.wrap, th.wrap { white-space: normal; min-width: 11.5rem; overflow-wrap: break-word; }
th.head { white-space: normal; min-width: 4rem; max-width: 9rem; }
td.long { white-space: normal; overflow-wrap: anywhere; min-width: 12rem; }
tr.fixed > * { color: var(--muted); font-weight: 400; }
.source { display: block; font-weight: 400; font-size: .78rem; }
.chip { display: inline-block; width: .7em; height: .7em; border-radius: 2px; margin-right: .45em; }
figure { margin: 1rem 0 1.6rem; }
figure > .scroll { border: 0; border-radius: 0; margin: 0 0 .3rem; }
figure svg { display: block; width: 100%; max-width: 58rem; min-width: 36rem; height: auto; }
figure svg * { stroke-linejoin: round; stroke-linecap: butt; }
pre { overflow-x: auto; background: var(--panel); border: 1px solid var(--line); border-radius: 6px;
  padding: .7rem 1rem; font-size: .84rem; }
details { margin: .5rem 0; }
summary { cursor: pointer; }
@media print { .scroll { overflow: visible; } }
"""
LIGHT = {"page": "#ffffff", "panel": "#f4f6f8", "line": "#d9dde2", "accent": "#0b62a4"}
DARK = {"page": "#15181c", "panel": "#1d2126", "line": "#343a41", "accent": "#6cb4f0"}
NAMES = {INK: "ink", MUTED: "muted", GRID: "grid", PAPER: "gap"}


def _variable(colour: str) -> str:
    return NAMES.get(colour, f"c{colour.removeprefix('#')}")


def _block(fixed: dict[str, str], figures: dict[str, str]) -> str:
    pairs = fixed | {_variable(colour): value for colour, value in figures.items()}
    return " ".join(f"--{name}: {value};" for name, value in pairs.items())


def css() -> str:
    """The style sheet; the reader's own choice of dark or light decides."""
    light = _block(LIGHT, {colour: colour for colour in COLOURS})
    dark = _block(DARK, COLOURS)
    return (
        f":root {{ color-scheme: light dark; {light} }}\n"
        f"@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}\n{RULES}"
    )


def recolour(svg: str) -> str:
    """The drawing with the colours of the figures as variables of the style sheet."""
    for colour in COLOURS:
        svg = svg.replace(colour, f"var(--{_variable(colour)})")
    return svg
