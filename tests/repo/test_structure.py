"""The core is read from top to bottom: a file imports only files above it, and stays short."""

from __future__ import annotations

import ast
import importlib.util
import io
import tokenize
from pathlib import Path

import pytest

from tests.repo import project

# Lines of code: docstrings, comments and blank lines are not counted, so that nobody saves lines by explaining less.
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60


def code_lines(source: str) -> set[int]:
    """Numbers of the lines that hold code: no blank, no comment, no docstring."""
    skipped = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in skipped:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines


def imported_modules(source: str, module: str, *, is_package: bool = False) -> set[str]:
    """The dotted crossfade modules that `source` imports anywhere, inside functions too.

    `from crossfade import x` counts as `crossfade.x` where that is a module, else as the front door.
    """
    package = module if is_package else module.rpartition(".")[0]
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            for alias in node.names:
                submodule = f"{base}.{alias.name}"
                found.add(submodule if _is_module(submodule) else base)
    return {name for name in found if name.split(".")[0] == "crossfade"}


def _is_module(name: str) -> bool:
    path = project.PACKAGE.parent.joinpath(*name.split("."))
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def rank(name: str, order: list[project.Entry]) -> tuple[int, int] | None:
    """The place of a dotted module name in the reading order; None where it has none.

    Inside a folder the first file comes first, its siblings next and side by side, its `__init__` last.
    """
    parts = name.split(".")[1:]
    for index, entry in enumerate(order):
        if entry.first is None and parts == [Path(entry.name).stem]:
            return index, 0
        if entry.first is not None and parts[:1] == [entry.name]:
            inner = parts[1:]
            return index, 2 if not inner else int(inner != [Path(entry.first).stem])
    return None


def wrong_imports(source: str, module: str, order: list[project.Entry], *, is_package: bool = False) -> list[str]:
    """The imports of a core module that do not point upwards in the reading order."""
    own = rank(module, order)
    assert own is not None, f"{module} has no place in the reading order"
    wrong = []
    for name in sorted(imported_modules(source, module, is_package=is_package)):
        other = rank(name, order)
        if other is None or not other < own:
            wrong.append(f"{module} imports {name}")
    return wrong


def function_lengths(source: str) -> list[tuple[str, int, int]]:
    """Name, first line and number of lines of code of every function."""
    code = code_lines(source)
    return [
        (node.name, node.lineno, len(code.intersection(range(node.lineno, (node.end_lineno or node.lineno) + 1))))
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def test_reading_order_lists_each_entry_once_and_each_exists() -> None:
    order = project.reading_order()
    names = [entry.name for entry in order]
    assert len(names) > 10
    assert len(set(names)) == len(names), "the reading order lists an entry twice"
    missing = [entry.name for entry in order if not entry.exists]
    assert not missing, f"the reading order lists files that do not exist: {missing}"


def test_every_core_file_stands_in_the_reading_order() -> None:
    order = project.reading_order()
    files = project.core_files()
    assert len(files) > 10
    unlisted = [str(path) for path in files if rank(project.module_name(path), order) is None]
    assert not unlisted, f"add these to the reading order in docs/design/architecture.md: {unlisted}"


def test_core_files_import_only_upwards() -> None:
    order = project.reading_order()
    wrong, seen = [], 0
    for path in project.core_files():
        source = (project.PACKAGE / path).read_text(encoding="utf-8")
        module, is_package = project.module_name(path), path.name == "__init__.py"
        seen += len(imported_modules(source, module, is_package=is_package))
        wrong += wrong_imports(source, module, order, is_package=is_package)
    assert seen > 10, "found hardly any import between core files; the parser is probably broken"
    assert not wrong, wrong


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("crossfade.gates", "from crossfade.blend import Blend"),
        ("crossfade.gates", "from crossfade import blend"),
        ("crossfade.gates", "import crossfade.blend as b"),
        ("crossfade.gates", "def f():\n    from crossfade.blend import Blend"),
        ("crossfade.gates", "from . import blend"),
        ("crossfade.gates", "from crossfade import Blend"),
        ("crossfade.gates", "import crossfade"),
        ("crossfade.persist", "from crossfade.lab import runner"),
        ("crossfade.persist", "import crossfade.cli"),
        ("crossfade.persist", "from crossfade.integrations.transformers import Callback"),
        ("crossfade.students.base", "from crossfade.students import basic"),
        ("crossfade.students.basic", "import crossfade.students"),
    ],
)
def test_a_downward_import_is_found(module: str, source: str) -> None:
    assert wrong_imports(source, module, project.reading_order())


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("crossfade.gates", "from crossfade.errors import CrossfadeError"),
        ("crossfade.gates", "from crossfade import errors"),
        ("crossfade.gates", "import torch"),
        ("crossfade.plan", "from crossfade.students import Reinit"),
        ("crossfade.students.basic", "from crossfade.students.base import Student"),
        ("crossfade.students", "from crossfade.students.basic import Reinit"),
    ],
)
def test_an_upward_import_is_allowed(module: str, source: str) -> None:
    assert wrong_imports(source, module, project.reading_order(), is_package=module.endswith("students")) == []


def test_nothing_in_the_core_names_the_outer_packages_in_a_dynamic_import() -> None:
    calls = 0
    for path in project.core_files():
        source = (project.PACKAGE / path).read_text(encoding="utf-8")
        for outer in project.OUTER:
            assert f'"crossfade.{outer}' not in source, f"{path} reaches crossfade.{outer} by name"
        calls += 1
    assert calls > 10


def test_the_outer_packages_do_not_import_the_lab_or_the_command_line_upwards() -> None:
    """`integrations` serves the lab and the command line, and `lab` serves the command line."""
    forbidden = {"integrations": ("lab", "cli"), "lab": ("cli",)}
    for outer, above in forbidden.items():
        for path in sorted((project.PACKAGE / outer).rglob("*.py")):
            relative = path.relative_to(project.PACKAGE)
            names = imported_modules(
                path.read_text(encoding="utf-8"),
                project.module_name(relative),
                is_package=path.name == "__init__.py",
            )
            wrong = [name for name in names if name.split(".")[1:2] and name.split(".")[1] in above]
            assert not wrong, f"{relative} imports {wrong}"


def test_files_outside_the_lab_stay_short() -> None:
    files = [path for path in project.PACKAGE.rglob("*.py") if path.relative_to(project.PACKAGE).parts[0] != "lab"]
    assert len(files) > 10
    lengths = {project.relative_name(path): len(code_lines(path.read_text(encoding="utf-8"))) for path in files}
    long = {name: lines for name, lines in lengths.items() if lines > MAX_FILE_LINES}
    assert not long, f"files over {MAX_FILE_LINES} lines: {long}"


def test_functions_stay_short() -> None:
    seen, long = 0, []
    for path in sorted(project.PACKAGE.rglob("*.py")):
        for name, line, length in function_lengths(path.read_text(encoding="utf-8")):
            seen += 1
            if length > MAX_FUNCTION_LINES:
                long.append(f"{project.relative_name(path)}:{line} {name}: {length} lines")
    assert seen > 50, "found hardly any function"
    assert not long, f"functions over {MAX_FUNCTION_LINES} lines: {long}"


def test_reading_order_refuses_a_line_it_cannot_read() -> None:
    with pytest.raises(AssertionError, match="cannot read this line"):
        project.reading_order("## Reading order\n\n```text\nerrors.py\nsome prose\n```\n")
