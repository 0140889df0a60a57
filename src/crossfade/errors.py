"""One family of errors. Every message says what was expected, what came, where, and what to do.

The leaves also inherit the builtin that a caller would reach for (`ValueError`, `TypeError`, ...), so that code
which knows nothing of crossfade catches them too.
"""

from __future__ import annotations

__all__ = [
    "CrossfadeError",
    "CrossfadeWarning",
    "NonFiniteError",
    "OutputError",
    "PersistError",
    "PlanError",
    "SelectionError",
    "StateError",
    "StudentError",
]


class CrossfadeError(Exception):
    r"""Base of all errors that crossfade raises on purpose.

    Args:
        what: One sentence that names the failure.
        expected: What would have been right.
        got: What came instead.
        where: The module path (or the file and key) where it happened.
        do: What the user can do about it.

    Example:
        >>> str(CrossfadeError("alpha left its range.", expected="a number in [0, 1]", got="1.5"))
        'alpha left its range.\n  expected: a number in [0, 1]\n  got: 1.5'
    """

    def __init__(
        self,
        what: str,
        *,
        expected: object = None,
        got: object = None,
        where: object = None,
        do: object = None,
    ) -> None:
        parts = (("where", where), ("expected", expected), ("got", got), ("what to do", do))
        super().__init__("\n".join([what, *(f"  {name}: {text}" for name, text in parts if text is not None)]))


class SelectionError(CrossfadeError, ValueError):
    """A target matches nothing, or matches modules that cannot be replaced together."""


class PlanError(CrossfadeError, ValueError):
    """A plan, schedule, gate or guidance is not valid, or cannot be written to a file."""


class StudentError(CrossfadeError, ValueError):
    """A student cannot be built, is secretly warm, or shares tensors with the model."""


class OutputError(CrossfadeError, TypeError):
    """Teacher and student do not agree on the call or on the structure of the output."""


class StateError(CrossfadeError, RuntimeError):
    """A call came at the wrong time: installed twice, stepped by hand after attach, finalized too early."""


class NonFiniteError(CrossfadeError, ArithmeticError):
    """A value that must be finite is not; the optimizer has not moved."""


class PersistError(CrossfadeError, ValueError):
    """A saved folder or checkpoint is incomplete, damaged, or belongs to another model."""


class CrossfadeWarning(UserWarning):
    """Something is probably wrong, but the run can go on."""
