"""Globs on dotted paths against a naive matcher, against the clock, and the names near a mistyped one."""

from __future__ import annotations

import contextlib
import time
import warnings

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from crossfade.errors import SelectionError
from crossfade.globs import Run, compile_glob, is_int, nearest, split_run

# ---- the meaning -----------------------------------------------------------------------------------------------------


def matches(pattern: str, path: str) -> bool:
    return compile_glob(pattern).fullmatch(path) is not None


def naive(pattern: list[str], path: list[str]) -> bool:
    """The definition, segment by segment."""
    if not pattern:
        return not path
    if pattern[0] == "**":
        return any(naive(pattern[1:], path[i:]) for i in range(len(path) + 1))
    return bool(path) and naive_segment(pattern[0], path[0]) and naive(pattern[1:], path[1:])


def naive_segment(pattern: str, name: str) -> bool:
    if not pattern:
        return not name
    if pattern[0] == "*":
        return any(naive_segment(pattern[1:], name[i:]) for i in range(len(name) + 1))
    if pattern[:2] == "[!":
        return bool(name) and name[0] != pattern[2] and naive_segment(pattern[4:], name[1:])
    if pattern[0] == "[":
        return bool(name) and name[0] == pattern[1] and naive_segment(pattern[3:], name[1:])
    return bool(name) and pattern[0] in ("?", name[0]) and naive_segment(pattern[1:], name[1:])


segments = st.one_of(
    st.just("**"),
    st.lists(st.sampled_from(["a", "b", "*", "?", "[a]", "[!a]"]), min_size=1, max_size=5).map("".join),
    st.sampled_from(["a", "b", "*", "?"]),
).filter(lambda text: text == "**" or "**" not in text)
patterns = st.lists(segments, min_size=1, max_size=6)
paths = st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=6)


@settings(max_examples=1000)
@given(patterns, paths)
@example(["a", "**", "*"], ["a"])
@example(["**", "a", "**", "*", "**"], ["b", "a"])
@example(["**", "a*a", "**", "a"], ["aaa", "a"])
@example(["*a*ab"], ["aabaab"])
def test_a_glob_means_what_the_naive_matcher_says(pattern: list[str], path: list[str]) -> None:
    assert matches(".".join(pattern), ".".join(path)) == naive(pattern, path)


@settings(max_examples=300)
@given(paths, st.data())
def test_a_path_matches_itself_and_every_loosened_form_of_itself(path: list[str], data: st.DataObject) -> None:
    loose = list(path)
    for i, name in enumerate(path):
        cut = data.draw(st.integers(0, len(name)))
        loose[i] = data.draw(st.sampled_from([name, "*", "**", name[:cut] + "*", "*" + name[cut:], "?" * len(name)]))
    assert matches(".".join(loose), ".".join(path))


@given(patterns, patterns, paths)
def test_braces_are_the_union_of_their_choices(first: list[str], second: list[str], path: list[str]) -> None:
    text = ".".join(path)
    a, b = ".".join(first), ".".join(second)
    assert matches(f"{{{a},{b}}}", text) == (matches(a, text) or matches(b, text))


@pytest.mark.parametrize(
    ("pattern", "hits", "misses"),
    [
        ("layers.1", ["layers.1"], ["layers.10", "layers.11", "model.layers.1", "layers.1.attn", "layers"]),
        ("layers.1.*", ["layers.1.attn"], ["layers.10.attn", "layers.1", "layers.1.attn.q"]),
        ("layers.1*", ["layers.1", "layers.10"], ["layers.2", "layers.1.attn"]),
        ("*", ["a", "blocks"], ["", "a.b"]),
        ("?", ["a", "7"], ["ab", "", "."]),
        ("**", ["a", "a.b", "a.b.c"], []),
        ("**.attn", ["attn", "a.attn", "a.0.attn"], ["xattn", "a.xattn", "attn.q"]),
        ("a.**", ["a", "a.b", "a.b.c"], ["ab", "b.a"]),
        ("a.**.b", ["a.b", "a.c.b", "a.c.d.b"], ["ab", "a.b.c", "a"]),
        ("a.**.*", ["a.b", "a.b.c"], ["a"]),
        ("a**b", ["ab", "axxb"], ["a.b"]),  # within a segment, two stars are one
        ("blocks.[0-9]", ["blocks.3"], ["blocks.10", "blocks.a"]),
        ("blocks.[0-9][0-9]", ["blocks.10"], ["blocks.3"]),
        ("a[!b]c", ["axc"], ["abc", "a.c", "ac"]),
        ("a[^b]c", ["axc", "a!c"], ["abc", "a.c"]),
        ("a[.]c", [], ["a.c", "axc"]),  # a dot only ever parts names
        ("a[+-9]c", ["a0c", "a+c"], ["a.c"]),
        ("a[x-]c", ["axc", "a-c"], ["ayc"]),
        ("a[!]c", ["a!c"], ["axc"]),
        ("a[b", ["a[b"], ["ab"]),  # what does not close is itself
        ("blocks.{0,3}.attn", ["blocks.0.attn", "blocks.3.attn"], ["blocks.1.attn", "blocks.0,3.attn"]),
        ("{a,b.{c,d}}.e", ["a.e", "b.c.e", "b.d.e"], ["b.e", "c.e"]),
        ("a{,.b}", ["a", "a.b"], ["ab", "b"]),
        ("q+(k)|v$^\\", ["q+(k)|v$^\\"], ["qk", "v", "qqk"]),
        ("A", ["A"], ["a"]),
    ],
)
def test_examples_of_globs(pattern: str, hits: list[str], misses: list[str]) -> None:
    assert [path for path in hits + misses if matches(pattern, path)] == hits


@given(st.text("[]!^-&~|\\ab.z0", max_size=8))
def test_a_character_class_never_warns_or_breaks_the_regex(text: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with contextlib.suppress(SelectionError):
            compile_glob.__wrapped__(f"x[{text}]")


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("a{b", "braces of a glob do not close"),
        ("a}b", "braces of a glob do not close"),
        ("{a{b,c}", "braces of a glob do not close"),
        ("{a,b}" * 9, r"too many alternatives(?s:.*)<= 256"),
        ("{" + ",".join(map(str, range(257))) + "}", "too many alternatives"),
        ("[9-0]", r"range of a glob runs backwards(?s:.*)\[9-0\]"),
        ("", "nothing before, between or after its dots"),
        (".a", "nothing before, between or after its dots"),
        ("a.", "nothing before, between or after its dots"),
        ("a..b", "nothing before, between or after its dots"),
        ("{,a}", "nothing before, between or after its dots"),
    ],
)
def test_what_is_no_glob_says_why(pattern: str, message: str) -> None:
    with pytest.raises(SelectionError, match=message):
        compile_glob(pattern)


def test_256_alternatives_are_enough_and_repeated_ones_count_once() -> None:
    assert matches("{a,b}" * 8, "abababab")
    assert matches("{a,a}" * 50, "a" * 50)


# ---- the clock -------------------------------------------------------------------------------------------------------

HOSTILE = {
    "stars in a segment": ("*a*a*a*a*a*a*a*b" * 20, "a" * 20_000),
    "a star before every ?": ("*?" * 100 + "b", "a" * 5_000),
    "stars and negated classes": ("[!b]*" * 100 + "b", "a" * 5_000),
    "double stars": ("**.a.**.a.**.a.**.b", ".".join("a" * 20_000)),
    "many double stars": ("**.a." * 100 + "b", ".".join("a" * 5_000)),
    "double stars around blocks": ("**.a.a.a.a.b.**." * 10 + "z", ".".join("a" * 5_000)),
    "both kinds": ("**.*a*a*b.**." * 20 + "z", ".".join(["aaaaaab"] * 5_000)),
    "stars in many segments": (".".join(["*a*a*a"] * 30) + ".b", ".".join(["a" * 300] * 30) + ".c"),
    "braces": ("{*a,*aa}" * 8 + "b", "a" * 1_000),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_pattern_takes_no_longer_than_a_friendly_one(name: str) -> None:
    pattern, path = HOSTILE[name]
    begin = time.process_time()
    assert not matches(pattern, path)
    assert time.process_time() - begin < 1.0  # a backtracking matcher would take longer than the universe has


def test_nested_or_endless_braces_take_no_time_either() -> None:
    begin = time.process_time()
    assert matches("{" * 300 + "a" + "}" * 300, "a")
    with pytest.raises(SelectionError, match="too many alternatives"):
        compile_glob("{a,b}" * 2_000)
    assert time.process_time() - begin < 1.0


# ---- runs ------------------------------------------------------------------------------------------------------------


@given(st.text("ab.[]:0", max_size=6), st.integers(-99, 99), st.integers(-99, 99))
def test_a_run_reads_back_as_it_was_written(container: str, start: int, stop: int) -> None:
    assert split_run(str(Run(container, start, stop))) == (container, start, stop)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("a.b[0:2]", ("a.b", 0, 2)),
        ("a[:]", ("a", None, None)),
        ("a[2:]", ("a", 2, None)),
        ("a[:-1]", ("a", None, -1)),
        ("[1:3]", ("", 1, 3)),
        ("a", None),
        ("a[0]", None),
        ("a[0:2].b", None),
        ("a[0:1:2]", None),
        ("a[0:" + "9" * 5_000 + "]", None),  # int() refuses so many digits
    ],
)
def test_examples_of_runs(text: str, parts: tuple[str, int | None, int | None] | None) -> None:
    assert split_run(text) == parts


@pytest.mark.parametrize("values", [(0, 0, 2), ("a", "0", 2), ("a", 0, None), ("a", 0.0, 2), ("a", False, True)])
def test_a_run_needs_a_path_and_integers(values: tuple[object, object, object]) -> None:
    with pytest.raises(SelectionError, match=r'path and two integers(?s:.*)Run\("encoder.layer", 0, 2\)'):
        Run(*values)


def test_a_truth_value_is_no_whole_number() -> None:
    assert [is_int(value) for value in (0, -3, True, 1.0, "1", None)] == [True, True, False, False, False, False]


# ---- near names ------------------------------------------------------------------------------------------------------


def test_the_nearest_names_come_first_and_layers_count_as_one() -> None:
    names = [f"blocks.{i}.{part}" for i in range(12) for part in ("attn", "mlp")] + ["head", "norm1", "norm2"]
    assert nearest("blocks.*.atn", names).startswith('"blocks.0.attn" (and 11 like it), "blocks.0.mlp" (and 11 like')
    assert nearest("blocks.99.attn", names).startswith('"blocks.0.attn" (and 11 like it)')
    assert nearest("norm", names).startswith('"norm1", "norm2"')  # only a whole segment of digits is a layer
    assert nearest("x", []) == ""
    assert nearest("x", ["a", "b", "c", "d"]).count('"') == 6
