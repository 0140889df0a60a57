"""Where things are in the repository, and the reading order of the core."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "crossfade"
ARCHITECTURE = ROOT / "docs" / "design" / "architecture.md"

# Folders of the package that build on the core. Every other file is core and stands in the reading order.
OUTER = ("cli", "integrations", "lab")

_ENTRY = re.compile(r"^(?P<file>\w+\.py)$|^(?P<folder>\w+)/ \((?P<first>\w+\.py) first\)$")


@dataclass(frozen=True)
class Entry:
    """One line of the reading order: a file, or a folder whose first file the others may import."""

    name: str
    first: str | None = None

    @property
    def exists(self) -> bool:
        """Whether the package has that file or folder."""
        path = PACKAGE / self.name
        return path.is_file() if self.first is None else (path / self.first).is_file()


def reading_order(text: str | None = None) -> list[Entry]:
    """Reads the fenced list under "Reading order" in the architecture note (or in `text`)."""
    text = ARCHITECTURE.read_text(encoding="utf-8") if text is None else text
    found = re.search(r"^## Reading order$.*?^```\w*\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    assert found, 'docs/design/architecture.md has no fenced list under "## Reading order"'
    entries = []
    for line in found[1].splitlines():
        match = _ENTRY.match(line)
        assert match, f"cannot read this line of the reading order: {line!r}"
        entries.append(Entry(match["file"] or match["folder"], match["first"]))
    return entries


def core_files() -> list[Path]:
    """All Python files of the core as they are on disk, relative to the package, without the front door."""
    files = (path.relative_to(PACKAGE) for path in sorted(PACKAGE.rglob("*.py")))
    return [path for path in files if path.parts[0] not in OUTER and path != Path("__init__.py")]


def module_name(relative: Path) -> str:
    """The dotted name of a file given relative to the package."""
    parts = relative.with_suffix("").parts
    return ".".join(("crossfade", *(parts[:-1] if parts[-1] == "__init__" else parts)))


def project_files() -> list[Path]:
    """The files that belong to the repository: tracked ones, and new ones that git does not ignore."""
    if shutil.which("git") and (ROOT / ".git").exists():
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout.decode()
        files = [ROOT / name for name in listed.split("\0") if name]
    else:
        # An unpacked archive has no git; what make writes is then told apart by name.
        skipped = ("build", "dist", "demo-out", "bench-out", "__pycache__")
        files = [
            path
            for path in ROOT.rglob("*")
            if not any(
                part in skipped or (part.startswith(".") and part not in {".ci", ".gitignore"})
                for part in path.relative_to(ROOT).parts
            )
        ]
    return sorted(path for path in files if path.is_file())


def documents() -> list[Path]:
    """README.md, CONTRIBUTING.md and every Markdown file under docs/."""
    return [
        path
        for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")))
        if path.is_file()
    ]


def relative_name(path: Path) -> str:
    """A path as it is written in messages and test ids."""
    return path.relative_to(ROOT).as_posix()
