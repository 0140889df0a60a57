"""FC-06: code outside the replaced module reads its attributes.

The parent asked the wrapper for `attention_type`, `layer_idx`, `num_heads`, or a linear's `.weight` to choose a
dtype, and got an AttributeError, or worse the wrapper's own attribute of that name. crossfade's blend answers from
the teacher while it is there, then from the student or from what the plan declared to carry; no name of the blend's
own may stand in the way of a usual name; and reading a *tensor* through the blend warns once, because who computes
with it bypasses the student.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import crossfade
from crossfade.errors import CrossfadeError, CrossfadeWarning

from .models import Holder, data, train


class Attention(nn.Module):
    attention_type = "full"

    def __init__(self, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx, self.num_heads = layer_idx, 2
        self.fc = nn.Linear(8, 8)

    @property
    def head_dim(self) -> int:
        return 8 // self.num_heads

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x)


class Reader(nn.Module):
    """Reads three attributes of its child at every call."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = Attention(3)
        self.read: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        self.read.append((self.attn.attention_type, self.attn.layer_idx, self.attn.num_heads, self.attn.head_dim))
        return self.attn(x).mean(1)[:, :3]


class Poor(nn.Module):
    """A student without the attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x)


class Rich(Poor):
    """A student with its own idea of one of them."""

    attention_type, num_heads, head_dim = "linear", 1, 8


NAMES = ("attention_type", "layer_idx", "num_heads", "head_dim")
READ = ("full", 3, 2, 4)


def faded(student: type[nn.Module], release: Any, **more: Any) -> tuple[Reader, crossfade.Fade]:
    model = Reader()
    plan = crossfade.Plan(
        targets="attn", student=lambda teacher, site: student(), gate=crossfade.Deterministic("linear"), **more
    )
    return model, crossfade.install(model, plan, total_steps=4, release=release)


@pytest.mark.parametrize("release", ["when_done", "finalize"])
@pytest.mark.parametrize("student", [Poor, Rich])
def test_declared_attributes_are_answered_in_every_phase_and_after(student: type[nn.Module], release: str) -> None:
    model, fade = faded(student, release, carry=NAMES)
    optimizer = torch.optim.SGD(fade.parameter_groups(), lr=0.1)
    fade.attach(optimizer)
    train(model, fade, optimizer, range(4))
    assert model.read == [READ] * 4
    # alpha is 0: the teacher may be gone, but what was declared is still answered.
    model(data()[0])
    plain = fade.finalize()
    plain(data()[0])
    own = READ if student is Poor else ("linear", 3, 1, 8)
    assert model.read[-1] == own  # Names that the student defines itself win in the end.
    assert model.read[-2] in (READ, own)


@pytest.mark.parametrize("release", ["when_done", "finalize"])
def test_a_student_that_has_all_the_names_needs_no_declaration(release: str) -> None:
    class Full(Rich):
        layer_idx = 9

    model, fade = faded(Full, release)
    optimizer = torch.optim.SGD(fade.parameter_groups(), lr=0.1)
    fade.attach(optimizer)
    train(model, fade, optimizer, range(4))
    model(data()[0])
    fade.finalize()(data()[0])
    assert model.read[-1] == ("linear", 9, 1, 8)


@pytest.mark.parametrize("release", ["when_done", "finalize"])
def test_a_carried_name_that_nobody_has_is_an_error_that_names_it(release: Any) -> None:
    # A misspelt name must not become an attribute that is None: at install best, at finalize at the latest.
    with pytest.raises(CrossfadeError, match=r"attn\.layer_index"):  # noqa: PT012 - whichever of them comes first
        model, fade = faded(Poor, release, carry=("layer_index",))
        model(data()[0])
        fade.seek(4)
        fade.finalize()


def test_a_missing_name_is_an_attribute_error_as_for_any_module() -> None:
    model, _ = faded(Poor, "finalize")
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = model.attn.no_such_name
    assert not hasattr(model.attn, "_private")
    assert getattr(model.attn, "no_such_name", "default") == "default"


# Names that modules in use have, among them every public attribute of torch's layers that a parent might read.
USUAL = (
    "weight",
    "bias",
    "in_features",
    "alpha",
    "output",
    "path",
    "residual",
    "skip",
    "structure",
    "where",
    "route",
    "guide",
    "observe",
    "release",
    "set",
)


@pytest.mark.parametrize("name", USUAL)
def test_no_name_of_the_blend_hides_one_of_the_module(name: str) -> None:
    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 8)
            object.__setattr__(self, name, f"the module's {name}")

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x)

    model = Holder(Module())
    crossfade.install(
        model,
        crossfade.Plan(targets="fc", student=lambda t, s: Poor(), gate=crossfade.Deterministic(0.5)),
        total_steps=4,
    )
    assert getattr(model.fc, name) == f"the module's {name}"


@pytest.mark.parametrize("alpha", [1.0, 0.5, 0.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_parent_that_casts_to_the_dtype_of_the_weight_gets_that_dtype(dtype: torch.dtype, alpha: float) -> None:
    # What T5 does with its `wo`: hidden_states = hidden_states.to(self.wo.weight.dtype)
    model = Holder(nn.Linear(8, 8), lambda fc, x: fc(x.to(fc.weight.dtype))).to(dtype)
    plan = crossfade.Plan(targets="fc", student=lambda t, s: nn.Linear(8, 8), gate=crossfade.Deterministic(alpha))
    crossfade.install(model, plan, total_steps=4, release="finalize")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CrossfadeWarning)
        assert model.fc.weight.dtype == dtype
        assert model(torch.randn(2, 8)).dtype == dtype


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_reading_a_tensor_through_the_blend_warns_once_and_names_the_site(name: str) -> None:
    model = Holder(nn.Linear(8, 8))
    plan = crossfade.Plan(targets="fc", student=lambda t, s: nn.Linear(8, 8), gate=crossfade.Deterministic(0.5))
    crossfade.install(model, plan, total_steps=4)
    with pytest.warns(CrossfadeWarning, match=rf"fc: .*{name!r}.*bypassed"):
        assert torch.equal(getattr(model.fc, name), getattr(model.fc.teacher, name))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert getattr(model.fc, name) is not None


def test_every_place_of_a_run_answers_for_the_module_that_stood_there() -> None:
    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Attention(i) for i in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for i, layer in enumerate(self.layers):
                assert (layer.layer_idx, layer.attention_type) == (i, "full")
                x = layer(x)
            return x

    model = Stack()
    plan = crossfade.Plan(targets="layers[1:3]", student=crossfade.students.Copy())
    fade = crossfade.install(model, plan, total_steps=4, release="finalize")
    x = data()[0]
    model(x)
    fade.seek(4)
    model(x)
    plain = fade.finalize(probe=x)  # The student is a copy of the first module: it keeps that one's index.
    assert len(plain.layers) == 2
    plain(x)
