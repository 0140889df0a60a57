"""The verbs and their options; what they do is in a file per verb."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["build"]


def _version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        typer.echo(f"crossfade {version('crossfade')}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    """Replace modules of a pretrained transformer and end with a plain model that contains only the new ones."""


def _demo(
    model: Annotated[
        str | None,
        typer.Option(
            metavar="PATH_OR_HUB_ID", help="A transformers encoder; default: MiniLM from its package, offline."
        ),
    ] = None,
    text: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="UTF-8 text; give it once per file. Default: Python's reference text."),
    ] = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where results, figures and the model go.")] = Path(
        "demo-out"
    ),
    seconds: Annotated[float, typer.Option(min=0.1, help="Training budget of each of the two arms.")] = 50.0,
    seed: Annotated[int, typer.Option(help="Of the new modules and of the order of the data.")] = 0,
    threads: Annotated[
        int | None,
        typer.Option(min=1, help="Threads of torch; default: 1 or torch's own choice, whichever is faster now."),
    ] = None,
    sites: Annotated[
        str | None, typer.Option(metavar="PATTERN", help="Modules to replace; default: all self-attentions.")
    ] = None,
) -> None:
    """Replace the attentions of a real sentence encoder by cold ones, and get the encoder back."""
    from .demo import demo

    demo(model=model, texts=text or [], out=out, seconds=seconds, seed=seed, threads=threads, sites=sites)


def _inspect(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A transformers folder or hub id, or timm:NAME.")],
    targets: Annotated[
        str | None, typer.Option(metavar="PATTERN", help="As crossfade.select takes it; default: the attentions.")
    ] = None,
) -> None:
    """Print what would be replaced in a model. Changes nothing."""
    from .inspect import inspect

    typer.echo(inspect(model, targets))


Source = Annotated[str, typer.Argument(metavar="RECIPE_OR_FILE", help="A recipe's name, or an experiment file.")]
Methods = Annotated[str | None, typer.Option(metavar="A,B,C", help="Methods to run, or `all`; default: the recipe's.")]
Changes = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Replace a value: --set training.lr=1e-3.")
]
Jobs = Annotated[int | None, typer.Option(min=1, help="Processes side by side; the figures do not depend on it.")]
Out = Annotated[Path | None, typer.Option(metavar="DIR", help="Default: crossfade-NAME.")]


def _run(
    source: Source,
    methods: Methods = None,
    seeds: Annotated[str | None, typer.Option(metavar="0,1,2", help="Or 0-4; default: the recipe's.")] = None,
    changes: Changes = None,
    tuned: Annotated[Path | None, typer.Option(metavar="FILE", help="Rates that `crossfade tune` chose.")] = None,
    equal_seconds: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Scale each method's steps to the reference's seconds, as measured in DIR."),
    ] = None,
    jobs: Jobs = None,
    out: Out = None,
) -> None:
    """Compare replacement methods over seeds; runs that are finished are not run again."""
    from .lab import run

    code = run(
        source,
        methods=methods,
        seeds=seeds,
        changes=changes or [],
        tuned=tuned,
        as_long_as=equal_seconds,
        jobs=jobs,
        out=out,
    )
    raise typer.Exit(code)


def _tune(
    source: Source,
    methods: Methods = None,
    seeds: Annotated[str, typer.Option(metavar="SEEDS", help="Not to be used for figures.")] = "1000,1001",
    rates: Annotated[str, typer.Option(metavar="A,B,C", help="Peak learning rates.")] = "1e-3,3e-3,1e-2,3e-2",
    changes: Changes = None,
    jobs: Jobs = None,
    out: Out = None,
) -> None:
    """Give every method the same small budget of tuning, on the validation part."""
    from .lab import tune

    raise typer.Exit(tune(source, methods=methods, seeds=seeds, rates=rates, changes=changes or [], jobs=jobs, out=out))


def _list() -> None:
    """Recipes, methods and tasks."""
    from .lab import listing

    typer.echo(listing())


def _report(folder: Annotated[Path, typer.Argument(metavar="DIR", help="As `crossfade run` made it.")]) -> None:
    """Write report.html, tables and figures of a run directory again."""
    from .lab import report

    report(folder)


def build() -> typer.Typer:
    """The application with all its verbs."""
    app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
    app.callback()(_root)
    app.command("demo")(_demo)
    app.command("inspect")(_inspect)
    app.command("run")(_run)
    app.command("tune")(_tune)
    app.command("list")(_list)
    app.command("report")(_report)
    return app
