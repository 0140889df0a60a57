"""Globs on dotted module paths, as regexes that a hostile pattern cannot slow down."""

from __future__ import annotations

import re
from functools import lru_cache

from .errors import SelectionError

__all__ = ["compile_glob"]

_BRACES = re.compile(r"\{([^{}]*)\}")
_TOKEN = re.compile(r"(?s)\*+|\[([!^]?)([^\]]+)\]|.")


@lru_cache(maxsize=256)
def compile_glob(pattern: str) -> re.Pattern[str]:
    """A glob on dotted paths as a regex for `fullmatch`, one branch per choice of `{a,b}`.

    Raises:
        SelectionError: Braces that do not close, or that make more than 256 alternatives.

    Example:
        >>> glob = compile_glob("blocks.*.attn")
        >>> bool(glob.fullmatch("blocks.10.attn")), bool(glob.fullmatch("blocks.0.attn.qkv"))
        (True, False)
    """
    return re.compile("|".join(f"(?:{_branch(text)})" for text in _alternatives(pattern)))


def _alternatives(pattern: str) -> list[str]:
    brace = _BRACES.search(pattern)
    if brace is None:
        if "{" in pattern or "}" in pattern:
            raise SelectionError("the braces of a glob do not close.", got=repr(pattern), expected='"{a,b}"')
        return [pattern]
    heads = [pattern[: brace.start()] + choice for choice in brace[1].split(",")]
    result = [text for head in heads for text in _alternatives(head + pattern[brace.end() :])]
    if len(result) > 256:
        raise SelectionError("the braces of a glob make too many alternatives.", got=len(result), expected="<= 256")
    return result


def _branch(pattern: str) -> str:
    """One glob without braces as a regex over whole segments.

    Every star but the last of its kind is an atomic group around a lazy search for the literal that follows, so that
    matching never goes back into it: a hostile pattern takes no longer than a friendly one.
    """
    segments = re.split(r"(?<!\[)\.", pattern)
    return _join_segments([segment if segment == "**" else _segment(segment) for segment in segments])


def _segment(segment: str) -> str:
    tokens = []
    for token in _TOKEN.finditer(segment):
        text = token[0]
        if text.startswith("*"):
            tokens.append("*")
        elif text == "?":
            tokens.append(r"[^.]")
        elif token[2] is not None:
            letters = re.sub(r"([\\^\[\]])", r"\\\1", token[2])
            tokens.append(f"[{'^.' if token[1] else ''}{letters}]")
        else:
            tokens.append(re.escape(text))
    # literals between stars: each but the last is found at its first place, which is always a right choice for a glob
    pieces: list[str] = [""]
    for piece in tokens:
        if piece == "*":
            pieces.append("")
        else:
            pieces[-1] += piece
    head, *middle = pieces
    if not middle:
        return head
    *inner, tail = middle
    return head + "".join(f"(?>[^.]*?{piece})" for piece in inner if piece) + f"[^.]*{tail}"


def _join_segments(parts: list[str]) -> str:
    """Segments joined by dots; `**` stands for any number. Blocks between two `**` are found at their first place."""
    blocks: list[list[str]] = [[]]
    for part in parts:
        if part == "**":
            blocks.append([])
        else:
            blocks[-1].append(part)
    texts = [r"\.".join(block) for block in blocks]
    if len(texts) == 1:
        return texts[0]
    head, *inner, tail = texts
    result = f"{head}(?:\\.|$)" if head else ""
    result += "".join(f"(?>(?:[^.]+\\.)*?{text}(?:\\.|$))" for text in inner if text)
    if not tail:
        # What is left is whole segments, or nothing (the last dot was then replaced by the end).
        return result + r"(?:[^.]+(?:\.[^.]+)*)?(?<!\.)"
    return result + r"(?:[^.]+\.)*" + tail
