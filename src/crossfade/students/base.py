"""What a student is, and how one is built for a site without touching the model or the global random state.

A student is any `nn.Module` that can be called as the teacher is called. A *factory* builds one per site:
`factory(teacher, site) -> nn.Module`.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import inspect
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import StudentError
from ..outputs import Where, cast_main, conform
from ..registry import lookup

__all__ = ["Adapter", "Factory", "SiteInfo", "StudentLike", "build", "check_call", "isolated_random"]


@dataclass(frozen=True)
class SiteInfo:
    """What a factory may know about its site.

    Attributes:
        path: Module path of the site (of its first place, if it has several).
        index: Number of the site in the swap, from 0.
        n: Number of sites in the swap.
        model: The whole model; read it, do not change it.
        seed: Seed of this site, derived from the plan's seed and the path.
    """

    path: str
    index: int
    n: int
    model: nn.Module
    seed: int


Factory = Callable[[nn.Module, SiteInfo], nn.Module]
StudentLike = str | Factory | nn.Module | Mapping[str, nn.Module]
"""A registered name, a factory, a module (for a single site), or modules by site path."""


def site_seed(seed: int, path: str) -> int:
    """A 63-bit seed from the plan's seed and a path."""
    return int.from_bytes(hashlib.blake2b(f"{seed}\0{path}".encode(), digest_size=8).digest(), "big") >> 1


@contextlib.contextmanager
def isolated_random(seed: int, device: torch.device) -> Iterator[None]:
    """Seed torch (CPU and `device`) and Python's `random` inside; put their states back afterwards."""
    state = random.getstate()
    devices = [device] if device.type not in ("cpu", "meta") else []
    try:
        with torch.random.fork_rng(devices=devices, device_type=device.type if devices else "cuda"):
            # Each generator by itself: torch.manual_seed would also move those of devices that are not forked.
            torch.default_generator.manual_seed(seed)
            if devices:
                torch.get_device_module(device).manual_seed(seed)
            random.seed(seed)
            yield
    finally:
        random.setstate(state)


def build(student: StudentLike, teacher: nn.Module, site: SiteInfo) -> nn.Module:
    """Build, place and check the student of one site.

    Args:
        student: See `StudentLike`.
        teacher: The module at the site; it is not changed.
        site: Where it stands.

    Returns:
        The student in the teacher's dtype and on its device, every floating-point parameter trainable, in the
        teacher's training mode.

    Raises:
        StudentError: Not a module, a single module for several sites, tensors shared with the model, size-0
            (sharded) or meta tensors.
    """
    first = next((p for p in teacher.parameters()), next(iter(site.model.parameters()), None))
    device = first.device if first is not None else torch.device("cpu")
    _refuse_unreadable(teacher, site)
    with isolated_random(site.seed, device):
        module = _make(student, teacher, site)
        if not isinstance(module, nn.Module):
            raise StudentError(
                "the factory returned no module.", where=site.path, expected="an nn.Module", got=type(module).__name__
            )
        _refuse_shared(module, site)
        _place(module, teacher, first, device, site.model.parameters())
    for parameter in module.parameters():
        if parameter.is_floating_point() or parameter.is_complex():
            parameter.requires_grad_(True)
    return module.train(teacher.training)


def _make(like: StudentLike, teacher: nn.Module, site: SiteInfo) -> Any:
    student: Any = like
    if isinstance(student, str):
        student = lookup("student", student)
    if isinstance(student, type) and not issubclass(student, nn.Module):
        student = student()  # `Copy` for `Copy()`: a factory class without arguments.
    if isinstance(student, Mapping):
        if site.path not in student:
            raise StudentError(
                "no student was given for this site.", where=site.path, got=", ".join(student), expected="one per path"
            )
        return student[site.path]
    if isinstance(student, nn.Module):
        if site.n > 1:
            raise StudentError(
                "one module cannot be the student of several sites.",
                where=site.path,
                got=f"{type(student).__name__} for {site.n} sites",
                do="pass a factory: lambda teacher, site: YourModule(...), or a dict of modules by path",
            )
        return student
    if not callable(student):
        raise StudentError(
            "this is not a student.",
            where=site.path,
            expected="a registered name, a factory (teacher, site) -> module, a module, or a dict by path",
            got=repr(student),
        )
    try:
        return student(teacher, site)
    except TypeError as error:
        raise StudentError(
            "the student factory failed.",
            where=site.path,
            expected="a factory that is called as (teacher, site) and returns a module",
            got=f"{getattr(student, '__name__', type(student).__name__)}: TypeError: {error}",
            do="wrap a class that takes other arguments: lambda teacher, site: YourModule(...)",
        ) from error


def _place(
    module: nn.Module, teacher: nn.Module, first: Tensor | None, device: torch.device, others: Iterable[Tensor]
) -> None:
    """Move the student to the teacher's device and floating dtype (the dtype of its first floating tensor)."""
    for name, tensor in named_tensors(module):
        if tensor.device.type == "meta":
            raise StudentError(
                "a tensor of the student is on the meta device.", where=name, do="build it with real values"
            )
    candidates = [*(t for _, t in named_tensors(teacher)), *([] if first is None else [first]), *others]
    floating = next((t for t in candidates if t.is_floating_point()), None)
    keep = bool(getattr(module, "crossfade_keep_dtype", False))
    module.to(device=device, dtype=None if keep or floating is None else floating.dtype)


def _refuse_unreadable(teacher: nn.Module, site: SiteInfo) -> None:
    for name, parameter in teacher.named_parameters():
        if parameter.device.type == "meta" or (
            parameter.numel() == 0 and getattr(parameter, "ds_shape", None) is not None
        ):
            raise StudentError(
                "the teacher's weights are not here (meta device or sharded away).",
                where=f"{site.path}.{name}",
                do="load the weights, and install before sharding or offloading",
            )


def _refuse_shared(module: nn.Module, site: SiteInfo) -> None:
    """A student that reuses a tensor of the model would train the teacher, and could not be saved."""
    own = {id(m) for m in module.modules()}
    inside = next((path for path, m in site.model.named_modules() if id(m) in own), None)
    if inside is not None:
        raise StudentError(
            "the student contains a module of the model itself.", where=site.path, got=inside, do="use copy.deepcopy"
        )
    theirs = {_storage(t): name for name, t in named_tensors(site.model) if t.numel() > 0}
    for name, tensor in named_tensors(module):
        other = theirs.get(_storage(tensor)) if tensor.numel() > 0 and tensor.device.type != "meta" else None
        if other is not None:
            raise StudentError(
                "a tensor of the student shares its memory with the model.",
                where=f"{site.path}: {name}",
                got=f"the storage of {other!r}",
                do="copy it: nn.Parameter(tensor.detach().clone())",
            )


def named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters, then buffers, by name."""
    yield from module.named_parameters()
    yield from module.named_buffers()


def _storage(tensor: Tensor) -> tuple[str, int]:
    return str(tensor.device), tensor.untyped_storage().data_ptr()


def deepcopy_of(teacher: nn.Module) -> nn.Module:
    """A copy of a teacher without the marks that its library left on it (hooks, "already initialised" flags)."""
    result = copy.deepcopy(teacher)
    for module in result.modules():
        for hooks in (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks):
            hooks.clear()
        module.__dict__.pop("_is_hf_initialized", None)
    for _, tensor in named_tensors(result):
        tensor.__dict__.pop("_is_hf_initialized", None)
    return result


class Adapter(nn.Module):
    """Lets a student answer a call that it does not take as it is. Part of the student: it stays after `finalize`.

    Args:
        module: The student.
        drop: Keyword arguments of the call that it does not get.
        where: Place of the main tensor in `structure`.
        structure: What the caller expects, with every tensor replaced by None (see `outputs.skeleton`).
        dtype: Dtype of the main tensor that the caller expects; None leaves it.

    Example:
        >>> attention = Adapter(nn.Linear(2, 2), drop=("mask",), where=0, structure=(None, None))
        >>> out, weights = attention(torch.ones(1, 2), mask=None)
        >>> out.shape, weights
        (torch.Size([1, 2]), None)
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        drop: tuple[str, ...] = (),
        where: Where = None,
        structure: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.module = module
        self.drop = drop
        self.where = where
        self.structure = structure
        self.dtype = dtype

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Shapes: the student's; the output in the caller's structure."""
        out = self.module(*args, **{key: value for key, value in kwargs.items() if key not in self.drop})
        return conform(cast_main(out, self.where, self.dtype), self.where, self.structure)


def check_call(student: nn.Module, teacher: str, path: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Whether the student can be called as the parent calls this site.

    Raises:
        StudentError: Its signature does not take the call; the message names the keyword and both classes.
    """
    inner = student.module if isinstance(student, Adapter) else student
    drop = student.drop if isinstance(student, Adapter) else ()
    forward = inspect.signature(inner.forward)
    given = {key: value for key, value in kwargs.items() if key not in drop}
    try:
        forward.bind(*args, **given)
    except TypeError as error:
        takes = [p.name for p in forward.parameters.values()]
        extra = [key for key in given if key not in takes]
        raise StudentError(
            f"the student cannot be called as the teacher is: {error}.",
            where=path,
            expected=f"{type(inner).__name__}.forward takes ({', '.join(takes)})",
            got=f"{teacher} is called with {len(args)} positional arguments and {', '.join(given) or 'no keywords'}",
            do=f"accept them, or declare that they may be lost: Swap(drop={extra!r})"
            if extra
            else "change its forward",
        ) from None
