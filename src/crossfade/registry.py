"""Names for things that are written to files, and the codec between frozen dataclasses and plain data.

Loading never imports: a name in a file resolves only to what was registered in this process. A registered frozen
dataclass is written with its fields, a registered function by its name alone.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from .errors import PlanError

__all__ = ["KINDS", "decode", "encode", "lookup", "nearest", "register", "registered_name"]

T = TypeVar("T")

KINDS = ("schedule", "resolver", "controller", "gate", "guidance", "initializer", "student", "target", "plan")

_entries: dict[str, dict[str, Any]] = {kind: {} for kind in KINDS}


def register(kind: str, name: str) -> Callable[[T], T]:
    """Give `thing` a name, so that a plan which holds it can be saved and loaded.

    Args:
        kind: One of `KINDS`: what the thing is.
        name: The name written to files. A name is taken once; only the same definition
            (module and qualified name) may be registered again, as when a notebook cell is run twice.

    Returns:
        A decorator that returns its argument unchanged.

    Raises:
        PlanError: `kind` is unknown, or `name` is taken.

    Example:
        >>> @register("schedule", "square_root")
        ... def square_root(t: float) -> float:
        ...     return 1.0 - t**0.5
        >>> lookup("schedule", "square_root") is square_root
        True
    """
    if kind not in _entries:
        raise PlanError("this kind cannot be registered.", expected=" | ".join(KINDS), got=repr(kind))

    def add(thing: T) -> T:
        taken = _entries[kind].setdefault(name, thing)
        if taken is not thing and _source(taken) == _source(thing):
            _entries[kind][name] = thing  # The same definition run again, as in a notebook.
        elif taken is not thing:
            raise PlanError(f"the {kind} name {name!r} is taken.", got=repr(thing), expected="a new name")
        return thing

    return add


def _source(thing: Any) -> tuple[Any, ...]:
    """Where a class or function was defined; itself for anything else."""
    named = getattr(thing, "__qualname__", None)
    return (thing.__module__, named) if named is not None and named != "<lambda>" else (id(thing),)


def nearest(name: str, known: list[str]) -> str | None:
    """A hint for a mistyped `name`: the closest names in `known`, or None."""
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    return f"did you mean {' or '.join(repr(c) for c in close)}?" if close else None


def lookup(kind: str, name: str) -> Any:
    """The thing registered as `name`.

    Raises:
        PlanError: Nothing of that kind has this name; the message lists the names that exist.
    """
    known = _entries.get(kind, {})
    if name not in known:
        raise PlanError(
            f"no {kind} is registered as {name!r}.",
            expected=", ".join(sorted(known)) or "nothing is registered",
            do=nearest(name, list(known)) or f'register yours: crossfade.register("{kind}", "{name}")',
        )
    return known[name]


def registered_name(thing: Any) -> tuple[str, str] | None:
    """`(kind, name)` under which `thing` was registered, or None."""
    for kind, known in _entries.items():
        for name, entry in known.items():
            if entry is thing:
                return kind, name
    return None


def encode(value: Any, where: str = "plan") -> Any:
    """Turn `value` into dicts, lists, strings, numbers, booleans and None.

    Args:
        value: Plain data, a registered thing, or a frozen dataclass whose class is registered.
        where: The key path, for the message.

    Raises:
        PlanError: Something in `value` has no registered name (a lambda, an instance of a private class).
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, re.Pattern):
        if not isinstance(value.pattern, str):
            raise PlanError("a pattern over bytes cannot be written.", where=where, got=repr(value))
        return {"kind": "target:regex", "pattern": value.pattern, "flags": value.flags}
    name = registered_name(value)
    if name is not None:
        return {"kind": ":".join(name)}
    if isinstance(value, Mapping) and "kind" in value:  # A key of the user's, not ours.
        return {"kind": "mapping", "items": [[str(key), encode(item, f"{where}.{key}")] for key, item in value.items()]}
    if isinstance(value, Mapping):
        return {str(key): encode(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [encode(item, f"{where}[{i}]") for i, item in enumerate(value)]
    name = registered_name(type(value))
    if name is not None and dataclasses.is_dataclass(value):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
        return {"kind": ":".join(name)} | {key: encode(item, f"{where}.{key}") for key, item in fields.items()}
    raise PlanError(
        "this value has no registered name, so it cannot be written to a file.",
        where=where,
        got=repr(value),
        do='register it (crossfade.register("student", "my_name")) or pass it again on loading',
    )


def decode(data: Any, where: str = "plan") -> Any:
    """The inverse of `encode`. Lists become tuples. Nothing is imported.

    Raises:
        PlanError: An unknown kind, name or key.
    """
    if isinstance(data, list):
        return tuple(decode(item, f"{where}[{i}]") for i, item in enumerate(data))
    if not isinstance(data, dict):
        return data
    if "kind" not in data:
        return {key: decode(item, f"{where}.{key}") for key, item in data.items()}
    if data["kind"] == "mapping":
        return _mapping(data.get("items"), where)
    if data["kind"] == "target:regex":
        return _compile(data.get("pattern"), data.get("flags", 0), where)
    kind, _, name = str(data["kind"]).partition(":")
    entry = lookup(kind, name)
    fields = {key: decode(item, f"{where}.{key}") for key, item in data.items() if key != "kind"}
    if not isinstance(entry, type) or not dataclasses.is_dataclass(entry):
        if fields:
            raise PlanError(f"{data['kind']!r} takes no fields.", where=where, got=", ".join(fields))
        return entry
    known = [f.name for f in dataclasses.fields(entry) if f.init]
    for key in fields:
        if key not in known:
            raise PlanError(
                f"{data['kind']!r} has no field {key!r}.",
                where=where,
                expected=", ".join(known),
                do=nearest(key, known),
            )
    try:
        return entry(**fields)
    except PlanError:
        raise
    except (TypeError, ValueError, OverflowError, AttributeError, LookupError) as error:
        raise PlanError(f"{data['kind']!r} cannot be built from this.", where=where, got=str(error)) from None


def _mapping(items: Any, where: str) -> dict[str, Any]:
    if not isinstance(items, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in items):
        raise PlanError("this is not a mapping.", where=where, expected="[[key, value], ...]", got=repr(items))
    return {str(key): decode(item, f"{where}.{key}") for key, item in items}


def _compile(pattern: Any, flags: Any, where: str) -> re.Pattern[str]:
    try:
        if not isinstance(pattern, str) or type(flags) is not int:
            raise TypeError("a pattern is text, its flags a number")
        return re.compile(pattern, flags)
    except (re.error, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise PlanError(
            "the regular expression is not valid.", where=where, expected="a pattern", got=f"{pattern!r}: {error}"
        ) from None
