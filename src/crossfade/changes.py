"""Changes to a model that can be taken back: what makes install, finalize and revert all-or-nothing."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any

from torch import nn

from .errors import StateError
from .targets import parent_of

__all__ = ["Changes", "unwrapped"]


class Changes:
    """A list of changes made so far. Leaving its `with` block by an exception undoes them, last first.

    Example:
        >>> model = nn.Sequential(nn.Linear(1, 1))
        >>> try:
        ...     with Changes() as changes:
        ...         changes.put(model, ["0"], nn.Identity())
        ...         raise RuntimeError
        ... except RuntimeError:
        ...     print(model[0])
        Linear(in_features=1, out_features=1, bias=True)
    """

    def __init__(self) -> None:
        self._undo: list[Callable[[], object]] = []

    def put(self, model: nn.Module, paths: Iterable[str], module: nn.Module) -> None:
        """Let `module` stand at every path."""
        for path in paths:
            parent, name = parent_of(model, path)
            before = parent._modules[name]
            # Through the dictionary, since a name may hold a dot; the key keeps its place in the order.
            self._undo.append(functools.partial(parent._modules.__setitem__, name, before))
            parent._modules[name] = module

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute."""
        missing = object()
        before = owner.__dict__.get(name, missing) if hasattr(owner, "__dict__") else getattr(owner, name)

        def undo() -> None:
            if before is missing:
                delattr(owner, name)
            else:
                setattr(owner, name, before)

        self._undo.append(undo)
        setattr(owner, name, value)

    def children(self, container: nn.Module, modules: list[nn.Module | None]) -> None:
        """Give a list-like container other items, numbered from 0."""
        before = dict(container._modules)

        def fill(items: dict[str, nn.Module | None]) -> None:
            container._modules.clear()
            container._modules.update(items)

        self._undo.append(lambda: fill(before))
        fill({str(i): m for i, m in enumerate(modules)})

    def train_flag(self, parameter: nn.Parameter, value: bool) -> None:
        """Set `requires_grad`."""
        before = parameter.requires_grad
        self._undo.append(lambda: parameter.requires_grad_(before))
        parameter.requires_grad_(value)

    def mode(self, module: nn.Module, training: bool) -> None:
        """Set train or eval for a module and everything in it, remembering each flag."""
        flags = [(m, m.training) for m in module.modules()]

        def undo() -> None:
            for m, flag in flags:
                m.training = flag

        self._undo.append(undo)
        module.train(training)

    def later(self, undo: Callable[[], object]) -> None:
        """Remember how to take back something done elsewhere."""
        self._undo.append(undo)

    def undo(self) -> None:
        """Take everything back, last change first."""
        while self._undo:
            self._undo.pop()()

    def __enter__(self) -> Changes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.undo()


def unwrapped(model: nn.Module) -> nn.Module:
    """`model` itself, or what stands inside DDP, DataParallel or `torch.compile`."""
    while True:
        inner = model.__dict__.get("_modules", {}).get("_orig_mod")
        if inner is None and type(model).__name__ in ("DistributedDataParallel", "DataParallel"):
            inner = model.module
        if inner is None:
            return model
        model = inner


def refuse_wrapped(model: nn.Module) -> None:
    """Modules are replaced before a model is wrapped.

    Raises:
        StateError: `model` is a DDP, DataParallel, compiled or FSDP model.
    """
    if not isinstance(model, nn.Module):
        raise StateError("this is not a model.", expected="an nn.Module", got=type(model).__name__)
    sharded = next(
        (path for path, m in model.named_modules() if "FSDP" in type(m).__name__ or hasattr(m, "ds_id")), None
    )
    if unwrapped(model) is not model or sharded is not None:
        raise StateError(
            "the model is already wrapped or sharded.",
            where=sharded or None,
            expected="the plain model",
            got=type(model).__name__,
            do="install first; then compile, wrap in DDP or shard",
        )
