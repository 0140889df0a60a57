"""What every verb shares: the error for bad input, and the way to ask for an extra."""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import rmtree
from types import ModuleType

from ..errors import CrossfadeError, PlanError, SelectionError, StudentError

__all__ = ["InputError", "exit_code", "need", "staging"]


class InputError(CrossfadeError):
    """Bad input to a verb: one message on stderr, exit code 2, nothing written."""


def exit_code(error: CrossfadeError) -> int:
    """2 for what the user asked for and cannot be done, 1 for what went wrong on the way."""
    return 2 if isinstance(error, (InputError, SelectionError, PlanError, StudentError)) else 1


def need(module: str, extra: str) -> ModuleType:
    """Import what an extra brings.

    Raises:
        InputError: It is not installed; the message holds the pip command.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        # A missing dependency of the module has another name, but the same cure.
        raise InputError(
            f"this needs the extra {extra!r}, which is not installed.",
            got=f"no module named {error.name!r}",
            do=f"pip install 'crossfade[{extra}]'",
        ) from None


@contextmanager
def staging(out: Path) -> Iterator[Path]:
    """A temporary folder whose files move to `out` when the block ends well; otherwise nothing is left.

    It is made beside the destination and at once, so that a place that cannot be written to is found before the work.
    Files of the same name in `out` are replaced, others stay.

    Raises:
        InputError: The destination cannot be written to.
    """
    home = out.absolute()
    while not home.exists() and home != home.parent:
        home = home.parent
    try:
        folder = Path(tempfile.mkdtemp(prefix=".crossfade-", dir=home))
    except OSError as error:
        raise InputError(
            "the output folder cannot be written.", where=out, got=error.strerror or error, do="another --out"
        ) from None
    try:
        yield folder
        for path in sorted(p for p in folder.rglob("*") if p.is_file()):
            target = out / path.relative_to(folder)
            target.parent.mkdir(parents=True, exist_ok=True)
            path.replace(target)
    finally:
        rmtree(folder, ignore_errors=True)
