"""A saved folder holds two files, loads exactly or says why not, and never runs code."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import crossfade
from crossfade import Deterministic, Plan, persist, registry, students
from crossfade.errors import CrossfadeError, PersistError
from crossfade.finalize import receipt_of
from crossfade.students import Reinit
from tests.models import MLP, Attention, batch, equal, net, plan, portrait

IDS, _ = batch()
KINDS = ("pre_norm", "post_norm", "shared")


def finalized(model: nn.Module | None = None, the_plan: Plan | None = None, x=IDS) -> nn.Module:
    model = net() if model is None else model
    fade = crossfade.install(model, the_plan or plan(Deterministic(0.0)), total_steps=1, probe=x)
    fade.seek(1)
    return fade.finalize(probe=x).eval()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """What `save` wrote; read only."""
    with torch.random.fork_rng(devices=[]):
        return crossfade.save(finalized(), tmp_path_factory.mktemp("saved"))


@pytest.fixture
def copied(folder, tmp_path) -> Path:
    """A copy of it to damage."""
    return Path(shutil.copytree(folder, tmp_path / "copy"))


def rewrite(folder: Path, change) -> Path:
    recipe = json.loads((folder / persist.RECIPE).read_text())
    change(recipe)
    (folder / persist.RECIPE).write_text(json.dumps(recipe))
    return folder


def reweigh(folder: Path, change) -> Path:
    """Other weights with a hash that fits."""
    tensors = load_file(folder / persist.WEIGHTS)
    change(tensors)
    save_file(tensors, folder / persist.WEIGHTS)
    digest = persist._sha256(folder / persist.WEIGHTS)
    return rewrite(folder, lambda recipe: recipe["weights"].update(sha256=digest))


# ---- there and back --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_that_a_model_comes_back_bit_for_bit(kind, dtype, tmp_path):
    model = finalized(net(kind).to(dtype))
    out = model(IDS)
    assert crossfade.save(model, tmp_path / "a" / "b") == tmp_path / "a" / "b"
    for base in (net(kind, seed=9).to(dtype).eval(), lambda: net(kind, seed=9).to(dtype).eval()):
        again = crossfade.load(tmp_path / "a" / "b", base=base)
        assert torch.equal(again(IDS), out)
        assert list(again.state_dict()) == list(model.state_dict())
        assert receipt_of(again) == receipt_of(model)
        assert not any(type(m).__module__.startswith("crossfade") for m in again.modules())
        assert not again.training


def test_what_a_folder_holds(tmp_path):
    model = finalized()
    crossfade.save(model, tmp_path, notes={"accuracy": 0.5})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["crossfade.json", "crossfade.safetensors"]
    recipe = json.loads((tmp_path / "crossfade.json").read_text())
    assert recipe["format"] == 1
    assert recipe["notes"] == {"accuracy": 0.5}
    assert recipe["receipt"] == json.loads(json.dumps(receipt_of(model).to_dict()))
    assert recipe["base"]["class"].endswith("models.Net")
    assert set(recipe["versions"]) == {"crossfade", "torch"}
    assert recipe["weights"]["file"] == "crossfade.safetensors"
    assert set(load_file(tmp_path / "crossfade.safetensors")) == set(model.state_dict())


def test_that_the_loaded_model_saves_again_to_the_same_bytes(folder, tmp_path):
    model = crossfade.load(folder, base=net(seed=3))
    crossfade.save(model, tmp_path)
    for name in (persist.WEIGHTS, persist.RECIPE):
        assert (tmp_path / name).read_bytes() == (folder / name).read_bytes()


def test_that_saving_over_a_folder_replaces_it(tmp_path):
    crossfade.save(finalized(), tmp_path)
    other = finalized(net(seed=4))
    crossfade.save(other, tmp_path)
    assert torch.equal(crossfade.load(tmp_path, base=net().eval())(IDS), other(IDS))


def test_that_a_plain_from_pretrained_stops(folder):
    transformers = pytest.importorskip("transformers")
    with pytest.raises((OSError, ValueError)):
        transformers.AutoModel.from_pretrained(folder)


def test_that_nothing_is_pickled_and_nothing_imported(folder, monkeypatch):
    import builtins
    import pickle

    def refuse(*args, **kwargs):
        raise AssertionError("pickle or import")

    base = net().eval()
    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    monkeypatch.setattr(torch, "load", refuse)
    real, seen = builtins.__import__, []

    def spy(name, globals=None, *rest):  # noqa: A002 - the name is Python's own
        if globals is not None and str(globals.get("__name__", "")).startswith("crossfade"):
            seen.append(name)
        return real(name, globals, *rest)

    monkeypatch.setattr(builtins, "__import__", spy)
    crossfade.load(folder, base=base)
    assert seen == []


# ---- tied tensors ----------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.body = net().blocks
        self.out = nn.Linear(8, 11, bias=False)
        self.out.weight = self.embed.weight
        self.register_buffer("table", torch.randn(3))
        self.register_buffer("same_table", self.table)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.body:
            x = block(x)
        return self.out(x) + self.table.sum() + self.same_table.sum()


def test_that_tied_weights_are_stored_once_and_stay_tied(tmp_path):
    model = finalized(Tied(), plan(Deterministic(0.0), targets="body.*.attn"))
    crossfade.save(model, tmp_path)
    stored = load_file(tmp_path / persist.WEIGHTS)
    aliases = json.loads((tmp_path / persist.RECIPE).read_text())["weights"]["aliases"]
    assert aliases == {"out.weight": "embed.weight", "same_table": "table"}
    assert set(stored) == set(model.state_dict()) - set(aliases)
    again = crossfade.load(tmp_path, base=Tied().eval())
    assert torch.equal(again(IDS), model(IDS))
    assert again.out.weight is again.embed.weight
    assert again.same_table is again.table


def test_that_views_of_one_storage_are_stored_apart(tmp_path):
    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            whole = torch.randn(4, 4)
            self.a, self.b = nn.Parameter(whole[:2]), nn.Parameter(whole[1:3])
            self.turned = nn.Parameter(whole.T)
            self.site = nn.Linear(4, 4)

        def forward(self, x):
            return self.site(x) @ self.turned + self.a.sum() + self.b.sum()

    x = torch.randn(2, 4)
    the_plan = Plan(targets="site", student=Reinit("reset_parameters"), gate=Deterministic(0.0))
    model = finalized(Views(), the_plan, x)
    crossfade.save(model, tmp_path)
    assert torch.equal(crossfade.load(tmp_path, base=Views().eval())(x), model(x))


# ---- students that the recipe cannot name ----------------------------------------------------------------------------


def bare(teacher, site):
    return MLP()


def test_that_unregistered_students_are_passed_again(tmp_path):
    model = finalized(the_plan=plan(Deterministic(0.0), student=bare, drop=["mask"]))
    crossfade.save(model, tmp_path)
    with pytest.raises(PersistError, match="students="):
        crossfade.load(tmp_path, base=net())
    modules = {f"blocks.{i}.attn": MLP() for i in range(2)}
    for given in (bare, modules):
        again = crossfade.load(tmp_path, base=net(seed=2).eval(), students=given)
        assert torch.equal(again(IDS), model(IDS))
        assert len(again.blocks[0].attn(torch.zeros(1, 2, 8))) == 2  # Still the teacher's structure.
    with pytest.raises(PersistError, match=r"blocks\.1\.attn"):
        crossfade.load(tmp_path, base=net(), students={"blocks.0.attn": MLP()})
    with pytest.raises(PersistError, match="do not belong"):
        crossfade.load(tmp_path, base=net(), students=lambda teacher, site: Attention())


def test_that_a_student_registered_elsewhere_is_resolved_by_name_or_by_what_the_caller_passes(tmp_path, monkeypatch):
    entries = {kind: dict(known) for kind, known in registry._entries.items()}
    monkeypatch.setattr(registry, "_entries", entries)
    registry.register("student", "mine")(bare)
    model = finalized(the_plan=plan(Deterministic(0.0), student="mine", drop=["mask"]))
    crossfade.save(model, tmp_path)
    assert torch.equal(crossfade.load(tmp_path, base=net().eval())(IDS), model(IDS))
    del entries["student"]["mine"]
    with pytest.raises(PersistError, match="mine"):
        crossfade.load(tmp_path, base=net())
    again = crossfade.load(tmp_path, base=net().eval(), students=bare)
    assert torch.equal(again(IDS), model(IDS))


def test_that_a_gate_registered_elsewhere_does_not_keep_a_model_from_loading_with_students(tmp_path, monkeypatch):
    entries = {kind: dict(known) for kind, known in registry._entries.items()}
    monkeypatch.setattr(registry, "_entries", entries)
    registry.register("schedule", "mine")(lambda t: 0.0)
    model = finalized(the_plan=plan(Deterministic(registry.lookup("schedule", "mine"))))
    crossfade.save(model, tmp_path)
    entries["schedule"].pop("mine")
    with pytest.raises(PersistError, match="mine"):
        crossfade.load(tmp_path, base=net())
    again = crossfade.load(tmp_path, base=net().eval(), students=Reinit("reset_parameters"))
    assert torch.equal(again(IDS), model(IDS))


def test_that_carried_attributes_come_back(tmp_path):
    class Plain(MLP):
        def forward(self, x, mask=None):
            return super().forward(x), None

    the_plan = plan(Deterministic(0.0), student=lambda teacher, site: Plain(), carry=["heads"])
    model = finalized(the_plan=the_plan)
    assert model.blocks[0].attn.heads == 2
    crossfade.save(model, tmp_path)
    again = crossfade.load(tmp_path, base=net(), students=lambda teacher, site: Plain())
    assert again.blocks[0].attn.heads == 2


def test_that_dropped_arguments_come_back_with_a_registered_student(tmp_path):
    model = finalized(the_plan=plan(Deterministic(0.0), student=students.Copy(), drop=["mask"]))
    crossfade.save(model, tmp_path)
    again = crossfade.load(tmp_path, base=net(seed=5).eval())
    assert torch.equal(again(IDS), model(IDS))
    assert torch.equal(
        again(IDS, torch.zeros(4, 5).long()[:, :1].expand(4, 5) + 1), model(IDS, torch.ones(4, 5).long())
    )


# ---- saving refused --------------------------------------------------------------------------------------------------


def test_that_a_fading_and_a_foreign_model_are_not_saved(tmp_path):
    model = net()
    with pytest.raises(PersistError, match="not finalized"):
        crossfade.save(model, tmp_path / "x")
    crossfade.install(model, plan(), total_steps=2)
    with pytest.raises(PersistError, match="finalize it first"):
        crossfade.save(model, tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_that_a_copy_is_saved_with_the_receipt(tmp_path):
    model = finalized()
    twin = copy.deepcopy(model)
    with pytest.raises(PersistError, match="receipt="):
        crossfade.save(twin, tmp_path)
    crossfade.save(twin, tmp_path, receipt=receipt_of(model))
    assert torch.equal(crossfade.load(tmp_path, base=net().eval())(IDS), model(IDS))


@pytest.mark.parametrize(
    "notes", [{"loss": float("nan")}, {"model": object()}, {"x": torch.ones(1)}, {1: {2}}], ids=str
)
def test_that_notes_which_are_no_data_are_refused_and_leave_nothing_behind(notes, tmp_path):
    with pytest.raises(PersistError, match="notes"):
        crossfade.save(finalized(), tmp_path / "out", notes=notes)
    assert not (tmp_path / "out").exists() or list((tmp_path / "out").iterdir()) == []


def test_that_a_diverged_and_forced_model_can_still_be_saved(tmp_path):
    model = net()
    fade = crossfade.install(model, plan(), total_steps=2)
    fade.seek(1)
    nn.init.constant_(fade.sites[0].blend.teacher.q.weight, float("nan"))
    model = fade.finalize(probe=IDS, force=True).eval()
    crossfade.save(model, tmp_path)
    assert torch.equal(crossfade.load(tmp_path, base=net().eval())(IDS), model(IDS))


# ---- the wrong base --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("base", "match"),
    [
        (lambda: net(layers=3), "missing: blocks.2"),
        (lambda: net(layers=1), "blocks.1.attn"),
        (lambda: net().to(torch.bfloat16), "float32"),
        (lambda: net().double(), "float64"),
        (lambda: nn.Sequential(nn.Linear(2, 2)), r"blocks\.\d\.attn"),
    ],
)
def test_that_a_wrong_base_is_a_persist_error_and_stays_as_it_was(folder, base, match):
    model = base()
    before = portrait(model)
    with pytest.raises(PersistError, match=match):
        crossfade.load(folder, base=model)
    assert equal(portrait(model), before)


def test_that_another_width_names_the_tensor(folder):
    model = net()
    model.head = nn.Linear(8, 4)
    with pytest.raises(PersistError, match=r"head\.(weight|bias)"):
        crossfade.load(folder, base=model)


@pytest.mark.parametrize("base", ["bert-base", None, 3, lambda: None], ids=str)
def test_that_what_is_no_base_is_a_crossfade_error(folder, base):
    with pytest.raises(CrossfadeError, match="base"):
        crossfade.load(folder, base=base)


# ---- damage ----------------------------------------------------------------------------------------------------------


def cut(name: str, keep: float):
    def damage(folder: Path) -> None:
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[: int(keep * len(data))])

    return damage


def flip(folder: Path) -> None:
    data = bytearray((folder / persist.WEIGHTS).read_bytes())
    data[-5] ^= 1
    (folder / persist.WEIGHTS).write_bytes(data)


def with_right_hash(data: bytes):
    def damage(folder: Path) -> None:
        (folder / persist.WEIGHTS).write_bytes(data)
        digest = persist._sha256(folder / persist.WEIGHTS)
        rewrite(folder, lambda recipe: recipe["weights"].update(sha256=digest))

    return damage


DAMAGE = {
    "no recipe": lambda f: (f / persist.RECIPE).unlink(),
    "no weights": lambda f: (f / persist.WEIGHTS).unlink(),
    "no folder": shutil.rmtree,
    "empty recipe": cut(persist.RECIPE, 0.0),
    "half a recipe": cut(persist.RECIPE, 0.5),
    "recipe is no text": lambda f: (f / persist.RECIPE).write_bytes(b"\xff\xfe\x00"),
    "recipe is a list": lambda f: (f / persist.RECIPE).write_text("[]"),
    "recipe is a number": lambda f: (f / persist.RECIPE).write_text("3"),
    "empty weights": cut(persist.WEIGHTS, 0.0),
    "half the weights": cut(persist.WEIGHTS, 0.5),
    "one bit": flip,
    "weights are no safetensors": with_right_hash(b"not safetensors"),
    "weights are a pickle": with_right_hash(b"\x80\x04}q\x00."),
    "another format": lambda f: rewrite(f, lambda r: r.update(format=2)),
    "an unknown student": lambda f: rewrite(
        f, lambda r: r["receipt"]["plan"]["swaps"][0]["student"].update(kind="student:os.system")
    ),
    "an unknown receipt field": lambda f: rewrite(f, lambda r: r["receipt"].update(extra=1)),
    "a site less": lambda f: rewrite(f, lambda r: r["receipt"]["sites"].pop("blocks.0.attn") and None),
}


@pytest.mark.parametrize("name", [n for n in DAMAGE if n != "a site less"])
def test_that_a_damaged_folder_is_a_persist_error_and_the_base_stays(name, copied):
    DAMAGE[name](copied)
    model = net()
    before = portrait(model)
    with pytest.raises(PersistError) as caught:
        crossfade.load(copied, base=model)
    assert equal(portrait(model), before)
    assert "\n  " in str(caught.value)


def test_that_tensors_more_or_less_are_named(copied):
    reweigh(copied, lambda t: (t.pop("head.bias"), t.update(extra=torch.zeros(1))))
    with pytest.raises(PersistError, match=r"missing: head\.bias") as caught:
        crossfade.load(copied, base=net())
    assert "unexpected: extra" in str(caught.value)


def _paths(value, path=()):
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from _paths(item, (*path, key))


GARBAGE = ("gone", None, "text", -1, [])


def test_that_no_damage_of_the_recipe_ends_in_anything_but_a_persist_error(copied):
    recipe = json.loads((copied / persist.RECIPE).read_text())
    base, wrong = net(), []
    before = portrait(base)
    for path in _paths(recipe):
        if path[0] in ("notes", "versions", "base"):
            continue
        for garbage in GARBAGE:
            damaged = copy.deepcopy(recipe)
            place = damaged
            for key in path[:-1]:
                place = place[key]
            if garbage == "gone":
                del place[path[-1]]
            else:
                place[path[-1]] = garbage
            (copied / persist.RECIPE).write_text(json.dumps(damaged))
            try:
                crossfade.load(copied, base=base)
                base = net()
                before = portrait(base)
            except PersistError:
                if not equal(portrait(base), before):
                    wrong.append((path, garbage, "the base was changed"))
                    base = net()
                    before = portrait(base)
            except Exception as error:  # noqa: BLE001 - any other error is what this test looks for
                wrong.append((path, garbage, type(error).__name__))
                base = net()
                before = portrait(base)
    assert wrong == []


def test_that_the_weights_are_as_readable_as_the_recipe(tmp_path):
    model = finalized()
    persist.save(model, tmp_path)
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    assert modes[persist.WEIGHTS] == modes[persist.RECIPE]
