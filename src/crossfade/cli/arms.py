"""The two arms of the demo: crossfade (align, then fade) and student-only, on the same data and the same budget."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from .. import schedules
from ..fade import Fade, handle
from ..gates import Deterministic
from ..guidance import DeepFeatureGuidance
from ..lab.clock import Clock
from ..lab.pretrained import Encoder, embed, no_dropout
from ..plan import Plan
from ..students import Reinit
from ..surgery import install
from .data import Batch, Data, by_length, trim
from .progress import Meter

__all__ = ["Arm", "Settings", "cold", "crossfade", "student_only"]

FEWEST_STEPS = 5  # of each stage, however short the budget is
REHEARSED, STEPS_REHEARSED = 2, 25  # sites and steps of the rehearsal


@dataclass(frozen=True)
class Settings:
    """The recipe. What was tried, and why these: docs/results/demo.md; chosen on validation topics.

    Attributes:
        weight_decay: On matrices, in both arms.
        clip: Gradient norm, in both arms.
        betas: Of AdamW, in the fade and in the student-only arm.
        capture_share: Part of the time for alignment after which no more texts are captured.
        align_share: Part of the budget that capture and alignment take; the fade has the rest.
        align_batch: Texts per step of the alignment. Small batches get further per second.
        align_lr: Peak rate of the alignment.
        fade_batch: Texts per step of the fade.
        fade_lr: Peak rate of the fade. The students are good by then; a higher rate undoes some of it.
        fade_until: Progress at which alpha reaches 0; guidance stays on to the end.
        task_weight: Factor of the task loss beside the guidance, which is a sum over all sites.
        student_only_batch: Texts per step of the student-only arm.
        student_only_lr: Peak rate of the student-only arm.
        curve_points: Measurements of a curve, roughly.
    """

    weight_decay: float = 0.05
    clip: float = 1.0
    betas: tuple[float, float] = (0.9, 0.95)
    capture_share: float = 0.3
    align_share: float = 0.85
    align_batch: int = 4
    align_lr: float = 3e-3
    fade_batch: int = 16
    fade_lr: float = 3e-4
    fade_until: float = 0.8
    task_weight: float = 10.0
    student_only_batch: int = 4
    student_only_lr: float = 1e-3
    curve_points: int = 8


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
    batch_size: int
    seed: int

    def __post_init__(self) -> None:
        # Batches are drawn anew for every pass over the texts.
        self._dice = torch.Generator().manual_seed(self.seed)
        self._queue: list[Tensor] = []
        groups = self.fade.parameter_groups(weight_decay=self.settings.weight_decay)
        self._optimizer = torch.optim.AdamW(groups, lr=self.lr, betas=self.settings.betas, fused=True)
        self._trained = [p for group in groups for p in group["params"]]

    def backward(self) -> tuple[float, float]:
        """Both losses of the next batch, gradients added; no step."""
        if not self._queue:
            self._queue = by_length(self.data.tokens["train"], self.batch_size, self._dice)
        batch, target = self.data.batch(self._queue.pop())
        task = 1.0 - functional.cosine_similarity(embed(self.fade.model, batch), target).mean()
        guidance = self.fade.guidance()
        (self.task_weight * task + guidance).backward()
        return float(task.detach()), float(guidance.detach())

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

    def seconds_per_step(self) -> float:
        """Cost of a step, from a dry run: its gradients are thrown away."""
        self.fade.model.train()
        begin = self.clock.seconds
        self.backward()
        self._optimizer.zero_grad()
        return self.clock.seconds - begin


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
    joint = _Joint(fade, data, settings, clock, 1.0, settings.student_only_lr, settings.student_only_batch, seed)
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
    """Align the cold students on captured inputs, then fade the teachers out, then finalize."""
    model = copy.deepcopy(encoder.model)
    clock = Clock()
    # Stage 1: the teachers alone are on the main path, and the students learn beside it.
    fade = install(model, _plan(sites, seed, Deterministic(1.0), None), total_steps=1)
    arm = Arm(model)
    with fade.view("student"):
        _mark(arm, data, clock, "align", model)
    _Alignment(arm, fade, data, settings, clock, settings.align_share * seconds, meter).run()
    arm.seconds["align"] = clock.seconds
    # Stage 2: on the task loss, while alpha goes to 0.
    guidance = DeepFeatureGuidance()
    gate = Deterministic(schedules.linear(until=settings.fade_until))
    with no_dropout(model):
        _fade_out(arm, fade, data, _plan(sites, seed, gate, guidance), settings, clock, seconds, meter)
    arm.seconds["fade"] = clock.seconds - arm.seconds["align"]
    model.eval()
    fade.finalize(probe=data.batch(torch.arange(min(8, len(data.targets["train"]))))[0])
    assert fade.receipt is not None
    arm.facts["finalize_probed"] = fade.receipt.probed
    return arm


class _Alignment:
    """Alignment within its share of the budget.

    The number of steps is planned from their cost in a rehearsal on a copy, so that the rate can follow its whole
    course. Should the machine become slower than that, a site whose time is up ends where it is.
    """

    def __init__(
        self, arm: Arm, fade: Fade, data: Data, settings: Settings, clock: Clock, end: float, meter: Meter
    ) -> None:
        self.arm, self.fade, self.data, self.settings = arm, fade, data, settings
        self.clock, self.end, self.meter = clock, end, meter
        self.paths = [site.path for site in fade.sites]
        self.batches = by_length(data.tokens["train"], 64, torch.Generator().manual_seed(fade.plan.seed))
        self.captured, self.steps, self.place, self.begin = 0, 0, 0, 0.0

    def run(self) -> None:
        """Rehearse, plan, align."""
        self.meter.show(self.clock.seconds, "align: rehearsal", alpha=1.0, validation=_last(self.arm))
        self.plan(*self.rehearse())
        self.meter.show(self.clock.seconds, "align: capture of interface inputs")
        report = self.fade.align(
            self.capture(),
            steps=self.steps,
            lr=self.settings.align_lr,
            batch_size=self.settings.align_batch,
            check_every=max(1, self.steps // 6),
            patience=None,
            progress=self.after,
        )
        self.point()
        self.arm.steps["align"] = max(site.steps for site in report.sites)
        self.arm.facts["align"] = {
            "texts": report.samples,
            "mebibytes": report.bytes / 2**20,
            "capture_seconds": report.capture_seconds,
            "steps_planned": self.steps,
            "sites": {site.path: asdict(site) for site in report.sites},
        }

    def rehearse(self) -> tuple[float, float]:
        """Seconds per step of one site, and seconds of capture per text: from a few steps of a copy."""
        twin = copy.deepcopy(self.fade.model)
        texts = len(self.data.targets["train"])
        sample = torch.arange(min(64, texts)) * texts // min(64, texts)
        tokens = {name: tensor[sample] for name, tensor in self.data.tokens["train"].items()}
        times: dict[str, list[float]] = {}

        def note(path: str, step: int, _: float) -> bool:
            times.setdefault(path, []).append(self.clock.seconds)
            return len(times) > REHEARSED  # The other sites are of the same kind.

        report = handle(twin).align(
            [trim({name: tensor[index] for name, tensor in tokens.items()}) for index in by_length(tokens, 16)],
            steps=STEPS_REHEARSED,
            batch_size=self.settings.align_batch,
            check_every=STEPS_REHEARSED,
            patience=None,
            progress=note,
        )
        # The first step of a site also makes the optimizer's state.
        costs = [(seen[-1] - seen[0]) / (len(seen) - 1) for seen in list(times.values())[:REHEARSED]]
        return sum(costs) / len(costs), report.capture_seconds / len(sample)

    def plan(self, step: float, capture: float) -> None:
        """How many steps fit beside the measurements (forward only, in larger batches), with a margin.

        A site that is cut off early has not seen the low rates, which costs more than a few steps less.
        """
        texts = len(self.data.targets["train"])
        left = self.end - self.clock.seconds
        left -= min(texts * capture, self.settings.capture_share * self.end)
        measuring = texts * (1.0 + 8 * 0.1) / self.settings.align_batch / 6.0
        self.steps = max(FEWEST_STEPS, int(0.9 * left / len(self.paths) / step - measuring))

    def capture(self) -> Iterator[Batch]:
        """Training texts in random order, as many as the time for it allows; at least one batch."""
        until = self.clock.seconds + self.settings.capture_share * self.end
        for index in self.batches:
            if self.captured and self.clock.seconds >= until:
                break
            self.captured += len(index)
            yield self.data.batch(index)[0]
        self.begin = self.clock.seconds

    def after(self, path: str, step: int, loss: float) -> bool:
        """Called after each step of a site; True ends the site."""
        number = self.paths.index(path)
        if number != self.place:
            self.place = number
            self.point()
        self.meter.show(self.clock.seconds, f"align {number + 1}/{len(self.paths)}, step {step}", guidance=loss)
        due = self.begin + (number + 1) / len(self.paths) * max(0.0, self.end - self.begin)
        return step >= FEWEST_STEPS and self.clock.seconds >= due

    def point(self) -> None:
        """A point of the curve: what the model would be if the fade ended now."""
        with self.clock.paused(), self.fade.view("student"):
            self.arm.curve.append((self.clock.seconds, self.data.score(self.fade.model, "validation"), "align"))
        self.meter.show(self.clock.seconds, "align", validation=_last(self.arm))


def _fade_out(
    arm: Arm,
    fade: Fade,
    data: Data,
    plan: Plan,
    settings: Settings,
    clock: Clock,
    seconds: float,
    meter: Meter,
) -> None:
    """The rest of the budget: alpha to 0, guidance kept, the task loss beside it."""
    weight, lr, batch = settings.task_weight, settings.fade_lr, settings.fade_batch
    joint = _Joint(fade, data, settings, clock, weight, lr, batch, plan.seed)
    fade.begin(plan, 10)
    fade.seek(4)  # In mid-fade, where a step costs most.
    cost = joint.seconds_per_step()
    steps = max(FEWEST_STEPS, int((seconds - clock.seconds) / cost))
    fade.begin(plan, steps)
    begin, every = clock.seconds, max(1, round(2 * steps / settings.curve_points))

    def progress(step: int) -> float:
        # A machine that has become slower skips steps of the schedule; the fade must end within the budget.
        return max(fade.progress, (clock.seconds - begin) / max(1e-3, seconds - begin) if step >= FEWEST_STEPS else 0.0)

    def after(step: int, task: float, guidance: float) -> None:
        due = int(progress(step) * steps)
        if due > fade.step_count:
            fade.seek(min(due, steps))
        log = fade.log()
        phase = f"fade, step {fade.step_count}/{steps}"
        shown = {"alpha": log["alpha"], "task": task, "guidance": guidance, "cosine": log.get("cosine")}
        meter.show(clock.seconds, phase, **shown, validation=_last(arm))
        if step % every == 0 or fade.step_count >= steps:
            with fade.view("student"):
                _mark(arm, data, clock, "fade", fade.model)

    arm.steps["fade"] = joint.run(progress, after)
    fade.seek(steps)
