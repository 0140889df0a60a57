"""Alignment: deterministic, local to the students, honours masks and memory, and helps."""

from __future__ import annotations

import copy
import gc
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import crossfade
from tests.models import WIDTH, Net, backbone, batch, difference, equal, net, padding, plan, random_states


def start(kind: str = "pre_norm", **more: Any) -> tuple[nn.Module, crossfade.Fade]:
    model = net(kind, layers=2, dropout=more.pop("dropout", 0.0))
    return model, crossfade.install(model, plan(**more), total_steps=10, release="finalize")


def data(batches: int = 4, size: int = 6) -> list[Tensor]:
    return [batch(k, size=size)[0] for k in range(batches)]


def students(fade: crossfade.Fade) -> dict[str, Tensor]:
    return {f"{s.path}.{k}": v.clone() for s in fade.sites for k, v in s.blend.student.state_dict().items()}


def test_align_is_a_function_of_the_seed() -> None:
    results = []
    for seed, noise in ((0, 1), (0, 2), (5, 1)):
        _, fade = start(seed=seed)
        for site in fade.sites:  # One start for both seeds: only the order of samples may differ.
            for parameter in site.blend.student.parameters():
                nn.init.constant_(parameter, 0.1)
        torch.manual_seed(noise)  # The global state has no part in it.
        report = fade.align(data(), steps=6, batch_size=4)
        results.append((students(fade), [(s.error, s.cosine, s.history) for s in report.sites]))
    assert difference(results[0][0], results[1][0]) == []
    assert results[0][1] == results[1][1]
    assert difference(results[0][0], results[2][0]) != []


@pytest.mark.parametrize("kind", ["pre_norm", "post_norm", "shared"])
@pytest.mark.parametrize("training", [True, False])
def test_align_moves_the_students_and_nothing_else(kind: str, training: bool) -> None:
    model, fade = start(kind, dropout=0.5, trains="all")
    model.train(training)
    model.blocks[0].mlp.eval()
    untouched = {name: p.detach().clone() for name, p in backbone(model).items()}
    teachers = {s.path: copy.deepcopy(dict(s.blend.teacher.state_dict())) for s in fade.sites}
    modes = [m.training for m in model.modules()]
    flags = [p.requires_grad for p in model.parameters()]
    before, states, alphas = students(fade), random_states(), [s.alpha for s in fade.sites]
    fade.align(data(), steps=5, batch_size=4)
    assert difference(untouched, {name: p.detach() for name, p in backbone(model).items()}) == []
    for site in fade.sites:
        assert difference(teachers[site.path], dict(site.blend.teacher.state_dict())) == []
    assert [m.training for m in model.modules()] == modes
    assert [p.requires_grad for p in model.parameters()] == flags
    assert all(p.grad is None for p in model.parameters())
    assert difference(states, random_states()) == []
    assert [s.alpha for s in fade.sites] == alphas
    assert fade.step_count == 0
    assert fade.ledger.terms == {}
    assert difference(before, students(fade)) != []
    assert equal(model.eval()(data()[0]), net(kind, layers=2, dropout=0.5).eval()(data()[0]))


def test_align_makes_the_error_smaller_and_keeps_the_best_weights() -> None:
    _, fade = start()
    report = fade.align(data(16, size=8), steps=150, lr=2e-2, check_every=25, patience=None)
    for site in report.sites:
        assert site.error == min(error for _, error in site.history)
        assert site.error < 0.5 * site.error_before
        assert site.cosine > 0.7
    # What the report says is true of the students that are left: another pass begins where this one ended.
    again = fade.align(data(16, size=8), steps=1)
    for first, second in zip(report.sites, again.sites, strict=True):
        assert second.error_before == pytest.approx(first.error, rel=1e-6)


def test_align_stops_early_at_a_plateau() -> None:
    _, fade = start()
    report = fade.align(data(), steps=500, lr=1e-12, check_every=2, patience=3)
    assert all(site.steps < 500 for site in report.sites)


@pytest.mark.parametrize("target", ["blocks.*.attn", "blocks[0:2]"])
def test_padding_does_not_reach_the_students(target: str) -> None:
    results = []
    lengths = [5, 3, 1, 4, 2, 5]
    mask = padding(lengths, 5)
    for filler in (None, 7):
        _, fade = start(targets=target)
        batches = []
        for ids in data():
            given = ids if filler is None else ids.masked_fill(mask == 0, filler)
            batches.append({"ids": given, "attention_mask": mask})
        report = fade.align(batches, steps=5, batch_size=4)
        results.append((students(fade), [(s.error_before, s.error, s.cosine) for s in report.sites]))
    assert difference(results[0][0], results[1][0]) == []
    assert results[0][1] == results[1][1]


def test_batches_of_unequal_lengths_and_sizes_are_all_used() -> None:
    _, fade = start()
    shapes = [(6, 5), (6, 3), (4, 5), (1, 4), (5, 7), (2, 2)]
    batches = [batch(k, size=size, length=length)[0] for k, (size, length) in enumerate(shapes)]
    report = fade.align(iter(batches), steps=40, batch_size=4)
    assert report.complete
    assert report.samples == sum(size for size, _ in shapes)
    assert all(site.error < site.error_before for site in report.sites)


def test_a_shared_tensor_as_long_as_the_batch_is_not_cut_by_sample() -> None:
    # A mask or table [L, L] has no samples, also when the batch happens to have L rows.
    class Positioned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, mixing: Tensor) -> Tensor:
            return mixing @ self.linear(x)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.site = Positioned()

        def forward(self, x: Tensor) -> Tensor:
            return self.site(x, torch.eye(x.shape[1]))

    errors = []
    for size in (6, 5):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model, x = Outer(), torch.randn(size, 5, WIDTH)
        fade = crossfade.install(model, plan(targets="site"), total_steps=4)
        report = fade.align([x], steps=30, batch_size=4)
        errors.append(report.sites[0].error < report.sites[0].error_before)
    assert errors == [True, True]


@pytest.mark.parametrize("whole", [3, 1])
def test_the_memory_budget_ends_the_capture(whole: int) -> None:
    # Both sites see [6, 5, 8] float32 in each batch.
    size = 2 * 6 * 5 * WIDTH * 4
    _, fade = start()
    report = fade.align(iter(data(8)), steps=2, memory_budget=whole * size + size // 2)
    assert report.bytes == whole * size
    assert report.samples == whole * 6
    assert not report.complete
    _, fade = start()
    assert fade.align(data(2), steps=2, memory_budget=2 * size).complete


def test_a_budget_below_one_batch_is_refused_and_leaves_the_model() -> None:
    model, fade = start()
    before, modes = students(fade), [m.training for m in model.modules()]
    with pytest.raises(crossfade.CrossfadeError, match="budget"):
        fade.align(data(), steps=2, memory_budget=100)
    assert difference(before, students(fade)) == []
    assert [m.training for m in model.modules()] == modes
    assert not any(site.blend._forward_pre_hooks for site in fade.sites)


def live_bytes() -> int:
    """Bytes of every tensor that Python can reach, each storage once."""
    gc.collect()
    held = [o for o in gc.get_objects() if issubclass(type(o), Tensor)]  # isinstance() would wake lazy modules.
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}.values())


def test_the_memory_budget_covers_what_is_really_held() -> None:
    model = Net(3)
    fade = crossfade.install(model, plan(), total_steps=10, release="finalize")
    batches = [batch(k, size=64, length=32)[0] for k in range(8)]
    budget = 4 * 3 * 64 * 32 * WIDTH * 4  # Inputs of four batches at three sites: 786 KB.
    small = sum(p.nbytes for p in model.parameters()) * 4  # Gradients, Adam's moments, best weights.
    peak, before = 0, live_bytes()

    def measure(path: str, step: int, loss: float) -> None:
        nonlocal peak
        peak = max(peak, live_bytes() - before)

    report = fade.align(batches, steps=2, batch_size=4, memory_budget=budget, progress=measure)
    assert report.bytes <= budget
    assert peak <= budget + small


def test_a_student_that_is_not_finite_stops_with_the_sites_name() -> None:
    _, fade = start()
    with torch.no_grad():
        fade.sites[1].blend.student.o.weight[0, 0] = float("nan")
    with pytest.raises(crossfade.CrossfadeError, match=r"blocks\.1\.attn"):
        fade.align(data(), steps=2)


def test_progress_is_told_without_a_warning_and_can_end_a_site() -> None:
    # In a process of its own: torch warns once per process of a number taken from a tensor with a gradient.
    code = (
        "import warnings; warnings.simplefilter('error')\n"
        "from tests.models import batch, net, plan; import crossfade\n"
        "fade = crossfade.install(net(), plan(), total_steps=4)\n"
        "report = fade.align([batch()[0]], steps=9, progress=lambda path, step, loss: step == 2)\n"
        "assert [site.steps for site in report.sites] == [2, 2]"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


@pytest.mark.parametrize("batches", [[], [torch.zeros(0, 5, dtype=torch.long)]])
def test_no_data_is_refused(batches: list[Tensor]) -> None:
    _, fade = start()
    with pytest.raises(crossfade.CrossfadeError):
        fade.align(batches, steps=2)
