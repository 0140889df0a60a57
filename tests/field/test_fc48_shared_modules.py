"""FC-48: one module stood at several places, or was called several times in one forward.

Walking names shows a shared module once, so only one place was replaced; or it was replaced twice. crossfade puts the
same blend at every place, counts guidance as the mean over its calls, draws its gate once per step, aligns on the
inputs of all calls, and finalize, revert, save and load keep the sharing.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import crossfade
from crossfade.students import Reinit

from .models import CLASSES, WIDTH, Mixer, data, same, seeded, values


class TwoPlaces(nn.Module):
    """`a.0` and `b.0` are one module."""

    def __init__(self) -> None:
        super().__init__()
        shared = Mixer()
        self.a, self.b = nn.ModuleList([shared]), nn.ModuleList([shared])
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head((self.b[0](x + self.a[0](x))).mean(1))


class ManyCalls(nn.Module):
    """One block, called six times, as ALBERT does."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = Mixer(), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(6):
            x = x + 0.3 * self.block(x)
        return self.head(x.mean(1))


# model, targets, places, calls per forward
CASES: dict[str, tuple[Callable[[], nn.Module], str, tuple[str, ...], int]] = {
    "two places, by the first": (TwoPlaces, "a.0", ("a.0", "b.0"), 2),
    "two places, by the second": (TwoPlaces, "b.0", ("a.0", "b.0"), 2),
    "two places, by both": (TwoPlaces, "*.0", ("a.0", "b.0"), 2),
    "six calls": (ManyCalls, "block", ("block",), 6),
}
cases = pytest.mark.parametrize("name", CASES)


def faded(name: str, alpha: float | str = 0.5, guided: bool = True, **more: object) -> tuple[nn.Module, crossfade.Fade]:
    make, targets, _, _ = CASES[name]
    model = seeded(make)
    plan = crossfade.Plan(
        targets=targets,
        student=Reinit("reset_parameters"),
        gate=more.pop("gate", None) or crossfade.Deterministic(alpha),
        guidance=crossfade.DeepFeatureGuidance(reduction="mean") if guided else None,
    )
    return model, crossfade.install(model, plan, total_steps=4, release="finalize", probe=data()[0])


def at(model: nn.Module, path: str) -> nn.Module:
    return model.get_submodule(path)


@cases
def test_every_place_holds_the_same_blend_and_the_reports_show_all(name: str) -> None:
    _, _, places, _ = CASES[name]
    model, fade = faded(name)
    assert len(fade.sites) == 1
    assert fade.sites[0].paths == places
    assert all(at(model, path) is fade.sites[0].blend for path in places)
    if len(places) > 1:
        table = str(crossfade.select(seeded(CASES[name][0]), CASES[name][1]))
        assert all(path in table for path in places)
    plain = fade.finalize(probe=data()[0], force=True)
    assert fade.receipt.sites[places[0]]["paths"] == list(places)
    assert len({id(at(plain, path)) for path in places}) == 1


@cases
def test_guidance_is_the_mean_over_calls(name: str) -> None:
    model, fade = faded(name)
    calls: list[tuple[Tensor, Tensor]] = []
    blend = fade.sites[0].blend
    teachers: list[Tensor] = []
    blend.teacher.register_forward_hook(lambda m, args, out: teachers.append(out.detach()))
    blend.student.register_forward_hook(lambda m, args, out: calls.append((teachers[-1], out)))
    model(data()[0])
    assert len(calls) == CASES[name][3]
    expected = torch.stack([(s - t).square().mean() for t, s in calls]).mean()
    torch.testing.assert_close(fade.guidance(), expected)


@cases
@pytest.mark.parametrize("execution", ["both", "skip"])
def test_the_gate_is_one_for_all_calls_of_a_step(name: str, execution: str) -> None:
    model, fade = faded(name, guided=False, gate=crossfade.Bernoulli(0.5, execution))
    blend, x = fade.sites[0].blend, data()[0]
    seen = set()
    for step in range(12):
        fade.seek(step)
        outputs: list[bool] = []
        hook = blend.register_forward_hook(
            lambda m, args, out, found=outputs: found.append(bool(torch.equal(out, m.teacher(*args))))
        )
        model.train()(x)
        hook.remove()
        assert outputs == [fade.sites[0].weight == 1.0] * CASES[name][3]
        seen.update(outputs)
    assert seen == {True, False}


@cases
def test_alignment_learns_from_the_inputs_of_all_calls(name: str) -> None:
    _, fade = faded(name)
    report = fade.align([data(step)[0] for step in range(3)], steps=20, lr=3e-2, check_every=10)
    assert len(report.sites) == 1
    assert report.samples == 3 * 4 * CASES[name][3]
    assert report.sites[0].error < report.sites[0].error_before


@cases
def test_metrics_and_parameters_are_counted_once(name: str) -> None:
    model, fade = faded(name)
    groups = fade.parameter_groups()
    held = [id(p) for group in groups for p in group["params"]]
    assert len(held) == len(set(held)) == 4
    optimizer = torch.optim.SGD(groups, lr=0.1)
    fade.attach(optimizer)
    x, y = data()
    (cross_entropy(model(x), y) + fade.guidance()).backward()
    optimizer.step()
    path = CASES[name][2][0]
    log = fade.log()
    assert [key for key in log if key.startswith("cosine/")] == [f"cosine/{path}"]
    assert -1.0 <= log["cosine"] <= 1.0


@cases
def test_revert_restores_the_sharing(name: str) -> None:
    make, _, places, _ = CASES[name]
    plain, x = seeded(make), data()[0]
    model, fade = faded(name)
    reverted = fade.revert()
    assert len({id(at(reverted, path)) for path in places}) == 1
    assert list(reverted.state_dict()) == list(plain.state_dict())
    assert same(values(reverted), values(plain))
    assert torch.equal(model(x), plain(x))


@cases
def test_finalize_save_and_load_keep_the_sharing(name: str, tmp_path: Path) -> None:
    make, _, places, _ = CASES[name]
    _, fade = faded(name)
    fade.seek(4)
    x = data()[0]
    final = fade.finalize(probe=x, force=True)
    assert len({id(at(final, path)) for path in places}) == 1
    assert list(final.state_dict()) == list(seeded(make).state_dict())
    crossfade.save(final, tmp_path)
    loaded = crossfade.load(tmp_path, base=lambda: seeded(make, seed=3))
    assert len({id(at(loaded, path)) for path in places}) == 1
    assert torch.equal(loaded(x), final(x))


@cases
def test_checkpoints_in_mid_fade_and_plain_ones_load(name: str) -> None:
    make = CASES[name][0]
    model, _ = faded(name)
    twin, twin_fade = faded(name)
    saved = model.state_dict()
    twin.load_state_dict(saved)
    assert torch.equal(twin(data()[0]), model(data()[0]))
    other = seeded(make, seed=3)
    result = twin.load_state_dict(other.state_dict())
    assert (result.missing_keys, result.unexpected_keys) == ([], [])
    with twin_fade.view("teacher"):
        assert torch.equal(twin(data()[0]), other(data()[0]))


def test_albert_of_transformers() -> None:
    from transformers import AlbertConfig, AlbertModel

    config = AlbertConfig(
        vocab_size=32,
        embedding_size=8,
        hidden_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=32,
    )
    model = seeded(lambda: AlbertModel(config)).eval()
    ids = torch.randint(1, 32, (2, 5))
    plan = crossfade.Plan(
        targets="**.attention",
        gate=crossfade.Deterministic("linear"),
        guidance=crossfade.DeepFeatureGuidance(),
    )
    before = model(input_ids=ids).last_hidden_state
    fade = crossfade.install(model, plan, total_steps=2, probe={"input_ids": ids}, release="finalize")
    assert len(fade.sites) == 1
    assert torch.equal(model(input_ids=ids).last_hidden_state, before)
    assert fade.align([{"input_ids": ids}], steps=2).samples == 6
    model.train()
    model(input_ids=ids)
    assert len(fade.ledger.terms[fade.sites[0].path]) == 3
    fade.guidance()
    fade.seek(2)
    fade.finalize(probe={"input_ids": ids})
