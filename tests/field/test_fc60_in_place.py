"""FC-60: in-place operations changed the input that both modules share.

The first module wrote into its input, the second saw the written one; sometimes autograd complains, without gradient
it never does. In crossfade teacher and student both see what the parent passed, whoever writes and whoever leads,
also in lists and dictionaries of the call; and the module on the main path may write as it always did.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import crossfade
from crossfade.errors import OutputError

from .models import Holder


class Doubles(nn.Module):
    """Writes into its input first."""

    def __init__(self, bias: float = 0.0) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.tensor(bias))

    def forward(self, x: Tensor) -> Tensor:
        x.mul_(2.0)
        return x + self.bias


class Reads(nn.Module):
    """Gives back what it got."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.bias


class Relu(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.act, self.fc = nn.ReLU(inplace=True), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.act(x))


class Views(nn.Module):
    """Writes through a view of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        x[..., 0].zero_()
        return x * 1.0 + self.bias


PAIRS = {
    "teacher writes": (Doubles, Reads),
    "student writes": (Reads, Doubles),
    "both write": (Doubles, Doubles),
    "neither writes": (Reads, Reads),
    "in-place relu in both": (Relu, Relu),
    "teacher writes through a view": (Views, Reads),
    "student writes through a view": (Reads, Views),
}
ALPHAS = (1.0, 0.7, 0.0)


def faded(pair: str, alpha: float, guided: bool, gate: Any = None) -> tuple[nn.Module, crossfade.Fade]:
    teacher, student = PAIRS[pair]
    model = Holder(teacher(), lambda fc, x: fc(x * 1.0))  # The parent's tensor is not a leaf, and the caller's stays.
    plan = crossfade.Plan(
        targets="fc",
        student=lambda t, s: student(),
        gate=gate or crossfade.Deterministic(alpha),
        guidance=crossfade.DeepFeatureGuidance(reduction="mean") if guided else None,
    )
    return model, crossfade.install(model, plan, total_steps=10, release="finalize", metrics_every=1)


def alone(module: nn.Module, x: Tensor) -> Tensor:
    return module(x.clone()).detach()


@pytest.mark.parametrize("mode", ["train", "train without grad", "eval", "inference"])
@pytest.mark.parametrize("guided", [True, False])
@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("pair", PAIRS)
def test_both_modules_see_the_parents_input(pair: str, alpha: float, guided: bool, mode: str) -> None:
    model, fade = faded(pair, alpha, guided)
    x = torch.randn(3, 4)
    t, s = alone(model.fc.teacher, x), alone(model.fc.student, x)
    model.train(mode.startswith("train"))
    for _ in range(3):  # What is learnt in the first call must hold in the later ones.
        if mode == "inference":
            with torch.inference_mode():
                out = model(x)
        else:
            with torch.set_grad_enabled(mode in ("train", "eval")):
                out = model(x)
        torch.testing.assert_close(out.detach().clone(), alpha * t + (1 - alpha) * s)
        if guided and mode == "train":
            loss = fade.guidance()
            torch.testing.assert_close(loss.detach(), (t - s).square().mean())
            (out.sum() + loss).backward()
        elif mode == "train" and out.requires_grad:
            out.sum().backward()


@pytest.mark.parametrize("execution", ["both", "skip"])
@pytest.mark.parametrize("pair", PAIRS)
def test_random_gates_see_it_too(pair: str, execution: Any) -> None:
    model, fade = faded(pair, 0.5, False, crossfade.Bernoulli(0.5, execution))
    x = torch.randn(3, 4)
    t, s = alone(model.fc.teacher, x), alone(model.fc.student, x)
    for step in range(8):
        fade.seek(step)
        torch.testing.assert_close(model(x).detach(), t if fade.sites[0].weight == 1.0 else s)


@pytest.mark.parametrize("pair", PAIRS)
def test_alignment_sees_it_too(pair: str) -> None:
    model, fade = faded(pair, 1.0, False)
    x = torch.randn(16, 4)
    t, s = alone(model.fc.teacher, x), alone(model.fc.student, x)
    report = fade.align([x], steps=1, lr=1e-12, loss=crossfade.DeepFeatureGuidance(reduction="mean"), holdout=0.9)
    expected = float((t - s).square().mean())
    assert report.sites[0].error_before == pytest.approx(expected, rel=0.5, abs=1e-6)
    if pair in ("teacher writes", "student writes"):
        assert report.sites[0].error_before > 0.1


class Logs(nn.Module):
    """Appends to a list of the call, as models do that collect hidden states."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.fc = name, nn.Linear(4, 4)

    def forward(self, x: Tensor, seen: list[Any], table: dict[str, Any]) -> Tensor:
        seen.append(self.name)
        table["who"] = self.name
        return self.fc(x)


@pytest.mark.parametrize("guided", [True, False])
@pytest.mark.parametrize("alpha", ALPHAS)
def test_lists_and_dicts_of_the_call_are_written_by_the_module_on_the_main_path_alone(
    alpha: float, guided: bool
) -> None:
    seen: list[Any] = []
    table: dict[str, Any] = {}
    model = Holder(Logs("T"), lambda fc, x: fc(x, seen=seen, table=table))
    plan = crossfade.Plan(
        targets="fc",
        student=lambda t, s: Logs("S"),
        gate=crossfade.Deterministic(alpha),
        guidance=crossfade.DeepFeatureGuidance() if guided else None,
    )
    crossfade.install(model, plan, total_steps=10, release="finalize")
    for calls in (1, 2):
        model(torch.randn(3, 4))
        leader = "S" if alpha == 0.0 else "T"
        assert seen == [leader] * calls
        assert table == {"who": leader}


def test_a_module_that_begins_to_write_later_is_reported_and_not_believed() -> None:
    class Turns(Reads):
        late = False

        def forward(self, x: Tensor) -> Tensor:
            if self.late:
                x.mul_(2.0)
            return super().forward(x)

    model = Holder(Reads(), lambda fc, x: fc(x * 1.0))
    plan = crossfade.Plan(targets="fc", student=lambda t, s: Turns(), gate=crossfade.Deterministic(0.5))
    crossfade.install(model, plan, total_steps=10)
    x = torch.randn(3, 4)
    model(x)
    Turns.late = True
    out, refused = None, None
    try:
        out = model(x)
    except OutputError as error:
        refused = str(error)
    if out is None:
        assert "wrote into its input" in refused
        assert "where: fc" in refused
    else:
        torch.testing.assert_close(out, 0.5 * x + 0.5 * 2.0 * x)


@pytest.mark.parametrize("leads", ["T", "S"])
def test_a_dropout_in_place_works_although_it_writes_in_training_only(leads: str) -> None:
    # In eval (a probe, an evaluation before training) it leaves its input alone; in training it writes.
    class Drops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop, self.fc = nn.Dropout(0.5, inplace=True), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(self.drop(x))

    model = Holder(Drops(), lambda fc, x: fc(x * 1.0))
    plan = crossfade.Plan(
        targets="fc",
        student=lambda t, s: Drops(),
        gate=crossfade.Deterministic(0.5 if leads == "T" else 0.0),
        guidance=crossfade.DeepFeatureGuidance(reduction="mean"),
    )
    x = torch.ones(3, 4)
    fade = crossfade.install(model, plan, total_steps=10, probe=x, release="finalize")
    target = alone(model.fc.teacher, x)
    seen: list[Tensor] = []
    model.fc.teacher.register_forward_hook(lambda m, args, out: seen.append(out.detach()))
    for _ in range(3):
        model.train()
        (model(x).sum() + fade.guidance()).backward()
        assert torch.equal(seen[-1], target)


@pytest.mark.parametrize("alpha", ALPHAS)
def test_one_tensor_passed_three_times_stays_one_tensor(alpha: float) -> None:
    # Self-attention is called as attention(x, x, x), and torch's asks whether they are the same.
    class Asks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.same = nn.Linear(4, 4), []

        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self.same.append(q is k and k is v)
            return self.fc(v)

    model = Holder(Asks(), lambda fc, x: fc(x, x, x))
    plan = crossfade.Plan(
        targets="fc",
        student=lambda t, s: Asks(),
        gate=crossfade.Deterministic(alpha),
        guidance=crossfade.DeepFeatureGuidance(detach_input=True),
    )
    crossfade.install(model, plan, total_steps=10, release="finalize")
    for _ in range(2):
        model(torch.randn(3, 4))
    assert all(model.fc.teacher.same)
    assert all(model.fc.student.same)
