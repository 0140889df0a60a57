"""FC-79: distillation from a full forward refuses an original that answers in another shape, before the first step."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from crossfade.lab import distill
from crossfade.lab.inputs import InputError
from crossfade.lab.loop import run
from crossfade.lab.tasks import Loaded
from tests.lab.conftest import TASK, experiment, task_of


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        return task_of(TASK).load()


@pytest.mark.parametrize("label", ["kd", "kd+features"])
@pytest.mark.parametrize("classes", [9, 11, 20])
def test_another_number_of_classes_is_refused_before_the_first_step(label: str, classes: int, loaded: Loaded) -> None:
    other = copy.copy(loaded)
    fresh = copy.deepcopy(loaded.model)
    fresh.head = nn.Linear(fresh.head.in_features, classes)  # Of the student network; a superset is no less wrong.
    other.fresh = lambda: fresh
    before = {key: value.clone() for key, value in fresh.state_dict().items()}
    with pytest.raises(InputError, match=rf"expected: \(16, 10\)\n  got: \(16, {classes}\)"):
        run(experiment(label), label, 0, loaded=other)
    after = fresh.state_dict()
    assert all(torch.equal(value, after[key]) for key, value in before.items() if key in after)


def test_the_same_batch_object_reaches_both(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, list[int]] = {"student": [], "original": []}
    forward = type(loaded).forward

    def noting(self, model, batch):
        if torch.is_grad_enabled() or model is self.model:
            seen["original" if model is self.model else "student"].append(id(batch))
        return forward(self, model, batch)

    class Spy(distill.Distiller):
        def loss(self, output, batch, index):
            assert not self.original.training
            seen["original"].clear()
            result = super().loss(output, batch, index)
            assert seen["original"] == [id(batch)] == seen["student"][-1:]
            return result

    monkeypatch.setattr(type(loaded), "forward", noting)
    monkeypatch.setattr("crossfade.lab.loop.Distiller", Spy)
    run(experiment("kd+features"), "kd+features", 0, loaded=loaded)
    assert len(seen["student"]) >= 10
