"""How paths are written: globs, as regexes that a hostile one cannot slow down; runs; names near a mistyped one."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import lru_cache

from .errors import SelectionError

__all__ = ["Run", "compile_glob"]

_BRACES = re.compile(r"\{([^{}]*)\}")
_MOST_ALTERNATIVES = 256
_TOKEN = re.compile(r"(?s)\*+|\[(?P<but>[!^]?)(?P<letters>[^\]]+)\]|.")
_RUN = re.compile(r"(?s)(.*)\[(-?\d{1,9})?:(-?\d{1,9})?\]")
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # a whole segment of digits: the index of a layer


@lru_cache(maxsize=256)
def compile_glob(pattern: str) -> re.Pattern[str]:
    """A glob on dotted paths as a regex for `fullmatch`, one branch per choice of `{a,b}`.

    Raises:
        SelectionError: Braces that do not close or make more than 256 alternatives, a range that runs backwards, or
            nothing between two dots.

    Example:
        >>> glob = compile_glob("blocks.*.attn")
        >>> bool(glob.fullmatch("blocks.10.attn")), bool(glob.fullmatch("blocks.0.attn.qkv"))
        (True, False)
    """
    branches = (_branch(text, pattern) for text in _alternatives(pattern))
    return re.compile("|".join(f"(?:{branch})" for branch in branches), re.DOTALL)


def _alternatives(pattern: str) -> list[str]:
    """The pattern without braces, once per choice; innermost braces are opened first."""
    texts = [pattern]
    while any(_BRACES.search(text) for text in texts):
        opened: dict[str, None] = {}
        for text in texts:
            brace = _BRACES.search(text)
            choices = [""] if brace is None else brace[1].split(",")
            start, end = (len(text), len(text)) if brace is None else brace.span()
            opened |= dict.fromkeys(text[:start] + choice + text[end:] for choice in choices)
        texts = list(opened)
        if len(texts) > _MOST_ALTERNATIVES:
            raise SelectionError(
                "the braces of a glob make too many alternatives.",
                got=repr(pattern),
                expected=f"<= {_MOST_ALTERNATIVES}",
            )
    if any("{" in text or "}" in text for text in texts):
        raise SelectionError("the braces of a glob do not close.", got=repr(pattern), expected='"{a,b}"')
    return texts


def _branch(text: str, pattern: str) -> str:
    """One glob without braces as a regex.

    Every star but the last of its kind is an atomic group around a lazy search for what follows it: the first place
    is always a right choice for a glob, so matching need never go back, and a hostile pattern takes no longer than a
    friendly one.
    """
    segments = _split([_token(token, pattern) for token in _TOKEN.finditer(text)], ".")
    if not all(segments):
        raise SelectionError("a glob has nothing before, between or after its dots.", got=repr(pattern))
    head, *rest = (r"\.".join(block) for block in _split([_segment(tokens) for tokens in segments], "**"))
    if not rest:
        return head
    *middle, tail = rest
    result = rf"{head}(?:\.|\Z)" if head else ""
    result += "".join(rf"(?>(?:[^.]+\.)*?{block}(?:\.|\Z))" for block in middle if block)
    return result + (rf"(?:[^.]+\.)*{tail}" if tail else ".*")


def _token(token: re.Match[str], pattern: str) -> str:
    """`*`, `**` and `.` as they are, the rest as a regex for one character within a segment."""
    text, letters = token[0], token["letters"]
    if letters is None:
        return {"?": "[^.]", ".": "."}.get(text) or (text[:2] if text[0] == "*" else re.escape(text))
    parts = []
    for low, high, single in re.findall(r"(?s)(.)-(.)|(.)", letters):
        if low > high:
            raise SelectionError("a range of a glob runs backwards.", got=repr(pattern), expected='"[0-9]"')
        parts.append(re.escape(single) or f"{re.escape(low)}-{re.escape(high)}")
    return rf"(?!\.)[{'^' if token['but'] else ''}{''.join(parts)}]"


def _segment(tokens: list[str]) -> str:
    """`**` as it is, another segment as a regex that matches at least one character (no name is empty)."""
    if tokens == ["**"]:
        return "**"
    if set(tokens) <= {"*", "**"}:
        return "[^.]+"
    head, *rest = ("".join(piece) for piece in _split([t[:1] if t == "**" else t for t in tokens], "*"))
    if not rest:
        return head
    *middle, tail = rest
    return head + "".join(f"(?>[^.]*?{piece})" for piece in middle) + f"[^.]*{tail}"


def _split(items: list[str], at: str) -> list[list[str]]:
    groups: list[list[str]] = [[]]
    for item in items:
        if item == at:
            groups.append([])
        else:
            groups[-1].append(item)
    return groups


@dataclass(frozen=True)
class Run:
    """The modules `start` to `stop` (exclusive) of one ModuleList or Sequential, replaced as one site.

    Args:
        container: Path of the container; `""` is the model itself.
        start: Index of the first module; negative counts from the end.
        stop: Index after the last one; negative counts from the end.

    Example:
        >>> str(Run("encoder.layer", 0, 2))
        'encoder.layer[0:2]'
    """

    container: str
    start: int
    stop: int

    def __post_init__(self) -> None:
        if type(self.container) is not str or not (is_int(self.start) and is_int(self.stop)):
            raise SelectionError(
                "a run needs a path and two integers.", got=repr(self), do='e.g. Run("encoder.layer", 0, 2)'
            )

    def __str__(self) -> str:
        return f"{self.container}[{self.start}:{self.stop}]"


def split_run(text: str) -> tuple[str, int | None, int | None] | None:
    """Container, start and stop of `name[0:2]`; None for any other text."""
    found = _RUN.fullmatch(text)
    if found is None:
        return None
    return found[1], (None if found[2] is None else int(found[2])), (None if found[3] is None else int(found[3]))


def is_int(value: object) -> bool:
    """Whether it is a whole number; True and False are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def nearest(wanted: str, names: Iterable[str]) -> str:
    """The three names closest to `wanted`, quoted; layers that differ only in their number count as one.

    Example:
        >>> nearest("blocks.*.atn", ["blocks.0.attn", "blocks.1.attn", "head"])
        '"blocks.0.attn" (and 1 like it), "head"'
    """
    kinds: dict[str, list[str]] = {}
    for name in names:
        kinds.setdefault(_NUMBER.sub("*", name), []).append(name)
    wanted = _NUMBER.sub("*", wanted)
    ranked = sorted(kinds, key=lambda kind: SequenceMatcher(None, wanted, kind).ratio(), reverse=True)
    alike = [(kinds[kind][0], len(kinds[kind]) - 1) for kind in ranked[:3]]
    return ", ".join(f'"{name}"' + (f" (and {more} like it)" if more else "") for name, more in alike)
