"""Make docs/results/lab.md from the committed files in docs/results/data.

    python benchmarks/results_page.py collect RUN_DIRECTORY   # what the page needs of a run -> docs/results/data
    python benchmarks/results_page.py page                    # docs/results/data -> docs/results/lab.md

The page holds no number that is not in those files, and the verdicts follow from paired intervals alone.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

from crossfade.lab.report.stats import bootstrap_interval

DOCS = Path(__file__).resolve().parents[1] / "docs" / "results"
DATA = DOCS / "data"


def rounded(value: Any) -> Any:
    """Six significant digits: enough for every table, and files that can be read."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return [rounded(item) for item in value] if isinstance(value, list) else value


def collect(folder: Path) -> None:
    """Copy what the page needs of a run directory."""
    results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    for row in results["methods"].values():
        row.pop("source", None)
        for cell in row["per_seed"].values():
            cell.pop("settings", None)
    results.pop("pairs", None)  # They follow from the values per seed.
    DATA.mkdir(parents=True, exist_ok=True)
    name = results["experiment"]["name"] if folder.name == "out" else folder.name
    (DATA / f"{name}.json").write_text(json.dumps(rounded(results)) + "\n", encoding="utf-8")
    shutil.copy(folder / "experiment.yaml", DATA / f"{name}.yaml")


# ---- values ----------------------------------------------------------------------------------------------------------


def finals(results: dict[str, Any], label: str) -> dict[str, float]:
    """Final test score by seed."""
    return {seed: cell["final"]["test"] for seed, cell in results["methods"][label]["per_seed"].items()}


def crossings(results: dict[str, Any], label: str, distance: float, unit: str) -> dict[str, float | None]:
    """Steps or seconds to a distance from the original, by seed."""
    row = next(t for t in results["methods"][label]["targets"] if t["distance"] == distance)
    return {seed: None if found is None else found[unit] for seed, found in row["per_seed"].items()}


def paired(one: dict[str, float], other: dict[str, float]) -> tuple[float, tuple[float, float] | None, int]:
    """Mean difference over the common seeds, its interval, and their number."""
    values = [one[seed] - other[seed] for seed in sorted(one) if seed in other]
    return fmean(values), bootstrap_interval(values), len(values)


def said(one: dict[str, float], other: dict[str, float]) -> str:
    """The difference and what it supports."""
    mean, interval, n = paired(one, other)
    if interval is None:
        return f"{mean:+.2f} ({n} seeds: no interval)"
    low, high = interval
    verdict = "better" if low > 0 else "worse" if high < 0 else "not separated"
    return f"{mean:+.2f} [{low:+.2f}, {high:+.2f}], {verdict}"


def number(spread: dict[str, Any] | None, digits: int = 2) -> str:
    """Mean and standard deviation."""
    if spread is None:
        return "-"
    return f"{spread['mean']:.{digits}f}" + (f" ± {spread['std']:.{digits}f}" if spread["std"] is not None else "")


def target(row: dict[str, Any]) -> str:
    """Seconds (steps) to a target over the seeds that reached it."""
    if not row["reached"]:
        return "-"
    some = "" if row["reached"] == row["of"] else f", {row['reached']} of {row['of']}"
    return f"{row['seconds']['mean']:.1f} ({row['steps']['mean']:.0f}{some})"


# ---- the parts of the page -------------------------------------------------------------------------------------------


def main_table(results: dict[str, Any]) -> list[str]:
    """All methods, best mean first."""
    distances = [t["distance"] for t in next(iter(results["methods"].values()))["targets"]]
    reference = results["experiment"]["reference"]
    head = ["method", "test", "behind the original", "seconds"]
    head += [f"seconds (steps) to −{d:g}" for d in distances] + [f"against {reference}"]
    lines = ["| " + " | ".join(head) + " |", "| --- |" + " --- |" * (len(head) - 1)]
    lines.append(f"| original | {number(results['original']['test'])} | 0 | - |" + " - |" * (len(distances) + 1))
    sign = -1 if results["higher_is_better"] else 1
    for label, row in sorted(results["methods"].items(), key=lambda item: sign * item[1]["test"]["mean"]):
        cells = [label, number(row["test"]), number(row["behind_original"]), number(row["seconds"], 1)]
        cells += [target(t) for t in row["targets"]]
        cells.append("-" if label == reference else said(finals(results, label), finals(results, reference)))
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def costs(results: dict[str, Any]) -> list[str]:
    """Milliseconds and saved bytes per step, by phase."""
    lines = ["| method | phase | ms per step | saved for backward, MB |", "| --- | --- | --- | --- |"]
    for label, row in results["methods"].items():
        phases: dict[str, list[dict[str, Any]]] = {}
        for cell in row["per_seed"].values():
            for cost in cell["costs"]:
                phases.setdefault(cost["phase"], []).append(cost)
        for phase, found in phases.items():
            saved = found[0]["saved_bytes"]
            ms = 1000 * fmean(cost["seconds_per_step"] for cost in found)
            lines.append(f"| {label} | {phase} | {ms:.1f} | {'-' if saved is None else f'{saved / 1e6:.1f}'} |")
    return lines


def cosines(results: dict[str, Any]) -> list[str]:
    """Interface cosine at the first, a middle and the last site, early and at the end."""
    lines = ["| method | at a fifth of the run | at the end |", "| --- | --- | --- |"]
    for label, row in results["methods"].items():
        sites = list(row["interface"])
        if not sites:
            continue
        chosen = [sites[0], sites[len(sites) // 2], sites[-1]]
        end = row["interface"][sites[0]]["cosine"][-1][0]
        cells = []
        for share in (0.2, 1.0):
            values = []
            for site in chosen:
                points = row["interface"][site]["cosine"]
                values.append(min(points, key=lambda point: abs(point[0] - share * end))[1])
            cells.append(" / ".join(f"{value:.2f}" for value in values))
        lines.append(f"| {label} | {cells[0]} | {cells[1]} |")
    return lines


def variances(results: dict[str, Any]) -> list[str]:
    """What the gate adds to the noise of the gradient."""
    lines = ["| method | step | alpha | gate variance | data variance | share of the gate |", "| --- |" + " --- |" * 5]
    for label, row in results["methods"].items():
        for step in sorted({found["step"] for found in row["variance"]}):
            rows = [found for found in row["variance"] if found["step"] == step]
            alpha, gate, data, share = (fmean(r[key] for r in rows) for key in ("alpha", "gate", "data", "share"))
            lines.append(f"| {label} | {step} | {alpha:.2f} | {gate:.3g} | {data:.3g} | {100 * share:.0f} % |")
    return lines


def bends(results: dict[str, Any]) -> str:
    """The largest ratio of bias to bound."""
    ratios = [
        row["bias"] / row["bound"]
        for method in results["methods"].values()
        for row in method["curvature"]
        if row["bound"]
    ]
    if not ratios:
        return "not measured"
    return f"bias over bound: mean {fmean(ratios):.2f}, largest {max(ratios):.2f}, over {len(ratios)} measurements"


def page() -> None:
    """Write the page."""
    parts = []
    for path in sorted(DATA.glob("*.json")):
        if path.name.startswith("tuned"):
            continue
        results = json.loads(path.read_text(encoding="utf-8"))
        experiment, environment = results["experiment"], results["environment"]
        seeds = ", ".join(map(str, experiment["seeds"]))
        clock = "the process on the CPU" if results["clock"] == ["cpu"] else "the wall"
        what = f"{len(results['methods'])} methods, seeds {seeds}; {results['metric']}; seconds of {clock}; "
        what += f"torch {environment['versions']['torch']}, {environment['threads']} thread. "
        what += f"Repeat it: `{environment['command']}`, with [the experiment](data/{path.stem}.yaml)."
        parts += [
            f"## {path.stem}",
            "",
            what,
            "",
            results["verdict"],
            "",
            *main_table(results),
            "",
        ]
        if any(row["interface"] for row in results["methods"].values()):
            parts += ["Interface cosine, first / middle / last site:", "", *cosines(results), ""]
        if any(row["variance"] for row in results["methods"].values()):
            parts += ["Variance of the task loss's gradient:", "", *variances(results), ""]
            parts += [f"Curvature at the next nonlinearity, p = 0.5: {bends(results)}.", ""]
        parts += ["<details><summary>Cost per step</summary>", "", *costs(results), "", "</details>", ""]
    opening = (DOCS / "lab-opening.md").read_text(encoding="utf-8")
    (DOCS / "lab.md").write_text(opening.rstrip() + "\n\n" + "\n".join(parts), encoding="utf-8")


def main() -> None:
    """Collect or write."""
    if sys.argv[1:2] == ["collect"] and len(sys.argv) == 3:
        collect(Path(sys.argv[2]))
    elif sys.argv[1:] == ["page"]:
        page()
    else:
        raise SystemExit(__doc__)


if __name__ == "__main__":
    main()
