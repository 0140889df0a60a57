"""`crossfade demo`: replace the attentions of a real sentence encoder by cold modules, and get the encoder back."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional

from ..lab import text
from ..lab.inputs import need, staging
from ..lab.pretrained import Encoder, find_attentions, load_encoder, use_threads
from ..lab.surroundings import command, surroundings, versions, write_json
from ..metrics import cosine_sum, count
from ..outputs import find_main, main, valid_positions
from ..persist import load, save
from .arms import Settings, cold, crossfade, student_only
from .data import Data, by_length, cosine, encode
from .figures import interface_figure, learning_figure
from .progress import meter
from .tables import score_table

__all__ = ["demo"]

LENGTH = 64  # tokens per paragraph
# Paragraphs that are used at most. The curves need few validation texts, which cost seconds at every point; a user's
# whole book would be embedded before the training begins.
MOST = {"train": 2048, "validation": 64, "held_out": 300}


def demo(
    *,
    model: str | None,
    texts: Sequence[Path],
    out: Path,
    seconds: float,
    seed: int,
    threads: int | None,
    sites: str | None,
) -> dict[str, Any]:
    """Run both arms, print the table, write everything to `out`.

    Args:
        model: A transformers folder or hub id; None for the encoder of the demo's package.
        texts: The user's text files; none for Python's own reference text.
        out: Folder for `results.json`, the figures and the saved model.
        seconds: Training budget of each arm.
        seed: Of the students and of the order of the data.
        threads: For torch; None tries its own choice and 1, and takes the faster.
        sites: Pattern of the modules to replace; None finds the attentions.

    Returns:
        What `results.json` holds.

    Raises:
        InputError: Bad input; nothing was written.
    """
    begin = time.perf_counter()
    need("matplotlib", "cli")  # Asked for at once: it is used only after the training.
    console = Console()
    with staging(out) as folder:
        split = _read(texts)
        encoder = load_encoder(model, length=LENGTH)
        pattern, selection = find_attentions(encoder.model, sites)
        selection.check()
        _greet(console, encoder, split, pattern, selection.table())
        used = use_threads(encoder, split.train, threads)
        console.print(
            f"{used} thread{'' if used == 1 else 's'}, {seconds:g} s of training for each arm\n", highlight=False
        )
        data = Data.of(encoder, split)
        results = _run(console, encoder, data, pattern, selection.paths, folder, seconds=seconds, seed=seed)
        results["seconds"]["everything"] = time.perf_counter() - begin
        results["text"] = {"source": split.source, "paragraphs": {name: len(t) for name, t in data.targets.items()}}
        _write(results, folder)
    _goodbye(console, results, out)
    return results


def _read(texts: Sequence[Path]) -> text.Split:
    if texts:
        return text.split(", ".join(path.name for path in texts), text.own_topics(texts)).capped(**MOST)
    return text.split("Python's own reference text", text.pydoc_topics()).capped(**MOST)


def _greet(console: Console, encoder: Encoder, split: text.Split, pattern: str, table: str) -> None:
    console.print(f"[bold]{type(encoder.model).__name__}[/bold] from {encoder.source}, targets {pattern!r}\n")
    console.print(table, highlight=False, markup=False)
    console.print(f"\n{split}\n", highlight=False)


def _run(
    console: Console,
    encoder: Encoder,
    data: Data,
    pattern: str,
    paths: Sequence[str],
    folder: Path,
    *,
    seconds: float,
    seed: int,
) -> dict[str, Any]:
    """Everything that is measured."""
    settings = Settings()
    floor = cold(encoder, pattern, seed)
    with meter(console, "crossfade", seconds) as line:
        ours = crossfade(encoder, data, pattern, settings=settings, seconds=seconds, seed=seed, meter=line)
        line.done(ours.total, "done")
    # Never less than the other arm had: neither in seconds nor in optimizer steps.
    budget, least = max(seconds, ours.total), sum(ours.steps.values())
    with meter(console, "student-only", budget) as line:
        hard = student_only(
            encoder, data, pattern, settings=settings, seconds=budget, least_steps=least, seed=seed, meter=line
        )
        line.done(hard.total, "done")
    models = {"floor": floor, "student_only": hard.model, "crossfade": ours.model}
    vectors = {name: encode(found, data.tokens["held_out"]) for name, found in models.items()}
    vectors["original"] = data.targets["held_out"]
    scores = {name: cosine(found, data.targets["held_out"]) for name, found in vectors.items()}
    return {
        **scores,
        "baseline": _constant(data, "held_out"),
        "validation": {"baseline": _constant(data, "validation"), "floor": ours.curve[0][1]},
        "seconds": {"crossfade": ours.total, "student_only": hard.total, **ours.seconds},
        "steps": {"crossfade": ours.steps, "student_only": hard.steps},
        "reload_max_abs_diff": _reload(encoder, ours.model, data, folder / "model", vectors["crossfade"]),
        "curves": {"crossfade": ours.curve, "student_only": hard.curve},
        "interface": _interface(encoder.model, models, paths, data),
        "details": {"crossfade": ours.facts, "student_only": hard.facts},
        "config": {
            "model": encoder.source,
            "targets": pattern,
            "sites": list(paths),
            "seconds": seconds,
            "seed": seed,
            "tokens": encoder.length,
            "settings": asdict(settings),
        },
    }


def _constant(data: Data, part: str) -> float:
    """The best that one and the same vector for every text can do."""
    return cosine(functional.normalize(data.targets["train"].mean(0), dim=0), data.targets[part])


@torch.no_grad()
def _interface(
    original: nn.Module, models: Mapping[str, nn.Module], paths: Sequence[str], data: Data
) -> dict[str, dict[str, float]]:
    """Cosine of each site's students and teacher on the teacher's input, over real positions of the held-out text."""
    sums = {name: dict.fromkeys(paths, 0.0) for name in models}
    positions = dict.fromkeys(paths, 0.0)
    mask: Tensor | None = None

    def compare(path: str, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        theirs = main(output, find_main(output))
        valid = None if mask is None else valid_positions(mask, theirs, path)
        positions[path] += float(count(theirs, valid))
        for name, model in models.items():
            answer = model.get_submodule(path)(*args, **kwargs)
            sums[name][path] += float(cosine_sum(main(answer, find_main(answer)), theirs, valid))

    def hook(path: str) -> Any:
        def compare_here(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            compare(path, args, kwargs, output)

        return compare_here

    hooks = [original.get_submodule(path).register_forward_hook(hook(path), with_kwargs=True) for path in paths]
    try:
        for index in by_length(data.tokens["held_out"], 64):
            batch, _ = data.batch(index, "held_out")
            mask = batch["attention_mask"]
            original(**batch)
    finally:
        for handle in hooks:
            handle.remove()
    return {name: {path: row[path] / max(positions[path], 1.0) for path in paths} for name, row in sums.items()}


def _reload(encoder: Encoder, model: nn.Module, data: Data, folder: Path, vectors: Tensor) -> float:
    """Save, load onto the bare architecture, and compare embeddings of the held-out text. Shapes: [N, D]."""
    save(model, folder, notes={"held_out_cosine": cosine(vectors, data.targets["held_out"]), "base": encoder.source})
    encoder.config.save_pretrained(folder)
    encoder.tokenizer.save_pretrained(folder)
    again = load(folder, base=encoder.build).eval()
    return float((encode(again, data.tokens["held_out"]) - vectors).abs().max())


def _write(results: dict[str, Any], folder: Path) -> None:
    results["surroundings"] = surroundings()
    results["versions"] = versions("transformers", "safetensors", "matplotlib")
    results["command"] = command()
    write_json(results, folder / "results.json")
    learning_figure(results, folder / "learning_curves.png")
    interface_figure(results, folder / "interface_cosine.png")


def _goodbye(console: Console, results: dict[str, Any], out: Path) -> None:
    seconds, steps = results["seconds"], results["steps"]
    both = f"{steps['crossfade']['align']} + {steps['crossfade']['fade']}"
    console.print()
    console.print(
        score_table(
            "held-out text: mean cosine to the original embeddings",
            [
                ("original", results["original"], None, None),
                ("constant embedding", results["baseline"], None, None),
                ("floor: cold, untrained", results["floor"], None, None),
                ("student-only", results["student_only"], seconds["student_only"], steps["student_only"]["train"]),
                ("crossfade: align, then fade", results["crossfade"], seconds["crossfade"], both),
            ],
        )
    )
    difference = results["reload_max_abs_diff"]
    same = "identical" if difference == 0.0 else f"different by up to {difference:.2g}"
    console.print(f"saved and loaded again: outputs {same}", highlight=False)
    console.print(f"{out}: results.json, learning_curves.png, interface_cosine.png, model/", highlight=False)
    console.print(f"{seconds['everything']:.0f} s in all", highlight=False)
