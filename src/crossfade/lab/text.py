"""The text of the demo: paragraphs by topic, split into training, validation and held-out text.

The default is the English reference text inside every CPython (`pydoc_data.topics`). The split is by topic and depends
on the text alone, so that every seed is judged on the same held-out paragraphs.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .inputs import InputError

__all__ = ["Split", "own_topics", "paragraphs", "pydoc_topics", "split"]

SHORTEST = 40  # characters: below this, a paragraph is mostly a heading or a piece of grammar
TOPIC = 16  # paragraphs of a user's file that count as one topic
FEWEST = 4  # paragraphs that each part of the split needs


@dataclass(frozen=True)
class Split:
    """Paragraphs of the three parts; no paragraph is in two of them.

    Attributes:
        source: Where the text comes from, for reports.
        train: What both arms learn from.
        validation: Other topics, for curves and for choosing settings.
        held_out: Other topics again, for the final table only.
    """

    source: str
    train: tuple[str, ...]
    validation: tuple[str, ...]
    held_out: tuple[str, ...]

    def capped(self, *, train: int, validation: int, held_out: int) -> Split:
        """At most so many paragraphs of each part, spread evenly over it."""
        return Split(
            self.source,
            _spread(self.train, train),
            _spread(self.validation, validation),
            _spread(self.held_out, held_out),
        )

    def __str__(self) -> str:
        """One line."""
        return (
            f"{self.source}: {len(self.train)} paragraphs to learn from, {len(self.validation)} for validation, "
            f"{len(self.held_out)} held out"
        )


def _spread(texts: tuple[str, ...], most: int) -> tuple[str, ...]:
    return texts if len(texts) <= most else tuple(texts[i * len(texts) // most] for i in range(most))


def paragraphs(text: str) -> list[str]:
    r"""Blocks between empty lines, white space normalised, short ones left out.

    Example:
        >>> paragraphs("A heading\n\n" + "word " * 10)
        ['word word word word word word word word word word']
    """
    found = (" ".join(block.split()) for block in re.split(r"\n\s*\n", text))
    return [block for block in found if len(block) >= SHORTEST]


def pydoc_topics() -> dict[str, list[str]]:
    """Python's own reference text: topic -> paragraphs."""
    from pydoc_data.topics import topics

    return {name: paragraphs(text) for name, text in topics.items()}


def own_topics(files: Sequence[Path]) -> dict[str, list[str]]:
    """The user's files: every 16 consecutive paragraphs are a topic.

    Raises:
        InputError: A file is missing, unreadable, not UTF-8, or holds no paragraph.
    """
    topics: dict[str, list[str]] = {}
    for file in files:
        try:
            text = file.read_text(encoding="utf-8")
        except OSError as error:
            raise InputError("a text file cannot be read.", where=file, got=error.strerror or error) from None
        except UnicodeDecodeError as error:
            raise InputError("a text file is not UTF-8.", where=file, got=error.reason) from None
        found = paragraphs(text)
        if not found:
            raise InputError(
                "a text file holds no paragraphs.",
                where=file,
                expected=f"blocks of at least {SHORTEST} characters with empty lines between them",
                got=f"{len(text)} characters",
            )
        for start in range(0, len(found), TOPIC):
            # Named by content, so that the split does not depend on where the file lies.
            part = found[start : start + TOPIC]
            topics[_digest(part[0]) + str(start)] = part
    return topics


def split(source: str, topics: Mapping[str, list[str]], *, held_out: float = 0.17, validation: float = 0.08) -> Split:
    """Deal whole topics to the three parts, until each share of the different paragraphs is reached.

    Reference texts repeat themselves across topics, so a paragraph that also stands in a held-out topic is taken out of
    training; otherwise the final figure would be measured on text that was learnt.

    Raises:
        InputError: There are too few paragraphs for three parts.
    """
    names = sorted(topics, key=_digest)
    total = len({_key(text) for name in names for text in topics[name]})
    seen: set[str] = set()
    parts: list[list[str]] = [[], [], []]
    for name in names:
        full_held, full_validation = len(parts[0]) >= held_out * total, len(parts[1]) >= validation * total
        part = parts[0] if not full_held else parts[1] if not full_validation else parts[2]
        part.extend(_new(topics[name], seen))
    result = Split(source, train=tuple(parts[2]), validation=tuple(parts[1]), held_out=tuple(parts[0]))
    if min(map(len, parts)) < FEWEST:
        raise InputError(
            "there is too little text to learn from and to judge by.",
            where=source,
            expected=f"at least {3 * TOPIC} different paragraphs of {SHORTEST} characters or more",
            got=f"{total} paragraphs",
        )
    return result


def _new(texts: Iterable[str], seen: set[str]) -> list[str]:
    """Those of `texts` that have not been dealt yet."""
    fresh = []
    for text in texts:
        if (key := _key(text)) not in seen:
            seen.add(key)
            fresh.append(text)
    return fresh


def _key(text: str) -> str:
    """Two paragraphs that differ in case, digits, punctuation or spaces only are the same text."""
    return re.sub(r"[\W\d_]+", " ", text.casefold()).strip() or text


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
