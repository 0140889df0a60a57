"""What a task is: a pretrained model, data in three parts, a loss and a score. One file per task; it registers itself.

A task is settings (frozen, written to the experiment file); `load()` makes the heavy part from them.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..base import Registry, Settings

__all__ = ["TASKS", "Batch", "Classification", "Loaded", "Part", "Task", "evaluating", "mean_over"]

Part = Literal["train", "validation", "test"]
Batch = dict[str, Tensor]


class Task(Settings):
    """Settings of a model with its data; registered in `TASKS` under the name that recipes use."""

    @abstractmethod
    def load(self) -> Loaded:
        """Model and data.

        Raises:
            InputError: Files or packages are missing; the message says how to get them.
        """


TASKS: Registry[type[Task]] = Registry("task")


class Loaded(ABC):
    """A pretrained model and its data.

    Attributes:
        model: The pretrained model, in eval mode. Never changed: ask `fresh()` for one to work on.
        targets: The sites that the task's question is about, as `crossfade.select` takes it.
        metric: Name of the score.
        higher_is_better: Direction of the score.
        sizes: Number of samples of each part.
        facts: What a reader of the results should know of the data (source, split, cleaning).
    """

    metric: ClassVar[str] = "score"
    higher_is_better: ClassVar[bool] = True
    # Whether the original's output for a sample is the same in every epoch (no augmentation).
    fixed: ClassVar[bool] = True
    model: nn.Module
    targets: str
    sizes: dict[str, int]
    facts: dict[str, Any]

    def fresh(self) -> nn.Module:
        """A copy of the pretrained model."""
        return copy.deepcopy(self.model)

    @abstractmethod
    def batch(self, index: Tensor, part: Part = "train", generator: torch.Generator | None = None) -> Batch:
        """Samples by number, labels included; `generator` draws the augmentation, None means none. Shapes: [b]."""

    @abstractmethod
    def forward(self, model: nn.Module, batch: Batch) -> Tensor:
        """What loss and score are computed from. One call of the model."""

    @abstractmethod
    def loss(self, output: Tensor, batch: Batch) -> Tensor:
        """The task loss, 0-dim, mean over what counts."""

    @abstractmethod
    def distance(self, output: Tensor, original: Tensor, batch: Batch, temperature: float) -> Tensor:
        """The distillation loss between two outputs, 0-dim."""

    @abstractmethod
    def score(self, model: nn.Module, part: Part, most: int | None = None) -> float:
        """The metric on a part, or on its first `most` samples; in eval mode, modes restored."""


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode without gradients; the mode of every module comes back."""
    modes = [(m, m.training) for m in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode


def mean_over(loaded: Loaded, part: Part, most: int | None, size: int = 500) -> Iterator[Batch]:
    """The part's samples in order, in batches."""
    n = loaded.sizes[part] if most is None else min(most, loaded.sizes[part])
    for index in torch.arange(n).split(size):
        yield loaded.batch(index, part)


class Classification(Loaded):
    """Images to classes, held in memory; the score is accuracy in percent.

    Attributes:
        images: Per part, [N, C, H, W] float32.
        labels: Per part, [N] int64.
        smoothing: Of the labels, in the task loss.
    """

    metric = "accuracy (%)"
    images: dict[str, Tensor]
    labels: dict[str, Tensor]
    smoothing: float

    def batch(self, index: Tensor, part: Part = "train", generator: torch.Generator | None = None) -> Batch:
        """`image` [b, C, H, W] and `label` [b]."""
        return {"image": self.images[part][index], "label": self.labels[part][index]}

    def forward(self, model: nn.Module, batch: Batch) -> Tensor:
        """Class scores [b, classes]."""
        scores: Tensor = model(batch["image"])
        return scores

    def loss(self, output: Tensor, batch: Batch) -> Tensor:
        """Cross-entropy with label smoothing."""
        return functional.cross_entropy(output, batch["label"], label_smoothing=self.smoothing)

    def distance(self, output: Tensor, original: Tensor, batch: Batch, temperature: float) -> Tensor:
        """T^2 KL(original || student) of the softened classes, mean over the batch (arXiv 1503.02531)."""
        return softened(output, original, temperature)

    def score(self, model: nn.Module, part: Part, most: int | None = None) -> float:
        """Accuracy in percent."""
        right, seen = 0, 0
        with evaluating(model):
            for batch in mean_over(self, part, most):
                right += int((self.forward(model, batch).argmax(-1) == batch["label"]).sum())
                seen += len(batch["label"])
        return 100.0 * right / seen


def softened(output: Tensor, original: Tensor, temperature: float) -> Tensor:
    """T^2 KL(original || student) at a temperature, mean over rows. Shapes: [N, classes] each."""
    student = functional.log_softmax(output / temperature, -1)
    teacher = functional.log_softmax(original / temperature, -1)
    loss: Tensor = functional.kl_div(student, teacher, reduction="batchmean", log_target=True)
    return temperature**2 * loss
