"""Alignment: train each student on captured interface inputs alone. Label-free, every site by itself.

The teacher's forward runs once over some batches, and what each site is called with is kept, within a memory budget.
Then each student learns to answer as its teacher does; no backward crosses the backbone, which is not even run. In our
trials this came close to the teacher several times sooner than distillation with features; where a student cannot
represent its teacher it reaches a plateau, and a joint phase has to follow.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from . import outputs
from .blend import Blend, Ledger, Term
from .errors import NonFiniteError, OutputError, PlanError, StateError
from .guidance import DeepFeatureGuidance, Guidance
from .metrics import cosine_sum, count, power_sum
from .site import Site
from .students.base import isolated_random, site_seed

__all__ = ["AlignReport", "Aligned", "Settings", "align", "parse_bytes"]

Progress = Callable[[str, int, float], bool | None]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How to align. Checked on construction.

    Attributes:
        steps: Most optimizer steps per site.
        lr: Peak learning rate of AdamW; 5 warm-up steps, then a cosine to 0.
        batch_size: Samples per step.
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
            "weight_decay": self.weight_decay >= 0.0,
            "clip": self.clip > 0.0,
            "holdout": 0.0 < self.holdout < 1.0,
            "check_every": self.check_every >= 1,
            "patience": self.patience is None or self.patience >= 1,
        }
        for name, ok in rules.items():
            if not ok:
                raise PlanError("a setting of align is out of range.", where=name, got=getattr(self, name))


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


def parse_bytes(value: int | str) -> int:
    """Bytes from a number or from text such as `"512MiB"` or `"2GB"`.

    Raises:
        PlanError: It is neither.
    """
    if isinstance(value, int) and value > 0:
        return value
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B\s*", str(value), re.IGNORECASE)
    if not found:
        raise PlanError("this is not an amount of memory.", expected='"1GiB", "512MB" or bytes', got=repr(value))
    return int(float(found[1]) * (1024 if found[3] else 1000) ** " KMGT".index(found[2].upper() or " "))


@dataclass
class _Chunk:
    """One captured call: the call with its tensors, its padding mask, and its number of samples."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    mask: Tensor | None
    samples: int


@dataclass
class _Group:
    """Calls of one site that differ in their samples only. Tensors named in `rows` are cut by sample."""

    chunks: list[_Chunk]
    rows: list[Tensor | None] = field(default_factory=list)
    mask: Tensor | None = None
    target: Tensor | None = None

    def __len__(self) -> int:
        return sum(chunk.samples for chunk in self.chunks)

    def join(self) -> None:
        """Lay the chunks' samples one after another."""
        first = self.chunks[0]
        columns = zip(*(list(outputs.tensors((c.args, c.kwargs))) for c in self.chunks), strict=True)
        self.rows = [torch.cat(column) if _by_sample(column[0], first.samples) else None for column in columns]
        self.mask = None if first.mask is None else torch.cat([c.mask for c in self.chunks if c.mask is not None])
        for chunk in self.chunks[1:]:
            chunk.args, chunk.kwargs, chunk.mask = (), {}, None

    def call(self, index: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The call for the samples at `index`. Shapes: [b]."""
        rows = iter(self.rows)

        def pick(tensor: Tensor) -> Tensor:
            row = next(rows)
            return tensor if row is None else row[index]

        first = self.chunks[0]
        args, kwargs = outputs.map_tensors((first.args, first.kwargs), pick)
        return args, kwargs


def _by_sample(tensor: Tensor, samples: int) -> bool:
    return tensor.dim() > 0 and tensor.shape[0] == samples


class _Capture:
    """Takes what each blend is called with while the teachers run, until the budget is reached."""

    def __init__(self, sites: list[Site], ledger: Ledger, budget: int) -> None:
        self.ledger, self.budget, self.bytes = ledger, budget, 0
        self.groups: dict[str, list[_Group]] = {site.path: [] for site in sites}
        self.pending: list[tuple[str, _Chunk]] = []
        self.copies: dict[int, tuple[Tensor, Tensor]] = {}
        self.by_module = {id(site.blend): site.path for site in sites}

    def hook(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Forward pre-hook of the blends."""
        path = self.by_module[id(module)]
        hidden = outputs.main_input(args, kwargs, path)
        mask = self.ledger.mask if self.ledger.mask is not None else outputs.padding_mask(kwargs, hidden)
        kept_args, kept_kwargs = outputs.map_tensors((args, dict(kwargs)), self._copy)
        kept_mask = None if mask is None else self._copy(mask)
        self.pending.append((path, _Chunk(kept_args, kept_kwargs, kept_mask, hidden.shape[0])))

    def _copy(self, tensor: Tensor) -> Tensor:
        """One copy of each tensor per batch: masks are shared by all sites."""
        if id(tensor) not in self.copies:
            self.copies[id(tensor)] = (tensor, tensor.detach().clone())
        return self.copies[id(tensor)][1]

    def commit(self) -> bool:
        """Keep the batch that ran if it fits; False when the budget is reached."""
        size = sum(copy.nbytes for _, copy in self.copies.values())
        pending, self.pending, self.copies = self.pending, [], {}
        if self.bytes + size > self.budget:
            if self.bytes == 0:
                raise PlanError(
                    "the memory budget does not hold the inputs of a single batch.",
                    expected=f"memory_budget of at least {size / 2**20:.1f} MiB",
                    got=f"{self.budget / 2**20:.1f} MiB",
                    do="smaller batches, fewer sites at a time, or a larger budget",
                )
            return False
        self.bytes += size
        for path, chunk in pending:
            group = next((g for g in self.groups[path] if _same_but_samples(g.chunks[0], chunk)), None)
            if group is None:
                self.groups[path].append(_Group([chunk]))
            else:
                group.chunks.append(chunk)
        return True


def _same_but_samples(a: _Chunk, b: _Chunk) -> bool:
    """Whether two calls may be laid one after another: same structure, same shapes per sample, same shared tensors."""
    left, right = list(outputs.tensors((a.args, a.kwargs))), list(outputs.tensors((b.args, b.kwargs)))
    if len(left) != len(right) or (a.mask is None) != (b.mask is None):
        return False
    if a.mask is not None and b.mask is not None and a.mask.shape[1:] != b.mask.shape[1:]:
        return False
    if repr(outputs.map_tensors((a.args, a.kwargs), lambda _: "tensor")) != repr(
        outputs.map_tensors((b.args, b.kwargs), lambda _: "tensor")
    ):
        return False
    for x, y in zip(left, right, strict=True):
        if _by_sample(x, a.samples) != _by_sample(y, b.samples) or x.dtype != y.dtype:
            return False
        if x.shape[1:] != y.shape[1:] if _by_sample(x, a.samples) else not torch.equal(x, y):
            return False
    return True


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
    begin = time.perf_counter()
    capture, complete = _capture(model, sites, ledger, batches, parse_bytes(memory_budget), forward)
    seconds = time.perf_counter() - begin
    room = max(0, parse_bytes(memory_budget) - capture.bytes)
    samples = sum(len(group) for group in capture.groups[sites[0].path])
    rows = []
    for site in sites:
        with isolated_random(site_seed(seed, "align " + site.path), site.blend.weight.device):
            trainer = _SiteTrainer(site, capture.groups.pop(site.path), settings, loss, room)
            rows.append(trainer.run(progress))
    return AlignReport(tuple(rows), samples, capture.bytes, seconds, complete)


@torch.no_grad()
def _capture(
    model: nn.Module,
    sites: list[Site],
    ledger: Ledger,
    batches: Iterable[Any],
    budget: int,
    forward: Callable[[nn.Module, Any], object] | None,
) -> tuple[_Capture, bool]:
    capture = _Capture(sites, ledger, budget)
    modes = [(m, m.training) for m in model.modules()]
    hooks = [site.blend.register_forward_pre_hook(capture.hook, with_kwargs=True) for site in sites]
    complete = True
    try:
        model.eval()
        for batch in batches:
            (forward or outputs.feed)(model, batch)
            if not capture.commit():
                complete = False
                break
    finally:
        for hook in hooks:
            hook.remove()
        for module, mode in modes:
            module.training = mode
    missing = [path for path, groups in capture.groups.items() if not groups]
    if missing:
        raise StateError(
            "nothing was captured: the batches were empty, or the forward does not reach these sites.",
            where=", ".join(missing),
        )
    return capture, complete


class _SiteTrainer:
    """Trains one student on its groups of captured calls."""

    def __init__(self, site: Site, groups: list[_Group], settings: Settings, loss: Guidance, room: int) -> None:
        self.site, self.groups, self.settings, self.loss = site, groups, settings, loss
        self.blend: Blend = site.blend
        for group in groups:
            group.join()
        # Draws are made on the CPU, so that every device sees the same order.
        self.dice = torch.Generator().manual_seed(torch.initial_seed() % 2**63)
        self._split()
        self._check_cut()
        self._measure_power(room)

    def _split(self) -> None:
        self.train: list[tuple[_Group, Tensor]] = []
        self.held: list[tuple[_Group, Tensor]] = []
        for group in self.groups:
            order = torch.randperm(len(group), generator=self.dice)
            cut = min(len(group) - 1, math.ceil(self.settings.holdout * len(group)))
            if cut > 0:
                self.held.append((group, order[:cut]))
            self.train.append((group, order[cut:]))
        if not self.held:
            raise PlanError(
                "too few samples to hold some out.", where=self.site.path, got=[len(g) for g in self.groups]
            )

    def _teacher(self, group: _Group, index: Tensor) -> Tensor:
        args, kwargs = group.call(index)
        return self.blend.main_of(self.blend.active_teacher()(*args, **kwargs)).detach()

    def _student(self, group: _Group, index: Tensor) -> Tensor:
        args, kwargs = group.call(index)
        out = self.blend.call_student(args, kwargs)
        return self.blend.main_of(out)

    @torch.no_grad()
    def _check_cut(self) -> None:
        """A site whose samples depend on one another (or whose call was cut wrongly) must not be trained by sample."""
        group = self.groups[0]
        whole = self._teacher(group, torch.arange(min(4, len(group))))
        alone = self._teacher(group, torch.tensor([0]))
        size = whole[:1].abs().max().clamp_min(1e-6)
        tolerance = 0.05 if whole.dtype in (torch.float16, torch.bfloat16) else 1e-3
        if alone.shape != whole[:1].shape or bool((alone - whole[:1]).abs().max() > tolerance * size):
            raise OutputError(
                "this site's call cannot be cut by sample.",
                where=self.site.path,
                expected="the teacher gives each sample the same output, alone and in a batch",
                got=f"outputs of shape {list(alone.shape)} and {list(whole[:1].shape)} that differ",
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

    def _branch(self, group: _Group, index: Tensor, out: Tensor) -> Tensor:
        if not self.blend.residual:
            return out
        args, kwargs = group.call(index)
        return out - outputs.main_input(args, kwargs)

    def _mask(self, group: _Group, index: Tensor, like: Tensor) -> Tensor | None:
        if group.mask is None or not self.loss.mask:
            return None
        return outputs.valid_positions(group.mask[index], like, self.site.path)

    def _error(self, group: _Group, index: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Reduced error of some samples, and both outputs."""
        if group.target is None:
            with torch.no_grad():
                target = self._teacher(group, index)
        else:
            target = group.target[index]
        student = self._student(group, index)
        mask = self._mask(group, index, target)
        term = Term(self.loss.error(student, target, mask), count(target, mask), target.new_zeros(()))
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
                error += float(value) * n
                a, b = self._branch(group, index, student), self._branch(group, index, target)
                cosine += float(cosine_sum(a, b, mask))
                positions += n
        return error / max(positions, 1.0), cosine / max(positions, 1.0)

    def _indices(self) -> Iterator[tuple[_Group, Tensor]]:
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
            value.backward()  # type: ignore[no-untyped-call]
            norm = torch.nn.utils.clip_grad_norm_(parameters, settings.clip)
            if not bool(torch.isfinite(norm)):
                optimizer.zero_grad()
                raise NonFiniteError(
                    "alignment met a value that is not finite.",
                    where=self.site.path,
                    got=f"loss {float(value)} at step {step}",
                )
            optimizer.step()
            optimizer.zero_grad()
            last = step == settings.steps
            stop = bool(progress and progress(self.site.path, step, float(value)))
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
        raise StateError("the student has no trainable parameter.", got=type(student).__name__)
    matrices, vectors = [p for p in trained if p.dim() >= 2], [p for p in trained if p.dim() < 2]
    groups = [
        {"params": params, "weight_decay": decay}
        for params, decay in ((matrices, settings.weight_decay), (vectors, 0.0))
        if params
    ]
    fused = all(p.is_floating_point() and p.device.type in ("cpu", "cuda") for p in trained)
    return torch.optim.AdamW(groups, lr=settings.lr, fused=fused)
