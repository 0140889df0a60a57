"""Every kind of error message: what came or where, what would be right or what to do, and the module path.

A row is a call that must fail. Which `raise` it reached is read off the traceback, so the table can be compared with
the source: every function of the core that raises one of our errors has a row, for each class that it raises.
"""

from __future__ import annotations

import ast
import copy
import json
import math
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import crossfade
from crossfade import (
    align,
    capture,
    changes,
    errors,
    finalize,
    gates,
    guidance,
    metrics,
    operators,
    outputs,
    persist,
    plan,
    registry,
    schedules,
    state,
    surgery,
)
from crossfade.blend import Blend
from crossfade.ledger import Ledger, Term
from crossfade.site import Site
from crossfade.students import Adapter, Copy, Normal, Reinit, SiteInfo, build, check_call
from tests.models import MLP, Attention, batch, net
from tests.models import plan as plan_of
from tests.repo.project import OUTER, PACKAGE

IDS, _ = batch()
X = torch.zeros(2, 3, 4)
ERRORS = [name for name in errors.__all__ if name.endswith("Error")]
ELSEWHERE = ("targets.py", "globs.py")  # Their messages are the business of tests/test_targets.py.


class Raise(NamedTuple):
    """One `raise` of our errors in the source."""

    file: str
    function: str
    error: str
    first: int
    last: int


def raises_in(path: Path) -> list[Raise]:
    found: list[Raise] = []

    def walk(node: ast.AST, inside: tuple[str, ...]) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.FunctionDef, ast.ClassDef)):
                walk(child, (*inside, child.name))
                continue
            if isinstance(child, ast.Raise) and isinstance(child.exc, ast.Call):
                name = getattr(child.exc.func, "id", getattr(child.exc.func, "attr", ""))
                if name in ERRORS:
                    file = path.relative_to(PACKAGE).as_posix()
                    found.append(Raise(file, ".".join(inside), name, child.lineno, child.end_lineno or child.lineno))
            walk(child, inside)

    walk(ast.parse(path.read_text(encoding="utf-8")), ())
    return found


def all_raises() -> list[Raise]:
    files = [p for p in sorted(PACKAGE.rglob("*.py")) if p.relative_to(PACKAGE).parts[0] not in (*OUTER, *ELSEWHERE)]
    return [found for path in files for found in raises_in(path)]


def origin(error: BaseException) -> tuple[str, str, int]:
    """File, function and line in the package where an error was raised."""
    where = ("", "", 0)
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        file = Path(code.co_filename)
        if file.is_relative_to(PACKAGE):
            where = (file.relative_to(PACKAGE).as_posix(), code.co_qualname.replace(".<locals>", ""), trace.tb_lineno)
        trace = trace.tb_next
    return where


# ---- material --------------------------------------------------------------------------------------------------------


def installed(total: int | None = 4, **more: Any) -> crossfade.Fade:
    options = {k: more.pop(k) for k in ("probe", "release", "snapshot") if k in more}
    return crossfade.install(net(), plan_of(**more), total_steps=total, **options)


def released() -> crossfade.Fade:
    fade = installed()
    for site in fade.sites:
        state.release(site)
    return fade


def over(**more: Any) -> crossfade.Fade:
    fade = installed(gate=crossfade.Deterministic(0.0), **more)
    fade.seek(4)
    return fade


def ended() -> crossfade.Fade:
    fade = installed()
    fade.revert()
    return fade


def blend(teacher: Callable[..., Any], student: Callable[..., Any]) -> Blend:
    class Fn(nn.Module):
        def __init__(self, fn: Callable[..., Any]) -> None:
            super().__init__()
            self.fn = fn

        def forward(self, x: Any) -> Any:
            return self.fn(x)

    made = Blend(Fn(teacher), Fn(student), path="a.b", ledger=Ledger())
    made.set_gate(alpha=0.5, weight=0.5, hard=False)
    return made


def info(model: nn.Module, path: str = "0", n: int = 1) -> SiteInfo:
    return SiteInfo(path, 0, n, model, 0)


def make(student: Any, model: nn.Module | None = None, n: int = 1) -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) if model is None else model
    return build(student, model[0], info(model, n=n))


def on_meta(fn: Callable[[], Any]) -> Any:
    with torch.device("meta"):
        return fn()


def shares(teacher: nn.Module, site: SiteInfo) -> nn.Module:
    student = nn.Linear(2, 2)
    student.weight = teacher.weight
    return student


class Restless(Attention):
    def forward(self, x: Any, mask: Any = None) -> Any:
        self.count = getattr(self, "count", 0) + 1
        y, w = super().forward(x, mask)
        return y + self.count, w


class MLPLike(nn.Module):
    """An attention without the attributes of the teacher."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Any, mask: Any = None) -> Any:
        return self.inner(x, mask)


class Cache:
    pass


def saved(change: Callable[[dict[str, Any]], Any] | None = None, **more: Any) -> Path:
    folder = Path(tempfile.mkdtemp())
    crossfade.save(over(**more).finalize(), folder)
    if change is not None:
        recipe = json.loads((folder / persist.RECIPE).read_text())
        change(recipe)
        (folder / persist.RECIPE).write_text(json.dumps(recipe))
    return folder


def damaged_state(change: Callable[[dict[str, Any]], Any]) -> None:
    fade = installed()
    data = copy.deepcopy(fade.state_dict())
    change(data)
    fade.load_state_dict(data)


def writes_late() -> None:
    active: list[bool] = []
    made = blend(lambda x: x.mul_(2) if active else x * 2, lambda x: x * 3)
    made.writes_input = False
    active.append(True)
    made(X.clone())


def step_after(change: Callable[[crossfade.Fade], Any]) -> None:
    fade = installed(guidance=crossfade.DeepFeatureGuidance())
    change(fade)
    fade.step()


def unread(fade: crossfade.Fade) -> None:
    fade.model(IDS)


def nan(fade: crossfade.Fade) -> None:
    nn.init.constant_(fade.sites[0].blend.student.q.weight, math.nan)
    fade.model(IDS)
    fade.guidance()


def recompute_twice() -> None:
    ledger = Ledger()
    for rows in (1, 2):
        ledger.begin_forward(torch.ones(rows, 3), records=True)
    ledger.check_recomputation("a.b")


def site_without_guidance() -> None:
    swap = crossfade.Swap(targets="a")
    made = Blend(nn.Linear(1, 1), nn.Linear(1, 1), path="a.b", ledger=Ledger())
    one = torch.ones(())
    Site(path="a.b", paths=("a.b",), index=0, n=1, swap=swap, blend=made).guidance_value([Term(one, one)], None)


def guided_by_a_dead_teacher() -> None:
    swap = crossfade.Swap(targets="a", guidance=crossfade.DeepFeatureGuidance())
    made = Blend(nn.Linear(1, 1), nn.Linear(1, 1), path="a.b", ledger=Ledger())
    one = torch.ones(())
    site = Site(path="a.b", paths=("a.b",), index=0, n=1, swap=swap, blend=made)
    site.power.fixed, site.power.positions = True, 1.0
    site.guidance_value([Term(one, one)], None)


class Mixing(Attention):
    def forward(self, x: Any, mask: Any = None) -> Any:
        y, w = super().forward(x, mask)
        return y + x.mean(0, keepdim=True), w


def mixing() -> None:
    model = net()
    model.blocks[0].attn = Mixing()
    crossfade.install(model, plan_of(targets="blocks.0.attn"), total_steps=2).align([IDS], steps=1)


def not_finite() -> None:
    fade = installed()
    nn.init.constant_(fade.sites[0].blend.student.q.weight, math.nan)
    fade.align([IDS], steps=1)


def captured_not_finite() -> None:
    model = net()
    nn.init.constant_(model.blocks[0].norm1.weight, math.nan)
    crossfade.install(model, plan_of(), total_steps=4).align([IDS], steps=1)


def align_released() -> None:
    fade = released()
    align.align(fade.model, fade.sites, fade.ledger, [IDS], settings=align.Settings())


class Fixed(nn.Module):
    def forward(self, x: Any, mask: Any = None) -> Any:
        return x, None


def capture_nothing() -> None:
    fade = installed()
    capture.capture(fade.model, fade.sites, fade.ledger, [], 10**9, None)


def gone_attribute() -> None:
    model = net()
    for block in model.blocks:
        block.attn.window = 3
    student = Reinit("reset_parameters", seed=1)
    fade = crossfade.install(
        model,
        plan_of(crossfade.Deterministic(0.0), student=lambda t, s: MLPLike(student(t, s)), carry=["window"]),
        total_steps=4,
    )
    fade.seek(4)
    for site in fade.sites:
        state.release(site)
        site.carried = {}
    fade.finalize()


def stage(change: Callable[[crossfade.Fade], Any]) -> None:
    fade = installed()
    change(fade)


def stages_too_soon() -> None:
    for _ in crossfade.stages(net(), (plan_of(), 2), (plan_of(), 2)):
        pass


def trained_backbone() -> None:
    fade = installed(trains="all")
    fade.step()
    fade.revert()


def optimizer_of(fade: crossfade.Fade, which: str) -> torch.optim.Optimizer:
    site = fade.sites[0].blend
    parameters = site.teacher.parameters() if which == "teacher" else site.student.parameters()
    return torch.optim.SGD(list(parameters), lr=0.1)


def audited(which: str) -> None:
    fade = installed()
    fade.attach(optimizer_of(fade, which))


def attached_twice() -> None:
    fade = installed()
    optimizer = torch.optim.SGD(fade.parameter_groups(), lr=0.1)
    fade.attach(optimizer)
    fade.attach(optimizer)


def stepped_twice() -> None:
    fade = installed()
    fade.attach(torch.optim.SGD(fade.parameter_groups(), lr=0.1))
    fade.step()


def viewed(fade: crossfade.Fade, which: Any) -> None:
    with fade.view(which):
        pass


def proof_fails() -> None:
    over(student=lambda teacher, site: Restless()).finalize(probe=IDS)


def put_back_gone() -> None:
    fade = released()
    finalize.put_teacher_back(changes.Changes(), fade.model, fade.sites[0])


def unknown_plan() -> finalize.Receipt:
    return finalize.Receipt({}, 1, 1, False, False, None, {"kind": "plan:NoSuchPlan"})


def late_negative_lambda() -> None:
    # Between the hundredths at which a schedule is checked beforehand.
    dip = guidance.DeepFeatureGuidance(schedule=lambda t: -1.0 if 0.5 < t < 0.51 else 1.0)
    guidance.lambda_at(dip, "blocks.0.attn", 0, 1, alpha=0.5, step=505, total=1000)


def wrong_rebuild() -> None:
    persist.load(saved(), base=nn.Sequential(nn.Linear(1, 1)))


def wider_base() -> nn.Module:
    model = net()
    model.head = nn.Linear(8, 4)
    return model


def unsaved() -> None:
    persist.save(net(), tempfile.mkdtemp())


def taken() -> None:
    registry.register("schedule", "linear")(abs)


def weights_of(change: Callable[[Path], Any]) -> Path:
    folder = saved()
    change(folder / persist.WEIGHTS)
    return folder


def own_schedule(t: float) -> float:
    return math.nan


def linformer(max_length: int = 9, rank: int = 2) -> operators.Linformer:
    return operators.Linformer(1, 4, max_length=max_length, rank=rank)


def attend(op: operators.Operator, **more: Any) -> None:
    op(*(torch.zeros(2, 1, 3, 4) for _ in "qkv"), **more)


# (the call, what the message must name: the module path or None)
ROWS: list[tuple[Callable[[], Any], str | None]] = [
    # align
    (lambda: align.Settings(steps=0), "steps"),
    (lambda: installed().align([IDS], stepz=1), "stepz"),
    (
        align_released,
        "blocks.0.attn",
    ),
    (lambda: installed().align([IDS[:1]], steps=1), "blocks.0.attn"),
    (mixing, "blocks.0.attn"),
    (not_finite, "blocks.0.attn"),
    (captured_not_finite, "blocks.0.attn"),
    (lambda: installed(student=lambda t, s: Fixed()).align([IDS], steps=1), "Fixed"),
    # blend
    (lambda: blend(lambda x: x, lambda x: x[:, :1])(X), "a.b"),
    (lambda: blend(lambda x: (x, x), lambda x: (x,))(X), "a.b"),
    (writes_late, "a.b"),
    (lambda: released().model(IDS), "blocks.0.attn"),
    # capture
    (guided_by_a_dead_teacher, "a.b"),
    (lambda: state.whole_step(-1), None),
    (lambda: state.items_of(0, torch.device("cpu")), None),
    (lambda: capture.parse_bytes("much"), None),
    (lambda: installed().align([IDS], steps=1, memory_budget=1), None),
    (capture_nothing, "blocks.0.attn"),
    # changes
    (lambda: changes.refuse_wrapped(3), None),
    (lambda: changes.refuse_wrapped(nn.Sequential(type("FSDPLinear", (nn.Linear,), {})(1, 1))), "0"),
    # fade
    (stepped_twice, None),
    (lambda: installed().attach(), None),
    (attached_twice, None),
    (lambda: installed(guidance=crossfade.DeepFeatureGuidance()).guidance(), "blocks.0.attn"),
    (lambda: viewed(installed(), "both"), None),
    (lambda: viewed(released(), "teacher"), "blocks.0.attn"),
    (lambda: installed().begin(plan_of(targets="blocks.0.attn"), 3), None),
    (lambda: released().begin(plan_of(), 3), "blocks.0.attn"),
    (lambda: released().revert(), "blocks.0.attn"),
    (trained_backbone, "embed.weight"),
    (lambda: ended().guidance(), None),
    (lambda: installed().attach("adam"), None),
    (lambda: crossfade.handle(net()), None),
    # finalize
    (lambda: installed().finalize(), "blocks.0.attn"),
    (gone_attribute, "blocks.0.attn.window"),
    (proof_fails, "blocks.0.attn"),
    (put_back_gone, "blocks.0.attn"),
    # gates
    (lambda: gates.check_alpha(2.0, "a.b, step 3"), "a.b"),
    (lambda: gates.Adaptive(low=0.9, high=0.1), None),
    (lambda: gates.Adaptive(smoothing=1.0), None),
    (lambda: gates.Bernoulli(execution="x"), None),
    (lambda: gates.Bernoulli(granularity="x"), None),
    (lambda: gates.Gumbel(temperature=0.0), None),
    (lambda: gates.Gumbel(granularity="x"), None),
    # guidance
    (lambda: guidance.DeepFeatureGuidance(-1.0), "weight"),
    (lambda: guidance.DeepFeatureGuidance(site_weights={"a.b": -1.0}), "a.b"),
    (lambda: guidance.DeepFeatureGuidance(reduction="x"), None),
    (lambda: guidance.DeepFeatureGuidance(schedule=-1.0), None),
    # ledger
    (recompute_twice, "a.b"),
    (lambda: step_after(unread), "blocks.0.attn"),
    (lambda: step_after(nan), "blocks.0.attn"),
    # metrics
    (lambda: metrics.gate_gradient_variance(lambda w: X, [0.5] * 13), None),
    (lambda: metrics.gate_gradient_variance(lambda w: X, [0.5], draws=1), None),
    # operators
    (lambda: operators.Grouped(3, 4, kv_heads=2), "Grouped"),
    (lambda: operators.operator(operators.Grouped.card)(Attention), "grouped"),
    (lambda: attend(linformer(), causal=True), "Linformer"),
    (lambda: attend(linformer(), mask=X), "Linformer"),
    (lambda: attend(linformer(max_length=2)), "Linformer"),
    (lambda: linformer(rank=0), "Linformer"),
    (lambda: operators.LinearAttention(1, 4, feature_map="x"), "LinearAttention"),
    (lambda: operators.Performer(1, 4, features=0), "Performer"),
    (lambda: operators.Window(1, 4, radius=-1), "Window"),
    (lambda: operators.pool_heads(X, heads=4, groups=3), None),
    # outputs
    (lambda: outputs.find_main(None, site="a.b"), "a.b"),
    (lambda: outputs.main((), 0, "a.b"), "a.b"),
    (lambda: outputs.pack(object()), None),
    (lambda: outputs.feed(net(), {"wrong": 1}), None),
    (lambda: outputs.refuse_caches((Cache(),), "a.b"), "a.b"),
    (lambda: outputs.main_input((), {}, "a.b"), "a.b"),
    (lambda: outputs.valid_positions(torch.ones(9, 9), X, "a.b"), "a.b"),
    # persist
    (lambda: persist.save(installed().model, tempfile.mkdtemp()), None),
    (unsaved, None),
    (wrong_rebuild, "blocks.0.attn"),
    (lambda: persist.load(saved(student=lambda t, s: Attention()), base=net()), "blocks.0.attn"),
    (lambda: persist._plain({"accuracy": math.nan}), "notes"),
    (lambda: persist._plan(unknown_plan(), needed=True), "crossfade.json"),
    (lambda: installed(carry=["no_such_name"]), "blocks.0.attn.no_such_name"),
    (late_negative_lambda, "blocks.0.attn"),
    (lambda: persist.load(saved(), base=net(layers=3)), "blocks.2"),
    (lambda: persist.load(saved(), base=wider_base()), "head."),
    (lambda: persist.load(tempfile.mkdtemp(), base=net()), persist.RECIPE),
    (lambda: persist.load(saved(lambda r: r.update(format=9)), base=net()), persist.RECIPE),
    (lambda: persist.load(weights_of(lambda p: p.write_bytes(b"x")), base=net()), persist.WEIGHTS),
    (lambda: persist.load(weights_of(Path.unlink), base=net()), persist.WEIGHTS),
    (lambda: persist.load(saved(lambda r: r["receipt"].update(extra=1)), base=net()), None),
    (lambda: persist._dtype("no_such_dtype"), None),
    # plan
    (lambda: plan.Swap(targets="a", drop="mask"), None),
    (lambda: plan.Swap(targets="a", gate=3), None),
    (lambda: plan.Swap(targets="a", gate=gates.Deterministic), None),
    (lambda: plan.Swap(targets="a", guidance=3), None),
    (lambda: plan.Plan(target="a"), None),
    (plan.Plan, None),
    (lambda: plan.Plan(targets="a", version=9), None),
    (lambda: plan.Plan(targets="a", seed=1.5), None),
    (lambda: plan.Plan(targets="a", trains="head"), None),
    (lambda: plan.Plan(drop=()), None),
    (lambda: plan.Plan.from_dict({}), None),
    # registry
    (lambda: registry.register("x", "y"), None),
    (taken, None),
    (lambda: registry.lookup("schedule", "linaer"), None),
    (lambda: registry.encode({"a": object()}), "plan.a"),
    (lambda: registry.decode({"kind": "mapping", "items": 3}), "plan"),
    (lambda: registry.decode({"kind": "schedule:linear", "x": 1}), "plan"),
    (lambda: registry.decode({"kind": "gate:Gumbel", "x": 1}), "plan"),
    (lambda: registry.decode({"kind": "plan:Swap"}), "plan"),
    (lambda: registry.decode({"kind": "target:regex", "pattern": "("}), "plan"),
    # schedules
    (schedules.piecewise, None),
    (lambda: schedules.piecewise((1.0, 1.0), (0.0, 1.0)), None),
    (lambda: schedules.join((0.5, 1.0)), None),
    (lambda: schedules.in_steps("linear", 0), None),
    (lambda: schedules.in_steps("linear", 3)(0.5), None),
    (lambda: schedules.linear(until=2.0), None),
    (lambda: schedules.as_schedule(None), None),
    (lambda: schedules.value_at(schedules.linear(), 0, None), None),
    (lambda: schedules.value_at(own_schedule, 0, 1), None),
    (lambda: schedules.staggered(order="x"), None),
    (lambda: schedules.staggered(overlap=2.0), None),
    (lambda: schedules.PerSite([0.5]).resolve("a.b", 0, 2), "a.b"),
    # site
    (site_without_guidance, "a.b"),
    # state
    (lambda: installed().calibrate([]), "blocks.0.attn"),
    (lambda: installed().load_state_dict({}), None),
    (lambda: damaged_state(lambda s: s.update(version=9)), None),
    (lambda: damaged_state(lambda s: s.update(plan="x")), None),
    (lambda: damaged_state(lambda s: s["sites"].pop("blocks.0.attn")), "blocks.0.attn"),
    (lambda: damaged_state(lambda s: s["sites"]["blocks.0.attn"].update(teacher_hash="x")), "blocks.0.attn"),
    (lambda: damaged_state(lambda s: s["sites"]["blocks.0.attn"].update(power="x")), "blocks.0.attn"),
    # students
    (lambda: make(lambda t, s: None), "0"),
    (lambda: make({}), "0"),
    (lambda: make(nn.Linear(2, 2), n=2), "0"),
    (lambda: make(3), "0"),
    (lambda: make(nn.LSTM), "0"),
    (lambda: make(lambda t, s: on_meta(lambda: nn.Linear(2, 2))), "weight"),
    (lambda: make(Copy(), on_meta(lambda: nn.Sequential(nn.Linear(2, 2)))), "0.weight"),
    (lambda: make(lambda t, s: t), "0"),
    (lambda: make(shares), "0"),
    (lambda: check_call(Adapter(MLP()), "Attention", "a.b", (X,), {"mask": 1}), "a.b"),
    (lambda: Normal(0.0), None),
    (lambda: Reinit("x"), None),
    (lambda: make(Reinit("reset_parameters", keep=("x",))), "0"),
    (lambda: make(Reinit("model")), "0"),
    (lambda: make(Reinit(Normal(1.0)), nn.Sequential(nn.PReLU())), "0: weight"),
    # surgery
    (lambda: crossfade.install(installed().model, plan_of(), total_steps=2), None),
    (lambda: crossfade.install(net(), 3, total_steps=2), None),
    (lambda: installed(total=0), None),
    (lambda: installed(release="x"), None),
    (lambda: list(surgery.stages(net())), None),
    (stages_too_soon, None),
    (
        lambda: crossfade.install(
            net(), crossfade.Plan([*plan_of().swaps, *plan_of(targets="blocks.0.attn").swaps]), total_steps=2
        ),
        "blocks.0.attn",
    ),
    (lambda: installed(guidance=crossfade.DeepFeatureGuidance(site_weights={"x": 1.0})), "blocks.0.attn"),
    (lambda: installed(probe=lambda model: model.embed(IDS)), "blocks.0.attn"),
    # training
    (lambda: installed(trains=["x"]), "embed.weight"),
    (lambda: installed().parameter_groups(no_decay=["x"]), "x"),
    (lambda: audited("teacher"), "blocks.0.attn.q.weight"),
    (lambda: audited("student"), "blocks.1.attn.student"),
]

Failed = tuple[BaseException, str | None]


@pytest.fixture(scope="module")
def failures() -> list[Failed]:
    """Each row's error, with what its message must name."""
    caught: list[Failed] = []
    for number, (call, names) in enumerate(ROWS):
        torch.manual_seed(0)
        try:
            call()
        except Exception as error:  # noqa: BLE001 - which class it is, is what the tests below look at
            caught.append((error, names))
        else:
            caught.append((AssertionError(f"row {number}, line {call.__code__.co_firstlineno}, raised nothing"), None))
    return caught


def lines_of(error: BaseException) -> dict[str, str]:
    """The labelled lines of a message, and under "what" its first sentence."""
    what, *rest = str(error).split("\n  where: ")[0].split("\n  expected: ")[0].split("\n")[:1]
    assert not rest
    found = {"what": what}
    for line in str(error).splitlines()[1:]:
        label, colon, text = line.strip().partition(": ")
        if colon and line.startswith("  ") and label in ("where", "expected", "got", "what to do"):
            found.setdefault(label, text)
    return found


def test_that_every_row_ends_in_an_error_of_ours(failures):
    foreign = [f"{type(e).__name__}: {e}" for e, _ in failures if not isinstance(e, errors.CrossfadeError)]
    assert not foreign


# A first sentence may carry a part itself: the rule that was broken, or the value that came, in quotes.
RULE = re.compile(r"\b(must|needs?|is within|is a whole number|takes no|cannot)\b")
VALUE = re.compile(r"'[^']+'")


def test_that_every_message_says_what_came_and_what_would_be_right(failures):
    poor = []
    for error, _ in failures:
        parts = lines_of(error)
        came = "where" in parts or "got" in parts or VALUE.search(parts["what"]) or isinstance(error, errors.StateError)
        right = "expected" in parts or "what to do" in parts or RULE.search(parts["what"])
        if not (came and right):
            file, function, line = origin(error)
            poor.append(f"{file}:{line} {function}: {sorted(set(parts) - {'what'})}: {parts['what']}")
    assert not poor, "\n" + "\n".join(poor)


def test_that_every_message_names_the_place(failures):
    silent = [f"{names!r} is not in: {error}" for error, names in failures if names and names not in str(error)]
    assert not silent, "\n" + "\n".join(silent)


def test_that_a_path_of_the_model_stands_where_it_belongs(failures):
    misplaced = []
    for error, names in failures:
        if names and names.startswith(("blocks.", "a.b")) and names not in str(error).split("\n", 1)[-1]:
            misplaced.append(str(error))
    assert not misplaced


def test_that_every_message_begins_with_a_sentence(failures):
    odd = [str(e) for e, _ in failures if not lines_of(e)["what"].rstrip().endswith((".", "!", "?"))]
    assert not odd, "\n" + "\n".join(odd)


def test_that_no_part_is_empty_or_an_address(failures):
    for error, _ in failures:
        for label, text in lines_of(error).items():
            assert text.strip(), f"{label} is empty in: {error}"


def test_that_the_table_is_complete(failures):
    reached = {(*origin(e)[:2], type(e).__name__) for error, _ in failures for e in (error, error.__cause__) if e}
    wanted = {(r.file, r.function, r.error) for r in all_raises()}
    assert sorted(wanted - reached) == []


def test_that_the_table_reaches_most_raises_one_by_one(failures):
    lines = {origin(e)[::2] for error, _ in failures for e in (error, error.__cause__) if e}
    missed = [r for r in all_raises() if not any((r.file, line) in lines for line in range(r.first, r.last + 1))]
    assert len(missed) <= 0.1 * len(all_raises()), missed


def test_that_the_scan_sees_the_source():
    found = all_raises()
    assert len(found) > 100
    assert {r.error for r in found} == set(ERRORS)
    assert ("gates.py", "check_alpha", "PlanError") in {r[:3] for r in found}
