"""Alignment: train each student on captured interface inputs alone. Label-free, every site by itself.

The teacher's forward runs once over some batches, and what each site is called with is kept, within a memory budget.
Then each student learns to answer as its teacher does; no backward crosses the backbone, which is not even run. In our
trials this came close to the teacher several times sooner than distillation with features; where a student cannot
represent its teacher it reaches a plateau, and a joint phase has to follow.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from . import outputs
from .blend import Blend
from .capture import Chunk, Group, by_sample, capture, parse_bytes
from .errors import NonFiniteError, OutputError, PlanError, StateError
from .guidance import DeepFeatureGuidance, Guidance
from .ledger import Ledger, Term
from .metrics import cosine_sum, count, power_sum
from .registry import nearest
from .site import Site
from .students.base import isolated_random, site_seed

__all__ = ["AlignReport", "Aligned", "Settings", "align"]

Progress = Callable[[str, int, float], bool | None]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How to align. Checked on construction.

    Attributes:
        steps: Most optimizer steps per site.
        lr: Peak learning rate of AdamW; 5 warm-up steps, then a cosine to 0.
        batch_size: Samples per step.
        betas: Of AdamW. A shorter memory of the squared gradients than torch's 0.999: the error falls by orders of
            magnitude within a few hundred steps, and old large gradients would keep the steps small
            (docs/results/demo.md has the comparison).
        weight_decay: On matrices only.
        clip: Gradient norm per site.
        holdout: Share of the captured samples on which the error is measured.
        check_every: Steps between two measurements.
        patience: Stop a site after this many measurements without a new best; None never stops early.
        dropout: Let the students' dropout act; off by default, since the teacher's does not.
    """

    steps: int = 400
    lr: float = 1e-2
    batch_size: int = 16
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.05
    clip: float = 1.0
    holdout: float = 0.1
    check_every: int = 50
    patience: int | None = 3
    dropout: bool = False

    def __post_init__(self) -> None:
        rules = {
            "steps": self.steps >= 1,
            "lr": self.lr > 0.0,
            "batch_size": self.batch_size >= 1,
            "betas": all(0.0 <= beta < 1.0 for beta in self.betas),
            "weight_decay": self.weight_decay >= 0.0,
            "clip": self.clip > 0.0,
            "holdout": 0.0 < self.holdout < 1.0,
            "check_every": self.check_every >= 1,
            "patience": self.patience is None or self.patience >= 1,
        }
        for name, ok in rules.items():
            if not ok:
                raise PlanError(
                    "a setting of align is out of range.",
                    where=name,
                    expected="a positive number (holdout and betas below 1, patience None or >= 1)",
                    got=getattr(self, name),
                )


def settings_of(**given: Any) -> Settings:
    """Settings from keywords.

    Raises:
        PlanError: An unknown name, or a value out of range.
    """
    known = list(Settings.__dataclass_fields__)
    for name in given:
        if name not in known:
            raise PlanError(f"align has no setting {name!r}.", expected=", ".join(known), do=nearest(name, known))
    return Settings(**given)


@dataclass(frozen=True)
class Aligned:
    """One site's result: held-out errors (relative to the teacher's power) and cosine, steps run, wall seconds."""

    path: str
    error_before: float
    error: float
    cosine: float
    steps: int
    seconds: float
    history: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class AlignReport:
    """What alignment did. Print it for a table.

    Attributes:
        sites: One `Aligned` per site.
        samples: Samples captured (per call of a site).
        bytes: Memory that the captured inputs took.
        capture_seconds: Wall time of the capture.
        complete: False when the budget ended the capture before the batches did.
    """

    sites: tuple[Aligned, ...]
    samples: int
    bytes: int
    capture_seconds: float
    complete: bool

    @property
    def seconds(self) -> float:
        """Wall time of capture and training."""
        return self.capture_seconds + sum(site.seconds for site in self.sites)

    def __str__(self) -> str:
        """One line per site."""
        width = max([4, *(len(s.path) for s in self.sites)])
        lines = [f"{'site':<{width}}  {'before':>8}  {'error':>8}  {'cosine':>7}  {'steps':>5}  {'seconds':>7}"]
        lines += [
            f"{s.path:<{width}}  {s.error_before:8.4f}  {s.error:8.4f}  {s.cosine:7.4f}  {s.steps:5d}  {s.seconds:7.1f}"
            for s in self.sites
        ]
        kept = f"{self.samples} samples, {self.bytes / 2**20:.1f} MiB captured in {self.capture_seconds:.1f} s"
        return "\n".join([*lines, kept + ("" if self.complete else " (the memory budget was reached)")])


def align(
    model: nn.Module,
    sites: list[Site],
    ledger: Ledger,
    batches: Iterable[Any],
    *,
    settings: Settings,
    memory_budget: int | str = "1GiB",
    loss: Guidance | None = None,
    seed: int = 0,
    forward: Callable[[nn.Module, Any], object] | None = None,
    progress: Progress | None = None,
) -> AlignReport:
    """Capture and train; see `Fade.align`."""
    loss = loss or DeepFeatureGuidance()
    gone = [site.path for site in sites if site.blend.teacher is None]
    if gone:
        raise StateError(
            "alignment needs the teachers, and some are gone.", where=", ".join(gone), do="align before the fade"
        )
    ledger.clear()  # Terms of a forward before the alignment hold a graph that the students' first step breaks.
    begin = time.perf_counter()
    taken, complete = capture(model, sites, ledger, batches, parse_bytes(memory_budget), forward)
    seconds = time.perf_counter() - begin
    room = max(0, parse_bytes(memory_budget) - taken.bytes)
    samples = sum(len(group) for group in taken.groups[sites[0].path])
    rows = []
    for site in sites:
        with isolated_random(site_seed(seed, "align " + site.path), site.blend.gate_weight.device):
            trainer = _SiteTrainer(site, taken.groups.pop(site.path), settings, loss, room)
            rows.append(trainer.run(progress))
    return AlignReport(tuple(rows), samples, taken.bytes, seconds, complete)


class _SiteTrainer:
    """Trains one student on its groups of captured calls."""

    def __init__(self, site: Site, groups: list[Group], settings: Settings, loss: Guidance, room: int) -> None:
        self.site, self.groups, self.settings, self.loss = site, groups, settings, loss
        self.blend: Blend = site.blend
        for group in groups:
            if not group.join(self._find_cut(group.chunks[0])):
                raise self._uncuttable("a tensor of the call differs between batches although it is not cut")
        # Draws are made on the CPU, so that every device sees the same order.
        self.dice = torch.Generator().manual_seed(torch.initial_seed() % 2**63)
        self._split()
        self._measure_power(room)

    def _split(self) -> None:
        self.train: list[tuple[Group, Tensor]] = []
        self.held: list[tuple[Group, Tensor]] = []
        for group in self.groups:
            order = torch.randperm(len(group), generator=self.dice)
            cut = min(len(group) - 1, math.ceil(self.settings.holdout * len(group)))
            if cut > 0:
                self.held.append((group, order[:cut]))
            self.train.append((group, order[cut:]))
        if not self.held:
            raise PlanError(
                "too few samples to hold some out.",
                where=self.site.path,
                expected="at least two samples of one shape",
                got=[len(g) for g in self.groups],
            )

    def _teacher(self, group: Group, index: Tensor) -> Tensor:
        args, kwargs = group.call(index)
        return self.blend.main_of(self.blend.active_teacher()(*args, **kwargs)).detach()

    def _student(self, group: Group, index: Tensor) -> Tensor:
        args, kwargs = group.call(index)
        out = self.blend.call_student(args, kwargs)
        return self.blend.main_of(out)

    @torch.no_grad()
    def _find_cut(self, chunk: Chunk) -> list[bool]:
        """Which tensors of the call are cut by sample: those with which the teacher gives a sample, alone, the same.

        A tensor of another kind may happen to be as long as the batch (a causal mask, a table of positions), so where
        the plain cut fails the others are tried.

        Raises:
            OutputError: No cut works: the site's samples depend on one another.
        """
        held = list(outputs.tensors((chunk.args, chunk.kwargs)))
        main = self.blend.input_of(chunk.args, chunk.kwargs)
        whole = self._answer(chunk, [False] * len(held))[:1]
        plain = [by_sample(tensor, chunk.samples) for tensor in held]
        unclear = [i for i, tensor in enumerate(held) if plain[i] and tensor is not main][:4]
        for choice in itertools.product((True, False), repeat=len(unclear)):
            cut = list(plain)
            for i, flag in zip(unclear, choice, strict=True):
                cut[i] = flag
            try:
                alone = self._answer(chunk, cut)
            except (RuntimeError, IndexError, ValueError):
                continue  # Shapes that do not go together: not this cut.
            tolerance = 0.05 if whole.dtype in (torch.float16, torch.bfloat16) else 1e-3
            size = whole.abs().max().clamp_min(1e-6)
            if alone.shape == whole.shape and bool((alone - whole).abs().max() <= tolerance * size):
                return cut
        if not bool(whole.isfinite().all()):
            raise NonFiniteError(
                "the teacher's output on captured inputs is not finite.",
                where=self.site.path,
                do="look for NaN or infinity in the batches",
            )
        raise self._uncuttable("outputs that differ")

    def _answer(self, chunk: Chunk, cut: list[bool]) -> Tensor:
        """The teacher's output for a captured call, the tensors marked in `cut` reduced to their first sample."""
        flags = iter(cut)
        args, kwargs = outputs.map_tensors((chunk.args, chunk.kwargs), lambda x: (x[:1] if next(flags) else x).clone())
        return self.blend.main_of(self.blend.active_teacher()(*args, **kwargs))

    def _uncuttable(self, got: str) -> OutputError:
        return OutputError(
            "this site's call cannot be cut by sample.",
            where=self.site.path,
            expected="the teacher gives each sample the same output, alone and in a batch",
            got=got,
            do="exclude this site from align and train it in the fade",
        )

    @torch.no_grad()
    def _measure_power(self, room: int) -> None:
        """Fix the teacher's power; keep its outputs if the memory budget has room for them."""
        total = positions = 0.0
        for group in self.groups:
            kept = []
            for index in torch.arange(len(group)).split(64):
                out = self._teacher(group, index)
                mask = self._mask(group, index, out)
                branch = self._branch(group, index, out)
                total += float(power_sum(branch, mask)) / out.shape[-1]
                positions += float(count(out, mask))
                room -= out.nbytes
                kept.append(out if room >= 0 else None)
            if all(out is not None for out in kept):
                group.target = torch.cat([out for out in kept if out is not None])
        if not self.site.power.fixed:
            self.site.power.observe(total, positions)
            self.site.power.fixed = True

    def _branch(self, group: Group, index: Tensor, out: Tensor) -> Tensor:
        if not self.blend.holds_residual:
            return out
        args, kwargs = group.call(index)
        return out - self.blend.input_of(args, kwargs)

    def _mask(self, group: Group, index: Tensor, like: Tensor) -> Tensor | None:
        if group.mask is None or not self.loss.mask:
            return None
        return outputs.valid_positions(group.mask[index], like, self.site.path)

    def _error(self, group: Group, index: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Reduced error of some samples, and both outputs."""
        if group.target is None:
            with torch.no_grad():
                target = self._teacher(group, index)
        else:
            target = group.target[index]
        student = self._student(group, index)
        mask = self._mask(group, index, target)
        term = Term(self.loss.error(student, target, mask), count(target, mask))
        power = self.site.power.value if self.loss.needs_power else None
        return self.loss.reduce(term, term.positions, power), student, target, mask

    @torch.no_grad()
    def _held_out(self) -> tuple[float, float]:
        """Error and cosine over the held-out samples, weighted by valid positions."""
        error = cosine = positions = 0.0
        for group, order in self.held:
            for index in order.split(64):
                value, student, target, mask = self._error(group, index)
                n = float(count(target, mask))
                error += float(value.detach()) * n
                a, b = self._branch(group, index, student), self._branch(group, index, target)
                cosine += float(cosine_sum(a, b, mask))
                positions += n
        return error / max(positions, 1.0), cosine / max(positions, 1.0)

    def _indices(self) -> Iterator[tuple[Group, Tensor]]:
        """Batches without end: every sample once per pass, groups mixed."""
        while True:
            pieces = []
            for group, order in self.train:
                shuffled = order[torch.randperm(len(order), generator=self.dice)]
                pieces += [(group, piece) for piece in shuffled.split(self.settings.batch_size)]
            for i in torch.randperm(len(pieces), generator=self.dice).tolist():
                yield pieces[i]

    def run(self, progress: Progress | None) -> Aligned:
        """Train; leave the student with its best held-out weights."""
        student = self.blend.student
        modes = [(m, m.training) for m in student.modules()]
        begin = time.perf_counter()
        try:
            self._set_modes(student)
            history, best = self._loop(student, progress)
        finally:
            for module, mode in modes:
                module.training = mode
        with torch.no_grad():
            for tensor, value in zip(_state(student), best[2], strict=True):
                tensor.copy_(value)
        return Aligned(
            self.site.path,
            error_before=history[0][1],
            error=best[0],
            cosine=best[1],
            steps=history[-1][0],
            seconds=time.perf_counter() - begin,
            history=tuple(history),
        )

    def _set_modes(self, student: nn.Module) -> None:
        """Train mode; without dropout, everything but running statistics is in eval."""
        student.train(self.settings.dropout)
        for module in student.modules():
            if getattr(module, "track_running_stats", False):
                module.train()

    def _loop(
        self, student: nn.Module, progress: Progress | None
    ) -> tuple[list[tuple[int, float]], tuple[float, float, list[Tensor]]]:
        settings = self.settings
        optimizer = _optimizer(student, settings)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        error, cosine = self._held_out()
        history, best = [(0, error)], (error, cosine, [t.detach().clone() for t in _state(student)])
        since_best = 0
        for step, (group, index) in enumerate(self._indices(), start=1):
            for settings_of_group in optimizer.param_groups:
                settings_of_group["lr"] = settings.lr * _rate(step - 1, settings.steps)
            value, *_ = self._error(group, index)
            value.backward()
            norm = torch.nn.utils.clip_grad_norm_(parameters, settings.clip)
            if not bool(torch.isfinite(norm)):
                optimizer.zero_grad()
                raise NonFiniteError(
                    "alignment met a value that is not finite.",
                    where=self.site.path,
                    got=f"loss {float(value.detach())} at step {step}",
                    do="a lower lr; a look at what the site is called with",
                )
            optimizer.step()
            optimizer.zero_grad()
            last = step == settings.steps
            stop = bool(progress and progress(self.site.path, step, float(value.detach())))
            if step % settings.check_every == 0 or last or stop:
                error, cosine = self._held_out()
                history.append((step, error))
                if error < best[0]:
                    best, since_best = (error, cosine, [t.detach().clone() for t in _state(student)]), 0
                else:
                    since_best += 1
                if last or stop or (settings.patience is not None and since_best >= settings.patience):
                    break
        return history, best


def _state(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def _rate(step: int, steps: int) -> float:
    """Five warm-up steps, then half a cosine to 0."""
    return min(1.0, (step + 1) / 5) * (0.5 + 0.5 * math.cos(math.pi * step / steps))


def _optimizer(student: nn.Module, settings: Settings) -> torch.optim.AdamW:
    trained = [p for p in student.parameters() if p.requires_grad]
    if not trained:
        raise StateError(
            "the student has no trainable parameter.", got=type(student).__name__, do="leave this site out"
        )
    matrices, vectors = [p for p in trained if p.dim() >= 2], [p for p in trained if p.dim() < 2]
    groups = [
        {"params": params, "weight_decay": decay}
        for params, decay in ((matrices, settings.weight_decay), (vectors, 0.0))
        if params
    ]
    fused = all(p.is_floating_point() and p.device.type in ("cpu", "cuda") for p in trained)
    return torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, fused=fused)
