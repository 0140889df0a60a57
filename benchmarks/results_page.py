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


def load(name: str) -> dict[str, Any]:
    """The figures of one run directory."""
    found: dict[str, Any] = json.loads((DATA / f"{name}.json").read_text(encoding="utf-8"))
    return found


def versus(results: dict[str, Any], pairs: list[tuple[str, str]]) -> list[str]:
    """Paired differences of the final test score."""
    lines = ["| comparison | difference of the test score, paired over seeds, 95 % interval |", "| --- | --- |"]
    for one, other in pairs:
        if one in results["methods"] and other in results["methods"]:
            lines.append(f"| {one} against {other} | {said(finals(results, one), finals(results, other))} |")
    return lines


def reached(results: dict[str, Any], labels: list[str]) -> list[str]:
    """Steps and seconds to the first target, and how many seeds reached it."""
    lines = ["| method | " + " | ".join(f"seconds (steps) to −{d:g}" for d in (2.0, 1.0)) + " |", "| --- | --- | --- |"]
    for label in labels:
        if label in results["methods"]:
            row = {t["distance"]: t for t in results["methods"][label]["targets"]}
            lines.append(f"| {label} | {target(row[2.0])} | {target(row[1.0])} |")
    return lines


def agreement(results: dict[str, Any], label: str, share: float) -> float:
    """Mean interface cosine over the sites at a share of the run."""
    values = []
    for row in results["methods"][label]["interface"].values():
        points = row["cosine"]
        values.append(min(points, key=lambda point: abs(point[0] - share * points[-1][0]))[1])
    return fmean(values)


def ranked(results: dict[str, Any], labels: list[str], share: float) -> str:
    """Methods by mean interface cosine."""
    found = {label: agreement(results, label, share) for label in labels if label in results["methods"]}
    return ", ".join(f"{label} {value:.2f}" for label, value in sorted(found.items(), key=lambda item: -item[1]))


def step_ms(results: dict[str, Any], label: str, phase: str) -> float:
    """Milliseconds of a step in a phase, mean over seeds."""
    cells = results["methods"][label]["per_seed"].values()
    return 1000 * fmean(c["seconds_per_step"] for cell in cells for c in cell["costs"] if c["phase"] == phase)


def claims() -> list[str]:
    """The paper's claims one by one, each with what was measured on Fashion-MNIST."""
    main, noise = load("fashion-mnist"), load("gate-variance")
    gates = {label: max(row["gate"] for row in noise["methods"][label]["variance"]) for label in noise["methods"]}
    student = step_ms(main, "student-only", "student")
    ms = {
        "DCR, blend": step_ms(main, "dcr", "blend"),
        "DCR + DFG, blend": step_ms(main, "dcr+dfg", "blend"),
        "BERN, blend": step_ms(main, "bern", "blend"),
        "KD": step_ms(main, "kd", "student"),
        "KD + features": step_ms(main, "kd+features", "student"),
    }
    cost = ", ".join(f"{name} {value / student:.2f}" for name, value in ms.items())
    blended = ["dcr", "dcr+dfg", "bern", "bern+dfg", "gum", "gum+dfg", "student-only"]
    return [
        "## The paper's claims, one by one",
        "",
        "Each is followed by what the files below hold. Verdicts are those of the intervals, at the stated setting.",
        "",
        "### Proposition: the variance of the gradient splits into the data's and the gate's",
        "",
        "For one hard gate the gate's part is p (1 - p) times the squared difference of the two gradients; exact",
        "enumeration gives that to rounding in `tests/laws/test_variance.py`. Measured in training, six gates drawn:",
        "",
        *variances(noise),
        "",
        "### Proposition: the deterministic gate has no variance",
        "",
        f"Largest value seen: {', '.join(f'{label} {value:.3g}' for label, value in gates.items())}.",
        "",
        "### Proposition: a random gate bends the mean at the next nonlinearity, within a bound",
        "",
        f"{bends(noise)[0].upper()}{bends(noise)[1:]} (p = 0.5, summed over the elements of a batch).",
        "",
        "### What should follow: better and faster training than with random gates",
        "",
        *versus(main, [("dcr", "bern"), ("dcr", "gum"), ("dcr+dfg", "bern+dfg"), ("dcr+dfg", "gum+dfg")]),
        "",
        "### Faster convergence than the hard swap and than distillation",
        "",
        *versus(
            main,
            [
                ("dcr", "student-only"),
                ("dcr+dfg", "student-only"),
                ("dcr+dfg", "student+dfg"),
                ("dcr+dfg", "kd"),
                ("dcr+dfg", "kd+features"),
            ],
        ),
        "",
        *reached(main, ["dcr", "dcr+dfg", "bern", "bern+dfg", "gum+dfg", "student-only", "kd", "kd+features"]),
        "",
        "### The order of interface alignment",
        "",
        f"Mean cosine over the sites after a fifth of the run: {ranked(main, blended, 0.2)}.",
        f"At the end: {ranked(main, blended, 1.0)}.",
        "",
        "### Cost",
        "",
        f"A step against the student-only step ({student:.0f} ms): {cost}. The blend lasts a fifth of the run.",
        "",
        "## What else the lab found here",
        "",
        *versus(
            main,
            [
                ("dcr+dfg-kept", "dcr+dfg"),
                ("dcr+dfg-kept", "student+dfg-kept"),
                ("kept-linear50", "dcr+dfg-kept"),
                ("kept-linear80", "dcr+dfg-kept"),
                ("adaptive+dfg", "dcr+dfg-kept"),
                ("kept-nograd", "dcr+dfg-kept"),
                ("dcr+cka", "dcr+dfg-kept"),
                ("local", "dcr+dfg"),
                ("align", "kd+features"),
                ("align-200", "kd+features"),
                ("align+fade", "align"),
                ("align+kd", "align"),
            ],
        ),
        "",
    ]


def page() -> None:
    """Write the page."""
    parts = claims()
    for path in sorted(DATA.glob("*.json")):
        if path.name.startswith("tuned"):
            continue
        results = json.loads(path.read_text(encoding="utf-8"))
        experiment, environment = results["experiment"], results["environment"]
        seeds = ", ".join(map(str, experiment["seeds"]))
        clock = "the process on the CPU" if results["clock"] == ["cpu"] else "the wall"
        what = f"{len(results['methods'])} methods, seeds {seeds}; {results['metric']}; seconds of {clock}; "
        what += f"torch {environment['versions']['torch']}, {experiment['training']['threads']} thread. "
        what += f"Repeat it: `crossfade run docs/results/data/{path.stem}.yaml`."
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
