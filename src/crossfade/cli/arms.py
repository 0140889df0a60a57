"""The two arms of the demo: crossfade (align, then fade) and student-only, on the same data and the same budget."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import schedules
from ..fade import Fade
from ..gates import Deterministic
from ..guidance import DeepFeatureGuidance
from ..plan import Plan
from ..students import Reinit
from ..surgery import install
from .models import Encoder, embed, no_dropout
from .progress import Clock, Meter
from .text import Split

__all__ = ["Arm", "Data", "Settings", "cosine", "crossfade", "encode", "student_only"]

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Settings:
    """The recipe. What was tried, and why these: docs/results/demo.md; chosen on validation topics.

    Attributes:
        batch_size: Texts per optimizer step, in both arms.
        weight_decay: On matrices, in both arms.
        clip: Gradient norm, in both arms.
        capture_share: Part of the budget after which no more texts are captured.
        align_share: Part of the budget that capture and alignment take; the fade has the rest.
        align_lr: Peak rate of the alignment.
        fade_lr: Peak rate of the fade.
        fade_until: Progress at which alpha reaches 0; guidance stays on to the end.
        task_weight: Factor of the task loss beside the guidance, which is a sum over all sites.
        student_only_lr: Peak rate of the student-only arm.
        curve_points: Measurements of a curve, roughly.
    """

    batch_size: int = 16
    weight_decay: float = 0.05
    clip: float = 1.0
    capture_share: float = 0.25
    align_share: float = 0.7
    align_lr: float = 1e-2
    fade_lr: float = 3e-3
    fade_until: float = 0.8
    task_weight: float = 10.0
    student_only_lr: float = 3e-3
    curve_points: int = 10


@dataclass
class Data:
    """Tokens and the original model's embeddings of each part of the split.

    Attributes:
        tokens: Per part: ids and mask, [N, L].
        targets: Per part: unit vectors, [N, D].
    """

    tokens: dict[str, Batch]
    targets: dict[str, Tensor]

    @classmethod
    def of(cls, encoder: Encoder, split: Split) -> Data:
        """Tokenise, and run the original model once over everything."""
        parts: dict[str, Sequence[str]] = {
            "train": split.train,
            "validation": split.validation,
            "held_out": split.held_out,
        }
        tokens = {name: encoder.tokens(texts) for name, texts in parts.items()}
        return cls(tokens, {name: encode(encoder.model, part) for name, part in tokens.items()})

    def batch(self, index: Tensor, part: str = "train") -> tuple[Batch, Tensor]:
        """Some texts, padded to the longest of them, and their targets. Shapes: [b] -> [b, l], [b, D]."""
        return trim({name: t[index] for name, t in self.tokens[part].items()}), self.targets[part][index]

    def score(self, model: nn.Module, part: str) -> float:
        """Mean cosine between a model's embeddings and the original ones."""
        return cosine(encode(model, self.tokens[part]), self.targets[part])


@dataclass
class Arm:
    """What one arm did.

    Attributes:
        model: The plain result.
        seconds: Of training, by stage; measurements of the curve are not in it.
        steps: Optimizer steps, by stage.
        curve: (seconds, cosine on the validation topics, stage).
        facts: More numbers for the report.
    """

    model: nn.Module
    seconds: dict[str, float] = field(default_factory=dict)
    steps: dict[str, int] = field(default_factory=dict)
    curve: list[tuple[float, float, str]] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def total(self) -> float:
        """Seconds of training."""
        return sum(self.seconds.values())


def cosine(a: Tensor, b: Tensor) -> float:
    """Mean cosine of unit vectors. Shapes: [N, D] or [D] each."""
    return float((a.double() * b.double()).sum(-1).mean())


def trim(batch: Batch) -> Batch:
    """Cut padding that the whole batch has, to a multiple of 16, so that few different lengths occur."""
    longest = int(batch["attention_mask"].sum(1).max())
    width = max(16, math.ceil(longest / 16) * 16)
    return {name: tensor[:, :width] for name, tensor in batch.items()}


def by_length(tokens: Batch, size: int, generator: torch.Generator | None = None) -> list[Tensor]:
    """Indices of batches whose texts have similar lengths; their order is random when a generator is given."""
    lengths = tokens["attention_mask"].sum(1).div(16).ceil()
    n = len(lengths)
    shuffled = torch.arange(n) if generator is None else torch.randperm(n, generator=generator)
    batches = list(shuffled[lengths[shuffled].argsort(stable=True)].split(size))
    if generator is None:
        return batches
    return [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]


@torch.no_grad()
def encode(model: nn.Module, tokens: Batch, size: int = 64) -> Tensor:
    """Unit sentence vectors in eval mode; the modes of all modules come back. Shapes: [N, L] -> [N, D]."""
    modes = [(m, m.training) for m in model.modules()]
    model.eval()
    index = by_length(tokens, size)
    try:
        parts = [embed(model, trim({name: t[i] for name, t in tokens.items()})) for i in index]
    finally:
        for module, mode in modes:
            module.training = mode
    return torch.cat(parts)[torch.cat(index).argsort()]


def warm_cosine(t: float) -> float:
    """Rate over progress: up over the first 3 %, then half a cosine to 0."""
    return min(1.0, t / 0.03) * (0.5 + 0.5 * math.cos(math.pi * min(1.0, t)))


def _plan(sites: str, seed: int, gate: Deterministic, guidance: DeepFeatureGuidance | None) -> Plan:
    return Plan(targets=sites, student=Reinit(init="model"), gate=gate, guidance=guidance, seed=seed)


def cold(encoder: Encoder, sites: str, seed: int) -> nn.Module:
    """The floor: the model with untrained students, the same ones that both arms start from."""
    model = copy.deepcopy(encoder.model)
    install(model, _plan(sites, seed, Deterministic(0.0), None), total_steps=1).finalize()
    return model


# ---- the joint loop that both arms use -----------------------------------------------------------------------------


@dataclass
class _Joint:
    """Optimizer steps on the task loss (and on guidance where the plan has it)."""

    fade: Fade
    data: Data
    settings: Settings
    clock: Clock
    task_weight: float
    lr: float
    seed: int

    def __post_init__(self) -> None:
        # Lists of batches are drawn per pass; both arms draw the same ones.
        self._dice = torch.Generator().manual_seed(self.seed)
        self._queue: list[Tensor] = []
        groups = self.fade.parameter_groups(weight_decay=self.settings.weight_decay)
        self._optimizer = torch.optim.AdamW(groups, lr=self.lr)
        self._trained = [p for group in groups for p in group["params"]]

    def backward(self) -> tuple[float, float]:
        """Both losses of the next batch, gradients added; no step."""
        if not self._queue:
            self._queue = by_length(self.data.tokens["train"], self.settings.batch_size, self._dice)
        batch, target = self.data.batch(self._queue.pop())
        task = 1.0 - F.cosine_similarity(embed(self.fade.model, batch), target).mean()
        guidance = self.fade.guidance()
        (self.task_weight * task + guidance).backward()
        return float(task), float(guidance)

    def run(self, progress: Callable[[int], float], after: Callable[[int, float, float], None]) -> int:
        """Train until `progress(step)` is 1.

        Args:
            progress: Where the run stands after so many steps, in [0, 1]; the rate follows it.
            after: `(step, task loss, guidance)`, called after each step.

        Returns:
            Steps done.
        """
        self.fade.attach(self._optimizer)
        self.fade.model.train()
        step = 0
        while (t := progress(step)) < 1.0:
            for group in self._optimizer.param_groups:
                group["lr"] = self.lr * warm_cosine(max(t, 1e-3))
            task, guidance = self.backward()
            nn.utils.clip_grad_norm_(self._trained, self.settings.clip)
            self._optimizer.step()
            self._optimizer.zero_grad()
            step += 1
            after(step, task, guidance)
        return step

    def seconds_per_step(self, repeats: int = 3) -> float:
        """Mean cost of a step, from dry runs: gradients are thrown away."""
        self.fade.model.train()
        self.backward()  # The first one is slower.
        begin = self.clock.seconds
        for _ in range(repeats):
            self.backward()
        self._optimizer.zero_grad()
        return (self.clock.seconds - begin) / repeats


# ---- student-only --------------------------------------------------------------------------------------------------


def student_only(
    encoder: Encoder,
    data: Data,
    sites: str,
    *,
    settings: Settings,
    seconds: float,
    least_steps: int,
    seed: int,
    meter: Meter,
) -> Arm:
    """Hard swap: cold students at once (alpha 0), the task loss alone, until both seconds and steps are reached."""
    model = copy.deepcopy(encoder.model)
    clock = Clock()
    fade = install(model, _plan(sites, seed, Deterministic(0.0), None), total_steps=1)
    arm = Arm(model)
    joint = _Joint(fade, data, settings, clock, 1.0, settings.student_only_lr, seed)
    marks = iter([(k + 1) / settings.curve_points for k in range(settings.curve_points)])
    following = next(marks)

    def progress(step: int) -> float:
        return min(clock.seconds / seconds, step / max(1, least_steps))

    def after(step: int, task: float, _: float) -> None:
        nonlocal following
        meter.show(clock.seconds, f"student-only, step {step}", alpha=0.0, task=task, validation=_last(arm))
        if progress(step) >= following:
            _mark(arm, data, clock, "student only", model)
            while progress(step) >= following < 1.0:
                following = next(marks, 1.0)

    with no_dropout(model):
        _mark(arm, data, clock, "student only", model)
        steps = joint.run(progress, after)
    arm.seconds, arm.steps = {"train": clock.seconds}, {"train": steps}
    model.eval()
    fade.finalize()
    return arm


def _mark(arm: Arm, data: Data, clock: Clock, stage: str, model: nn.Module) -> None:
    """Measure a point of the curve, off the clock."""
    with clock.paused():
        arm.curve.append((clock.seconds, data.score(model, "validation"), stage))


def _last(arm: Arm) -> float | None:
    return arm.curve[-1][1] if arm.curve else None


# ---- crossfade -----------------------------------------------------------------------------------------------------


def crossfade(
    encoder: Encoder, data: Data, sites: str, *, settings: Settings, seconds: float, seed: int, meter: Meter
) -> Arm:
    """Align the cold students on captured inputs, then fade the teachers out; finalize."""
    model = copy.deepcopy(encoder.model)
    clock = Clock()
    # Stage 1: the teachers alone are on the main path, and the students learn beside it.
    fade = install(model, _plan(sites, seed, Deterministic(1.0), None), total_steps=1)
    arm = Arm(model)
    with fade.view("student"):
        _mark(arm, data, clock, "align", model)
    _align(arm, fade, data, settings, clock, seconds, meter)
    with no_dropout(model):
        _fade(arm, fade, data, sites, settings, clock, seconds, seed, meter)
    model.eval()
    probe, _ = data.batch(torch.arange(min(8, len(data.targets["train"]))))
    fade.finalize(probe=probe)
    assert fade.receipt is not None
    arm.facts["receipt"] = {"probed": fade.receipt.probed, "gap": fade.receipt.gap}
    return arm


def _capture(data: Data, clock: Clock, until: float) -> Iterator[Batch]:
    """Batches of training text, in random order, until the time for the capture is up; at least one."""
    order = by_length(data.tokens["train"], 64, torch.Generator().manual_seed(0))
    for number, index in enumerate(order):
        if number > 0 and clock.seconds >= until:
            return
        yield data.batch(index)[0]


def _align(
    arm: Arm, fade: Fade, data: Data, settings: Settings, clock: Clock, seconds: float, meter: Meter
) -> None:
    """Alignment within its share of the budget.

    The number of steps is planned from their cost, which a rehearsal on one batch gives; the callback ends a site whose
    time is up, should the machine become slower.
    """
    n, share = len(fade.sites), settings.align_share * seconds
    cost = _cost_of_aligning(fade, data, settings)
    arm.facts["align_seconds_per_step"] = cost
    raise NotImplementedError
