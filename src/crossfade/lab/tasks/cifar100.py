"""CIFAR-100 with a ViT-Small of ImageNet: the setting of arXiv 2511.18670. Wants a GPU, and a network for its files."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from pydantic import Field
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

from ...students.base import isolated_random
from ..base import Settings
from ..cache import content_hash, remembered
from ..inputs import InputError, need
from ..order import generator as dice
from ..order import order
from .base import TASKS, Batch, Classification, Loaded, Part, Task, evaluating, mean_over
from .teachers import augment

__all__ = ["CIFAR100", "StageZero", "fine_tune", "read_folder"]

VERSION = 1  # of stage 0; a change makes new teachers
DATA = "uoft-cs/cifar100"
HELD_OUT = 5000
# Images that stage 0 may look at without a GPU; more would take hours before the experiment begins.
MOST_ON_CPU = 100_000

Progress = Callable[[str, int, int], None]


class StageZero(Settings):
    """How the teacher is made of the ImageNet model: first the new head alone, then everything. Plain AdamW.

    Attributes:
        head_epochs: Epochs of the head alone.
        head_lr: Its peak rate.
        epochs: Epochs of the whole model.
        lr: Its peak rate; both stages warm up over a tenth of their steps (500 at most) and end in a cosine at 0.
        batch_size: Images per step.
        weight_decay: On matrices; not on the class token and the positions.
        clip: Gradient norm.
        seed: Of the head, the order and the augmentation.
    """

    head_epochs: int = Field(default=6, ge=0)
    head_lr: float = Field(default=1e-3, gt=0.0)
    epochs: int = Field(default=50, ge=0)
    lr: float = Field(default=5e-4, gt=0.0)
    batch_size: int = Field(default=128, ge=1)
    weight_decay: float = Field(default=0.05, ge=0.0)
    clip: float = Field(default=1.0, gt=0.0)
    seed: int = Field(default=0, ge=0)


@TASKS.add("cifar100")
class CIFAR100(Task):
    """CIFAR-100 (Krizhevsky 2009; 50,000 + 10,000 colour images of 32 x 32) and a ViT of timm fine-tuned on it.

    5,000 of the training images, by a fixed permutation, are the validation part; neither the teacher nor a student is
    trained on them. The source of this setting trains on all 50,000.

    Attributes:
        model: Name of a ViT in timm (Apache-2.0 weights for the default).
        model_args: More for `timm.create_model`, such as the size of a small one.
        resolution: The images are resized to it, on the model's device.
        pretrained: Begin stage 0 with timm's weights, which come from the Hub; otherwise with random ones.
        teacher: The fine-tuned weights, as `fine_tune` writes them; None: stage 0 runs at the first load and is cached.
        stage_zero: See `StageZero`; not used with `teacher`.
        images: Instead of the Hub, a folder with `train/CLASS/*.png` and `test/CLASS/*.png`, or with parquet files
            `*train*.parquet` and `*test*.parquet` of the `datasets` library.
        revision: Of the data on the Hub.
        crop: Most pixels (of 32) that a training image is shifted by.
        flip: Half of the training images are mirrored.
        smoothing: Of the labels.
    """

    model: str = "vit_small_patch16_224"
    model_args: dict[str, Any] = Field(default_factory=dict)
    resolution: int = Field(default=224, ge=8)
    pretrained: bool = True
    teacher: Path | None = None
    stage_zero: StageZero = StageZero()
    images: Path | None = None
    revision: str | None = None
    crop: int = Field(default=4, ge=0)
    flip: bool = True
    smoothing: float = Field(default=0.1, ge=0.0, lt=1.0)

    def load(self) -> Loaded:
        """Model and data; without `teacher`, stage 0 runs at the first call: tens of minutes of a large GPU."""
        data = _data(self)
        if self.teacher is not None:
            _read_weights(data.model, self.teacher.expanduser())
            data.facts["teacher"] = str(self.teacher)
        else:
            data.facts["teacher"] = self._cached(data)
        data.model.eval()
        return data

    def _cached(self, data: _Loaded) -> str:
        """Load the teacher from the cache, after stage 0 if it is not there; its key."""
        made_of = self.model_dump(mode="json", exclude={"teacher", "images", "revision"})
        key = content_hash(VERSION, made_of, data.images["train"], data.labels["train"])

        def train(model: nn.Module) -> dict[str, float]:
            return _stage_zero(model, self, data, None)

        remembered(data.model, "cifar100", key, train)
        return key


class _Loaded(Classification):
    """Images are kept as bytes, [N, 3, H, W] uint8, and normalised when a batch is made."""

    targets = "blocks.*.attn"

    def __init__(self, task: CIFAR100) -> None:
        train, train_labels, test, test_labels = _images(task)
        classes = int(train_labels.max()) + 1
        held = min(HELD_OUT, len(train) // 10)
        if held < 1 or len(test) < 1 or int(test_labels.max()) >= classes:
            raise InputError(
                "there are too few images.", where=task.images or DATA, got=f"{len(train)} + {len(test)} images"
            )
        dealt = order(0, 0, len(train))
        kept, validation = dealt[:-held], dealt[-held:]
        self.images = {"train": train[kept], "validation": train[validation], "test": test}
        self.labels = {"train": train_labels[kept], "validation": train_labels[validation], "test": test_labels}
        self.sizes = {part: len(found) for part, found in self.labels.items()}
        self.smoothing, self.task = task.smoothing, task
        self.model = _model(task, classes, pretrained=False)
        settings = need("timm", "timm").data.resolve_model_data_config(self.model)
        self.mean, self.std = (torch.tensor(settings[name]).view(3, 1, 1) for name in ("mean", "std"))
        self.facts: dict[str, Any] = {
            "data": str(task.images or DATA),
            "revision": task.revision,
            "model": task.model,
            "validation": f"{held} of the training images",
        }

    def batch(self, index: Tensor, part: Part = "train", generator: torch.Generator | None = None) -> Batch:
        """`image` [b, 3, H, W], normalised and of the data's own size; `label` [b]."""
        images = (self.images[part][index].float() / 255.0 - self.mean) / self.std
        if generator is not None:
            images = augment(images, generator, flip=self.task.flip, shift=self.task.crop)
        return {"image": images, "label": self.labels[part][index]}

    def forward(self, model: nn.Module, batch: Batch) -> Tensor:
        """Class scores [b, classes]; the images are resized here, so that little travels to the device."""
        images = batch["image"].to(next(model.parameters()).device)
        size = (self.task.resolution, self.task.resolution)
        if images.shape[-2:] != size:
            images = functional.interpolate(images, size, mode="bicubic", antialias=True)
        scores: Tensor = model(images)
        return scores

    def loss(self, output: Tensor, batch: Batch) -> Tensor:
        """Cross-entropy with label smoothing."""
        return functional.cross_entropy(
            output.float(), batch["label"].to(output.device), label_smoothing=self.smoothing
        )

    def score(self, model: nn.Module, part: Part, most: int | None = None) -> float:
        """Accuracy in percent."""
        right, seen = 0, 0
        with evaluating(model):
            for batch in mean_over(self, part, most, size=250):
                output = self.forward(model, batch)
                right += int((output.argmax(-1) == batch["label"].to(output.device)).sum())
                seen += len(output)
        return 100.0 * right / seen


class _Augmented(_Loaded):
    fixed = False


def _data(task: CIFAR100) -> _Loaded:
    """The data and an untrained model."""
    return (_Augmented if task.crop or task.flip else _Loaded)(task)


def _model(task: CIFAR100, classes: int, *, pretrained: bool) -> nn.Module:
    """A ViT of timm; what is random depends on the seed of stage 0 alone."""
    timm = need("timm", "timm")
    settings = {"img_size": task.resolution, "num_classes": classes, **task.model_args}
    try:
        with isolated_random(task.stage_zero.seed, torch.device("cpu")):
            model = timm.create_model(task.model, pretrained=pretrained, **settings)
    except (RuntimeError, ValueError, TypeError, OSError) as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InputError("timm cannot make this model.", where="task.model", got=f"{task.model}: {first}") from None
    assert isinstance(model, nn.Module)
    return model


def _read_weights(model: nn.Module, path: Path) -> None:
    try:
        model.load_state_dict(load_file(path))
    except (OSError, SafetensorError, RuntimeError) as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InputError(
            "the teacher's weights cannot be loaded.",
            where=path,
            expected="a safetensors file of this model, as `fine_tune` writes it",
            got=first,
        ) from None


# ---- stage 0 -------------------------------------------------------------------------------------------------------


def fine_tune(task: CIFAR100, out: Path, progress: Progress | None = None) -> dict[str, float]:
    """Stage 0 by itself: train the teacher that `task.teacher` then names.

    Args:
        task: Its `stage_zero` says how; its `teacher` is not read.
        out: The safetensors file to write; it appears whole or not at all.
        progress: `(stage, epoch, epochs)`, called after each epoch.

    Returns:
        Accuracy in percent on validation and test.

    Raises:
        InputError: Data, packages or weights are missing, or the file cannot be written.
    """
    data = _data(task)
    facts = _stage_zero(data.model, task, data, progress)
    staged = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        tensors = {name: value.detach().cpu().contiguous() for name, value in data.model.state_dict().items()}
        save_file(tensors, staged, metadata={"facts": json.dumps(facts)})
        staged.replace(out)
    except (OSError, SafetensorError) as error:
        staged.unlink(missing_ok=True)
        raise InputError("the teacher cannot be written.", where=out, got=error) from None
    return facts


def _stage_zero(model: nn.Module, task: CIFAR100, data: _Loaded, progress: Progress | None) -> dict[str, float]:
    """Train `model` in place on a GPU if there is one; it comes back to the CPU, in eval mode."""
    plan = task.stage_zero
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    images = data.sizes["train"] * (plan.head_epochs + plan.epochs)
    if device.type == "cpu" and images > MOST_ON_CPU:
        raise InputError(
            "the teacher is not trained yet, and there is no GPU to do it.",
            got=f"{images} images to look at",
            do="set task.teacher to weights from `fine_tune`, or fewer epochs: --set task.stage_zero.epochs=1",
        )
    if task.pretrained:
        model.load_state_dict(_model(task, int(data.labels["train"].max()) + 1, pretrained=True).state_dict())
    model.to(device)
    head = {id(p) for p in model.get_classifier().parameters()}  # type: ignore[operator]  # timm's models have it
    wanted = [p.requires_grad for p in model.parameters()]
    for parameter in model.parameters():
        parameter.requires_grad_(id(parameter) in head)
    _train(model, data, plan, "head", plan.head_epochs, plan.head_lr, progress)
    for parameter, needs in zip(model.parameters(), wanted, strict=True):
        parameter.requires_grad_(needs)
    _train(model, data, plan, "all", plan.epochs, plan.lr, progress)
    facts = {part: data.score(model, part) for part in ("validation", "test")}
    model.cpu().eval()
    return facts


def _train(
    model: nn.Module, data: _Loaded, plan: StageZero, stage: str, epochs: int, lr: float, progress: Progress | None
) -> None:
    """Train what requires gradients. BF16 on a GPU."""
    size = min(plan.batch_size, data.sizes["train"])
    per_epoch = data.sizes["train"] // size
    total, step = epochs * per_epoch, 0
    warm = min(500, max(1, total // 10))
    optimizer = torch.optim.AdamW(_groups(model, plan.weight_decay), lr=lr)
    device = next(model.parameters()).device
    model.train()
    for epoch in range(epochs):
        draws = dice("stage zero", plan.seed, stage, epoch)
        for index in order(plan.seed, epoch, data.sizes["train"])[: per_epoch * size].split(size):
            for group in optimizer.param_groups:
                group["lr"] = lr * min(1.0, (step + 1) / warm) * (0.5 + 0.5 * math.cos(math.pi * step / total))
            batch = data.batch(index, "train", draws)
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                output = data.forward(model, batch)
            data.loss(output, batch).backward()
            nn.utils.clip_grad_norm_(model.parameters(), plan.clip)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
        if progress is not None:
            progress(stage, epoch + 1, epochs)


def _groups(model: nn.Module, decay: float) -> list[dict[str, Any]]:
    """What trains, with weight decay on matrices alone."""
    told: Any = getattr(model, "no_weight_decay", set)
    spared = told()
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    matrices = [p for name, p in trained if p.dim() >= 2 and name not in spared]
    others = [p for name, p in trained if p.dim() < 2 or name in spared]
    return [{"params": matrices, "weight_decay": decay}, {"params": others, "weight_decay": 0.0}]


# ---- images --------------------------------------------------------------------------------------------------------


def _images(task: CIFAR100) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images [N, 3, H, W] uint8 and labels [N] of the training part, then of the test."""
    folder = task.images.expanduser() if task.images is not None else None
    if folder is not None and (folder / "train").is_dir():
        names = sorted(path.name for path in (folder / "train").iterdir() if path.is_dir())
        return *read_folder(folder / "train", names), *read_folder(folder / "test", names)
    datasets = need("datasets", "data")
    try:
        if folder is None:
            found = datasets.load_dataset(DATA, revision=task.revision)
        else:
            files = {part: sorted(map(str, folder.glob(f"**/*{part}*.parquet"))) for part in ("train", "test")}
            if not all(files.values()):
                raise InputError(
                    "no images were found.", where=folder, expected="train/CLASS/*.png, or *train*.parquet; and test"
                )
            found = datasets.load_dataset("parquet", data_files=files)
        return *_columns(found["train"]), *_columns(found["test"])
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        # The library wraps network and file errors in these, with text of many lines.
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InputError("the images cannot be loaded.", where=folder or DATA, got=first) from None


def _columns(rows: Any) -> tuple[Tensor, Tensor]:
    """Images and labels of a part in the format of the `datasets` library."""
    image = next(name for name in ("img", "image", *rows.column_names) if name in rows.column_names)
    label = "fine_label" if "fine_label" in rows.column_names else "label"
    return _stacked((row[image] for row in rows), DATA), torch.tensor(list(rows[label]), dtype=torch.int64)


def read_folder(folder: Path, names: list[str]) -> tuple[Tensor, Tensor]:
    """Images of a folder with one folder per class.

    Args:
        folder: Holds `CLASS/*.png`.
        names: Of the classes, in the order of their numbers.

    Returns:
        Images [N, 3, H, W] uint8 and labels [N].

    Raises:
        InputError: There are none, one cannot be read, or their sizes differ.
    """
    pillow = need("PIL.Image", "timm")
    files = [(path, number) for number, name in enumerate(names) for path in sorted((folder / name).glob("*.png"))]
    if not files:
        raise InputError("no images were found.", where=folder, expected="CLASS/*.png")

    def opened() -> Iterable[Any]:
        for path, _ in files:
            try:
                with pillow.open(path, formats=["PNG"]) as image:
                    image.load()
                    yield image
            except (OSError, SyntaxError, ValueError, pillow.DecompressionBombError) as error:
                raise InputError("an image cannot be read.", where=path, got=error) from None

    return _stacked(opened(), folder), torch.tensor([number for _, number in files], dtype=torch.int64)


def _stacked(images: Iterable[Any], where: object) -> Tensor:
    """Pillow's images as bytes. Shapes: [N, 3, H, W]."""
    found = []
    for image in images:
        plain = image.convert("RGB")
        pixels = torch.frombuffer(bytearray(plain.tobytes()), dtype=torch.uint8)
        found.append(pixels.view(plain.height, plain.width, 3).permute(2, 0, 1))
    if len({image.shape for image in found}) != 1:
        raise InputError("the images are not all of one size.", where=where)
    return torch.stack(found)
