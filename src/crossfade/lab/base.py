"""What the parts of the lab share: frozen settings with good messages, and registries."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from ..errors import CrossfadeError
from ..registry import nearest
from .inputs import InputError, need

need("pydantic", "cli")

from pydantic import BaseModel, ConfigDict, ValidationError  # noqa: E402 - the check above comes first

__all__ = ["Registry", "Settings", "checked"]

S = TypeVar("S", bound="Settings")
T = TypeVar("T")


class Settings(BaseModel):
    """Frozen data; an unknown key, a wrong type or a value out of range is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=False, arbitrary_types_allowed=True)


def checked(cls: type[S], data: Mapping[str, Any], where: str) -> S:
    """Settings from plain data.

    Raises:
        InputError: One line per fault: the key path, the value, what is allowed, the nearest known key.
    """
    try:
        return cls.model_validate(dict(data))
    except ValidationError as error:
        raise InputError("; ".join(_line(cls, fault, where) for fault in error.errors())) from None


def _line(cls: type[BaseModel], fault: Mapping[str, Any], where: str) -> str:
    path = ".".join(str(part) for part in (where, *fault["loc"]) if part != "")
    if fault["type"] == "extra_forbidden":
        known = _keys_at(cls, fault["loc"][:-1])
        hint = nearest(str(fault["loc"][-1]), known)
        return f"{path}: unknown key; allowed: {', '.join(known)}" + (f"; {hint}" if hint else "")
    if fault["type"] == "missing":
        return f"{path}: missing"
    inner = fault.get("ctx", {}).get("error")
    if isinstance(inner, CrossfadeError):
        return f"{path}: {' '.join(str(inner).split())}"
    message = fault["msg"].removeprefix("Value error, ")
    return f"{path} = {fault['input']!r}: {message[:1].lower()}{message[1:]}"


def _keys_at(cls: type[BaseModel], loc: tuple[Any, ...]) -> list[str]:
    """The keys that the settings at `loc` know."""
    for part in loc:
        field = cls.model_fields.get(str(part))
        inner = field.annotation if field is not None else None
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            cls = inner
    return list(cls.model_fields)


class Registry(Generic[T]):
    """Names for things of one kind; a thing registers itself beside its code."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, T] = {}

    def add(self, name: str) -> Callable[[T], T]:
        """A decorator that gives its argument a name."""

        def put(thing: T) -> T:
            if name in self._entries:
                raise ValueError(f"the {self.kind} name {name!r} is taken")
            self._entries[name] = thing
            return thing

        return put

    def __getitem__(self, name: str) -> T:
        """The thing of that name.

        Raises:
            InputError: There is none; the message lists the names and the nearest one.
        """
        if name not in self._entries:
            hint = nearest(name, list(self._entries))
            allowed = ", ".join(self._entries)
            raise InputError(f"unknown {self.kind} {name!r}; allowed: {allowed}" + (f"; {hint}" if hint else ""))
        return self._entries[name]

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def names(self) -> list[str]:
        """All names, in the order of registration."""
        return list(self._entries)
