"""`Blend(teacher, student)`: the one wrapper. It runs what its phase needs and joins the two outputs.

    align    w = 1, guidance on    y = T(h); S(h) only for the guidance
    blend    0 < w < 1             y = w T(h) + (1 - w) S(h)
    guide    w = 0, guidance on    y = S(h); T(h) only as a target, without gradient
    student  w = 0                 y = S(h); T is not run

There are no dice and no counters here: `w` and the route are set from outside once per optimizer step. What a forward
leaves behind (guidance terms, metrics) goes to the `Ledger` that all blends of a model share, as values.
"""

from __future__ import annotations

import contextlib
import enum
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from . import outputs
from .errors import CrossfadeWarning, OutputError, StateError
from .ledger import Ledger, Term
from .metrics import cosine_sum, count, power_sum, squared_error_sum

__all__ = ["Blend", "Route", "blends", "is_blend"]


class Route(enum.Enum):
    """What reaches the output of a blend."""

    TEACHER = "teacher"
    MIX = "mix"
    SELECT = "select"
    STUDENT = "student"


def _alias(tensor: Tensor) -> Tensor:
    """The same memory behind a graph node of its own.

    A clone has one too: gradients are then summed in one order whether inputs are copied or not, to the last bit.
    """
    return tensor.view_as(tensor)


class _Connect(torch.autograd.Function):
    """A copy of a tensor that hangs on the student's parameters: no gradient for them, or zeros under DDP."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, zeros: bool, *parameters: Tensor) -> Tensor:
        ctx.shapes = [(p.shape, p.dtype, p.device) for p in parameters] if zeros else None
        ctx.n = len(parameters)
        return y.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        if ctx.shapes is None:
            return (grad, None, *([None] * ctx.n))
        return (grad, None, *(torch.zeros(s, dtype=d, device=v) for s, d, v in ctx.shapes))


class Blend(nn.Module):
    """Teacher and student at one site. Built by `crossfade.install`; the parent calls it as it called the teacher.

    Args:
        teacher: The module that was there. It is frozen, stays in eval whatever `train()` says above it, and is left
            out of `state_dict()`: it can be rebuilt from the base model.
        student: Its replacement.
        path: Module path, for messages and as the key in the ledger.
        ledger: Shared by all blends of the model.
        output: Place of the main tensor, or `"auto"`.
        residual: True when the site contains its residual connection: agreement is then measured on output - input.
        teacher_gradient: Whether gradients reach earlier students through this teacher (they should: the gradient of
            the blend does). False saves its backward, at the price of a biased gradient upstream.

    Raises:
        OutputError: Teacher and student return different structures or shapes, or one writes into the shared input
            after it was found not to.

    Example:
        >>> blend = Blend(nn.Linear(2, 2), nn.Linear(2, 2), path="fc", ledger=Ledger())
        >>> blend.set_gate(alpha=1.0, weight=1.0, hard=False)
        >>> x = torch.ones(1, 2)
        >>> torch.equal(blend(x), blend.teacher(x))
        True
    """

    __crossfade_blend__: ClassVar[bool] = True
    teacher: nn.Module | None
    student: nn.Module

    def __init__(
        self,
        teacher: nn.Module,
        student: nn.Module,
        *,
        path: str,
        ledger: Ledger,
        output: outputs.Where | str = "auto",
        residual: bool = False,
        teacher_gradient: bool = True,
    ) -> None:
        super().__init__()
        self.teacher = teacher
        self.student = student
        self.site_path = path
        self.ledger = ledger
        self.declared_output = output
        self.holds_residual = residual
        self.teacher_gradient = teacher_gradient
        # Plain attributes, not buffers: a cast, DDP's buffer broadcast or an averaged copy must not change them.
        device = next((p.device for p in student.parameters()), torch.device("cpu"))
        self.gate_alpha = torch.ones((), dtype=torch.float32, device=device)
        self.gate_weight = torch.ones((), dtype=torch.float32, device=device)
        self.train_route = self.eval_route = Route.TEACHER
        self.guidance_error: Callable[[Tensor, Tensor, Tensor | None], Tensor] | None = None
        self.guided = False
        self.detach_input = False
        self.use_mask = True
        self.observing = False
        self.calibrating = False
        self.skips = False
        self.check_call: Callable[[tuple[Any, ...], dict[str, Any]], None] | None = None
        self.argument_names = outputs.argument_names(getattr(teacher, "first_of_chain", teacher))
        self.main_place: outputs.Where | str = "auto"
        self.teacher_structure: Any = None
        self.bare_student = False
        self.cast: torch.dtype | None = None
        self.carried: dict[str, Any] = {}
        self.attached = False
        self.last = True
        self.writes_input: bool | None = None
        self.training = teacher.training
        teacher.eval()

    # ---- set from outside, once per optimizer step -------------------------------------------------------------

    def set_gate(self, *, alpha: float, weight: float, hard: bool, skip: bool = False) -> None:
        """Take this step's alpha and gate. Tensors are written in place, so that a compiled graph sees them."""
        with torch.no_grad():
            self.gate_alpha.fill_(alpha)
            self.gate_weight.fill_(weight)
        fixed = {0.0: Route.STUDENT, 1.0: Route.TEACHER}
        self.eval_route = fixed.get(alpha, Route.MIX)
        if hard and not skip and alpha not in fixed:
            self.train_route = Route.SELECT
        else:
            self.train_route = fixed.get(weight, Route.MIX)
        self.skips = skip

    def release_teacher(self) -> None:
        """Let the teacher go; only the student route is left."""
        self.teacher = None

    # ---- the call ----------------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call teacher, student or both exactly as the parent called the site.

        Returns:
            The teacher's structure; only its main tensor is blended. Shapes, dtype: the teacher's.
        """
        guided = self.guided and self.training
        observe = self.observing and self.training
        route = self.train_route if self.training else self.eval_route
        if not guided:
            if route is Route.STUDENT:
                return self._conform(self.call_student(args, kwargs), args, kwargs)
            if route is Route.TEACHER and not observe:
                out = self.active_teacher()(*args, **kwargs)
                self._learn(out)
                return self._connect(out)
        return self._run_both(route, guided, observe, args, kwargs)

    def _run_both(
        self, route: Route, guided: bool, observe: bool, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        teacher = self.active_teacher()
        teacher_leads = route is not Route.STUDENT
        (t_args, t_kwargs), (s_args, s_kwargs), check = self._separate(teacher_leads, args, kwargs)
        target_only = not teacher_leads or not self.teacher_gradient
        with torch.no_grad() if target_only else contextlib.nullcontext():
            t_out = teacher(*t_args, **t_kwargs)
        off_path = route is Route.TEACHER
        detached = guided and self.detach_input
        if detached and off_path:
            s_args, s_kwargs = outputs.detach((s_args, s_kwargs))
        with self._watching() if off_path and not guided else contextlib.nullcontext():
            s_out = self.call_student(s_args, s_kwargs)
        s_guided = s_out
        if detached and not off_path:
            d_args, d_kwargs = outputs.detach((s_args, s_kwargs))
            s_guided = self.student(*d_args, **d_kwargs)
        check()
        self._learn(t_out, s_out)
        t, s = self.main_of(t_out), self.main_of(s_out)
        if t.shape != s.shape:
            raise OutputError(
                "the student's output has another shape than the teacher's.",
                where=self.site_path,
                expected=outputs.describe(t),
                got=outputs.describe(s),
            )
        if guided or observe:
            target = t.detach()
            if not torch.compiler.is_compiling() and target.is_inference():
                target = target.clone()  # An inference tensor cannot be saved for a backward.
            self._record(guided, observe, self.main_of(s_guided), target, (args, kwargs))
        return self._join(route, t_out, s_out, t, s)

    @contextlib.contextmanager
    def _watching(self) -> Iterator[None]:
        """For a look at the student that must not change the run: no graph, no dropout, no running statistics."""
        modes = [(module, module.training) for module in self.student.modules()]
        self.student.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            for module, mode in modes:
                module.training = mode

    def try_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Call both once, for the checks that it makes; nothing is recorded (the blend is in eval)."""
        before, self.eval_route = self.eval_route, Route.MIX
        try:
            self._run_both(Route.MIX, False, False, args, kwargs)
        finally:
            self.eval_route = before

    def call_student(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the student as the parent calls the site; the first time, check that it can be."""
        if self.check_call is not None:
            self.check_call(args, kwargs)
            self.check_call = None  # Once: the parent calls a site in one way.
        return self.student(*args, **kwargs)

    def _join(self, route: Route, t_out: Any, s_out: Any, t: Tensor, s: Tensor) -> Any:
        if route is Route.STUDENT:
            return self._conform(s_out)
        if route is Route.TEACHER:
            return self._connect(t_out)
        weight = self.gate_weight if self.training else self.gate_alpha
        if route is Route.SELECT:
            self.ledger.watch(self.site_path, t, s)
            return outputs.set_main(t_out, self._place(), outputs.select_exact(t, s, weight))
        return outputs.set_main(t_out, self._place(), outputs.mix(t, s, weight))

    def _record(self, guided: bool, observe: bool, s: Tensor, t: Tensor, call: tuple[Any, Any]) -> None:
        """Leave guidance term and metrics in the ledger; recomputation and `no_grad` leave nothing."""
        again = not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1
        mask = self.mask_of(t, call, again=again)
        if guided and self.guidance_error is not None and torch.is_grad_enabled():
            if again:
                self.ledger.check_recomputation(self.site_path)
            error = self.guidance_error(s, t, mask)  # Also when recomputed: checkpointing compares what was saved.
            if not again:
                with torch.no_grad():
                    # Once the teacher's power is fixed, a pass over its output is saved.
                    power = power_sum(self._branch(t, call), mask) / t.shape[-1] if self.calibrating else None
                    term = Term(error, count(t, mask), power)
                self.ledger.terms.setdefault(self.site_path, []).append(term)
        if observe and not again:
            with torch.no_grad():
                a, b = self._branch(s, call), self._branch(t, call)
                values = (cosine_sum(a, b, mask), squared_error_sum(a, b, mask), power_sum(b, mask), count(b, mask))
            self.ledger.similarities.setdefault(self.site_path, []).append(torch.stack(values))

    def _branch(self, out: Tensor, call: tuple[Any, Any]) -> Tensor:
        """What the site adds to the residual stream: the output, or output minus input if it holds the residual."""
        return out - self.input_of(*call).detach() if self.holds_residual else out

    def input_of(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
        """The tensor that a call of this site transforms."""
        return outputs.main_input(args, kwargs, self.site_path, self.argument_names)

    def mask_of(self, like: Tensor, call: tuple[Any, Any], *, again: bool = False) -> Tensor | None:
        """Valid positions of this call: the padding mask of its forward, else one that the call itself shows."""
        if not self.use_mask:
            return None
        mask = self.ledger.recorded_mask if again else self.ledger.mask
        mask = mask if mask is not None else outputs.padding_mask(call[1], like)
        return outputs.valid_positions(mask, like, self.site_path)

    # ---- structure of outputs and calls ------------------------------------------------------------------------

    def _learn(self, t_out: Any, s_out: Any = None) -> None:
        """Find the main tensor and keep the teacher's structure for the time when it no longer runs."""
        if self.main_place == "auto":
            where = outputs.find_main(t_out, self.declared_output, self.site_path)
            outputs.main(t_out, where, self.site_path)
            self.teacher_structure = outputs.skeleton(t_out)
            self.main_place = where
        if s_out is not None:
            if not outputs.same_structure(s_out, t_out):
                raise OutputError(
                    "the student returned another structure than the teacher.",
                    where=self.site_path,
                    expected=outputs.describe(t_out),
                    got=outputs.describe(s_out),
                    do="return the teacher's structure, or the main tensor alone",
                )
            self.bare_student = isinstance(s_out, Tensor) and self._place() is not None
            dtype = self.main_of(t_out).dtype
            if self.main_of(s_out).dtype == dtype:
                self.cast = None
            elif not torch.is_autocast_enabled(self.gate_weight.device.type):
                self.cast = dtype

    def _place(self) -> outputs.Where:
        return None if self.main_place == "auto" else self.main_place

    def main_of(self, out: Any) -> Tensor:
        """The main tensor of an output of teacher or student."""
        return out if isinstance(out, Tensor) else outputs.main(out, self._place(), self.site_path)

    def _conform(self, s_out: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """The student's output in the teacher's structure; one that is not known yet is asked of the teacher, once."""
        if self.main_place == "auto":
            if self.teacher is None or not isinstance(s_out, Tensor):
                return s_out
            with torch.no_grad():
                own_args, own_kwargs = outputs.map_tensors((args, dict(kwargs or {})), torch.clone)
                self._learn(self.teacher(*own_args, **own_kwargs), s_out)
        place = self._place()
        return outputs.conform(outputs.cast_main(s_out, place, self.cast), place, self.teacher_structure)

    def _separate(
        self, teacher_leads: bool, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, Any], tuple[Any, Any], Callable[[], None]]:
        """Calls for teacher and student that share no mutable state, and a check to run after both.

        The module on the main path gets the caller's own objects (code after the site may rely on what it writes
        into them); the other gets its own containers, and copies of the tensors if either module writes into them.
        Until the first call has shown whether one does, copies are made.
        """
        outputs.refuse_caches((args, kwargs), self.site_path)
        own = (args, kwargs)
        spare = outputs.map_tensors(own, outputs.once(torch.clone if self.writes_input is not False else _alias))
        if torch.compiler.is_compiling():  # Version counters are not traced; copies stay until an eager call has shown.
            return (own, spare, lambda: None) if teacher_leads else (spare, own, lambda: None)
        held = [x for x in (*outputs.tensors(own), *outputs.tensors(spare)) if not x.is_inference()]
        before = [x._version for x in held]

        def check() -> None:
            wrote = before != [x._version for x in held]
            if wrote and self.writes_input is False:
                raise OutputError(
                    "a module wrote into its input, so teacher and student did not see the same.",
                    where=self.site_path,
                    expected="what the first call showed: no in-place change of the input",
                    do="make the module's first operation out of place, or clone the input in its forward",
                )
            # Only a call in training shows that nothing is written: an in-place dropout does nothing in eval.
            if held and (wrote or self.training):
                self.writes_input = wrote or bool(self.writes_input)

        return (own, spare, check) if teacher_leads else (spare, own, check)

    def active_teacher(self) -> nn.Module:
        """The teacher.

        Raises:
            StateError: It was released.
        """
        if self.teacher is not None and self.teacher.training:
            self.teacher.eval()  # A loop over all modules may have set it, past `train()` of this wrapper.
        if self.teacher is None:
            raise StateError(
                "the teacher of this site is gone: its part of the run is over and its memory was released.",
                where=self.site_path,
                do='install with release="finalize" to keep teachers until the end',
            )
        return self.teacher

    def _connect(self, out: Any) -> Any:
        """Let the loss depend on the student although only the teacher spoke, with a gradient of nothing.

        Else the first step of a fade with a frozen backbone would have no graph at all, and DDP would wait for
        gradients that never come.
        """
        if not (self.training and torch.is_grad_enabled()):
            return out
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        y = self.main_of(out)
        # One connection is enough for a graph; more would run a backward through the backbone for nothing.
        if not distributed and (y.requires_grad or not self.last):
            return out
        trained = [p for p in self.student.parameters() if p.requires_grad]
        return (
            outputs.set_main(out, self._place(), _Connect.apply(y, distributed or self.attached, *trained))
            if trained
            else out
        )

    # ---- what the rest of the model and of PyTorch sees ----------------------------------------------------------

    def train(self, mode: bool = True) -> Blend:
        """Set the mode of the student; the teacher stays in eval."""
        super().train(mode)
        if self.teacher is not None:
            self.teacher.eval()
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Blend:
        """Follow a move to another device, never a cast: alpha stays float32."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch has no types for it
        device = fn(torch.empty((), dtype=torch.float32, device=self.gate_weight.device)).device
        if device.type != "meta":
            self.gate_alpha, self.gate_weight = self.gate_alpha.to(device), self.gate_weight.to(device)
        return self

    def __getattr__(self, name: str) -> Any:
        """Public attributes that code around the site reads come from the teacher while it is there."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            modules = self.__dict__.get("_modules", {})
            teacher = modules.get("teacher")
            source = teacher if teacher is not None else modules.get("student")
            carried = self.__dict__.get("carried", {})
            if teacher is None and name in carried and not hasattr(source, name):
                return carried[name]
            if source is None or (name.startswith("_") and name != "_qkv_same_embed_dim"):
                raise
            if not hasattr(source, name):
                raise AttributeError(
                    f"{self.__dict__.get('site_path')}: neither the site nor its student has an attribute {name!r}. If "
                    f"code outside reads it off the old module, keep it: carry=({name!r},) in the swap."
                ) from None
        value = getattr(source, name)
        if isinstance(value, Tensor) and not self.__dict__.get("tensors_may_be_read", False):
            self.__dict__["tensors_may_be_read"] = True  # Once is enough.
            warnings.warn(
                f"{self.site_path}: code outside reads the tensor {name!r} of a module that is being replaced; if it "
                "computes with it, the student is bypassed. Replace the module that reads it instead.",
                CrossfadeWarning,
                stacklevel=2,
            )
        return value

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Student only, under `student.`: the teacher is rebuilt from the base model."""
        result = super().state_dict(*args, **kwargs)
        prefix = kwargs.get("prefix", args[1] if len(args) > 1 else "") + "teacher."
        for key in [key for key in result if key.startswith(prefix)]:
            del result[key]
        return result

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Accept a checkpoint taken in mid-fade (student keys) or of the plain model (its keys go to the teacher)."""
        given = [key for key in state_dict if key.startswith(prefix)]
        # A run's first module stands where the run's blend does; the others' keys go to the fillers behind it.
        inner = "0." if getattr(self.teacher, "is_chain", False) else ""
        teacher_keys = {} if self.teacher is None else self.teacher.state_dict()
        plain = {prefix + key.removeprefix(inner) for key in teacher_keys if key.startswith(inner)}
        students = {f"{prefix}student.{key}" for key in self.student.state_dict()}
        if (plain or students) and not (plain | students).intersection(given):
            error_msgs.append(
                f"{prefix.rstrip('.')}: none of the {len(given)} keys given for this site belong to its student "
                f"({len(students)} keys below 'student.') or to the original module ({len(plain)} keys)."
            )
        if self.teacher is not None:
            from_plain = bool(plain.intersection(given)) and not students.intersection(given)
            for key, value in teacher_keys.items():
                own = prefix + key.removeprefix(inner)
                replaced = from_plain and key.startswith(inner) and own in state_dict
                given_value = state_dict.pop(own) if replaced else value
                if replaced or not (from_plain and key.startswith(inner)):  # Else torch reports it as missing.
                    state_dict.setdefault(f"{prefix}teacher.{key}", given_value)
            if from_plain:
                for key, value in self.student.state_dict().items():
                    state_dict.setdefault(f"{prefix}student.{key}", value)
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

    def extra_repr(self) -> str:
        """Path and this step's route."""
        return f"path={self.site_path!r}, route={self.train_route.value}"


def is_blend(module: object) -> bool:
    """Whether `module` is a blend, also after a library changed its class (FSDP2 does)."""
    return getattr(type(module), "__crossfade_blend__", False) is True


def blends(model: nn.Module) -> Mapping[str, Blend]:
    """Every blend in `model` by path, each once."""
    return {path: module for path, module in model.named_modules() if isinstance(module, Blend)}
