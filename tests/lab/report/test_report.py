"""The files of the report: complete, strict, the same each time, safe to open, and without anything to fetch."""

from __future__ import annotations

import csv
import html
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, NoReturn

import pytest

from crossfade.lab.inputs import InputError
from crossfade.lab.report import write_report
from tests.lab.report import runs

FIGURES = ("curves-steps", "curves-seconds", "interface", "variance")


class Reader(HTMLParser):
    """Collects tags, addresses and texts, and checks that every element is closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.open: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [value or "" for name, value in attrs if name in {"src", "href", "xlink:href", "srcset"}]
        if tag not in {"meta", "link", "br"}:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def read(folder: Path) -> tuple[str, Reader]:
    source = (folder / "report.html").read_text(encoding="utf-8")
    reader = Reader()
    reader.feed(source)
    assert not reader.open
    return source, reader


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = runs.write_run(tmp_path_factory.mktemp("whole"))
    write_report(folder)
    return folder


def test_all_files_are_there_and_nothing_else_is_left(tmp_path: Path) -> None:
    runs.write_run(tmp_path)
    before = set(tmp_path.rglob("*"))
    paths = write_report(tmp_path)
    names = ["report.html", "results.csv", "results.json"]
    names += [f"figures/{name}.{kind}" for name in FIGURES for kind in ("png", "svg")]
    assert [str(path.relative_to(tmp_path)) for path in paths] == names
    assert set(tmp_path.rglob("*")) - before == {*paths, tmp_path / "figures"}
    assert (tmp_path / "figures" / "interface.png").read_bytes().startswith(b"\x89PNG")


def test_the_same_cells_give_the_same_bytes(tmp_path: Path, whole: Path) -> None:
    for path in write_report(runs.write_run(tmp_path)):
        assert path.read_bytes() == (whole / path.relative_to(tmp_path)).read_bytes(), path.name


def test_csv_has_a_row_per_cell(whole: Path) -> None:
    with (whole / "results.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["method"], row["seed"]) for row in rows][:4] == [("kd", "0"), ("kd", "1"), ("kd", "2"), ("dcr", "0")]
    assert len(rows) == 9
    assert float(rows[3]["final_test"]) == 86.0
    assert float(rows[3]["behind_original"]) == 4.0
    assert float(rows[3]["better_than_reference"]) == 1.0
    assert rows[0]["better_than_reference"] == ""
    assert rows[0]["steps_to_within_4"] == ""
    assert float(rows[1]["steps_to_within_4"]) == 200.0
    assert float(rows[1]["seconds_to_within_4"]) == pytest.approx(20.0)
    assert float(rows[0]["seconds_wall"]) == 25.0


def test_json_is_strict_and_complete(whole: Path) -> None:
    def refuse(constant: str) -> NoReturn:
        raise AssertionError(constant)

    data = json.loads((whole / "results.json").read_text(encoding="utf-8"), parse_constant=refuse)
    assert data["best"] == "align"
    assert data["original"]["test"] == {"mean": 90.0, "std": 0.0, "n": 3}
    assert data["methods"]["dcr"]["test"] == {"mean": 87.0, "std": 1.0, "n": 3}
    assert data["methods"]["dcr"]["against_reference"]["interval_95"] == [0.0, 2.0]
    assert data["methods"]["dcr"]["per_seed"]["1"]["final"]["test"] == 88.0
    assert data["methods"]["kd"]["targets"][0]["reached"] == 2
    assert data["methods"]["kd"]["targets"][0]["per_seed"]["0"] is None
    assert data["methods"]["kd"]["curve"]["mean"] == [10.0, 60.0, 86.5]
    assert data["environment"]["command"].startswith("crossfade run")


def test_the_page_shows_the_numbers_and_the_command(whole: Path) -> None:
    source, reader = read(whole)
    text = " ".join(reader.text.split())
    for expected in (
        "Best on the test part: Alignment.",
        "87.00 ± 1.00",
        "3.00 ± 1.00",
        "+1.00",
        "0.00 to +2.00",
        "not separated",
        "+3.00 to +4.00",
        "2 of 3",
        "Within 4 of the original",
        "crossfade run small.yaml --out 'my run'",
        "0123abc",
        "torch 2.14.1",
        "model a small ViT",
        "1.0 MiB",
        "Floor",
    ):
        assert expected in text, expected
    assert source.count("<svg") == len(FIGURES)
    assert '<meta name="viewport"' in source
    assert "prefers-color-scheme: dark" in source
    assert all(f'id="figure-{name}"' in source for name in FIGURES)


def test_the_page_fetches_nothing_and_runs_nothing(whole: Path) -> None:
    source, reader = read(whole)
    assert not {"script", "iframe", "object", "embed", "img", "image", "base"} & set(reader.tags)
    assert reader.addresses
    assert all(address.startswith("#") or address == "data:," for address in reader.addresses)
    assert "@import" not in source
    assert "http:" not in source
    assert "https:" not in source
    assert set(re.findall(r"url\((.)", source)) <= {"#"}


def test_every_id_is_unique_and_every_reference_has_its_target(whole: Path) -> None:
    source, reader = read(whole)
    ids = re.findall(r'\bid="([^"]+)"', source)
    assert len(ids) == len(set(ids))
    used = {address[1:] for address in reader.addresses if address.startswith("#")}
    used |= set(re.findall(r"url\(#([^)]+)\)", source))
    assert used
    assert used <= set(ids)


def test_drawings_have_no_colour_that_a_dark_page_cannot_change(whole: Path) -> None:
    source, _ = read(whole)
    for drawing in re.findall(r'<svg[^>]*id="figure-(?:curves|variance).*?</svg>', source, flags=re.DOTALL):
        assert "var(--ink)" in drawing
        assert not re.findall(r"#[0-9a-f]{6}\b", drawing)


HOSTILE = "<script>alert('x')</script> & \"$x_\\frac$"


def test_everything_that_comes_from_the_run_is_escaped(tmp_path: Path) -> None:
    rows = [
        runs.cell(
            method, seed, title=HOSTILE, source=HOSTILE, method=f"{method}{HOSTILE}", key=HOSTILE,
            metric=HOSTILE, settings={HOSTILE: HOSTILE}, seconds={"total": 1.0, HOSTILE: 1.0},
            costs=[{"phase": HOSTILE, "steps": 1, "seconds_per_step": 0.1, "saved_bytes": 0}],
            interface=[{"step": s, "seconds": 0.0, "sites": {HOSTILE: {"cosine": 0.5}}} for s in (0, 1)],
        )
        for method in runs.TEST
        for seed in range(3)
    ]  # fmt: skip
    asked = runs.experiment(
        name=HOSTILE,
        methods={f"{m}{HOSTILE}": {} for m in runs.TEST},
        reference=f"kd{HOSTILE}",
        training={HOSTILE: HOSTILE},
    )
    write_report(runs.write_run(tmp_path, rows, asked=asked, environment={HOSTILE: HOSTILE, "command": HOSTILE}))
    source, reader = read(tmp_path)
    assert "script" not in reader.tags
    assert "<script" not in source
    assert source.count(html.escape(HOSTILE)) > 30


def rows_without(*keys: str) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if name not in keys} for row in runs.cells()]


def test_parts_without_data_are_left_out(tmp_path: Path) -> None:
    rows = rows_without("variance", "interface", "costs", "curvature", "facts", "settings", "stages", "key", "source")
    for row in rows:
        row["curve"] = row["curve"][:1]
    asked = {"name": "bare", "methods": {"kd": None, "dcr": None, "align": None}}
    paths = write_report(runs.write_run(tmp_path, rows, asked=asked, environment=None))
    assert [path.name for path in paths] == ["report.html", "results.csv", "results.json"]
    source, reader = read(tmp_path)
    assert "<svg" not in source
    assert "Cost per phase" not in reader.text
    assert "Repeat it" not in reader.text
    assert "Settings of" not in reader.text
    assert "Against Distillation" in reader.text  # Without a named reference the first method is it.
    assert "Every seed" in reader.text


def test_one_cell_alone_makes_a_report(tmp_path: Path) -> None:
    write_report(runs.write_run(tmp_path, [runs.cell("kd", 0, variance=[])]))
    _, reader = read(tmp_path)
    assert "86.00" not in reader.text
    assert "85.00" in reader.text
    assert "at least 3 seeds" in reader.text


def test_sites_may_differ_between_methods_and_a_cosine_may_be_missing(tmp_path: Path) -> None:
    def interface(*sites: str) -> list[dict[str, Any]]:
        return [{"step": s, "seconds": 0.0, "sites": {site: {"cosine": None} for site in sites}} for s in (0, 9)]

    rows = [runs.cell("kd", 0, interface=interface("a.b", "c")), runs.cell("dcr", 0, interface=interface("d"))]
    rows.append(runs.cell("align", 0))
    assert any(path.name == "interface.svg" for path in write_report(runs.write_run(tmp_path, rows)))


def test_lower_is_better_scores_near_zero_keep_their_digits(tmp_path: Path) -> None:
    rows = []
    for row in runs.cells():
        scores = {key: {name: (100 - value) / 100 for name, value in row[key].items()} for key in ("original", "final")}
        curve = [point | {"score": (100 - point["score"]) / 100} for point in row["curve"]]
        rows.append(row | scores | {"metric": "loss", "higher_is_better": False, "curve": curve})
    write_report(runs.write_run(tmp_path, rows, asked=runs.experiment(evaluation={"targets": [0.04]})))
    _, reader = read(tmp_path)
    text = " ".join(reader.text.split())
    assert "loss, lower is better" in text
    assert "0.1300 ± 0.0100" in text
    assert "+0.0100" in text
    assert "Within 0.04 of the original" in text
    assert "Best on the test part: Alignment." in text


def test_a_broken_cell_leaves_the_earlier_report(tmp_path: Path) -> None:
    paths = write_report(runs.write_run(tmp_path))
    before = {path: path.read_bytes() for path in paths}
    (tmp_path / "cells" / "new-s9.json").write_text("{", encoding="utf-8")
    with pytest.raises(InputError, match="new-s9"):
        write_report(tmp_path)
    assert {path: path.read_bytes() for path in paths} == before


def test_a_place_that_cannot_be_written_to(tmp_path: Path) -> None:
    runs.write_run(tmp_path)
    (tmp_path / "figures").write_text("a file, not a folder", encoding="utf-8")
    with pytest.raises(InputError, match=r"cannot be written(.|\n)*figures(.|\n)*make the folder writable"):
        write_report(tmp_path)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_many_methods_of_many_sites_are_drawn(tmp_path: Path) -> None:
    sites = {f"layers.{i}.self_attn": {"cosine": 0.5 - i / 24} for i in range(24)}
    rows = [
        runs.cell("kd", 0, method=f"m{i}", title=f"A method with a long name, number {i}",
                  interface=[{"step": s, "seconds": 0.0, "sites": sites} for s in range(0, 300, 20)])
        for i in range(14)
    ]  # fmt: skip
    write_report(runs.write_run(tmp_path, rows, asked=runs.experiment(methods={f"m{i}": {} for i in range(14)})))
    assert (tmp_path / "figures" / "interface.svg").stat().st_size < 4_000_000
