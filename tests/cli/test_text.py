"""The demo's text: paragraphs, topics, and a split that keeps the held-out text apart."""

from __future__ import annotations

import re
from itertools import combinations

import pytest

from crossfade.lab import text
from crossfade.lab.inputs import InputError


def letters(paragraph: str) -> str:
    return re.sub(r"[^a-z]+", "", paragraph.casefold())


def test_the_reference_text_is_split_without_overlap() -> None:
    topics = text.pydoc_topics()
    found = text.split("pydoc", topics)
    parts = [{letters(p) or p for p in part} for part in (found.train, found.validation, found.held_out)]
    assert [len(part) for part in parts] == [len(found.train), len(found.validation), len(found.held_out)]
    assert all(a.isdisjoint(b) for a, b in combinations(parts, 2))
    assert len(found.train) > 700
    assert len(found.held_out) > 150
    assert len(found.validation) > 64


def test_what_repeats_across_topics_goes_to_the_held_out_text() -> None:
    shared = "this paragraph stands in every topic, word for word, {}!"
    own = "this one of topic {} is its own, number {} of those that it has here"
    names = "abcdefghijklmnop"
    topics = {
        name: [shared.format(name_number), *(own.format(name * 3, "x" * i) for i in range(1, 5))]
        for name_number, name in enumerate(names)
    }
    found = text.split("test", topics)
    assert not [p for p in (*found.train, *found.validation) if p.startswith("this paragraph")]
    assert len([p for p in found.held_out if p.startswith("this paragraph")]) == 1


def test_the_split_is_by_topic_and_does_not_depend_on_their_order() -> None:
    topics = {
        f"topic {n}": [f"topic {'i' * n} paragraph {'x' * k} " + "and so on " * 4 for k in range(1, 6)]
        for n in range(12)
    }
    found = text.split("test", topics)
    again = text.split("test", dict(reversed(topics.items())))
    assert found == again
    for part in (found.train, found.validation, found.held_out):
        assert len(part) % 5 == 0


def test_too_little_text_is_refused() -> None:
    with pytest.raises(InputError, match="too little text"):
        text.split("test", {"one": ["a paragraph that is long enough to be one, but it is alone"]})
