"""All numbers of the report, computed once: tables, figures and files only show them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .cells import Cell, Run
from .stats import (
    FEWEST,
    Crossing,
    Curve,
    bootstrap_interval,
    first_crossing,
    mean,
    mean_curve,
    paired_differences,
    sample_std,
)

__all__ = ["Difference", "MethodSummary", "Spread", "Summary", "TargetSummary", "summarise"]

FLOOR = "floor"
FEW_POINTS = 4


@dataclass(frozen=True)
class Spread:
    """A mean over seeds, the sample standard deviation (None for one value), and how many values there are."""

    mean: float
    std: float | None
    n: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """The spread of at least one value."""
        return cls(mean(values), sample_std(values), len(values))


@dataclass(frozen=True)
class TargetSummary:
    """How soon a method came within a distance of the original.

    Args:
        distance: The distance, in units of the metric.
        per_seed: The crossing of each seed; None where the seed did not come so close.
        steps: Over the seeds that did; None where none did.
        seconds: Likewise.
    """

    distance: float
    per_seed: dict[int, Crossing | None]
    steps: Spread | None
    seconds: Spread | None

    @property
    def reached(self) -> int:
        """How many seeds came so close."""
        return sum(crossing is not None for crossing in self.per_seed.values())


@dataclass(frozen=True)
class Difference:
    """By how much one method is better than another on the test part, over the seeds that both have.

    Args:
        method: The label of the one.
        other: The label of the other.
        per_seed: One difference per common seed; positive where `method` is better.
        mean: Their mean; None without a common seed.
        interval: The 95 % bootstrap interval; None for fewer than three common seeds.
    """

    method: str
    other: str
    per_seed: dict[int, float]
    mean: float | None
    interval: tuple[float, float] | None

    @property
    def separated(self) -> bool:
        """Whether the interval exists and excludes zero."""
        return self.interval is not None and (self.interval[0] > 0 or self.interval[1] < 0)

    @property
    def better(self) -> bool:
        """Whether the interval lies wholly on the side of `method`."""
        return self.interval is not None and self.interval[0] > 0


@dataclass(frozen=True)
class MethodSummary:
    """One row of the main table.

    Args:
        label: The method's label in the experiment.
        cells: Its cells, by seed.
        test: The final test score.
        behind: How far the test score is behind the original's; positive is worse.
        targets: One entry per target of the experiment.
        seconds: Total seconds, without evaluation.
        against: The paired difference to the reference; None for the reference itself, the floor, or without one.
        curve: The mean curve of the students alone.
    """

    label: str
    cells: tuple[Cell, ...]
    test: Spread
    behind: Spread
    targets: tuple[TargetSummary, ...]
    seconds: Spread
    against: Difference | None
    curve: Curve

    @property
    def title(self) -> str:
        """The name for readers."""
        return self.cells[0].title

    @property
    def is_floor(self) -> bool:
        """Whether this is the untrained floor and not a method."""
        return self.cells[0].base == FLOOR


@dataclass(frozen=True)
class Summary:
    """Everything that the report shows.

    Args:
        run: What it was computed from.
        methods: One entry per method with a cell.
        original: The original's test score over the seeds.
        floor: The score of the first curve point at step 0, over the seeds; None where no curve begins there.
        pairs: The paired differences of all trained methods, each pair once in each direction.
        best: The label of the method whose interval lies above zero against every other; None if there is none.
        verdict: The same in one sentence.
        notes: What a reader must know before the figures: missing cells, strangers, mixed clocks, few seeds.
    """

    run: Run
    methods: tuple[MethodSummary, ...]
    original: Spread
    floor: Spread | None
    pairs: tuple[Difference, ...]
    best: str | None
    verdict: str
    notes: tuple[str, ...]

    @property
    def first(self) -> Cell:
        """A cell to read the metric, its direction and the clock from."""
        return self.run.cells[0]

    @property
    def trained(self) -> tuple[MethodSummary, ...]:
        """The methods without the floor."""
        return tuple(method for method in self.methods if not method.is_floor)


def summarise(run: Run) -> Summary:
    """The numbers of a run."""
    groups: dict[str, list[Cell]] = {}
    for cell in run.cells:
        groups.setdefault(cell.method, []).append(cell)
    methods = tuple(_method(label, cells, groups, run) for label, cells in groups.items())
    trained = [method for method in methods if not method.is_floor]
    pairs = tuple(
        _difference(one.cells, other.cells) for one in trained for other in trained if one.label != other.label
    )
    best, verdict = _verdict(trained, pairs, higher_is_better=run.cells[0].higher_is_better)
    originals = {cell.seed: cell.original.test for cell in run.cells}
    return Summary(
        run=run,
        methods=methods,
        original=Spread.of(list(originals.values())),
        floor=_floor(run.cells),
        pairs=pairs,
        best=best,
        verdict=verdict,
        notes=_notes(run, groups),
    )


def _method(label: str, cells: list[Cell], groups: dict[str, list[Cell]], run: Run) -> MethodSummary:
    sign = 1.0 if cells[0].higher_is_better else -1.0
    reference = run.experiment.reference
    compared = reference in groups and reference != label and cells[0].base != FLOOR
    return MethodSummary(
        label=label,
        cells=tuple(cells),
        test=Spread.of([cell.final.test for cell in cells]),
        behind=Spread.of([sign * (cell.original.test - cell.final.test) for cell in cells]),
        targets=tuple(_target(cells, distance) for distance in run.experiment.evaluation.targets),
        seconds=Spread.of([cell.seconds["total"] for cell in cells]),
        against=_difference(cells, groups[reference]) if compared and reference is not None else None,
        curve=mean_curve([cell.curve for cell in cells]),
    )


def _target(cells: Sequence[Cell], distance: float) -> TargetSummary:
    per_seed: dict[int, Crossing | None] = {}
    for cell in cells:
        # Each seed against its own original: the subset that curves use may depend on the seed.
        sign = 1.0 if cell.higher_is_better else -1.0
        target = cell.original.validation_curve - sign * distance
        per_seed[cell.seed] = first_crossing(cell.curve, target, higher_is_better=cell.higher_is_better)
    found = [crossing for crossing in per_seed.values() if crossing is not None]
    return TargetSummary(
        distance,
        per_seed,
        Spread.of([crossing.steps for crossing in found]) if found else None,
        Spread.of([crossing.seconds for crossing in found]) if found else None,
    )


def _difference(cells: Sequence[Cell], others: Sequence[Cell]) -> Difference:
    per_seed = paired_differences(
        {cell.seed: cell.final.test for cell in cells},
        {cell.seed: cell.final.test for cell in others},
        higher_is_better=cells[0].higher_is_better,
    )
    values = list(per_seed.values())
    return Difference(
        cells[0].method, others[0].method, per_seed, mean(values) if values else None, bootstrap_interval(values)
    )


def _floor(cells: Sequence[Cell]) -> Spread | None:
    """One value per seed, the mean over the methods that begin untrained at step 0."""
    seeds: dict[int, list[float]] = {}
    for cell in cells:
        if cell.curve and cell.curve[0].step == 0:
            seeds.setdefault(cell.seed, []).append(cell.curve[0].score)
    return Spread.of([mean(values) for values in seeds.values()]) if seeds else None


def _verdict(
    trained: Sequence[MethodSummary], pairs: Sequence[Difference], *, higher_is_better: bool
) -> tuple[str | None, str]:
    """The label of the best method, if the data support one, and the sentence for the reader."""
    if len(trained) < 2:
        return None, "One method has cells, so there is nothing to compare."
    sign = 1.0 if higher_is_better else -1.0
    first = max(trained, key=lambda method: sign * method.test.mean)
    titles = {method.label: method.title for method in trained}
    own = [pair for pair in pairs if pair.method == first.label]
    if all(pair.better for pair in own):
        return first.label, (
            f"Best on the test part: {first.title}. Its paired 95 % interval lies above zero against every other "
            "method."
        )
    few = [titles[pair.other] for pair in own if pair.interval is None]
    open_ = [titles[pair.other] for pair in own if pair.interval is not None and not pair.better]
    parts = [f"No method is called best. The best mean on the test part is that of {first.title}"]
    if open_:
        parts.append(f"but it is not separated from {_listed(open_)}")
    if few:
        parts.append(f"but the comparison with {_listed(few)} needs at least {FEWEST} common seeds")
    return None, ", ".join(parts) + "."


def _listed(names: Sequence[str]) -> str:
    if any("," in name for name in names):
        return "; ".join(names)
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _notes(run: Run, groups: dict[str, list[Cell]]) -> tuple[str, ...]:
    notes = []
    asked = run.experiment.seeds
    missing = []
    for label in run.experiment.methods:
        lacking = [str(seed) for seed in asked if seed not in {cell.seed for cell in groups.get(label, [])}]
        if lacking:
            missing.append(f"{label} (seed {', '.join(lacking)})")
    if missing:
        notes.append(f"This run is not complete. Cells without a result: {'; '.join(missing)}.")
    strangers = [label for label in groups if label not in run.experiment.methods]
    if strangers:
        notes.append(f"Cells of methods that the experiment does not name: {', '.join(strangers)}.")
    if len({cell.clock for cell in run.cells}) > 1:
        notes.append("The cells use different clocks (CPU time and wall time): do not compare their seconds.")
    reference = run.experiment.reference
    if reference is not None and reference not in groups:
        notes.append(f"The reference {reference} has no cell, so there are no differences to it.")
    coarse = [label for label, cells in groups.items() if any(1 < len(cell.curve) < FEW_POINTS for cell in cells)]
    if coarse and run.experiment.evaluation.targets:
        notes.append(
            f"Curves with fewer than {FEW_POINTS} points: {', '.join(coarse)}. A straight line between points so far "
            "apart says little about when a target was reached."
        )
    fewest = min((len(cells) for cells in groups.values() if cells[0].base != FLOOR), default=None)
    if fewest is not None and fewest < FEWEST:
        notes.append(f"Intervals need at least {FEWEST} seeds per method; the smallest number here is {fewest}.")
    elif fewest == FEWEST:
        notes.append(
            "With three seeds, a 95 % interval is the range of three differences; two equal methods exclude zero this "
            "way one time in four. More seeds make it a stronger statement."
        )
    return tuple(notes)
