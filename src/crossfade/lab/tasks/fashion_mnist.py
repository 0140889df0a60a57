"""Fashion-MNIST: 70,000 grey images of 28 x 28 (Xiao et al., arXiv 1708.07747, MIT licence). The standing benchmark."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from ..cache import content_hash, remembered
from ..inputs import InputError
from ..vit import VisionTransformer
from .base import TASKS, Classification, Loaded, Task
from .teachers import train_classifier

__all__ = ["FashionMNIST", "read_idx"]

VERSION = 1  # of the recipe below; a change makes new teachers
DEBIAN = Path("/usr/share/datasets/fashion-mnist")  # of the package dataset-fashion-mnist
HELD_OUT = 5000


@TASKS.add("fashion-mnist")
class FashionMNIST(Task):
    """The images, and a ViT of six blocks, 96 wide, with a convolutional stem to 16 tokens and a class token.

    The last 5,000 training images are the validation part; neither the teacher nor a student is trained on them.

    Attributes:
        folder: Holds the four IDX files, gzipped or not; None: where Debian's package puts them.
        epochs: Of the teacher's training.
        smoothing: Of the labels.
    """

    folder: Path | None = None
    epochs: int = Field(default=16, ge=1)
    smoothing: float = Field(default=0.1, ge=0.0, lt=1.0)

    def load(self) -> Loaded:
        """Model and data; the model is trained at the first call, in about 15 minutes of one core, and cached."""
        return _Loaded(self)


class _Loaded(Classification):
    targets = "blocks.*.attn"

    def __init__(self, task: FashionMNIST) -> None:
        folder = task.folder or DEBIAN
        images, labels = _pair(folder, "train")
        if len(images) < 2 * HELD_OUT:
            raise InputError(
                "there are too few training images.", where=folder, expected=f">= {2 * HELD_OUT}", got=len(images)
            )
        last = len(images) - HELD_OUT
        mean, std = images[:last].mean(), images[:last].std()
        test_images, test_labels = _pair(folder, "t10k")
        self.images = {
            "train": (images[:last] - mean) / std,
            "validation": (images[last:] - mean) / std,
            "test": (test_images - mean) / std,
        }
        self.labels = {"train": labels[:last], "validation": labels[last:], "test": test_labels}
        self.sizes = {part: len(found) for part, found in self.labels.items()}
        self.smoothing = task.smoothing
        settings: dict[str, Any] = {"size": 28, "width": 96, "depth": 6, "heads": 3, "stem": (24, 48), "seed": 0}
        model = VisionTransformer(**settings)
        key = content_hash(VERSION, task.epochs, task.smoothing, settings, images, labels)
        self.model = model
        train: dict[str, Any] = {"epochs": task.epochs, "batch_size": 128, "lr": 2e-3, "flip": True, "shift": 2}
        remembered(model, "fashion-mnist", key, lambda m: train_classifier(m, self, **train))
        self.facts = {"data": "Fashion-MNIST", "teacher": key}


def _pair(folder: Path, part: str) -> tuple[Tensor, Tensor]:
    """Images [N, 1, H, W] in [0, 1] and labels [N] of one part."""
    images = read_idx(_find(folder, f"{part}-images-idx3-ubyte"))
    labels = read_idx(_find(folder, f"{part}-labels-idx1-ubyte"))
    if images.dim() != 3 or labels.dim() != 1 or len(images) != len(labels):
        raise InputError(
            "images and labels do not belong together.",
            where=folder,
            expected=f"{part}: [N, H, W] and [N]",
            got=f"{list(images.shape)} and {list(labels.shape)}",
        )
    return images[:, None].float() / 255.0, labels.long()


def _find(folder: Path, name: str) -> Path:
    for path in (folder / f"{name}.gz", folder / name):
        if path.is_file():
            return path
    raise InputError(
        "a file of Fashion-MNIST is missing.",
        where=folder / name,
        do="apt-get install dataset-fashion-mnist, or name a folder with the four IDX files: --set task.folder=FOLDER",
    )


def read_idx(path: Path, most: int = 2**28) -> Tensor:
    """A file of unsigned bytes in the IDX format, gzipped if its name ends so.

    Args:
        path: The file.
        most: Bytes that the content may have; a small file cannot claim more memory.

    Returns:
        uint8, of the shape that the file states.

    Raises:
        InputError: It cannot be read, is not IDX, or its size is not what its head says.
    """
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            content = file.read(most + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise InputError("a file cannot be read.", where=path, got=error) from None
    if len(content) < 4 or content[:3] != b"\0\0\x08" or not 1 <= content[3] <= 4 or len(content) > most:
        raise InputError(
            "this is not an IDX file of bytes.", where=path, expected="magic 00 00 08", got=content[:4].hex()
        )
    dims = content[3]
    head = 4 + 4 * dims
    if len(content) < head:
        raise InputError("an IDX file is cut off.", where=path, expected=f">= {head} bytes", got=len(content))
    shape = struct.unpack(f">{dims}I", content[4:head])
    if math.prod(shape) != len(content) - head or 0 in shape:
        raise InputError(
            "the size of an IDX file is not what its head says.",
            where=path,
            expected=f"{list(shape)}, so {math.prod(shape)} bytes",
            got=len(content) - head,
        )
    return torch.frombuffer(bytearray(content[head:]), dtype=torch.uint8).view(shape)
