"""The digits of scikit-learn: 1,797 images of 8 x 8. Seconds per run; known to forgive a hard swap."""

from __future__ import annotations

from typing import Any

import torch
from pydantic import Field

from ..cache import content_hash, remembered
from ..inputs import need
from ..order import order
from ..vit import VisionTransformer
from .base import TASKS, Classification, Loaded, Task
from .teachers import train_classifier

__all__ = ["Digits"]

VERSION = 1  # of the recipe below; a change makes new teachers


@TASKS.add("digits")
class Digits(Task):
    """UCI's optical digits as scikit-learn carries them, and a ViT of six blocks trained on them.

    1,197 images to train, 200 for validation, 400 for the test, dealt by a fixed permutation.
    """

    epochs: int = Field(default=60, ge=1)
    smoothing: float = Field(default=0.1, ge=0.0, lt=1.0)

    def load(self) -> Loaded:
        """Model and data; the model is trained at the first call, in about half a minute, and cached."""
        return _Loaded(self)


class _Loaded(Classification):
    targets = "blocks.*.attn"

    def __init__(self, task: Digits) -> None:
        found = need("sklearn.datasets", "data").load_digits()
        images = torch.tensor(found.images, dtype=torch.float32)[:, None] / 16.0
        labels = torch.tensor(found.target, dtype=torch.int64)
        dealt = order(0, 0, len(labels)).split([len(labels) - 600, 200, 400])
        mean, std = images[dealt[0]].mean(), images[dealt[0]].std()
        parts = dict(zip(("train", "validation", "test"), dealt, strict=True))
        self.images = {part: (images[index] - mean) / std for part, index in parts.items()}
        self.labels = {part: labels[index] for part, index in parts.items()}
        self.sizes = {part: len(index) for part, index in parts.items()}
        self.smoothing = task.smoothing
        settings: dict[str, Any] = {"size": 8, "width": 48, "depth": 6, "heads": 3, "stem": (), "seed": 0}
        model = VisionTransformer(**settings)
        key = content_hash(VERSION, task.model_dump(), settings, self.images["train"], self.labels["train"])
        self.model = model
        train: dict[str, Any] = {"epochs": task.epochs, "batch_size": 64, "lr": 2e-3, "flip": False, "shift": 1}
        remembered(model, "digits", key, lambda m: train_classifier(m, self, **train))
        self.facts = {"data": "scikit-learn digits", "teacher": key}
