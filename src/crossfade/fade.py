"""`Fade`: the handle of an installed plan. It moves the sites from step to step and ends the fade.

The clock counts optimizer steps: it moves when an attached optimizer has stepped (never in a forward), so gradient
accumulation and skipped steps count right. Everything that a step needs is a function of (plan, step) and of the saved
state of controllers and calibration.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from . import align as alignment
from . import outputs, state, training
from .blend import Route
from .changes import Changes, unwrapped
from .errors import CrossfadeWarning, StateError
from .finalize import (
    Receipt,
    check_over,
    largest_difference,
    look,
    prove,
    put_teacher_back,
    remember,
    route_all,
    strip,
    write_receipt,
)
from .gates import Controller
from .guidance import Guidance
from .ledger import Ledger, Term
from .plan import Plan
from .site import Site

__all__ = ["Fade"]

Release = Literal["when_done", "finalize"]


class Fade:
    """An installed plan. Made by `crossfade.install`; found again by `crossfade.handle(model)`.

    Attributes:
        model: The model, with blends at the sites.
        plan: The plan.
        sites: One `Site` per place of replacement.
        step_count: Optimizer steps done.
        total_steps: Length of the fade, or None when all schedules count in steps.
        receipt: What `finalize` did, once it has.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        sites: list[Site],
        ledger: Ledger,
        *,
        total_steps: int | None,
        release: Release,
        metrics_every: int,
        flags: list[tuple[nn.Parameter, bool]],
        snapshot: dict[str, Tensor] | None = None,
    ) -> None:
        self.model = model
        self.plan = plan
        self.sites = sites
        self.ledger = ledger
        self.total_steps = total_steps
        self.step_count = 0
        self.release = release
        self.metrics_every = metrics_every
        self.receipt: Receipt | None = None
        self.ended = False
        # As data, not as closures: a copied model gets a handle whose flags are those of its own parameters.
        self._flags = flags
        self.hook_id = -1
        self._mode_found = model.training
        self._snapshot = snapshot
        self._seen: dict[str, list[Term]] = {}
        self._last: dict[str, Tensor] = {}
        self._metrics: dict[str, tuple[float, float]] = {}
        self._optimizers: tuple[Optimizer, ...] = ()
        self._handles: list[Any] = []
        self._viewing: str | None = None
        self._statistics = [(m, m.training) for m in training.frozen_statistics(model, sites)]
        self._forward_names = outputs.argument_names(model)
        self._copies: list[weakref.ref[Fade]] = []
        self._writes: int | None = None

    # ---- the clock ---------------------------------------------------------------------------------------------

    @property
    def progress(self) -> float:
        """Share of the run that is done, in [0, 1]; 0 when the length is unknown."""
        return min(1.0, self.step_count / self.total_steps) if self.total_steps else 0.0

    def seek(self, step: int) -> None:
        """Go to optimizer step `step` (0 = nothing done). Gates depend on the step alone; controllers keep their state.

        Raises:
            StateError: The fade has ended, or `step` is no whole number >= 0.
        """
        self._alive("seek")
        self.step_count = state.whole_step(step)
        for site in self.sites:
            site.seek(step, self.total_steps, self.plan.seed)
            site.blend.observing = site.adaptive or bool(self.metrics_every and step % self.metrics_every == 0)
            # Not before the first step: alignment and calibration still may come.
            done = site.blend.teacher is not None and step > 0 and site.over_at(step, self.total_steps)
            if self.release == "when_done" and done and site.blend.main_place != "auto":
                state.release(site)
                for copied in filter(None, (reference() for reference in self._copies)):  # See `follow`.
                    copied._writes = state.writes(copied.model)
        if self._viewing is not None:
            self._show()

    def step(self) -> None:
        """Count one optimizer step by hand, after `optimizer.step()`; for runs without `attach`.

        Raises:
            StateError: An optimizer is attached and already counts.
        """
        if self._optimizers:
            raise StateError(
                "the attached optimizer already counts the steps.",
                got="a call of fade.step()",
                do="remove the call, or do not attach",
            )
        self.ledger.check_step(self._last, self.step_count)
        self._advance()

    def attach(self, *optimizers: Optimizer) -> None:
        """Audit the optimizers' groups and let the clock follow the last one's steps.

        Before each step: the step is stopped when guidance or a protected branch is not finite, or when guidance was
        recorded but not read; zero gradients of students that had no part in the step are dropped, so that weight
        decay and momentum do not move them.

        Args:
            optimizers: All optimizers of the model. Wrappers with an `.optimizer` inside (Accelerate) are opened.

        Raises:
            StateError: Already attached; students missing; teachers present.
        """
        self._alive("attach")
        if not optimizers:
            raise StateError("attach needs an optimizer.", expected="fade.attach(optimizer)")
        if self._optimizers:
            raise StateError("an optimizer is already attached.", do="pass all of them in one call")
        inner = tuple(training.opened(optimizer) for optimizer in optimizers)
        training.audit(self.model, self.sites, inner)
        self._optimizers = inner
        self._handles = [inner[0].register_step_pre_hook(self._before_step)]
        self._handles.append(inner[-1].register_step_post_hook(self._after_step))
        for site in self.sites:  # A gradient scaler wants gradients in every step; zeros are dropped before the step.
            site.blend.attached = True

    def detach(self) -> None:
        """Let go of the optimizers; the clock stands until `attach` or `step`."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._optimizers = [], ()
        for site in self.sites:
            site.blend.attached = False

    def _before_step(self, *_: Any) -> None:
        self.ledger.check_step(self._last, self.step_count)
        for site in self.sites:
            if site.weight == 1.0 and site.lam == 0.0 and self._viewing is None:
                for parameter in site.blend.student.parameters():
                    parameter.grad = None

    def _after_step(self, *_: Any) -> None:
        self._advance()

    def _advance(self) -> None:
        state.calibrate_first_step(self.sites, self._seen)
        for site, (cosine, error) in state.observed(self.sites, self.ledger.similarities).items():
            self._metrics[site.path] = (cosine, error)
            if isinstance(site.driver, Controller):
                site.driver.observe(cosine)
        self._seen = {}
        self.ledger.clear()
        self.seek(self.step_count + 1)

    # ---- the loss ----------------------------------------------------------------------------------------------

    def guidance(self, num_items: int | Tensor | None = None) -> Tensor:
        """The lambda-weighted sum over sites of the mean over calls since the last read; reading clears.

        Add it to the task loss of every micro-batch, and scale it by accumulation as you scale the task loss.

        Args:
            num_items: Number of valid positions in the *whole* accumulated batch. When given, errors are divided by
                it instead of by each micro-batch's own count, so that micro-batches of unequal length *add up* to the
                full batch's value (as Hugging Face's `num_items_in_batch` does for the task loss).

        Returns:
            0-dim float32 with a gradient; plain 0 when no site has guidance at this step.

        Raises:
            StateError: A site should have recorded something, and has not; `num_items` is no number > 0.
        """
        self._alive("guidance")
        terms = self.ledger.read()
        wanted = [site for site in self.sites if site.lam > 0.0 and self._viewing is None]
        device = self.sites[0].blend.gate_weight.device
        if not wanted:
            return torch.zeros((), device=device)
        missing = [site.path for site in wanted if not terms.get(site.path)]
        if missing:
            raise StateError(
                "no guidance was recorded, although these sites have lambda > 0.",
                where=", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else ""),
                expected="a forward in train mode with gradients, since the last read",
                do="call model.train() and read once per forward; reentrant gradient checkpointing runs its forward "
                "without gradients: use_reentrant=False",
            )
        items = state.items_of(num_items, device)
        total = torch.zeros((), device=device)
        for site in wanted:
            value = site.guidance_value(terms[site.path], items)
            self._last[site.path] = value.detach()
            self._seen.setdefault(site.path, []).extend(
                Term(t.error.detach(), t.positions, t.power) for t in terms[site.path]
            )
            total = total + value.to(device)
        return total

    @contextlib.contextmanager
    def mask(self, mask: Tensor | None) -> Iterator[None]:
        """Say which positions are real, for forwards that do not take `attention_mask`. Shapes: [B, L], 1 = real."""
        before = self.ledger.explicit
        self.ledger.explicit = self.ledger.mask = self.ledger.recorded_mask = mask
        try:
            yield
        finally:
            self.ledger.explicit = before

    def calibrate(self, batches: Iterable[Any]) -> dict[str, float]:
        """Measure and fix every teacher's power over some batches (for the relative reduction).

        Args:
            batches: As for `align`. No gradient, eval mode, global random state untouched by us.

        Returns:
            Mean square of the teacher's output by site path.
        """
        self._alive("calibrate")
        with self.view("teacher"):
            return state.calibrate(self.model, self.sites, batches)

    # ---- what to look at ---------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def view(self, which: Literal["student", "teacher", "blend"]) -> Iterator[nn.Module]:
        """Let every site answer as its student, its teacher, or the blend at this step's alpha.

        Without a view, evaluation uses `w = alpha`. Report the student view: it is what `finalize` leaves.

        Raises:
            StateError: Unknown view, or teachers that are gone.
        """
        self._alive("view")
        if which not in ("student", "teacher", "blend"):
            raise StateError("unknown view.", expected='"student", "teacher" or "blend"', got=repr(which))
        gone = [site.path for site in self.sites if site.blend.teacher is None]
        if which == "teacher" and gone:
            raise StateError(
                "the teacher view needs teachers that are gone.",
                where=", ".join(gone[:3]),
                do='install with release="finalize" to keep them',
            )
        before, self._viewing = self._viewing, which
        self._show()
        try:
            yield self.model
        finally:
            self._viewing = before
            if not self.ended:
                self._show()

    def _show(self) -> None:
        if self._viewing in ("student", "teacher"):
            route_all(self.sites, Route.STUDENT if self._viewing == "student" else Route.TEACHER)
            return
        for site in self.sites:
            site.apply()
            observed = site.adaptive or bool(self.metrics_every and self.step_count % self.metrics_every == 0)
            site.blend.observing = observed and self._viewing is None
            site.blend.guided = site.blend.guided and self._viewing is None

    def log(self) -> dict[str, float]:
        """A flat dict of floats for any tracker: alpha, weight, lambda, guidance, cosine, error; mean and per site."""
        clock = {"step": float(self.step_count), "progress": self.progress}
        return clock | state.figures(self.sites, self._last, self._metrics)

    def summary(self) -> str:
        """A table of what trains, and each site's phase."""
        return training.summary(self.model, self.sites)

    def parameter_groups(
        self,
        *,
        weight_decay: float = 0.05,
        lr: float | None = None,
        student_lr: float | None = None,
        no_decay: Iterable[str] = (),
        rates: Mapping[str, float] | None = None,
    ) -> list[dict[str, Any]]:
        """Optimizer groups of everything that trains.

        Args:
            weight_decay: For tensors of two or more dimensions; biases, norms, scales, what `no_weight_decay()` of the
                model or of a student names, and parameters marked with `_no_weight_decay` get 0.
            lr: Learning rate of the backbone (and of the students unless `student_lr`); None: the optimizer's.
            student_lr: Learning rate of the students.
            no_decay: Globs on further parameter or module paths without decay.
            rates: Learning rates of their own, by glob; the first that matches counts.

        Returns:
            Groups with `params`, `name` (`students/decay`, ...), `weight_decay` and, when given, `lr`.

        Raises:
            SelectionError: A glob matches nothing.
        """
        self._alive("parameter_groups")
        return training.parameter_groups(
            self.model,
            self.sites,
            weight_decay=weight_decay,
            lr=lr,
            student_lr=student_lr,
            no_decay=no_decay,
            rates=rates or {},
        )

    def align(
        self,
        batches: Iterable[Any],
        steps: int = 400,
        *,
        lr: float = 1e-2,
        batch_size: int = 16,
        memory_budget: int | str = "1GiB",
        loss: Guidance | None = None,
        forward: Callable[[nn.Module, Any], object] | None = None,
        progress: alignment.Progress | None = None,
        **settings: Any,
    ) -> alignment.AlignReport:
        """Label-free alignment: capture what each site is called with, then train each student on that alone.

        Args:
            batches: Unlabelled batches: a mapping is passed as keywords, a tuple or list as positions, anything else
                as the one argument. Read once, until the budget is reached.
            steps: Most optimizer steps per site.
            lr: Peak learning rate (AdamW, warm-up, cosine).
            batch_size: Samples per step.
            memory_budget: For captured inputs (and teacher outputs if they fit): bytes, or `"512MiB"`.
            loss: The error to minimise; default `DeepFeatureGuidance()` (relative).
            forward: `(model, batch)` -> anything, for batches that need another call.
            progress: `(site, step, loss)` after each step; return True to end that site.
            settings: Further fields of `align.Settings` (betas, holdout, patience, check_every, clip, weight_decay,
                dropout).

        Returns:
            An `AlignReport`: held-out error and cosine, steps and seconds per site. It prints as a table.

        Raises:
            PlanError: A setting out of range, or a budget too small for one batch.
            StateError: No batches, or teachers that are gone.
            NonFiniteError: A student's loss is not finite.
        """
        self._alive("align")
        checked = alignment.settings_of(steps=steps, lr=lr, batch_size=batch_size, **settings)
        with self.view("teacher"):
            return alignment.align(
                self.model,
                self.sites,
                self.ledger,
                batches,
                settings=checked,
                memory_budget=memory_budget,
                loss=loss,
                seed=self.plan.seed,
                forward=forward,
                progress=progress,
            )

    # ---- stop, resume, next stage --------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Step, calibration and controllers: numbers, strings, lists and dicts only.

        The model's own `state_dict()` holds students and backbone; teachers are rebuilt from the base model, whose
        hash is kept here.
        """
        self._alive("state_dict")
        return state.save(self.plan, self.sites, self.step_count, self.total_steps)

    def load_state_dict(self, saved: Mapping[str, Any], *, rescale: bool = False) -> None:
        """Go on where `saved` stopped.

        Args:
            saved: From `state_dict()` of a fade of the same plan on the same base model.
            rescale: Keep this run's `total_steps` although the saved one differs (the schedules are then stretched);
                by default the saved length wins, with a warning.

        Raises:
            PersistError: Another plan, other sites, or another base model.
        """
        self._alive("load_state_dict")
        step, total = state.load(saved, self.plan, self.sites, self.total_steps)
        if total != self.total_steps and not rescale:
            warnings.warn(state.length_warning(self.total_steps, total), CrossfadeWarning, stacklevel=2)
            self.total_steps = total
        self.ledger.clear()
        self.seek(step)

    def begin(self, plan: Plan, total_steps: int | None) -> None:
        """Start the next stage: new gates, guidance and `trains` for the same sites and students; the clock at 0.

        Raises:
            StateError: The plan has other targets, a teacher is needed that is gone, or the fade has ended.
        """
        self._alive("begin")
        if len(plan.swaps) != len(self.plan.swaps) or any(
            a.targets != b.targets for a, b in zip(plan.swaps, self.plan.swaps, strict=True)
        ):
            raise StateError("a stage keeps the sites of the plan before it.", do="finalize, then install a new plan")
        swaps = {id(old): new for old, new in zip(self.plan.swaps, plan.swaps, strict=True)}
        with Changes() as changes:
            for parameter, flag in self._flags:  # What the stage before froze is free again.
                changes.train_flag(parameter, flag)
            training.freeze(changes, self.model, self.sites, plan.trains)
            for site in self.sites:
                old = site.swap
                changes.later(functools.partial(site.restore, old, site.driver, (site.alpha, site.weight, site.lam)))
                site.drive(swaps[id(old)])
                site.seek(0, total_steps, plan.seed)
                if site.blend.teacher is None and (site.alpha > 0 or site.lam > 0):
                    raise StateError(
                        "this stage needs a teacher that is gone.", where=site.path, do='release="finalize"'
                    )
        self.detach()
        self.plan, self.total_steps = plan, total_steps
        known = {id(m): mode for m, mode in self._statistics}
        frozen = training.frozen_statistics(self.model, self.sites)
        self._statistics = [(m, known.get(id(m), m.training)) for m in frozen]
        self.seek(0)

    def follow(self, other: Fade) -> None:
        """Take step, length, alphas and gates of another fade: for an averaged (EMA) copy of its model.

        Call it after each optimizer step and before the average is updated: where a teacher is released, the copy has
        to release its own first, or an average that pairs parameters by position (torch's `AveragedModel`) mixes
        wrong ones. An update that came too early is warned about.
        """
        self._alive("follow")
        if self._writes not in (None, state.writes(self.model)):
            warnings.warn(state.EARLY, CrossfadeWarning, stacklevel=2)
        self._writes = None
        self.total_steps = other.total_steps
        state.follow(self.sites, other.sites)
        self.seek(other.step_count)

    # ---- the end -----------------------------------------------------------------------------------------------

    def finalize(
        self, probe: Any = None, *, force: bool = False, recalibrate: Iterable[Any] | None = None
    ) -> nn.Module:
        """Leave only the students, and nothing of the blend.

        Args:
            probe: A batch (as for `align`): the student view before and the plain model after must then be bit-equal
                in eval mode. Without one, the receipt says that nothing was proven.
            force: Drop what the teachers still add.
            recalibrate: Batches to run first, without gradients, to renew running statistics (BatchNorm) of students.

        Returns:
            The model: the same object, plain; backbone flags as install found them. `fade.receipt` tells the rest.

        Raises:
            StateError: The fade is not over, and `force` is False.
            CrossfadeError: The proof failed; the model is as it was.
        """
        self._alive("finalize")
        forced = check_over(self.sites, self.step_count, self.total_steps, force)
        if recalibrate is not None:
            with self.view("student"):
                state.recalibrate(self.model, self.sites, recalibrate)
        gap: float | None = None
        before = None
        if probe is not None:
            with self.view("student"):
                before = look(self.model, probe)
            gap = largest_difference(before, look(self.model, probe)) if forced else 0.0
        with Changes() as changes:
            strip(changes, self.model, self.sites)
            if probe is not None:
                # Before the flags: torch's attention rounds otherwise when its parameters ask for gradients.
                prove(self.model, self.sites, before, probe)
            self._restore(changes, self._flags)
        self.receipt = write_receipt(
            self.plan, self.sites, self.step_count, self.total_steps, forced=forced, probed=probe is not None, gap=gap
        )
        remember(self.model, self.receipt)
        self._end()
        return self.model

    def revert(self) -> nn.Module:
        """Leave only the teachers: the model as install found it, bit for bit.

        Raises:
            StateError: A teacher is gone, or the backbone trained and no snapshot was taken at install.
        """
        self._alive("revert")
        gone = [site.path for site in self.sites if site.blend.teacher is None]
        if gone:
            raise StateError("a teacher is gone.", where=", ".join(gone[:3]), do='install with release="finalize"')
        trained = [n for n, p in training.backbone(self.model, self.sites) if p.requires_grad]
        if trained and self._snapshot is None and self.step_count > 0:
            raise StateError(
                "the backbone has trained, so the teachers alone do not make the old model.",
                where=", ".join(trained[:3]),
                do="install(..., snapshot=True) keeps a copy to go back to",
            )
        with Changes() as changes:
            for site in self.sites:
                put_teacher_back(changes, self.model, site)
                self._restore(changes, site.teacher_flags)
            if self.model.training == self._mode_found:  # Also modes that differed from the model's come back.
                for module, mode in [pair for site in self.sites for pair in site.teacher_modes]:
                    changes.set(module, "training", mode)
            self._restore(changes, self._flags)
            if self._snapshot is not None:
                self.model.load_state_dict(self._snapshot)
        self._end()
        return self.model

    def _restore(self, changes: Changes, flags: list[tuple[nn.Parameter, bool]]) -> None:
        for encoder in [encoder for site in self.sites for encoder in site.encoders]:
            changes.set(encoder, "use_nested_tensor", True)
        for parameter, flag in flags:
            changes.train_flag(parameter, flag)
        for frozen, mode in self._statistics:
            changes.mode(frozen, mode if self.model.training == self._mode_found else self.model.training)

    def _end(self) -> None:
        self.detach()
        # By key and not through the handle, which in a copied model still belongs to the original.
        self.model._forward_pre_hooks.pop(self.hook_id, None)
        self.model._forward_pre_hooks_with_kwargs.pop(self.hook_id, None)
        self.model.__dict__.pop("_crossfade", None)
        self.ended = True
        self.sites, self.ledger = [], Ledger()
        self._seen, self._last, self._snapshot, self._flags, self._statistics = {}, {}, None, [], []

    def _alive(self, what: str) -> None:
        if self.ended:
            raise StateError(f"{what}: this fade has ended.", do="install again for a new one")

    # ---- the model's own forward, and copies ---------------------------------------------------------------------

    def before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Forward pre-hook of the model: note the padding mask, keep frozen statistics in eval."""
        training.keep_in_eval(self.sites, self._statistics)
        mask = outputs.mask_argument(self._forward_names, args, kwargs)
        records = module.training and torch.is_grad_enabled()
        if records and (self._seen or self.ledger.finite or self.ledger.similarities) and self._no_gradients():
            self._seen, self._last = {}, {}
            self.ledger.forget_skipped()
        self.ledger.begin_forward(mask, records=records)

    def _no_gradients(self) -> bool:
        """Whether gradients were thrown away since the last forward: then no step follows from it."""
        return all(p.grad is None for p in self.model.parameters() if p.requires_grad)

    def __deepcopy__(self, memo: dict[int, Any]) -> Fade:
        """The handle of a copied model: same step and plan, no optimizer, an empty ledger."""
        memo[id(self)] = new = Fade.__new__(Fade)
        skipped = self._not_copied()
        for name, value in self.__dict__.items():
            new.__dict__[name] = skipped[name] if name in skipped else copy.deepcopy(value, memo)
        self._copies.append(weakref.ref(new))
        return new

    def _not_copied(self) -> dict[str, Any]:
        return {"_optimizers": (), "_handles": [], "_seen": {}, "_last": {}, "_copies": []}

    def __getstate__(self) -> dict[str, Any]:
        """Without optimizer hooks and graphs."""
        return self.__dict__ | self._not_copied()


def handle(model: nn.Module) -> Fade:
    """The fade that is installed in `model` (which may be wrapped in DDP or compiled).

    Raises:
        StateError: None is.

    Example:
        >>> handle(nn.Linear(1, 1))
        Traceback (most recent call last):
        ...
        crossfade.errors.StateError: no plan is installed in this model.
          got: Linear
          what to do: pass the very model that was given to crossfade.install (or a copy of it)
    """
    fade = unwrapped(model).__dict__.get("_crossfade")
    if not isinstance(fade, Fade):
        raise StateError(
            "no plan is installed in this model.",
            got=type(unwrapped(model)).__name__,
            do="pass the very model that was given to crossfade.install (or a copy of it)",
        )
    return fade
