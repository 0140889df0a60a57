"""FC-53: layer-wise rates by name give a student the scale that the old module had."""

from __future__ import annotations

import pytest
import torch

import crossfade
from crossfade.students import Reinit

timm = pytest.importorskip("timm", reason="the extra 'timm' is not installed")


def scales(model: torch.nn.Module) -> dict[str, float]:
    groups = timm.optim.param_groups_layer_decay(model, weight_decay=0.05, layer_decay=0.5)
    by_id = {id(p): group["lr_scale"] for group in groups for p in group["params"]}
    return {name: by_id[id(p)] for name, p in model.named_parameters() if id(p) in by_id}


@pytest.mark.parametrize("trains", ["students", "all"])
def test_a_student_has_the_scale_of_the_module_before_it(trains: str) -> None:
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=32, depth=3, num_heads=2, num_classes=4
    )
    before = scales(model)
    plan = crossfade.Plan(targets="blocks.1.attn", student=Reinit(), trains=trains)
    crossfade.install(model, plan, total_steps=10)
    after = scales(model)
    students = {name: scale for name, scale in after.items() if ".student." in name}
    assert len(students) == 4
    for name, scale in students.items():
        assert scale == before[name.replace(".student", "")]
    for name, scale in after.items():
        if name in before:
            assert scale == before[name], name
    assert not [name for name in after if ".teacher." in name]
