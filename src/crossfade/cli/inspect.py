"""`crossfade inspect`: what would be replaced in a model. Changes nothing."""

from __future__ import annotations

from ..lab.inputs import InputError
from ..lab.pretrained import find_attentions, load_model
from ..targets import select

__all__ = ["inspect"]


def inspect(model: str, targets: str | None) -> str:
    """The selection table of a model.

    Args:
        model: A transformers folder or hub id, or `timm:NAME`.
        targets: As `crossfade.select` accepts it; by default the attentions of the usual families.

    Returns:
        The table, with the pattern that found it.

    Raises:
        InputError: The model is unknown, or no known pattern matches it.
        SelectionError: The given pattern matches nothing.
    """
    loaded = load_model(model)
    if targets is not None:
        return _text(loaded, targets, select(loaded, targets).table())
    try:
        pattern, selection = find_attentions(loaded, None)
    except InputError as error:
        kinds = sorted({type(module).__name__ for module in loaded.modules()})
        raise InputError(f"{error}\n  classes in this model: {', '.join(kinds)}") from None
    return _text(loaded, pattern, selection.table())


def _text(model: object, pattern: str, table: str) -> str:
    return f"{type(model).__name__}, targets {pattern!r}\n\n{table}"
