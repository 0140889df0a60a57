"""Install is atomic: resolve, build, check, and only then change anything."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import crossfade
from crossfade import DeepFeatureGuidance, Deterministic, Plan, Swap, schedules, students
from crossfade.errors import CrossfadeError, OutputError, PlanError, SelectionError, StateError, StudentError
from crossfade.students import Reinit
from tests.models import KINDS, MLP, Attention, batch, difference, equal, net, plan, portrait, random_states

IDS, _ = batch()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("probe", [None, IDS, {"ids": IDS}, (IDS,), lambda model: model(IDS)], ids=type)
def test_that_installing_changes_no_output(kind, probe):
    model = net(kind)
    expected = model(IDS)
    states = random_states()
    fade = crossfade.install(model, plan(), total_steps=4, probe=probe)
    assert equal(random_states(), states)
    assert torch.equal(model(IDS), expected)
    assert model.training
    assert fade.model is model
    assert fade.plan == plan()
    assert crossfade.handle(model) is fade
    assert [site.path for site in fade.sites] == (
        ["blocks.0.attn"] if kind == "shared" else ["blocks.0.attn", "blocks.1.attn"]
    )


def test_the_rows_of_a_site():
    fade = crossfade.install(net("shared"), plan(), total_steps=4)
    (site,) = fade.sites
    assert site.paths == ("blocks.0.attn", "blocks.1.attn")
    assert (site.index, site.n, site.teacher_class) == (0, 1, "Attention")
    assert site.parameters == sum(p.numel() for p in Attention().parameters())
    blocks = fade.model.blocks
    assert blocks[0].attn is blocks[1].attn is site.blend


def test_that_several_swaps_count_their_own_sites():
    both = Plan([Swap(targets="blocks.*.mlp", student="Copy"), *plan().swaps])
    fade = crossfade.install(net(), both, total_steps=4)
    assert [(s.path, s.index, s.n) for s in fade.sites] == [
        ("blocks.0.mlp", 0, 2),
        ("blocks.1.mlp", 1, 2),
        ("blocks.0.attn", 0, 2),
        ("blocks.1.attn", 1, 2),
    ]


# ---- nothing changes when it fails -----------------------------------------------------------------------------------


def fails_at_site_two(teacher, site):
    if site.index == 1:
        raise ZeroDivisionError("on purpose")
    return Attention()


class Wide(Attention):
    def forward(self, x, mask=None):
        y, w = super().forward(x, mask)
        return torch.cat((y, y), -1), w


class Structure(Attention):
    def forward(self, x, mask=None):
        return list(super().forward(x, mask))


def always(module):
    return lambda teacher, site: module


FAILURES = {
    "no such target": (plan(targets="blocks.*.attention"), {}, SelectionError),
    "nested sites": (Plan([*plan().swaps, *plan(targets="blocks.0").swaps]), {}, SelectionError),
    "the same site twice": (Plan([*plan().swaps, *plan(targets="blocks.0.attn").swaps]), {}, SelectionError),
    "the factory fails": (plan(student=fails_at_site_two), {}, ZeroDivisionError),
    "no module": (plan(student=lambda teacher, site: 3), {}, StudentError),
    "the teacher itself": (plan(student=lambda teacher, site: teacher), {}, StudentError),
    "one module for two sites": (plan(student=Attention()), {}, StudentError),
    "the same module from the factory for two sites": (
        plan(student=always(Attention())),
        {},
        StudentError,
    ),
    "no rule": (plan(student=Reinit("model")), {}, StudentError),
    "the call does not fit": (plan(student=lambda teacher, site: MLP()), {"probe": IDS}, StudentError),
    "another shape": (plan(student=lambda teacher, site: Wide()), {"probe": IDS}, OutputError),
    "another structure": (plan(student=lambda teacher, site: Structure()), {"probe": IDS}, OutputError),
    "the declared output is none": (plan(output=5), {"probe": IDS}, OutputError),
    "the probe does not fit": (plan(), {"probe": {"wrong": IDS}}, CrossfadeError),
    "the probe misses the sites": (plan(), {"probe": lambda m: m.embed(IDS)}, OutputError),
    "a site weight without site": (plan(None, DeepFeatureGuidance(site_weights={"x": 1.0})), {}, PlanError),
    "a pattern that trains nothing": (plan(trains=["x"]), {}, SelectionError),
    "one schedule too few": (plan(Deterministic(schedules.PerSite([0.5]))), {}, PlanError),
    "no length": (plan(), {"total_steps": None}, PlanError),
    "a length of zero": (plan(), {"total_steps": 0}, PlanError),
    "a length in floats": (plan(), {"total_steps": 3.0}, PlanError),
    "an unknown release": (plan(), {"release": "now"}, PlanError),
    "no plan": ("blocks.*.attn", {}, PlanError),
}


@pytest.mark.parametrize("name", FAILURES)
@pytest.mark.parametrize("training", [True, False])
def test_that_a_failing_install_leaves_everything_as_it_was(name, training):
    the_plan, options, error = FAILURES[name]
    model = net().train(training)
    model.blocks[0].attn.q.eval()
    model.embed.weight.requires_grad_(False)
    before, states = portrait(model), random_states()
    with pytest.raises(error):
        crossfade.install(model, the_plan, **({"total_steps": 4} | options))
    assert difference(portrait(model), before) == []
    assert equal(random_states(), states)
    crossfade.install(model, plan(), total_steps=4, probe=IDS).revert()
    assert difference(portrait(model), before) == []


def test_that_an_alpha_outside_its_range_at_one_site_is_found_at_install():
    def choose(site, index, n):
        return 2.0 if n == 2 and index == 1 else 0.5

    model = net()
    before = portrait(model)
    with pytest.raises(PlanError, match="alpha left its range"):
        crossfade.install(model, plan(Deterministic(schedules.PerSite(choose))), total_steps=4)
    assert difference(portrait(model), before) == []


def test_that_a_second_install_is_refused_until_the_first_ends():
    model = net()
    fade = crossfade.install(model, plan(), total_steps=4)
    with pytest.raises(StateError, match="already installed"):
        crossfade.install(model, plan(targets="blocks.*.mlp"), total_steps=4)
    with pytest.raises(CrossfadeError):
        crossfade.install(model.blocks, plan(targets="*.attn"), total_steps=4)
    fade.revert()
    crossfade.install(model, plan(), total_steps=4)


def test_that_wrapped_models_are_refused():
    for wrong in (nn.DataParallel(net()), torch.compile(net(), backend="eager"), None, net):
        with pytest.raises(StateError):
            crossfade.install(wrong, plan(), total_steps=4)


# ---- the probe -------------------------------------------------------------------------------------------------------


def test_that_the_probe_runs_without_gradient_in_eval_and_moves_no_statistics():
    seen = []

    class Spy(Attention):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(8)

        def forward(self, x, mask=None):
            seen.append((torch.is_grad_enabled(), self.training))
            self.norm(x.transpose(1, 2))
            return super().forward(x, mask)

    model = net()
    fade = crossfade.install(model, plan(student=lambda teacher, site: Spy()), total_steps=4, probe=IDS)
    assert seen
    assert not any(grad or training for grad, training in seen)
    assert all(s.blend.student.norm.num_batches_tracked.item() == 0 for s in fade.sites)
    assert all(s.blend.student.training for s in fade.sites)
    assert not fade.ledger.terms


def test_that_the_probe_teaches_the_structure():
    fade = crossfade.install(net(), plan(Deterministic(0.0)), total_steps=4, probe=IDS)
    assert all(site.blend.main_place == 0 for site in fade.sites)


def test_that_messages_of_check_call_reach_the_user_without_probe_too():
    fade = crossfade.install(net(), plan(Deterministic(0.5), student=lambda t, s: MLP()), total_steps=4)
    with pytest.raises(StudentError, match=r"drop=\['mask'\]") as caught:
        fade.model(IDS)
    for part in ("blocks.0.attn", "MLP", "Attention", "(x)"):
        assert part in str(caught.value)


def test_that_drop_lets_a_student_do_without():
    fade = crossfade.install(net(), plan(student=lambda t, s: MLP(), drop=["mask"]), total_steps=4, probe=IDS)
    assert type(fade.sites[0].blend.student).__name__ == "Adapter"
    fade.seek(2)
    fade.model(IDS)


# ---- options ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [True, False])
def test_that_modes_and_flags_are_as_documented(training):
    model = net().train(training)
    fade = crossfade.install(model, plan(), total_steps=4)
    for site in fade.sites:
        assert not any(m.training for m in site.blend.teacher.modules())
        assert all(m.training is training for m in site.blend.student.modules())
        assert not any(p.requires_grad for p in site.blend.teacher.parameters())
        assert all(p.requires_grad for p in site.blend.student.parameters())


def test_that_residual_is_true_for_runs_unless_said():
    for targets, given, expected in (
        ("blocks[0:2]", None, True),
        ("blocks.0", None, False),
        ("blocks.0", True, True),
        ("blocks[0:2]", False, False),
    ):
        the_plan = plan(targets=targets, student=students.Copy(), residual=given)
        fade = crossfade.install(net(), the_plan, total_steps=2)
        assert fade.sites[0].blend.holds_residual is expected


def test_that_a_teacher_gradient_of_false_reaches_the_blend():
    fade = crossfade.install(net(), plan(teacher_gradient=False), total_steps=2)
    assert not any(site.blend.teacher_gradient for site in fade.sites)


def test_that_torch_encoders_with_a_fast_path_call_their_blends():
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2)
    x = torch.randn(2, 3, 8)
    the_plan = Plan(targets="layers.*.linear1", student=Reinit("reset_parameters"), gate=Deterministic(0.0))
    fade = crossfade.install(model, the_plan, total_steps=2, probe=x)
    model.eval()
    with torch.no_grad():
        out = model(x)
    expected = fade.finalize(force=True).eval()
    with torch.no_grad():
        torch.testing.assert_close(out, expected(x))


@pytest.mark.parametrize(
    "targets", ["layers.*.linear1", "layers.*.self_attn", "layers.*.norm1", "layers.*", "layers[0:2]"]
)
def test_that_a_probe_with_padding_fits_torchs_encoder(targets):
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = nn.TransformerEncoder(layer, 3)
    mask = torch.zeros(4, 6, dtype=torch.bool)
    mask[1, 3:] = True
    probe = {"src": torch.randn(4, 6, 16), "src_key_padding_mask": mask}
    student = students.Reinit("reset_parameters") if targets == "layers.*.linear1" else students.Copy()
    plan = crossfade.Plan(targets=targets, student=student)
    fade = crossfade.install(model, plan, total_steps=2, probe=probe)
    assert not model.use_nested_tensor
    fade.revert()
    assert model.use_nested_tensor
    with pytest.raises(OutputError):
        crossfade.install(model, plan, total_steps=2, probe=lambda model: None)
    assert model.use_nested_tensor


def test_that_a_site_which_returns_a_number_is_refused():
    class Scalar(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x):
            return x.mean() * self.scale

    model = nn.Sequential(Scalar())
    with pytest.raises(OutputError, match="single number"):
        crossfade.install(
            model, crossfade.Plan(targets="0", student=students.Copy()), total_steps=2, probe=torch.randn(2, 3)
        )
    assert type(model[0]) is Scalar
