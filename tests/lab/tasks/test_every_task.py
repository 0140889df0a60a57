"""What holds for every task that the loop may be given."""

from __future__ import annotations

import torch

import crossfade
from crossfade.lab.tasks import Loaded
from crossfade.lab.tasks.base import Part

PARTS: tuple[Part, ...] = ("train", "validation", "test")


def plan(loaded: Loaded, alpha: float) -> crossfade.Plan:
    return crossfade.Plan(
        targets=loaded.targets,
        student=crossfade.students.Reinit(init="model"),
        gate=crossfade.Deterministic(alpha),
    )


def test_every_part_has_samples_and_batches_follow_the_index(loaded: Loaded) -> None:
    for part in PARTS:
        assert loaded.sizes[part] >= 2
        both = loaded.batch(torch.tensor([0, 1]), part)
        swapped = loaded.batch(torch.tensor([1, 0]), part)
        for name, tensor in both.items():
            assert torch.equal(tensor.flip(0), swapped[name]), name


def test_parts_share_no_sample(loaded: Loaded) -> None:
    def rows(part: Part) -> set[bytes]:
        batch = loaded.batch(torch.arange(loaded.sizes[part]), part)
        first = batch["image"] if "image" in batch else batch["input_ids"]
        return {row.numpy().tobytes() for row in first}

    train, validation, test = map(rows, PARTS)
    if loaded.metric != "perplexity":  # Two chunks of a tiny vocabulary may be the same by chance.
        assert not train & validation
        assert not train & test
        assert not validation & test


def test_the_original_is_at_no_distance_from_itself_and_another_model_is(loaded: Loaded) -> None:
    batch = loaded.batch(torch.arange(4))
    with torch.no_grad():
        own = loaded.forward(loaded.model, batch)
        other = loaded.fresh()
        for parameter in other.parameters():
            parameter.add_(torch.randn_like(parameter))
        far = loaded.forward(other, batch)
    assert abs(float(loaded.distance(own, own, batch, 2.0))) < 1e-5
    assert float(loaded.distance(far, own, batch, 2.0)) > 1e-3


def test_training_mode_adds_no_noise(loaded: Loaded) -> None:
    batch = loaded.batch(torch.arange(4))
    with torch.no_grad():
        still = loaded.forward(loaded.model, batch)
        training = loaded.forward(loaded.fresh().train(), batch)
    torch.testing.assert_close(training, still, rtol=1e-5, atol=1e-6)


def test_scores_repeat_and_leave_the_model_as_it_was(loaded: Loaded) -> None:
    model = loaded.fresh().train()
    modes = [module.training for module in model.modules()]
    first = loaded.score(model, "test")
    assert loaded.score(model, "test") == first == loaded.score(loaded.model, "test")
    assert [module.training for module in model.modules()] == modes
    assert all(parameter.grad is None for parameter in model.parameters())
    assert loaded.score(model, "test", most=10**6) == first
    assert isinstance(loaded.score(model, "test", most=2), float)


def test_the_score_of_a_part_does_not_depend_on_the_batches(loaded: Loaded) -> None:
    """Padding in a batch, and the other samples of it, have no say in a sample's output."""
    alone = [loaded.forward(loaded.model, loaded.batch(torch.tensor([i]), "test")) for i in range(4)]
    together = loaded.forward(loaded.model, loaded.batch(torch.arange(4), "test"))
    torch.testing.assert_close(torch.cat(alone), together, rtol=1e-4, atol=1e-5)


def test_students_learn_at_the_targets(loaded: Loaded) -> None:
    model = loaded.fresh()
    fade = crossfade.install(model, plan(loaded, 0.0), total_steps=1)
    batch = loaded.batch(torch.arange(4))
    loaded.loss(loaded.forward(model.train(), batch), batch).backward()
    students = [parameter for group in fade.parameter_groups() for parameter in group["params"]]
    assert students
    assert sum(float(p.grad.abs().sum()) for p in students if p.grad is not None) > 0.0


def test_alignment_takes_batches_of_the_task(loaded: Loaded) -> None:
    fade = crossfade.install(loaded.fresh(), plan(loaded, 1.0), total_steps=1)
    batches = [loaded.batch(index) for index in torch.arange(8).split(4)]
    report = fade.align(batches, 2, forward=loaded.forward, batch_size=4)
    assert len(report.sites) == len(fade.sites) == 2
    assert report.samples == 8


def test_facts_are_plain_data(loaded: Loaded) -> None:
    assert loaded.facts["data"]
    assert all(isinstance(value, str | int | float | None) for value in loaded.facts.values())
