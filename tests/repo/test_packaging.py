"""What a user installs and what a developer gets: metadata, the tested set, reasons, no private paths."""

from __future__ import annotations

import importlib.metadata
import os
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

import crossfade
from tests.repo import project

PYPROJECT = project.ROOT / "pyproject.toml"
CONSTRAINTS = project.ROOT / "constraints.txt"

# The extras that `make` installs, so the ones whose versions the tests vouch for.
TESTED_EXTRAS = ("cli", "hf", "timm", "dev")


def pyproject() -> dict[str, Any]:
    """The parsed pyproject.toml."""
    return tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))


def pins() -> dict[str, Version]:
    """The tested set: lower-case name -> version."""
    lines = [line for line in CONSTRAINTS.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    found = {}
    for line in lines:
        match = re.fullmatch(r"([A-Za-z0-9][\w.-]*)==([\w.!+]+)", line)
        assert match, f"constraints.txt pins exactly, by name, one a line; not so: {line!r}"
        found[canonical(match[1])] = Version(match[2])
    assert len(found) > 20
    return found


def canonical(name: str) -> str:
    """A package name in the one spelling that registries compare."""
    return re.sub(r"[-_.]+", "-", name).lower()


def test_the_version_is_written_in_one_place() -> None:
    version = pyproject()["project"]["version"]
    assert str(Version(version)) == version
    assert importlib.metadata.version("crossfade") == version
    assert crossfade.__version__ == version
    written = [
        project.relative_name(path)
        for path in project.project_files()
        if path != PYPROJECT and path.suffix in {".py", ".cff", ".toml", ".cfg"}
        if version in path.read_text(encoding="utf-8")
    ]
    assert written == []


def test_the_core_needs_torch_and_safetensors_only() -> None:
    # numpy is there for safetensors.torch.save_file, which needs it without asking for it.
    names = {Requirement(text).name for text in pyproject()["project"]["dependencies"]}
    assert names == {"numpy", "safetensors", "torch"}
    assert pyproject()["project"]["requires-python"] == ">=3.11"


def test_all_is_every_extra_but_the_developers() -> None:
    extras = pyproject()["project"]["optional-dependencies"]
    assert set(extras) == {"all", "cli", "data", "dev", "fla", "hf", "lightning", "timm"}
    (everything,) = extras["all"]
    assert Requirement(everything).extras == set(extras) - {"all", "dev"}


@pytest.mark.parametrize("extra", ["core", *TESTED_EXTRAS])
def test_the_tested_set_pins_what_make_installs_within_the_declared_bounds(extra: str) -> None:
    table = pyproject()["project"]
    texts = table["dependencies"] if extra == "core" else table["optional-dependencies"][extra]
    assert texts
    pinned = pins()
    for requirement in map(Requirement, texts):
        version = pinned.get(canonical(requirement.name))
        assert version is not None, f"constraints.txt does not pin {requirement.name}"
        assert requirement.specifier.contains(version, prereleases=True), f"{requirement} excludes {version}"


def test_the_tested_set_fits_every_platform() -> None:
    foreign = [name for name in pins() if name.startswith(("nvidia-", "cuda-")) or name in {"triton", "crossfade"}]
    assert foreign == []


def test_the_command_is_declared() -> None:
    assert pyproject()["project"]["scripts"] == {"crossfade": "crossfade.cli:main"}


def test_license_types_and_changelog_are_there() -> None:
    assert pyproject()["project"]["license"] == "Apache-2.0"
    text = (project.ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in text
    assert "END OF TERMS AND CONDITIONS" in text
    assert (project.PACKAGE / "py.typed").is_file()
    changelog = (project.ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert "\n## [Unreleased]\n" in changelog


def test_the_citation_names_the_software_and_the_paper() -> None:
    citation = yaml.safe_load((project.ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["cff-version"] == "1.2.0"
    assert citation["title"] == "crossfade"
    assert citation["license"] == pyproject()["project"]["license"]
    (paper,) = citation["references"]
    assert paper["title"].startswith("Deterministic Continuous Replacement")
    assert paper["identifiers"][0]["value"] == "arXiv:2511.18670"


def test_ci_runs_make_test() -> None:
    script = project.ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK), ".ci/run is not executable"
    assert "make test" in script.read_text(encoding="utf-8").splitlines()


def ignores_without_a_reason(lines: list[str]) -> tuple[int, list[str]]:
    """Counts the entries of ruff's ignore lists and returns those without a comment that says why."""
    inside, seen, bare = False, 0, []
    for line in lines:
        if re.match(r'(ignore|"[^"]*\*[^"]*") = \[', line):
            assert line.endswith("["), f"write one ignored rule a line, each with its reason: {line!r}"
            inside = True
        elif line.startswith("]"):
            inside = False
        elif inside and line.strip() and not line.strip().startswith("#"):
            seen += 1
            if not re.search(r'^\s+"[A-Z]+\d*",\s+# \w.{6,}', line):
                bare.append(line.strip())
    return seen, bare


def test_every_ignored_rule_has_its_reason() -> None:
    text = PYPROJECT.read_text(encoding="utf-8")
    seen, bare = ignores_without_a_reason(text.splitlines())
    lint = tomllib.loads(text)["tool"]["ruff"]["lint"]
    listed = len(lint["ignore"]) + sum(map(len, lint["per-file-ignores"].values()))
    assert seen == listed > 10, "an ignore list is written in a form that this test does not read"
    assert not bare, f"ignored without a reason: {bare}"


def test_a_bare_ignored_rule_is_found() -> None:
    seen, bare = ignores_without_a_reason(["ignore = [", '    "D105", # Reason enough for it.', '    "D107",', "]"])
    assert (seen, bare) == (2, ['"D107",'])


def test_every_ignored_warning_has_its_reason() -> None:
    filters = pyproject()["tool"]["pytest"]["ini_options"]["filterwarnings"]
    assert filters[0] == "error"
    lines = PYPROJECT.read_text(encoding="utf-8").splitlines()
    for text in filters[1:]:
        (index,) = [i for i, line in enumerate(lines) if text in line.replace('\\"', '"').replace("\\\\", "\\")]
        reasoned = "# " in lines[index] or lines[index - 1].lstrip().startswith("# ")
        assert reasoned, f"filterwarnings ignores {text!r} without saying why"


# A line that silences a tool, and the reason that must follow: "noqa: RULE - because" for ruff,
# "type: ignore[code]  # because" for mypy. Put together from parts so that this file passes its own test.
_SILENCED = re.compile("# (" + "noqa|type: ?" + r"ignore)\b(?P<rest>.*)")
_REASONED = re.compile(r"(: [A-Z]+\d+(, [A-Z]+\d+)* - \w.{4,}|\[[\w-]+(, ?[\w-]+)*\]  # \w.{4,})")


def unreasoned(lines: list[str]) -> tuple[int, list[str]]:
    """Counts the lines that silence ruff or mypy and returns those that do not say why."""
    silenced = [(line, match["rest"]) for line in lines if (match := _SILENCED.search(line))]
    return len(silenced), [line.strip() for line, rest in silenced if not _REASONED.match(rest)]


def test_every_silenced_line_says_why() -> None:
    read, bare = 0, []
    for path in project.project_files():
        if path.suffix == ".py" and path != Path(__file__):
            read += 1
            bare += [f"{project.relative_name(path)}: {line}" for line in unreasoned(_lines(path))[1]]
    assert read > 20
    assert not bare, f"silenced without a reason: {bare}"


def test_a_silenced_line_without_reason_is_found() -> None:
    mark = "# " + "noqa"
    lines = [
        f"x  {mark}",
        f"x  {mark}: E501",
        f"x  {mark}: E501 - a table",
        "x  # " + "type: ignore[arg-type]",
    ]
    seen, bare = unreasoned(lines)
    assert seen == 4
    assert len(bare) == 3


# Paths that exist on one developer's machine only, and settings that point pip at one; in parts, as above.
_PRIVATE = re.compile(
    r"(?<![\w.~])/(" + "|".join(["ho" + r"me/\w", "ro" + "ot/", "Us" + r"ers/\w", "wo" + "rk/", "op" + "t/"]) + ")"
    r"|[A-Z]:\\\\?Us" + r"ers\b"
    r"|fi" + r"le:///"
    r"|extra-ind" + r"ex-url|find-li" + r"nks"
)


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()


def test_no_file_names_a_path_of_a_developers_machine() -> None:
    read, found = 0, []
    for path in project.project_files():
        try:
            lines = _lines(path)
        except UnicodeDecodeError:
            continue  # A picture.
        read += 1
        found += [
            f"{project.relative_name(path)}:{number} {match[0]}"
            for number, line in enumerate(lines, 1)
            if (match := _PRIVATE.search(line))
        ]
    assert read > 20
    assert not found, found


@pytest.mark.parametrize(
    ("line", "private"),
    [
        ("see /ho" + "me/ann/model", True),
        ('"/ro' + 'ot/.cache"', True),
        ("pip install --find-li" + "nks x", True),
        ("docs/ho" + "me/page.md", False),
        ("the framework/ folder", False),
    ],
)
def test_a_private_path_is_found(line: str, private: bool) -> None:
    assert bool(_PRIVATE.search(line)) is private
