"""The code in README.md and docs/ runs, and the commands that README.md gives exist."""

from __future__ import annotations

import re
import sys
import types
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.repo import project

# Blocks that cannot run here, as (file, reason). A block says so itself, behind the language:
# "python no-run: needs a GPU". Each one stands here too, so that none is skipped by accident.
NOT_RUN: set[tuple[str, str]] = set()

_FENCE = re.compile(r"^(?P<indent> *)```(?P<info>[^`\n]*)\n(?P<code>.*?)^(?P=indent)``` *$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """One fenced block: its info string, its code, and the line of the file where the code starts."""

    info: str
    code: str
    line: int

    @property
    def language(self) -> str:
        """The first word of the info string."""
        return self.info.split(" ")[0]


def blocks(text: str) -> list[Block]:
    """All fenced blocks of a Markdown text, in order."""
    found = []
    for match in _FENCE.finditer(text):
        code = "\n".join(line.removeprefix(match["indent"]) for line in match["code"].split("\n"))
        found.append(Block(match["info"].strip(), code, text.count("\n", 0, match.start("code")) + 1))
    return found


def document_blocks(path: Path) -> list[Block]:
    """All fenced blocks of a file; a fence that is opened and not closed is an error."""
    text = path.read_text(encoding="utf-8")
    found = blocks(text)
    fences = len(re.findall(r"^ *```", text, re.MULTILINE))
    assert fences == 2 * len(found), f"{project.relative_name(path)} has an unbalanced code fence"
    return found


def with_python() -> list[Path]:
    """The documents that hold Python to run."""
    return [path for path in project.documents() if any(b.info == "python" for b in document_blocks(path))]


def test_there_is_code_to_run() -> None:
    assert project.ROOT / "README.md" in with_python(), "README.md shows no Python"
    assert sum(b.info == "python" for path in with_python() for b in document_blocks(path)) >= 3


@pytest.mark.docs
@pytest.mark.parametrize("path", with_python(), ids=project.relative_name)
def test_python_blocks_run(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs the blocks of one file in order in one namespace, as a reader would who types them in."""
    monkeypatch.chdir(tmp_path)
    # A module of its own, so that classes defined in the docs can be copied, pickled and inspected.
    module = types.ModuleType("docs_" + re.sub(r"\W", "_", project.relative_name(path)))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    ran = 0
    for block in document_blocks(path):
        if block.info != "python":
            continue
        # The empty lines in front make a traceback name the line of the Markdown file.
        source = "\n" * (block.line - 1) + block.code
        exec(compile(source, str(path), "exec"), module.__dict__)
        ran += 1
    assert ran > 0


def test_blocks_that_do_not_run_are_listed_with_their_reason() -> None:
    found = set()
    for path in project.documents():
        for block in document_blocks(path):
            if block.language == "python" and block.info != "python":
                match = re.fullmatch(r"python no-run: (\S.*)", block.info)
                assert match, f"{project.relative_name(path)}:{block.line} has the odd mark {block.info!r}"
                found.add((project.relative_name(path), match[1]))
    assert found == NOT_RUN


def test_no_python_hides_behind_another_language_name() -> None:
    hidden = [
        f"{project.relative_name(path)}:{block.line} {block.info!r}"
        for path in project.documents()
        for block in document_blocks(path)
        if block.language.lower() in {"", "py", "py3", "python3", "pycon"} or block.language == "Python"
    ]
    assert not hidden, f"name the language of these blocks (python, or text): {hidden}"


def make_targets(makefile: str) -> set[str]:
    """The targets that a Makefile defines, without special ones and files."""
    return set(re.findall(r"^([a-z][\w-]*):(?!=)", makefile, re.MULTILINE))


def shell_lines(path: Path) -> list[str]:
    """The command lines in the shell blocks of a document, without prompts and comments."""
    lines = [
        line.strip().removeprefix("$ ").partition(" #")[0].rstrip()
        for block in document_blocks(path)
        if block.language in {"bash", "console", "sh", "shell"}
        for line in block.code.splitlines()
    ]
    return [line for line in lines if line and not line.startswith("#")]


def test_make_commands_in_the_docs_are_targets() -> None:
    targets = make_targets((project.ROOT / "Makefile").read_text(encoding="utf-8"))
    assert {"demo", "test", "check", "test-full", "mutants", "bench", "clean"} <= targets
    named = [
        (project.relative_name(path), word)
        for path in [*project.documents(), project.ROOT / "CONTRIBUTING.md"]
        for line in shell_lines(path)
        if line.startswith("make ")
        for word in line.split()[1:]
        if re.fullmatch(r"[a-z][\w-]*", word)
    ]
    assert ("README.md", "demo") in named, "README.md does not show `make demo`"
    unknown = [(name, word) for name, word in named if word not in targets]
    assert not unknown, f"not in the Makefile: {unknown}"


def test_links_between_documents_lead_somewhere() -> None:
    seen, broken = 0, []
    for path in [*project.documents(), project.ROOT / "CONTRIBUTING.md"]:
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", path.read_text(encoding="utf-8")):
            if re.match(r"[a-z]+:", target):
                continue
            seen += 1
            if not (path.parent / target).exists():
                broken.append(f"{project.relative_name(path)} -> {target}")
    assert seen > 0, "found no link between documents"
    assert not broken, broken


def test_the_block_parser_reads_what_it_should() -> None:
    text = "a\n```python\nx = 1\n```\n- item\n  ```python no-run: needs a GPU\n  y = 2\n  ```\n```text\nz\n```\n"
    assert [(b.info, b.code.strip(), b.line) for b in blocks(text)] == [
        ("python", "x = 1", 3),
        ("python no-run: needs a GPU", "y = 2", 7),
        ("text", "z", 10),
    ]
