from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from crossfade.lab.inputs import InputError
from crossfade.lab.tasks import TASKS, Loaded
from crossfade.lab.tasks import cifar100 as module
from crossfade.lab.tasks.cifar100 import CIFAR100, fine_tune, read_folder
from tests.lab.tasks.conftest import TINY_VIT, write_images

pytest.importorskip("timm")


def test_a_folder_is_read_class_by_class(images: Path) -> None:
    found, labels = read_folder(images / "test", ["blue", "green", "red"])
    assert found.shape == (12, 3, 32, 32)
    assert found.dtype == torch.uint8
    assert labels.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert found.float().mean((2, 3)).argmax(1).tolist() == labels.tolist()


def test_bad_folders_are_bad_input(tmp_path: Path) -> None:
    from PIL import Image

    with pytest.raises(InputError, match="no images"):
        read_folder(tmp_path, ["a"])
    (tmp_path / "a").mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "a" / "0.png")
    Image.new("L", (8, 9)).save(tmp_path / "a" / "1.png")
    with pytest.raises(InputError, match="one size"):
        read_folder(tmp_path, ["a"])
    (tmp_path / "a" / "1.png").write_bytes(b"no image")
    with pytest.raises(InputError, match=r"1\.png"):
        read_folder(tmp_path, ["a"])


def test_a_tenth_of_the_training_images_is_held_out(cifar100: Loaded) -> None:
    assert cifar100.sizes == {"train": 54, "validation": 6, "test": 12}


def test_augmentation_is_the_generators(cifar100: Loaded) -> None:
    index = torch.arange(8)

    def drawn(seed: int | None) -> Tensor:
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        return cifar100.batch(index, "train", generator)["image"]

    assert torch.equal(drawn(1), drawn(1))
    assert not torch.equal(drawn(1), drawn(2))
    assert torch.equal(drawn(None), drawn(None))
    assert not torch.equal(drawn(1), drawn(None))
    assert not cifar100.fixed


def test_without_augmentation_a_sample_is_always_the_same(images: Path, tmp_path: Path) -> None:
    task = CIFAR100(images=images, crop=0, flip=False, **TINY_VIT)
    fine_tune(task.model_copy(update={"stage_zero": module.StageZero(head_epochs=0, epochs=0)}), tmp_path / "t")
    loaded = task.model_copy(update={"teacher": tmp_path / "t"}).load()
    assert loaded.fixed
    index = torch.arange(4)
    drawn = loaded.batch(index, "train", torch.Generator().manual_seed(0))
    assert torch.equal(drawn["image"], loaded.batch(index)["image"])


def test_images_are_resized_by_the_forward(cifar100: Loaded) -> None:
    batch = cifar100.batch(torch.arange(2))
    small = {**batch, "image": batch["image"][..., ::2, ::2]}
    assert cifar100.forward(cifar100.model, small).shape == (2, 3)


def test_smoothing_is_in_the_loss(cifar100: Loaded) -> None:
    batch = {"label": torch.tensor([0])}
    output = torch.tensor([[30.0, 0.0, 0.0]])
    # With 0.1 spread over three classes, two thirds of it stand on scores that are 30 lower.
    assert float(cifar100.loss(output, batch)) == pytest.approx(30.0 * 0.1 * 2 / 3, rel=1e-4)


def test_stage_zero_learns_and_the_teacher_is_what_it_wrote(images: Path, tmp_path: Path) -> None:
    task = CIFAR100(images=images, **{**TINY_VIT, "stage_zero": {"head_epochs": 1, "epochs": 6, "batch_size": 6}})
    seen: list[tuple[str, int, int]] = []
    facts = fine_tune(task, tmp_path / "new" / "teacher.safetensors", lambda *now: seen.append(now))
    assert seen == [("head", 1, 1), *(("all", epoch, 6) for epoch in range(1, 7))]
    assert facts["test"] > 80.0
    loaded = task.model_copy(update={"teacher": tmp_path / "new" / "teacher.safetensors"}).load()
    assert loaded.score(loaded.model, "test") == facts["test"]
    assert all(parameter.requires_grad for parameter in loaded.model.parameters())
    with safe_open(tmp_path / "new" / "teacher.safetensors", framework="pt") as file:
        assert json.loads(file.metadata()["facts"]) == facts
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["teacher.safetensors"]


def test_the_head_learns_alone_at_first(images: Path, tmp_path: Path) -> None:
    def weights(**stage_zero: Any) -> dict[str, Tensor]:
        path = tmp_path / "teacher.safetensors"
        fine_tune(CIFAR100(images=images, **{**TINY_VIT, "stage_zero": stage_zero}), path)
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping

    start, end = weights(head_epochs=0, epochs=0), weights(head_epochs=1, epochs=0, batch_size=6)
    changed = {name for name in start if not torch.equal(start[name], end[name])}
    assert changed == {"head.weight", "head.bias"}


def test_the_teacher_is_trained_once_and_cached(images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    task = CIFAR100(images=images, **{**TINY_VIT, "stage_zero": {"head_epochs": 1, "epochs": 0}})
    first = task.load()
    monkeypatch.setattr(module, "_stage_zero", None)
    again = task.load()
    assert again.facts["teacher"] == first.facts["teacher"]
    assert all(map(torch.equal, first.model.state_dict().values(), again.model.state_dict().values()))


def test_stage_zero_does_not_move_the_global_generator(images: Path, tmp_path: Path) -> None:
    before = torch.get_rng_state()
    fine_tune(CIFAR100(images=images, **{**TINY_VIT, "stage_zero": {"head_epochs": 1, "epochs": 0}}), tmp_path / "t")
    assert torch.equal(torch.get_rng_state(), before)


def test_hours_on_the_cpu_are_refused(images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    task = CIFAR100(images=images, **{**TINY_VIT, "stage_zero": {"epochs": 10_000}})
    with pytest.raises(InputError, match="no GPU"):
        fine_tune(task, tmp_path / "teacher.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_other_weights_and_unknown_models_are_bad_input(images: Path, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"x": torch.zeros(1)}, tmp_path / "other.safetensors")
    (tmp_path / "broken.safetensors").write_bytes(b"nothing")
    for name in ("other.safetensors", "broken.safetensors", "missing.safetensors"):
        with pytest.raises(InputError, match="teacher"):
            CIFAR100(images=images, teacher=tmp_path / name, **TINY_VIT).load()
    with pytest.raises(InputError, match=r"task\.model"):
        CIFAR100(images=images, model="no_such_vit", pretrained=False).load()


def test_too_few_images_are_bad_input(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="too few images"):
        CIFAR100(images=write_images(tmp_path, train=3, test=1), **TINY_VIT).load()


def test_the_hub_needs_the_datasets_library() -> None:
    if importlib.util.find_spec("datasets") is not None:
        pytest.skip("the datasets library is installed")
    with pytest.raises(InputError, match=r"pip install 'crossfade\[data\]'"):
        TASKS["cifar100"](**TINY_VIT).load()


def test_parquet_files_are_read_like_the_folder(images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets", reason="needs: pip install 'crossfade[data]'")
    import pyarrow as pa
    from pyarrow import parquet

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    names = ["blue", "green", "red"]
    schema = datasets.Features({"img": datasets.Image(), "fine_label": datasets.ClassLabel(names=names)}).arrow_schema
    for part in ("train", "test"):
        files = [
            (path, number) for number, name in enumerate(names) for path in sorted((images / part / name).iterdir())
        ]
        rows = [{"img": {"bytes": path.read_bytes(), "path": None}, "fine_label": number} for path, number in files]
        parquet.write_table(pa.Table.from_pylist(rows, schema=schema), tmp_path / f"{part}-0.parquet")
    ours = module._images(CIFAR100(images=images))
    theirs = module._images(CIFAR100(images=tmp_path))
    assert all(map(torch.equal, ours, theirs))
    (tmp_path / "train-0.parquet").unlink()
    with pytest.raises(InputError, match="no images"):
        module._images(CIFAR100(images=tmp_path))
