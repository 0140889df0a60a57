"""Surgery: put a plan into a model. Resolve, build, check, and only then change anything."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from . import outputs
from .blend import Blend, is_blend
from .changes import Changes, refuse_wrapped
from .errors import OutputError, PlanError, SelectionError, StateError, StudentError
from .fade import Fade, Release
from .ledger import Ledger
from .plan import Plan, Swap
from .runs import Chain, PassThrough
from .site import Site
from .students import Adapter, SiteInfo, build, check_call
from .students.base import isolated_random, site_seed
from .targets import Match, Selection, select
from .training import freeze

__all__ = ["install", "stages"]


@dataclass
class _Built:
    """One site before the model is touched."""

    match: Match
    swap: Swap
    index: int
    n: int
    teacher: nn.Module
    student: nn.Module


def install(
    model: nn.Module,
    plan: Plan,
    *,
    total_steps: int | None = None,
    probe: Any = None,
    release: Release = "when_done",
    metrics_every: int = 10,
    snapshot: bool = False,
) -> Fade:
    """Put a plan into a model, in place: at each site a blend of the module that was there and its student.

    Nothing is changed until everything is resolved, built and checked; a call that fails leaves the model, the global
    random state and the training flags as they were.

    Args:
        model: The plain model. Install before wrapping (DDP, FSDP, `torch.compile`) and before building the optimizer.
        plan: What to replace, by what, and how.
        total_steps: Optimizer steps of the whole run; None only if every schedule counts in steps.
        probe: A batch (mapping, tuple, single argument, or function of the model) for a trial call of every site:
            students that do not fit are found before anything is changed.
        release: `"when_done"` lets each teacher go as soon as it is never needed again; `"finalize"` keeps it, for
            `view("teacher")` and `revert`.
        metrics_every: Measure interface cosine and error every so many steps for `log()`; 0 never.
        snapshot: Keep a copy of the weights, so that `revert` works although the backbone trains.

    Returns:
        The handle.

    Raises:
        SelectionError: A target matches nothing, or sites overlap.
        StudentError: A student cannot be built, or does not take the call.
        OutputError: A student's output does not fit (with `probe`).
        PlanError: A schedule needs `total_steps`, or leaves [0, 1].
        StateError: Already installed, or the model is wrapped.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        >>> fade = install(model, Plan(targets="0", student=lambda teacher, site: nn.Linear(2, 2)), total_steps=10)
        >>> type(model[0]).__name__, [site.phase for site in fade.sites]
        ('Blend', ['align'])
        >>> type(fade.revert()[0]).__name__
        'Linear'
    """
    refuse_wrapped(model)
    if "_crossfade" in model.__dict__:
        raise StateError("a plan is already installed in this model.", do="finalize or revert it first")
    if not isinstance(plan, Plan):
        raise PlanError("this is not a plan.", expected="a crossfade.Plan", got=type(plan).__name__)
    if total_steps is not None and (type(total_steps) is not int or total_steps < 1):
        raise PlanError("total_steps is a whole number of optimizer steps.", expected=">= 1", got=repr(total_steps))
    if release not in ("when_done", "finalize"):
        raise PlanError("unknown release.", expected='"when_done" or "finalize"', got=repr(release))
    built = [_build(model, plan, *site) for site in _resolve(model, plan)]
    _check_built(built)
    ledger, sites = Ledger(), []
    modes = [(module, module.training) for item in built for module in item.teacher.modules()]
    try:
        found = {id(module): mode for module, mode in modes}
        sites += [_site(item, ledger, found) for item in built]
        for site in sites:
            site.seek(0, total_steps, plan.seed)
        _check_names(plan, sites)
        if probe is not None:
            _probe(model, built, sites, probe)
        copy = {key: value.detach().clone() for key, value in model.state_dict().items()} if snapshot else None
        with Changes() as changes:
            for site in sites:
                _mount(changes, model, site)
            flags = [(p, p.requires_grad) for p in _outside(model)]
            freeze(changes, model, sites, plan.trains)
            fade = _start(
                model,
                plan,
                sites,
                ledger,
                total_steps,
                release,
                metrics_every,
                flags=flags,
                snapshot=copy,
                changes=changes,
            )
    except BaseException:
        for module, mode in modes:  # Building a blend put its teacher in eval.
            module.training = mode
        raise
    return fade


def stages(
    model: nn.Module,
    *plans: tuple[Plan, int],
    probe: Any = None,
    release: Release = "finalize",
    metrics_every: int = 10,
) -> Iterator[Fade]:
    """Plans in sequence on the same sites and students: align, then fade, then fine-tune.

    Args:
        model: The plain model.
        plans: `(plan, total_steps)` of each stage. The students are those of the first plan.
        probe: As for `install`.
        release: As for `install`; teachers are kept by default, since a later stage may need them.
        metrics_every: As for `install`.

    Yields:
        The same handle, once per stage, its clock at 0. Build an optimizer, attach it, and train to the stage's end.

    Raises:
        StateError: The loop moved on before the stage's steps were done.

    Example:
        >>> from crossfade.gates import Deterministic
        >>> from crossfade.guidance import DeepFeatureGuidance
        >>> model, make = nn.Sequential(nn.Linear(2, 2)), lambda teacher, site: nn.Linear(2, 2)
        >>> warm = Plan(targets="0", student=make, gate=Deterministic(1.0), guidance=DeepFeatureGuidance())
        >>> fade_out = Plan(targets="0", student=make, gate=Deterministic("linear"))
        >>> for fade in stages(model, (warm, 2), (fade_out, 3)):
        ...     optimizer = torch.optim.SGD(fade.parameter_groups(), lr=0.1)
        ...     fade.attach(optimizer)
        ...     for _ in range(fade.total_steps):
        ...         (model(torch.ones(1, 2)).square().sum() + fade.guidance()).backward()
        ...         optimizer.step()
        >>> type(fade.finalize()[0]).__name__
        'Linear'
    """
    if not plans:
        raise PlanError("stages needs at least one plan.", expected="(plan, total_steps), ...", got="nothing")
    fade: Fade | None = None
    for plan, total_steps in plans:
        if fade is None:
            fade = install(
                model, plan, total_steps=total_steps, probe=probe, release=release, metrics_every=metrics_every
            )
        else:
            if fade.total_steps is not None and fade.step_count < fade.total_steps:
                raise StateError(
                    "the stage is not over.",
                    do="train to its end before the loop moves on",
                    expected=f"{fade.total_steps} optimizer steps",
                    got=fade.step_count,
                )
            fade.begin(plan, total_steps)
        yield fade


# ---- resolve and build ---------------------------------------------------------------------------------------------


def _resolve(model: nn.Module, plan: Plan) -> list[tuple[Swap, Match, int, int]]:
    selections = [select(model, swap.targets) for swap in plan.swaps]
    every = [match for selection in selections for match in selection]
    seen: dict[str, int] = {}
    for number, selection in enumerate(selections):
        for match in selection:
            if seen.setdefault(match.path, number) != number:
                raise SelectionError(
                    "two swaps of the plan have the same site.", where=match.path, do="exclude it from one of them"
                )
    Selection(model, tuple(every)).check()
    return [
        (swap, match, index, len(selection))
        for swap, selection in zip(plan.swaps, selections, strict=True)
        for index, match in enumerate(selection)
    ]


def _build(model: nn.Module, plan: Plan, swap: Swap, match: Match, index: int, n: int) -> _Built:
    # The students of a run are built from its first module.
    info = SiteInfo(match.path, index, n, model, site_seed(plan.seed, match.path))
    student = build(swap.student, match.module, info)
    if swap.drop:
        student = Adapter(student, drop=swap.drop).train(student.training)
    teacher = match.module if match.run is None else Chain(match.modules)
    return _Built(match, swap, index, n, teacher, student)


def _site(item: _Built, ledger: Ledger, modes: dict[int, bool]) -> Site:
    match, swap, teacher = item.match, item.swap, item.teacher
    blend = Blend(
        teacher,
        item.student,
        path=match.path,
        ledger=ledger,
        output=swap.output,
        residual=match.run is not None if swap.residual is None else swap.residual,
        teacher_gradient=swap.teacher_gradient,
    )
    blend.check_call = functools.partial(check_call, item.student, match.class_name, match.path)
    run = match.run
    fillers = () if run is None else tuple(PassThrough(blend, m) for m in match.modules[1:])
    return Site(
        path=match.path,
        paths=match.paths,
        index=item.index,
        n=item.n,
        swap=swap,
        blend=blend,
        run=run,
        fillers=fillers,
        parameters=match.parameters,
        teacher_class=match.class_name,
        teacher_flags=[(p, p.requires_grad) for p in teacher.parameters()],
        teacher_modes=[(m, modes[id(m)]) for m in teacher.modules()],
    )


def _check_built(built: list[_Built]) -> None:
    """Each site has a student of its own, and what is to be carried exists."""
    owner: dict[int, str] = {}
    for item in built:
        first = owner.setdefault(id(item.student), item.match.path)
        if first != item.match.path:
            raise StudentError(
                "the factory returned one module for two sites.",
                where=f"{first} and {item.match.path}",
                expected="a module of its own for each site",
                do="build it inside the factory",
            )
        for name in item.swap.carry:
            if not hasattr(item.teacher, name) and not hasattr(item.student, name):
                raise StudentError(
                    "an attribute to carry is nowhere.",
                    where=f"{item.match.path}.{name}",
                    expected="an attribute of the teacher or of the student",
                    do="leave it out of carry=, or define it on the student",
                )


def _check_names(plan: Plan, sites: list[Site]) -> None:
    """A site weight that names no site would be ignored; so it is an error."""
    for swap in plan.swaps:
        paths = [site.path for site in sites if site.swap is swap]
        for name in getattr(swap.guidance, "site_weights", {}):
            if name not in paths:
                raise PlanError("site_weights names no site.", got=name, expected=", ".join(paths))


# ---- check ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
def _probe(model: nn.Module, built: list[_Built], sites: list[Site], batch: Any) -> None:
    """Run the untouched model once; at each site, let the blend try the call that came.

    Raises:
        OutputError: A site was not reached, or its student does not fit.
    """
    modes = [(m, m.training) for m in model.modules()] + [(m, m.training) for s in sites for m in s.blend.modules()]
    reached: set[str] = set()
    hooks = []
    for item, site in zip(built, sites, strict=True):
        hooks.append(_try_site(item, site, reached))
    device = sites[0].blend.gate_weight.device
    nested = [m for m in model.modules() if isinstance(m, nn.TransformerEncoder) and m.use_nested_tensor]
    try:
        for encoder in nested:  # As it will be while the plan is installed: nested tensors cannot be mixed.
            encoder.use_nested_tensor = False
        model.eval()
        for site in sites:
            site.blend.eval()
        with isolated_random(0, device):
            outputs.feed(model, batch)
    finally:
        for hook in hooks:
            hook.remove()
        for module, mode in modes:
            module.training = mode
        for encoder in nested:
            encoder.use_nested_tensor = True
    missing = [site.path for site in sites if site.path not in reached]
    if missing:
        raise OutputError(
            "the probe's forward does not reach these sites.",
            where=", ".join(missing),
            do="give a probe that uses them, or leave them out",
        )


def _try_site(item: _Built, site: Site, reached: set[str]) -> Any:
    """A hook on the first module of the site that calls the blend with copies of what came."""
    busy = False

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal busy
        if busy or site.path in reached:  # The blend calls the teacher, which has this hook.
            return
        busy = True
        try:
            clones, named = outputs.map_tensors((args, dict(kwargs)), Tensor.clone)
            site.blend.try_call(clones, named)
        finally:
            busy = False
        reached.add(site.path)

    return item.match.module.register_forward_pre_hook(hook, with_kwargs=True)


def _outside(model: nn.Module) -> Iterator[nn.Parameter]:
    """Parameters that stay when the teachers go; one that a teacher shares with the backbone is among them."""
    seen: set[int] = set()
    stack = [model]
    while stack:
        module = stack.pop()
        if is_blend(module) or id(module) in seen:
            continue
        seen.add(id(module))
        yield from (p for p in module.parameters(recurse=False) if id(p) not in seen)
        seen.update(id(p) for p in module.parameters(recurse=False))
        stack.extend(module.children())


# ---- mutate --------------------------------------------------------------------------------------------------------

_FAST_PATHS = (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention)


def _mount(changes: Changes, model: nn.Module, site: Site) -> None:
    if site.run is None:
        changes.put(model, site.paths, site.blend)
    else:
        places = [f"{site.run.container}.{i}".lstrip(".") for i in range(site.run.start, site.run.stop)]
        for place, module in zip(places, (site.blend, *site.fillers), strict=True):
            changes.put(model, [place], module)
    for path in site.paths:
        above = (m for name, m in model.named_modules() if name and path.startswith(name + "."))
        if any(isinstance(m, _FAST_PATHS) for m in (model, *above)):
            # torch's fused encoder kernel reads its children's weights and never calls them; a hook keeps it off.
            site.blend.register_forward_pre_hook(_keep_fast_path_off)
            site.blend.__dict__["tensors_may_be_read"] = True
            for encoder in (model, *(m for name, m in model.named_modules() if name and path.startswith(name + "."))):
                if isinstance(encoder, nn.TransformerEncoder) and encoder.use_nested_tensor:
                    changes.set(encoder, "use_nested_tensor", False)  # Nested tensors cannot be mixed.
                    site.encoders.append(encoder)
            break


def _keep_fast_path_off(module: nn.Module, args: Any) -> None:
    """Does nothing; being there is enough."""


def _start(
    model: nn.Module,
    plan: Plan,
    sites: list[Site],
    ledger: Ledger,
    total_steps: int | None,
    release: Release,
    metrics_every: int,
    *,
    flags: list[tuple[nn.Parameter, bool]],
    snapshot: dict[str, Tensor] | None,
    changes: Changes,
) -> Fade:
    fade = Fade(
        model,
        plan,
        sites,
        ledger,
        total_steps=total_steps,
        release=release,
        metrics_every=metrics_every,
        flags=flags,
        snapshot=snapshot,
    )
    handle = model.register_forward_pre_hook(fade.before_forward, with_kwargs=True)
    changes.later(handle.remove)
    fade.hook_id = handle.id
    changes.set(model, "_crossfade", fade)
    for site in sites:
        site.blend.last = site is sites[-1]
    fade.seek(0)
    return fade
