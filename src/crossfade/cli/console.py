"""What every verb shares: the error for bad input, and the way to ask for an extra."""

from __future__ import annotations

import importlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import rmtree
from types import ModuleType

from ..errors import CrossfadeError

__all__ = ["Problem", "need", "staging"]


class Problem(CrossfadeError):
    """Bad input to a verb: one message on stderr, exit code 2, nothing written."""


def need(module: str, extra: str) -> ModuleType:
    """Import what an extra brings.

    Raises:
        Problem: It is not installed; the message holds the pip command.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        # A missing dependency of the module has another name, but the same cure.
        raise Problem(
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
        Problem: The destination cannot be written to.
    """
    home = out.absolute()
    while not home.exists() and home != home.parent:
        home = home.parent
    try:
        folder = Path(tempfile.mkdtemp(prefix=".crossfade-", dir=home))
    except OSError as error:
        raise Problem(
            "the output folder cannot be written.", where=out, got=error.strerror or error, do="another --out"
        ) from None
    try:
        yield folder
        for path in sorted(p for p in folder.rglob("*") if p.is_file()):
            target = out / path.relative_to(folder)
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(path, target)
    finally:
        rmtree(folder, ignore_errors=True)
