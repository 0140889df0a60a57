"""One run: a method, a seed, a task. The same loop, data order and budget for every method."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..fade import Fade
from ..gates import Deterministic
from ..plan import Plan
from ..registry import decode
from ..surgery import install
from . import checkpoint
from .clock import Clock
from .distill import Distiller
from .experiment import Experiment, task_of
from .inputs import InputError, need
from .measure import curvature, gate_variance, interfaces, saved_bytes
from .methods import Align, Joint, Stage
from .order import generator, indices, order
from .tasks.base import Batch, Loaded

__all__ = ["Tell", "run"]

Tell = Callable[[dict[str, Any]], None]


def run(
    experiment: Experiment,
    label: str,
    seed: int,
    *,
    loaded: Loaded | None = None,
    folder: Path | None = None,
    tell: Tell | None = None,
) -> dict[str, Any]:
    """Run one method with one seed, from the pretrained model to the final score.

    Args:
        experiment: What to compare.
        label: Of the method.
        seed: Of initialisation, data order and gates.
        loaded: The task, if it is loaded already.
        folder: For checkpoints; needed where `training.checkpoint_every` is not 0.
        tell: Called now and then with where the run stands.

    Returns:
        The record of the run: plain data.

    Raises:
        InputError: The task's files are missing, or the method does not fit.
        NonFiniteError: A loss is not finite.
    """
    loaded = loaded or task_of(experiment.task).load()
    return _Run(experiment, label, seed, loaded, folder, tell or (lambda _: None)).run()


def _accelerator(experiment: Experiment, folder: Path | None) -> Any:
    """Accelerate's handle on device, precision, processes and trackers.

    Raises:
        InputError: A tracker is unknown or not installed.
    """
    trackers = list(experiment.evaluation.trackers)
    try:
        made = need("accelerate", "hf").Accelerator(
            cpu=experiment.training.device == "cpu",
            mixed_precision=experiment.training.precision,
            log_with=trackers or None,
            project_dir=str(folder.parent.parent / "trackers") if folder is not None else None,
        )
    except ValueError as error:
        raise InputError(f"evaluation.trackers: {error}") from None
    there = [str(getattr(tracker, "value", tracker)) for tracker in made.log_with]
    if lost := [name for name in trackers if name not in there]:  # Accelerate only writes a line to its log.
        raise InputError(f"evaluation.trackers: not installed: {', '.join(lost)}", do=f"pip install {' '.join(lost)}")
    return made


class _Run:
    """The state of one run."""

    def __init__(
        self, experiment: Experiment, label: str, seed: int, loaded: Loaded, folder: Path | None, tell: Tell
    ) -> None:
        self.experiment, self.label, self.seed, self.loaded, self.tell = experiment, label, seed, loaded, tell
        self.training, self.evaluation = experiment.training, experiment.evaluation
        self.method = experiment.method(label)
        self.stages = self.method.resolved(self.training.steps, self.training.lr)
        self.key = experiment.key(label, seed)
        self.folder = folder
        self.accelerator = _accelerator(experiment, folder)
        self.device = self.accelerator.device
        self.done = 0  # optimizer steps, of all stages
        self.timed: dict[str, list[float]] = {}
        self.bytes: dict[str, int] = {}
        self._begun = False  # Whether a resume has begun the stage already.

    # ---- from beginning to end ---------------------------------------------------------------------------------

    def run(self) -> dict[str, Any]:
        """All stages; the record."""
        begin = time.perf_counter()
        self.record = self._heading()
        self._install()
        self.clock = Clock(self.evaluation.clock)
        if self.evaluation.trackers:
            config = {"method": self.label, "seed": self.seed, "key": self.key}
            self.accelerator.init_trackers(f"{self.label}-s{self.seed}", config=config)
        resumed = self._resume()
        if resumed is None:
            with self.clock.paused():
                self._point("start", 0.0 if not self.stages else 1.0)
        first, step = (resumed.stage, resumed.step) if resumed else (0, 0)
        for number in range(first, len(self.stages)):
            stage = self.stages[number]
            before = self.clock.seconds if step == 0 else resumed.record["stage_began"] if resumed else 0.0
            self.record["stage_began"] = before
            if isinstance(stage, Align):
                self._align(stage)
            else:
                self._joint(stage, number, step)
            self.record["seconds"][stage.name] = self.clock.seconds - before
            step = 0
        self.record["seconds"]["total"] = self.clock.seconds
        self._finish()
        if self.evaluation.trackers:
            self.accelerator.end_training()
        del self.record["stage_began"]
        self.record["seconds"]["wall"] = time.perf_counter() - begin
        return self.record

    def _heading(self) -> dict[str, Any]:
        loaded, samples = self.loaded, self.evaluation.samples
        base = self.experiment.methods[self.label].get("method", self.label)
        model = loaded.model.to(self.device)
        return {
            "schema": 1,
            "method": self.label,
            "base": base,
            "title": self.method.title + (f" ({self.label})" if self.label != base else ""),
            "source": self.method.source,
            "seed": self.seed,
            "key": self.key,
            "metric": loaded.metric,
            "higher_is_better": loaded.higher_is_better,
            "clock": self.evaluation.clock,
            "facts": loaded.facts,
            "original": {
                "validation": loaded.score(model, "validation"),
                "test": loaded.score(model, "test"),
                "validation_curve": loaded.score(model, "validation", samples),
            },
            "settings": self.method.model_dump(mode="json"),
            "stages": [{"name": s.name, "steps": s.steps, "lr": s.lr} for s in self.stages],
            "curve": [],
            "interface": [],
            "seconds": {},
            "stage_began": 0.0,
            "costs": [],
            "variance": [],
            "curvature": [],
        }

    def _plan(self, stage: Joint | None) -> Plan:
        student = decode(self.method.student if self.method.student is not None else self.experiment.student)
        return Plan(
            targets=self.experiment.targets or self.loaded.targets,
            student=student,
            gate=stage.gate if stage else Deterministic(1.0),
            guidance=stage.guidance if stage else None,
            teacher_gradient=stage.teacher_gradient if stage else True,
            trains=self.training.trains,
            seed=self.seed,
        )

    def _install(self) -> None:
        """Put the students in; the first stage's plan follows when it begins."""
        self.model: nn.Module = self.loaded.fresh().to(self.device)
        self.fade: Fade = install(self.model, self._plan(None), total_steps=1, metrics_every=0)
        # Teachers are frozen, so holding on to them costs memory alone.
        self.originals = {site.path: site.blend.active_teacher() for site in self.fade.sites}
        with self.fade.view("teacher"), torch.no_grad():  # One call tells each blend what its site returns.
            self.loaded.forward(self.model.eval(), self._batch(torch.arange(2), None))
        self.model.train()

    def _batch(self, index: Tensor, dice: torch.Generator | None, part: Any = "train") -> Batch:
        return {key: value.to(self.device) for key, value in self.loaded.batch(index, part, dice).items()}

    # ---- alignment ---------------------------------------------------------------------------------------------

    def _align(self, stage: Align) -> None:
        index = order(self.seed, 0, self.loaded.sizes["train"])[: stage.samples]

        def batches() -> Iterator[Batch]:
            for part in index.split(64):
                yield self._batch(part, None)

        def progress(site: str, step: int, loss: float) -> None:
            self.tell({"stage": f"{stage.name} {site}", "step": step, "steps": stage.steps})

        report = self.fade.align(
            batches(),
            steps=stage.steps,
            lr=stage.lr,
            batch_size=stage.batch_size,
            betas=stage.betas,
            weight_decay=self.training.weight_decay,
            check_every=max(1, stage.steps // 4),
            patience=None,
            forward=self.loaded.forward,
            progress=progress,
        )
        self.done += stage.steps
        with self.clock.paused():
            self._point(stage.name, 0.0)
        spent = self.clock.seconds - self.record["stage_began"]
        self.record["costs"].append(
            {
                "phase": "cached align",
                "steps": stage.steps,
                "seconds_per_step": (spent - report.capture_seconds) / stage.steps,
                "capture_seconds": report.capture_seconds,
                "captured_bytes": report.bytes,
                "saved_bytes": None,
            }
        )

    # ---- the joint stage ---------------------------------------------------------------------------------------

    def _joint(self, stage: Joint, number: int, start: int) -> None:
        """Optimizer steps `start` to the end of the stage."""
        if not self._begun:
            self.fade.begin(self._plan(stage), stage.steps)
            self.optimizer = self._optimizer(stage)
        distiller = None
        if stage.distill is not None:
            distiller = Distiller(self.loaded, self.fade.sites, stage.distill, self.loaded.model)
        self.fade.attach(self.optimizer)
        self.model.train()
        # What trains may differ between stages, so each has a wrapper of its own.
        several = self.accelerator.num_processes > 1
        self.parallel = self.accelerator.prepare_model(self.model) if several else self.model
        marks = {round(stage.steps * k / self.evaluation.points) for k in range(1, self.evaluation.points + 1)}
        for step in range(start, stage.steps):
            if step in self.evaluation.variance:
                with self.clock.paused():
                    self._variance(step)
            self._rate(stage, step)
            self._step(stage, step, distiller)
            self.done += 1
            every = self.training.checkpoint_every
            if step + 1 in marks:
                with self.clock.paused():
                    self._point(stage.name, self.fade.sites[0].alpha)
            if every and (step + 1) % every == 0 and step + 1 < stage.steps:
                with self.clock.paused():
                    self._save(number, step + 1)
        if distiller is not None:
            distiller.close()
        self.fade.detach()
        self._begun = False
        for phase, seconds in self.timed.items():
            self.record["costs"].append(
                {
                    "phase": phase,
                    "steps": len(seconds),
                    "seconds_per_step": sum(seconds) / len(seconds),
                    "saved_bytes": self.bytes.get(phase),
                }
            )
        self.timed.clear()

    def _optimizer(self, stage: Joint) -> torch.optim.Optimizer:
        groups = self.fade.parameter_groups(
            weight_decay=self.training.weight_decay,
            lr=self.training.backbone_lr or stage.lr,
            student_lr=stage.lr,
        )
        optimizer = torch.optim.AdamW(groups, betas=self.training.betas, fused=True)
        for group in optimizer.param_groups:
            group["peak"] = group["lr"]
        return optimizer

    def _rate(self, stage: Joint, step: int) -> None:
        warm = min(1.0, (step + 1) / max(1, self.training.warmup))
        t = step / stage.steps
        shape = {"cosine": 0.5 + 0.5 * math.cos(math.pi * t), "linear": 1.0 - t, "constant": 1.0}[self.training.rate]
        for group in self.optimizer.param_groups:
            group["lr"] = group["peak"] * warm * shape

    def _step(self, stage: Joint, step: int, distiller: Distiller | None) -> None:
        """One optimizer step."""
        begin = self.clock.seconds
        phases = {site.phase for site in self.fade.sites}
        phase = next(iter(phases)) if len(phases) == 1 else "blend"
        n, size = self.loaded.sizes["train"], self.training.batch_size
        index = indices(self.seed, step, n, size)
        dice = generator("augment", self.seed, step)
        first = self.evaluation.costs and phase not in self.bytes
        parts = index.split(max(1, math.ceil(len(index) / self.training.accumulate)))
        rank, world = self.accelerator.process_index, self.accelerator.num_processes
        task = guidance = 0.0
        for part in parts:
            mine = part[rank::world]
            batch = self._batch(mine, dice)
            if first:
                with saved_bytes() as bytes_so_far:
                    loss, task, guidance = self._loss(stage, phase, batch, mine, distiller)
                self.bytes[phase] = max(self.bytes.get(phase, 0), bytes_so_far())
            else:
                loss, task, guidance = self._loss(stage, phase, batch, mine, distiller)
            self.accelerator.backward(loss * (len(part) / len(index)))
        trained = [p for group in self.optimizer.param_groups for p in group["params"]]
        if self.training.clip is not None:
            nn.utils.clip_grad_norm_(trained, self.training.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if not first:
            self.timed.setdefault(phase, []).append(self.clock.seconds - begin)
        self.tell({"stage": stage.name, "step": step + 1, "steps": stage.steps, "task": task, "guidance": guidance})

    def _loss(
        self, stage: Joint, phase: str, batch: Batch, index: Tensor, distiller: Distiller | None
    ) -> tuple[Tensor, float, float]:
        """The loss of a micro-batch; while all sites align, the task loss is none of the students' business."""
        with self.accelerator.autocast():
            output = self.loaded.forward(self.parallel, batch)
        guidance = self.fade.guidance()
        if phase == "align" and stage.guidance is not None and self.training.trains == "students":
            return guidance, 0.0, float(guidance.detach())
        # Distillation first: it finds two models that answer differently before a label meets a missing class.
        with self.accelerator.autocast():
            extra = distiller.loss(output, batch, index) if distiller is not None else 0.0
        task = self.loaded.loss(output, batch)
        loss = stage.task * task + guidance + extra
        return loss, float(task.detach()), float(guidance.detach())

    # ---- measuring, all off the clock --------------------------------------------------------------------------

    def _point(self, stage: str, alpha: float) -> None:
        """A point of the curve, and the interfaces, in the student view."""
        here = {"step": self.done, "seconds": self.clock.seconds}
        with self.fade.view("student"):
            score = self.loaded.score(self.model, "validation", self.evaluation.samples)
            per_epoch = max(1, self.loaded.sizes["train"] // self.training.batch_size)
            self.record["curve"].append(
                {**here, "epoch": self.done / per_epoch, "stage": stage, "alpha": alpha, "score": score}
            )
            if self.evaluation.interface:
                index = torch.arange(min(self.evaluation.interface, self.loaded.sizes["validation"]))
                batch = self._batch(index, None, "validation")
                sites = interfaces(self.model, self.fade.sites, self.originals, self.loaded, batch)
                self.record["interface"].append({**here, "sites": sites})
        self.tell({"stage": stage, "score": score})
        if self.evaluation.trackers:
            self.accelerator.log({"score": score, "alpha": alpha} | self.fade.log(), step=self.done)

    def _variance(self, step: int) -> None:
        if any(site.blend.teacher is None for site in self.fade.sites):
            return
        n, size = self.loaded.sizes["train"], self.training.batch_size
        dealt = order(self.seed, -1, n)  # An order of its own: no step of the run has these batches.
        parts = dealt.split(min(size, n))[: self.evaluation.batches]
        batches = [self._batch(part, None) for part in parts]
        found = gate_variance(
            self.fade, self.loaded, batches, draws=self.evaluation.draws, seed=self.seed * 1009 + step
        )
        self.record["variance"].append({"step": step, **found})
        self.record["curvature"] += [{"step": step, **row} for row in curvature(self.fade, self.loaded, batches[0])]

    def _finish(self) -> None:
        """Leave only the students; score what is left."""
        if any(site.alpha > 0.0 for site in self.fade.sites):
            self.fade.begin(self._plan(Joint(1, 1.0)), 1)  # Alignment alone, or nothing at all: a hard switch.
        model = self.fade.finalize()
        self.record["final"] = {
            "validation": self.loaded.score(model, "validation"),
            "test": self.loaded.score(model, "test"),
            "validation_curve": self.loaded.score(model, "validation", self.evaluation.samples),
        }

    # ---- stop and go on ----------------------------------------------------------------------------------------

    def _save(self, stage: int, step: int) -> None:
        if self.folder is None or not self.accelerator.is_main_process:
            return
        record = self.record | {"done": self.done, "timed": self.timed, "bytes": self.bytes}
        found = checkpoint.Checkpoint(self.key, stage, step, record, self.fade.state_dict(), self.clock.seconds)
        checkpoint.save(self.folder, found, self.model.state_dict(), self.optimizer)

    def _resume(self) -> checkpoint.Checkpoint | None:
        """Go to where an interrupted run stood."""
        found = checkpoint.load(self.folder, self.key) if self.folder is not None else None
        if found is None:
            return None
        saved, tensors, states = found
        stage: Stage = self.stages[saved.stage]
        assert isinstance(stage, Joint)
        self.record = dict(saved.record)
        self.done, self.timed, self.bytes = (self.record.pop(key) for key in ("done", "timed", "bytes"))
        self.fade.begin(self._plan(stage), stage.steps)
        self.optimizer = self._optimizer(stage)
        self._begun = True
        self.model.load_state_dict(tensors)
        checkpoint.restore(self.optimizer, states)
        self.fade.load_state_dict(saved.fade)
        self.clock.start_at(saved.seconds)
        return saved
