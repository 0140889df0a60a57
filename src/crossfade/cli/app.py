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
    seconds: Annotated[float, typer.Option(min=0.1, help="Training budget of each of the two arms.")] = 60.0,
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


def build() -> typer.Typer:
    """The application with all its verbs."""
    app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
    app.callback()(_root)
    app.command("demo")(_demo)
    app.command("inspect")(_inspect)
    return app
