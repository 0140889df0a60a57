"""The examples in the docstrings of the package run and give what they show."""

from __future__ import annotations

import doctest
import importlib

import pytest
import torch

from crossfade import registry
from tests.repo.project import PACKAGE, module_name

FINDER = doctest.DocTestFinder(exclude_empty=True)
FLAGS = doctest.NORMALIZE_WHITESPACE


def modules() -> list[str]:
    return [module_name(path.relative_to(PACKAGE)) for path in sorted(PACKAGE.rglob("*.py"))]


def examples(name: str) -> list[doctest.DocTest]:
    module = importlib.import_module(name)
    return [test for test in FINDER.find(module, name) if test.examples]


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch):
    """An example may register a name; it must not be taken in the next test."""
    monkeypatch.setattr(registry, "_entries", {kind: dict(known) for kind, known in registry._entries.items()})


@pytest.mark.parametrize("name", modules())
def test_the_examples_of(name):
    try:
        tests = examples(name)
    except ModuleNotFoundError as error:
        pytest.skip(f"an extra is missing: {error.name}")
    for test in tests:
        test.globs.update(torch=torch, nn=torch.nn)
        report: list[str] = []
        torch.manual_seed(0)
        result = doctest.DocTestRunner(optionflags=FLAGS, verbose=False).run(test, out=report.append)
        assert result.failed == 0, "".join(report)


def test_that_examples_are_found():
    core = [name for name in modules() if name.split(".")[1:2] not in (["cli"], ["lab"], ["integrations"])]
    found = [test.name for name in core for test in examples(name)]
    assert len(found) > 20, found
    assert sum(len(test.examples) for name in core for test in examples(name)) > 20
