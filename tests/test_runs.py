"""Runs: k modules become one, in hand-written and library models, and the counters follow."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import crossfade
from crossfade import Deterministic, Plan, students
from crossfade.blend import Blend
from crossfade.changes import Changes
from crossfade.errors import CrossfadeError
from crossfade.ledger import Ledger
from crossfade.runs import Chain, PassThrough, shorten
from crossfade.students import Reinit
from crossfade.targets import Run
from tests.models import MLP, Net, batch, difference, equal, net, portrait

IDS, LABELS = batch()


def ours(model: nn.Module) -> list[str]:
    return [path for path, m in model.named_modules() if type(m).__module__.startswith("crossfade")]


def run_plan(targets="blocks[1:3]", **more) -> Plan:
    return Plan(**({"targets": targets, "student": students.Copy(), "gate": Deterministic("linear")} | more))


def faded(model: nn.Module, plan: Plan, x, steps: int = 2) -> crossfade.Fade:
    """A fade that is over, with students that have moved."""
    fade = crossfade.install(model, plan, total_steps=steps, probe=x)
    optimizer = torch.optim.SGD(fade.parameter_groups(), lr=0.05)
    fade.attach(optimizer)
    model.train()
    for _ in range(steps):
        out = crossfade_main(model, x)
        out.float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return fade


def crossfade_main(model, x):
    out = model(**x) if isinstance(x, dict) else model(x)
    return out if isinstance(out, torch.Tensor) else out[0]


# ---- parts -----------------------------------------------------------------------------------------------------------


def test_that_a_chain_runs_its_modules_in_order():
    a, b = MLP(), MLP()
    chain = Chain((a, b))
    x = torch.randn(2, 3, 8)
    assert torch.equal(chain(x), b(a(x)))


def test_that_a_chain_hands_on_the_main_tensor_and_the_rest_of_the_call():
    seen = []

    class Layer(nn.Module):
        def forward(self, hidden_states, mask=None, *, flag=None):
            seen.append((mask, flag))
            return hidden_states + 1, "weights"

    out = Chain((Layer(), Layer(), Layer()))(torch.zeros(1), "mask", flag=3)
    assert out[0].item() == 3.0
    assert out[1] == "weights"
    assert seen == [("mask", 3)] * 3
    assert Chain((Layer(), Layer()))(hidden_states=torch.zeros(1), flag=3)[0].item() == 2.0


def test_that_a_chain_answers_for_its_first_module():
    a, b = MLP(), MLP()
    a.kind, b.kind = "first", "second"
    chain = Chain((a, b))
    assert chain.kind == "first"
    with pytest.raises(AttributeError):
        chain.nothing  # noqa: B018 - reading it is the test


def test_that_a_pass_through_returns_its_input_in_the_blocks_structure():
    class Layer(nn.Module):
        def forward(self, x):
            return x + 1, None

    module = Layer()
    module.kind = "here"
    blend = Blend(Chain((Layer(), module)), Layer(), path="x", ledger=Ledger())
    filler = PassThrough(blend, module)
    x = torch.zeros(1, 2)
    assert filler(x) is x
    blend(x)
    out = filler(x)
    assert isinstance(out, tuple)
    assert out[0] is x
    assert out[1] is None
    assert filler.kind == "here"
    assert not list(filler.parameters())
    assert not list(filler.children())


def test_that_shorten_sets_counters_and_indices_and_can_be_undone():
    model = net(layers=5)
    model.config = type("Config", (), {})()
    model.config.num_hidden_layers = 5
    model.config.layer_types = list("abcde")
    model.config.n_layer = 7  # Another count: not ours to change.
    for i, block in enumerate(model.blocks):
        block.layer_idx = i
        block.attn.layer_idx = i
    before = portrait(model)
    config = dict(vars(model.config))
    student = MLP()
    changes = Changes()
    shorten(changes, model, Run("blocks", 1, 4), student)
    assert len(model.blocks) == 3
    assert model.blocks[1] is student
    assert list(model.blocks._modules) == ["0", "1", "2"]
    assert model.num_layers == 3
    assert vars(model.config) == {"num_hidden_layers": 3, "layer_types": ["a", "b", "e"], "n_layer": 7}
    assert [model.blocks[i].layer_idx for i in (0, 2)] == [0, 2]
    assert model.blocks[2].attn.layer_idx == 2
    changes.undo()
    assert not difference(portrait(model), before)
    assert vars(model.config) == config


# ---- whole fades -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("targets", ["blocks[0:2]", "blocks[1:3]", "blocks[2:4]", "blocks[0:4]", "blocks[1:2]"])
def test_that_a_run_fades_finalizes_and_loads(targets, tmp_path):
    model = net(layers=4)
    reference = copy.deepcopy(model)
    fade = crossfade.install(model, run_plan(targets), total_steps=2, probe=IDS)
    assert torch.equal(model(IDS), reference(IDS))
    fade.revert()
    assert equal(model.state_dict(), reference.state_dict())
    fade = faded(model, run_plan(targets), IDS)
    model.eval()
    out = model(IDS)
    k = int(targets[-2]) - int(targets[-4])
    model = fade.finalize(probe=IDS)
    assert torch.equal(model(IDS), out)
    assert len(model.blocks) == model.num_layers == 5 - k
    assert not ours(model)
    crossfade.save(model, tmp_path)
    again = crossfade.load(tmp_path, base=lambda: net(layers=4, seed=9).eval())
    assert torch.equal(again(IDS), out)
    assert again.num_layers == model.num_layers


@pytest.mark.parametrize(
    "targets",
    [
        ["blocks[0:2]", "blocks[2:4]"],
        ["blocks[1:3]", "blocks[3:5]"],
        ["blocks[0:2]", "blocks.3.attn"],
        ["blocks.0.attn", "blocks[1:3]"],
        ["blocks[2:4]", "blocks[10:12]"],
        ["blocks[0:2]", "blocks.2"],
    ],
    ids=str,
)
def test_that_several_sites_with_runs_finalize_and_load(targets, tmp_path):
    layers = 12 if "blocks[10:12]" in targets else 5
    model = net(layers=layers)
    fade = faded(model, run_plan(targets), IDS)
    model.eval()
    with fade.view("student"):
        out = model(IDS)
    model = fade.finalize(probe=IDS)
    assert torch.equal(model(IDS), out)
    cut = sum(1 for target in targets if "[" in target)
    assert len(model.blocks) == model.num_layers == layers - cut
    assert not ours(model)
    crossfade.save(model, tmp_path)
    again = crossfade.load(tmp_path, base=lambda: net(layers=layers, seed=9).eval())
    assert torch.equal(again(IDS), out)


def test_that_a_run_of_the_model_itself_works(tmp_path):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    x = torch.randn(2, 4)
    fade = faded(model, run_plan("[0:2]"), x)
    model = fade.finalize(probe=x)
    assert len(model) == 2
    crossfade.save(model, tmp_path)
    again = crossfade.load(tmp_path, base=nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)))
    assert torch.equal(again(x), model(x))


def test_that_revert_puts_a_run_back_exactly():
    model = net(layers=4)
    model.train()
    before = portrait(model)
    fade = crossfade.install(model, run_plan(), total_steps=4, release="finalize", probe=IDS)
    optimizer = torch.optim.SGD(fade.parameter_groups(), lr=0.1)
    fade.attach(optimizer)
    for _ in range(4):
        cross_entropy(model(IDS), LABELS).backward()
        optimizer.step()
    assert not difference(portrait(fade.revert()), before)


def test_that_plain_weights_go_to_the_modules_of_a_run():
    model, other = net(layers=4), net(layers=4, seed=5)
    crossfade.install(model, run_plan(), total_steps=4, release="finalize", probe=IDS)
    model.load_state_dict(other.state_dict(), strict=True)
    model.eval()
    assert torch.equal(model(IDS), other.eval()(IDS))


@pytest.mark.parametrize("step", [0, 2, 4])
def test_that_a_mid_fade_state_of_a_run_loads_strictly(step):
    states = []
    for seed in (0, 0):
        model = net(layers=4, seed=seed)
        fade = crossfade.install(model, run_plan(), total_steps=4)
        fade.seek(step)
        states.append((model, fade))
    with torch.no_grad():
        for p in states[0][0].blocks[1].student.parameters():
            p.add_(1.0)
    states[1][0].load_state_dict(states[0][0].state_dict(), strict=True)
    assert torch.equal(states[0][0].eval()(IDS), states[1][0].eval()(IDS))


def test_that_metrics_and_guidance_of_a_run_leave_the_residual_out():
    model = net(layers=4)
    fade = crossfade.install(
        model, run_plan(guidance=crossfade.DeepFeatureGuidance(reduction="sum")), total_steps=4, probe=IDS
    )
    assert fade.sites[0].blend.holds_residual
    seen = {}
    fade.sites[0].blend.register_forward_hook(lambda m, a, o: seen.update(x=a[0], out=o))
    model(IDS)
    power = fade.calibrate([IDS])["blocks[1:3]"]
    model.eval()
    with fade.view("teacher"):
        model(IDS)
    expected = (seen["out"] - seen["x"]).square().mean().item()
    assert power == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("targets", ["blocks[3:9]", "blocks[2:2]", "nothing[0:2]", "blocks.0.attn[0:2]"])
def test_that_a_run_which_is_none_is_refused_and_nothing_changes(targets):
    model = net(layers=4)
    before = portrait(model)
    with pytest.raises(CrossfadeError):
        crossfade.install(model, run_plan(targets), total_steps=3)
    assert not difference(portrait(model), before)


# ---- libraries -------------------------------------------------------------------------------------------------------


def tiny_bert():
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=20,
        hidden_size=16,
        num_hidden_layers=4,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=16,
        num_labels=3,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return transformers.BertForSequenceClassification(config)


@pytest.mark.parametrize("student", [students.Copy(), Reinit("model")], ids=["copy", "cold"])
def test_a_run_in_bert(student, tmp_path):
    model = tiny_bert()
    x = {"input_ids": IDS, "attention_mask": torch.tensor([[1] * 5, [1] * 3 + [0] * 2] * 2)}
    reference = copy.deepcopy(model).eval()
    plan = run_plan("bert.encoder.layer[0:2]", student=student, guidance=crossfade.DeepFeatureGuidance())
    fade = crossfade.install(model, plan, total_steps=2, probe=x)
    optimizer = torch.optim.SGD(fade.parameter_groups(), lr=0.05)
    fade.attach(optimizer)
    assert torch.equal(model.eval()(**x).logits, reference(**x).logits)
    model.train()
    for _ in range(2):
        (cross_entropy(model(**x).logits, LABELS) + fade.guidance()).backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    out = model(**x).logits
    model = fade.finalize(probe=x)
    assert torch.equal(model(**x).logits, out)
    assert len(model.bert.encoder.layer) == model.config.num_hidden_layers == 3
    assert model.bert.config.num_hidden_layers == model.bert.encoder.config.num_hidden_layers == 3
    states = model(**x, output_hidden_states=True).hidden_states
    assert len(states) == 4
    assert not ours(model)
    crossfade.save(model, tmp_path)
    again = crossfade.load(tmp_path, base=tiny_bert().eval())
    assert torch.equal(again(**x).logits, out)
    assert again.config.num_hidden_layers == 3


def tiny_vit():
    timm = pytest.importorskip("timm")
    return timm.models.vision_transformer.VisionTransformer(
        img_size=8, patch_size=4, embed_dim=16, depth=4, num_heads=2, num_classes=3
    )


def test_a_run_in_timm_vit(tmp_path):
    model, x = tiny_vit(), torch.randn(2, 3, 8, 8)
    reference = copy.deepcopy(model).eval()
    model.eval()
    fade = crossfade.install(model, run_plan("blocks[1:3]"), total_steps=2, probe=x)
    assert torch.equal(model(x), reference(x))
    optimizer = torch.optim.SGD(fade.parameter_groups(), lr=0.05)
    fade.attach(optimizer)
    model.train()
    for _ in range(2):
        cross_entropy(model(x), LABELS[:2]).backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    out = model(x)
    model = fade.finalize(probe=x)
    assert torch.equal(model(x), out)
    assert len(model.blocks) == 3
    if isinstance(getattr(reference, "depth", None), int):
        assert model.depth == 3
    # The per-layer features that timm's own code reads by index still work.
    assert len(model.forward_intermediates(x, intermediates_only=True)) == 3
    crossfade.save(model, tmp_path)
    again = crossfade.load(tmp_path, base=tiny_vit().eval())
    assert torch.equal(again(x), out)


@pytest.mark.parametrize("nested", [False, True])
def test_that_a_configuration_which_other_models_hold_is_not_touched(nested):
    class Config:
        def __init__(self, **given):
            self.__dict__.update(given)

    class Part(nn.Module):
        def __init__(self, config):
            super().__init__()
            self.config, self.layers = config, nn.ModuleList(nn.Linear(4, 4) for _ in range(config.num_layers))

        def forward(self, x):
            for layer in self.layers[: self.config.num_layers]:
                x = layer(x)
            return x

    class Whole(nn.Module):
        def __init__(self, config):
            super().__init__()
            self.config, self.part = config, Part(config.part if nested else config)

        def forward(self, x):
            return self.part(x)

    inner = Config(num_layers=4, layer_types=["a", "b", "c", "d"])
    config = Config(part=inner, name="whole") if nested else inner
    model, other = Whole(config), Whole(config)
    x = torch.randn(2, 4)
    expected = other(x)
    plan = crossfade.Plan(
        targets="part.layers[1:3]", student=lambda teacher, site: nn.Linear(4, 4), gate=Deterministic(0.0)
    )
    model = crossfade.install(model, plan, total_steps=1).finalize(probe=x)
    assert len(model.part.layers) == model.part.config.num_layers == 3
    assert model.part.config.layer_types == ["a", "b", "d"]
    assert (model.config.part if nested else model.config) is model.part.config
    assert inner.num_layers == len(inner.layer_types) == 4
    assert config is other.config
    assert other.part.config is inner
    assert torch.equal(other(x), expected)


def test_that_a_causal_language_model_still_generates_after_a_run(tmp_path):
    transformers = pytest.importorskip("transformers")

    def tiny():
        config = transformers.LlamaConfig(
            vocab_size=20,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=4,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=32,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        )
        return transformers.LlamaForCausalLM(config)

    model = tiny()
    model.config.use_cache = False
    x = {"input_ids": IDS}
    fade = faded(model, run_plan("model.layers[1:3]"), x)
    model = fade.finalize(probe=x)
    assert model.config.num_hidden_layers == 3
    assert [layer.self_attn.layer_idx for layer in model.model.layers] == [0, 1, 2]
    model.eval()
    settings = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    with_cache = model.generate(IDS, use_cache=True, **settings)
    assert torch.equal(with_cache, model.generate(IDS, use_cache=False, **settings))
    crossfade.save(model, tmp_path)
    base = tiny().eval()
    base.config.use_cache = False
    again = crossfade.load(tmp_path, base=base)
    assert torch.equal(again.generate(IDS, use_cache=True, **settings), with_cache)


def test_that_a_net_with_shared_blocks_still_runs():
    model = Net(4)
    plan = run_plan("blocks[1:3]", student=Reinit("reset_parameters"))
    fade = faded(model, plan, IDS, steps=3)
    assert len(fade.finalize(probe=IDS).blocks) == 3
