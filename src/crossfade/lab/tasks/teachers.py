"""How the lab trains the small image classifiers that it then replaces modules of."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..order import order
from .base import Classification

__all__ = ["augment", "train_classifier"]


def augment(images: Tensor, generator: torch.Generator, *, flip: bool, shift: int) -> Tensor:
    """Random horizontal flips and shifts, drawn per image. Shapes: [b, C, H, W] -> the same.

    Args:
        images: Normalised images; what a shift uncovers takes the image's corner value.
        generator: Of the draws.
        flip: Half of the images are flipped.
        shift: Most pixels of a shift, in both directions.
    """
    b, _, height, width = images.shape
    if flip:
        chosen = torch.rand(b, generator=generator) < 0.5
        images = torch.where(chosen[:, None, None, None], images.flip(-1), images)
    if shift:
        padded = functional.pad(images, (shift,) * 4, mode="replicate")
        down, right = torch.randint(0, 2 * shift + 1, (2, b), generator=generator)
        rows = (down[:, None] + torch.arange(height))[:, None, :, None]
        columns = (right[:, None] + torch.arange(width))[:, None, None, :]
        channels = torch.arange(images.shape[1])[None, :, None, None]
        images = padded[torch.arange(b)[:, None, None, None], channels, rows, columns]
    return images


def train_classifier(
    model: nn.Module, data: Classification, *, epochs: int, batch_size: int, lr: float, flip: bool, shift: int
) -> dict[str, float]:
    """Train on the training part; nothing of the validation part is seen.

    AdamW, 200 warm-up steps at most, a cosine to 0, weight decay 0.05 on matrices, clipping at 1, label smoothing.

    Returns:
        Accuracy in percent on validation and test.
    """
    matrices = [p for n, p in model.named_parameters() if p.dim() >= 2 and n not in ("cls", "position")]
    chosen = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in chosen]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=lr, fused=True)
    per_epoch = data.sizes["train"] // batch_size
    total, step = epochs * per_epoch, 0
    warm = min(200, max(1, total // 10))
    dice = torch.Generator().manual_seed(0)
    model.train()
    for epoch in range(epochs):
        for index in order(0, epoch, data.sizes["train"])[: per_epoch * batch_size].split(batch_size):
            rate = lr * min(1.0, (step + 1) / warm) * (0.5 + 0.5 * math.cos(math.pi * step / total))
            for group in optimizer.param_groups:
                group["lr"] = rate
            batch = data.batch(index)
            batch["image"] = augment(batch["image"], dice, flip=flip, shift=shift)
            data.loss(data.forward(model, batch), batch).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
    model.eval()
    return {part: data.score(model, part) for part in ("validation", "test")}
