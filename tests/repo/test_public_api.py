"""Every public name has a docstring and stands in the docs."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from tests.repo import project


def core_modules() -> list[ModuleType]:
    """The front door and every module of the core."""
    names = ["crossfade", *(project.module_name(path) for path in project.core_files())]
    return [importlib.import_module(name) for name in names]


def public_objects() -> Iterator[tuple[str, Any]]:
    """Every name in `__all__` of a core module, with what it stands for."""
    for module in core_modules():
        for name in getattr(module, "__all__", ()):
            yield f"{module.__name__}.{name}", getattr(module, name)


def public_members(cls: type) -> Iterator[tuple[str, Any]]:
    """The public methods and properties that a class of ours defines itself."""
    for name, member in vars(cls).items():
        if name.startswith("_"):
            continue
        if isinstance(member, property):
            yield name, member.fget
        elif isinstance(member, classmethod | staticmethod):
            yield name, member.__func__
        elif inspect.isfunction(member):
            yield name, member


def has_docstring(thing: Any) -> bool:
    """Whether a class or function says something of its own, not what a dataclass wrote for it."""
    text = (getattr(thing, "__doc__", None) or "").strip()
    return bool(text) and not (inspect.isclass(thing) and text.startswith(f"{thing.__name__}("))


def test_core_modules_have_a_docstring_and_say_what_is_public() -> None:
    modules = core_modules()
    assert len(modules) > 10
    assert not [module.__name__ for module in modules if not (module.__doc__ or "").strip()]
    assert not [module.__name__ for module in modules if not hasattr(module, "__all__")]


def test_every_public_name_has_a_docstring() -> None:
    seen, bare = 0, []
    for label, thing in public_objects():
        if not (inspect.isclass(thing) or callable(thing)):
            continue  # Constants and type aliases are explained in the comment beside them.
        if not getattr(thing, "__module__", "").startswith("crossfade"):
            continue
        seen += 1
        if not has_docstring(thing):
            bare.append(label)
        if inspect.isclass(thing):
            for name, member in public_members(thing):
                seen += 1
                if not has_docstring(member):
                    bare.append(f"{label}.{name}")
    assert seen > 40, "found hardly any public name"
    assert not bare, f"without a docstring: {sorted(set(bare))}"


def test_every_public_name_stands_in_the_docs() -> None:
    text = "\n".join(path.read_text(encoding="utf-8") for path in project.documents())
    words = set(re.findall(r"\w+", text))
    assert len(words) > 200, "found hardly any documentation"
    names = {label.rpartition(".")[2]: label for label, _ in public_objects()}
    assert len(names) > 20, "found hardly any public name"
    missing = sorted(label for name, label in names.items() if name not in words)
    assert not missing, f"in no page of the docs: {missing}"


def test_the_docstring_check_finds_a_bare_class_and_a_bare_method() -> None:
    from dataclasses import dataclass

    @dataclass
    class Bare:
        size: int

        def method(self) -> None: ...

    assert not has_docstring(Bare)
    assert [(name, has_docstring(member)) for name, member in public_members(Bare)] == [("method", False)]
