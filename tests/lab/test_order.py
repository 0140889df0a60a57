"""The order of the data depends on seed, epoch and index alone."""

from __future__ import annotations

import pytest
import torch

from crossfade.lab.order import generator, indices, order
from crossfade.lab.tasks.teachers import augment


def test_an_epoch_holds_each_sample_once() -> None:
    assert sorted(order(3, 2, 17).tolist()) == list(range(17))


def test_the_order_is_the_same_on_every_machine() -> None:
    assert order(0, 0, 8).tolist() == [2, 3, 0, 7, 5, 6, 1, 4]
    assert generator("a", 1).initial_seed() == 5586053867827315457


@pytest.mark.parametrize("n", [10, 11, 3])
def test_steps_walk_through_the_epochs(n: int) -> None:
    size = min(4, n)
    per_epoch = n // size
    for epoch in range(3):
        found = torch.cat([indices(1, epoch * per_epoch + k, n, 4) for k in range(per_epoch)])
        assert torch.equal(found, order(1, epoch, n)[: per_epoch * size])


def test_augmentation_is_drawn_from_its_generator_alone() -> None:
    images = torch.arange(2 * 3 * 5 * 5, dtype=torch.float32).view(2, 3, 5, 5)
    one, two = (augment(images, generator("x"), flip=True, shift=2) for _ in range(2))
    assert torch.equal(one, two)
    assert one.shape == images.shape
    assert torch.equal(augment(images, generator("x"), flip=False, shift=0), images)


def test_a_shift_moves_and_repeats_the_border() -> None:
    row = torch.arange(4.0).view(1, 1, 1, 4).expand(1, 1, 4, 4)
    seen = {tuple(augment(row, generator(k), flip=False, shift=1)[0, 0, 0].tolist()) for k in range(40)}
    assert seen == {(0, 0, 1, 2), (0, 1, 2, 3), (1, 2, 3, 3)}
