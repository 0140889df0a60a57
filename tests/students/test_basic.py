"""`Copy` is warm, `Reinit` is cold, and what would be neither is an error."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import crossfade
from crossfade.errors import PlanError, StudentError
from crossfade.students import Copy, Normal, Reinit, SiteInfo
from tests.models import Attention, equal, net, random_states


def cold(init, teacher: nn.Module, model: nn.Module | None = None, path: str = "site", **more) -> nn.Module:
    """The student that `Reinit` makes of a teacher."""
    model = nn.ModuleDict({"site": teacher}) if model is None else model
    return Reinit(init, **more)(teacher, SiteInfo(path, 0, 1, model, seed=3))


def warm_names(student: nn.Module, teacher: nn.Module) -> list[str]:
    """Tensors that still hold what training wrote, constants aside."""
    theirs = teacher.state_dict()
    return [
        name
        for name, t in student.state_dict().items()
        if t.is_floating_point() and torch.equal(t, theirs[name]) and not bool((t == t.flatten()[0]).all())
    ]


def trained(module: nn.Module) -> nn.Module:
    """A module whose every floating-point tensor is far from any initialisation."""
    with torch.no_grad():
        for tensor in module.state_dict().values():
            if tensor.is_floating_point():
                tensor.copy_(torch.randn_like(tensor) + 3.0)
    return module


# ---- Copy ------------------------------------------------------------------------------------------------------------


def test_that_copy_is_warm_and_shares_nothing():
    teacher = trained(Attention())
    student = Copy()(teacher, SiteInfo("a", 0, 1, teacher, seed=0))
    assert equal(student.state_dict(), teacher.state_dict())
    ours = {t.data_ptr() for t in student.state_dict().values()}
    assert not ours.intersection(t.data_ptr() for t in teacher.state_dict().values())


# ---- Reinit on torch.nn ----------------------------------------------------------------------------------------------

MODULES = {
    "Linear": lambda: nn.Linear(4, 3),
    "Attention": Attention,
    "MultiheadAttention": lambda: nn.MultiheadAttention(8, 2),
    "MultiheadAttention, other keys": lambda: nn.MultiheadAttention(8, 2, kdim=4, vdim=4, add_bias_kv=True),
    "TransformerEncoderLayer": lambda: nn.TransformerEncoderLayer(8, 2, 16),
    "LayerNorm": lambda: nn.LayerNorm(4),
    "BatchNorm1d": lambda: nn.BatchNorm1d(4),
    "Conv and BatchNorm": lambda: nn.Sequential(nn.Conv1d(3, 4, 3), nn.BatchNorm1d(4), nn.GELU()),
    "LSTM": lambda: nn.LSTM(3, 4),
    "Embedding": lambda: nn.Embedding(5, 4),
    "GroupNorm": lambda: nn.GroupNorm(2, 4),
}


@pytest.mark.parametrize("name", MODULES)
def test_that_reset_parameters_makes_torch_modules_cold(name):
    teacher = trained(MODULES[name]())
    student = cold("reset_parameters", teacher)
    assert not warm_names(student, teacher)
    assert all(bool(torch.isfinite(t).all()) for t in student.state_dict().values() if t.is_floating_point())
    for tensor in student.state_dict().values():
        if tensor.is_floating_point():
            assert abs(float(tensor.float().mean())) < 2.5  # Nothing of the 3.0 that training left.


@pytest.mark.parametrize("name", ["Linear", "Attention", "LayerNorm", "Conv and BatchNorm", "BatchNorm1d", "GroupNorm"])
def test_that_normal_makes_them_cold_at_its_width(name):
    teacher = trained(MODULES[name]())
    student = cold(Normal(0.02), teacher)
    assert not warm_names(student, teacher)
    for path, module in student.named_modules():
        for key, p in module.named_parameters(recurse=False):
            if p.dim() >= 2:
                assert 0.0 < float(p.detach().std()) < 0.06, path
                assert float(p.detach().abs().max()) < 0.15, path
            elif key == "bias":
                assert torch.equal(p, torch.zeros_like(p)), path
            elif "Norm" in type(module).__name__:
                assert torch.equal(p, torch.ones_like(p)), path


def test_that_normal_sets_every_norm_weight_to_one_whatever_its_shape():
    student = cold(Normal(0.02), trained(nn.LayerNorm((3, 4))))
    assert torch.equal(student.weight, torch.ones(3, 4))
    assert torch.equal(student.bias, torch.zeros(3, 4))


@pytest.mark.parametrize("init", ["reset_parameters", Normal(0.02)], ids=str)
def test_that_running_statistics_are_cold(init):
    teacher = trained(nn.BatchNorm1d(4))
    teacher.num_batches_tracked.fill_(7)
    student = cold(init, teacher)
    assert torch.equal(student.running_mean, torch.zeros(4))
    assert torch.equal(student.running_var, torch.ones(4))
    assert student.num_batches_tracked.item() == 0


class Raw(nn.Module):
    """Tensors that no rule of torch knows."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(3, 3)
        self.gate = nn.Parameter(torch.randn(3))
        self.register_buffer("table", torch.randn(3))
        self.register_buffer("derived", torch.arange(3.0), persistent=False)

    def forward(self, x):
        return self.proj(x) * self.gate + self.table


def test_that_what_would_stay_warm_is_refused_by_name():
    for init in ("reset_parameters", Normal(0.02)):
        with pytest.raises(StudentError) as caught:
            cold(init, Raw())
        assert "site: gate, table" in str(caught.value)
        assert "keep=" in str(caught.value)
        assert "derived" not in str(caught.value)


def test_that_constants_may_be_kept_by_name():
    teacher = Raw()
    student = cold("reset_parameters", teacher, keep=("gate", "tab*"))
    assert torch.equal(student.gate, teacher.gate)
    assert torch.equal(student.table, teacher.table)
    assert torch.equal(student.derived, teacher.derived)
    assert not torch.equal(student.proj.weight, teacher.proj.weight)


def test_that_keep_must_match_something():
    with pytest.raises(StudentError, match="gatee"):
        cold("reset_parameters", Raw(), keep=("gatee",))


def test_that_a_rule_which_copies_the_old_weights_back_is_found():
    teacher = Attention()
    weights = {name: t.clone() for name, t in teacher.state_dict().items()}

    class Sly(nn.ModuleDict):
        def _init_weights(self, module):
            for name, p in module.named_parameters():
                if name in weights:
                    p.copy_(weights[name])

    model = Sly({"site": teacher})
    with pytest.raises(StudentError, match=r"q\.weight"):
        cold("model", teacher, model)


def test_that_complex_parameters_are_not_left_warm():
    class Spectral(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.filter = nn.Parameter(torch.randn(3, 2, dtype=torch.complex64))

    with pytest.raises(StudentError, match="filter"):
        cold("reset_parameters", Spectral())


def test_that_a_constant_bias_proves_nothing():
    teacher = nn.Linear(3, 3)
    nn.init.zeros_(teacher.bias)
    assert torch.equal(cold(Normal(0.02), teacher).bias, torch.zeros(3))


# ---- seeds -----------------------------------------------------------------------------------------------------------


def test_that_the_seed_decides_and_the_global_state_does_not():
    teacher = Attention()
    states = random_states()
    one, two = cold("reset_parameters", teacher), cold("reset_parameters", teacher)
    other = cold("reset_parameters", teacher, seed=1)
    assert equal(one.state_dict(), two.state_dict())
    assert not torch.equal(one.q.weight, other.q.weight)
    assert equal(random_states(), states)


def test_that_sites_of_one_plan_differ():
    model = net()
    plan = crossfade.Plan(targets="blocks.*.attn", student=Reinit("reset_parameters"))
    fade = crossfade.install(model, plan, total_steps=3)
    a, b = (s.blend.student.q.weight for s in fade.sites)
    assert not torch.equal(a, b)


def test_that_the_teacher_is_not_touched():
    teacher = trained(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))
    before = {name: t.clone() for name, t in teacher.state_dict().items()}
    cold("reset_parameters", teacher)
    assert equal(dict(teacher.state_dict()), before)


# ---- the model's own rule --------------------------------------------------------------------------------------------


def test_that_the_nearest_rule_above_the_site_is_used():
    class Holder(nn.Module):
        def __init__(self, value: float, **children: nn.Module) -> None:
            super().__init__()
            self.value = value
            for name, child in children.items():
                self.add_module(name, child)

        def _init_weights(self, module):
            for p in module.parameters(recurse=False):
                p.fill_(self.value)

    model = Holder(1.0, inner=Holder(2.0, site=nn.Linear(2, 2)), site=nn.Linear(2, 2))
    assert cold("model", model.inner.site, model, "inner.site").weight[0, 0].item() == 2.0
    assert cold("model", model.site, model, "site").weight[0, 0].item() == 1.0


def test_that_a_model_without_rule_says_what_else_there_is():
    with pytest.raises(StudentError, match=r"Normal\(0\.02\)"):
        cold("model", Attention())


@pytest.fixture(scope="module")
def bert():
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=20,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=16,
    )
    return transformers.BertModel(config)


@pytest.fixture(scope="module")
def vit():
    timm = pytest.importorskip("timm")
    return timm.models.vision_transformer.VisionTransformer(
        img_size=8, patch_size=4, embed_dim=16, depth=2, num_heads=2, num_classes=3
    )


@pytest.mark.parametrize("path", ["encoder.layer.0.attention", "encoder.layer.0.attention.self", "encoder.layer.1"])
def test_that_transformers_bert_is_cold_by_its_own_rule(bert, path):
    teacher = trained(bert.get_submodule(path))
    student = cold("model", teacher, bert, path)
    assert not warm_names(student, teacher)
    for name, p in student.named_parameters():
        if p.dim() >= 2:
            assert float(p.detach().std()) == pytest.approx(bert.config.initializer_range, rel=0.4), name
        else:
            assert set(p.unique().tolist()) <= {0.0, 1.0}, name


@pytest.mark.parametrize("init", ["model", "reset_parameters", Normal(0.02)], ids=str)
def test_that_timm_vit_attention_is_cold(vit, init):
    teacher = trained(vit.blocks[0].attn)
    student = cold(init, teacher, vit, "blocks.0.attn")
    assert not warm_names(student, teacher)
    assert float(student.qkv.weight.detach().abs().mean()) < 0.5


@pytest.mark.parametrize("init", ["model", "reset_parameters", Normal(0.02)], ids=str)
def test_that_a_whole_timm_block_is_cold(vit, init):
    teacher = trained(vit.blocks[0])
    student = cold(init, teacher, vit, "blocks.0")
    assert not warm_names(student, teacher)


@pytest.fixture
def eva():
    timm = pytest.importorskip("timm")
    return timm.models.eva.Eva(
        img_size=8, patch_size=4, embed_dim=16, depth=1, num_heads=2, num_classes=2, qkv_fused=True, qkv_bias=True
    )


@pytest.mark.parametrize("init", ["model", "reset_parameters", Normal(0.02)], ids=str)
def test_that_eva_attention_with_its_raw_biases_is_cold(eva, init):
    teacher = trained(eva.blocks[0].attn)
    assert [name for name in teacher.state_dict() if name in ("q_bias", "v_bias")] == ["q_bias", "v_bias"]
    student = cold(init, teacher, eva, "blocks.0.attn")
    assert not warm_names(student, teacher)
    assert torch.equal(student.q_bias, torch.zeros(16))


def test_that_the_raw_biases_of_eva_are_named_where_timm_has_no_reset_for_them(eva, monkeypatch):
    monkeypatch.delattr(type(eva.blocks[0].attn), "reset_parameters")  # As before timm 1.0.21.
    with pytest.raises(StudentError) as caught:
        cold("reset_parameters", trained(eva.blocks[0].attn), eva, "blocks.0.attn")
    assert "blocks.0.attn: q_bias, v_bias" in str(caught.value)
    assert "Normal(0.02)" in str(caught.value)


def test_that_a_batchnorm_host_is_cold_or_refused(vit):
    class Host(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.site = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))

        def _init_weights(self, module):
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight)
                nn.init.zeros_(module.bias)

    model = Host()
    trained(model.site)
    with pytest.raises(StudentError, match=r"1\.weight, 1\.bias, 1\.running_mean, 1\.running_var"):
        cold("model", model.site, model)
    assert not warm_names(cold("reset_parameters", model.site, model), model.site)


# ---- refused ---------------------------------------------------------------------------------------------------------


def test_that_nonsense_is_a_plan_error():
    for std in (0.0, -1.0, float("nan")):
        with pytest.raises(PlanError):
            Normal(std)
    for init in ("zeros", None, 3):
        with pytest.raises(PlanError):
            Reinit(init)


def test_that_students_are_values():
    assert Reinit(Normal(0.02), keep=["a"]) == Reinit(Normal(0.02), keep=("a",))
    assert hash(Reinit()) == hash(Reinit("model"))
