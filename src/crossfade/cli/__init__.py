"""The command line: `crossfade demo`, `crossfade inspect`, `crossfade --version`.

Each verb lives in a file of its own, which is imported when the verb is called. Bad input ends with one message on
stderr and exit code 2, before anything is written.
"""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Entry point of the console script."""
    from ..errors import CrossfadeError

    try:
        from ..lab.inputs import need

        need("typer", "cli")
        need("rich", "cli")
        from .app import build

        build()()
    except CrossfadeError as error:
        from ..lab.inputs import exit_code

        print(f"crossfade: {error}", file=sys.stderr)  # noqa: T201 - this is how a command speaks
        sys.exit(exit_code(error))
