"""Which modules to replace: list, count, narrow and explain them before anything is touched.

A *site* is one place of replacement: a module, under every path at which it stands, or a contiguous run of modules
of one container. Nothing here changes a model, and nothing here looks inside an installed blend.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from difflib import SequenceMatcher
from functools import lru_cache
from itertools import groupby
from typing import TypeAlias, overload

from torch import nn
from torch.nn.parameter import UninitializedParameter

from crossfade.errors import SelectionError

__all__ = ["Match", "Run", "Selection", "Target", "Targets", "parent_of", "resolve", "select"]

_RUN = re.compile(r"(?s)(.*)\[(-?\d+)?:(-?\d+)?\]")
_BRACES = re.compile(r"\{([^{}]*)\}")
_TOKEN = re.compile(r"(?s)\*+|\[([!^]?)([^\]]+)\]|.")
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # a whole segment of digits: the index of a layer
_SEE_ALL = "see every path with print(crossfade.select(model))"
_SHOWN = 6  # notes and conflicts that a table prints before it only counts them


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
        if not isinstance(self.container, str) or not (_is_int(self.start) and _is_int(self.stop)):
            raise SelectionError(
                "a run needs a path and two integers.", got=repr(self), do='e.g. Run("encoder.layer", 0, 2)'
            )

    def __str__(self) -> str:
        return f"{self.container}[{self.start}:{self.stop}]"


@dataclass(frozen=True)
class Targets:
    """A target and how to narrow it, as data. At most one of `first`, `last`, `every`, `indices`.

    Args:
        match: What to take (see `select`).
        exclude: What to leave out of it; must hit at least one match.
        first: Keep the first n matches.
        last: Keep the last n matches.
        every: Keep the matches 0, n, 2n, ...
        indices: Keep the matches at these indices; negative counts from the end.

    Raises:
        SelectionError: A value has the wrong type or range, or two ways of narrowing are given.

    Example:
        >>> Targets("blocks.*.attn", every=2).every
        2
    """

    match: Target
    _: KW_ONLY
    exclude: Target | None = None
    first: int | None = None
    last: int | None = None
    every: int | None = None
    indices: Sequence[int] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "match", _valid(self.match, "target"))
        if self.exclude is not None:
            object.__setattr__(self, "exclude", _valid(self.exclude, "exclude"))
        ways = [way for way in ("first", "last", "every", "indices") if getattr(self, way) is not None]
        if len(ways) > 1:
            raise SelectionError(
                "the target is narrowed twice.",
                expected="at most one of first, last, every, indices",
                got=", ".join(ways),
                do="chain them on the selection: select(...).first(6).every(2)",
            )
        if self.indices is not None:
            object.__setattr__(self, "indices", _valid_indices(self.indices))
        elif ways:
            _valid_count(ways[0], getattr(self, ways[0]))


Target: TypeAlias = (
    str | re.Pattern[str] | type[nn.Module] | Callable[[str, nn.Module], bool] | Sequence[str] | Run | Targets
)


@dataclass(frozen=True)
class Match:
    """One site as found in a model.

    Args:
        path: The first of `paths`.
        paths: Every dotted path under which this very module stands; for a run, the run at every path of its
            container (`"encoder.layer[0:2]"`).
        module: The module; for a run, its first one.
        modules: All modules of the site: one, or the k of a run.
        parameters: Number of its parameters, each tensor counted once.
        share: The same as a part of the model's, from 0 to 1.
    """

    path: str
    paths: tuple[str, ...]
    module: nn.Module
    modules: tuple[nn.Module, ...]
    parameters: int
    share: float

    @property
    def run(self) -> Run | None:
        """The run with its ends resolved, or None for a single module."""
        found = _RUN.fullmatch(self.path)
        return Run(found[1], int(found[2]), int(found[3])) if found else None

    @property
    def class_name(self) -> str:
        """`"Block"`; for a run `"2 x Block"` or `"Block + Pool"`."""
        groups = [(name, len(list(same))) for name, same in groupby(type(m).__name__ for m in self.modules)]
        return " + ".join(name if count == 1 else f"{count} x {name}" for name, count in groups)


@dataclass(frozen=True, repr=False)
class Selection:
    """The matches of a target in `model`, in the order of `model.named_modules()`. Print it to see them.

    Every narrowing method returns a new selection and raises `SelectionError` when it would do nothing it was
    asked for: no match hit, nothing left, more asked for than there is. Only a slice may be empty.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
        >>> print(select(model, nn.Linear))
        index  path  class   parameters   share
            0  0     Linear          20   66.7%
            1  2     Linear          10   33.3%
        total  2 sites               30  100.0%
    """

    model: nn.Module
    matches: tuple[Match, ...]

    @property
    def paths(self) -> tuple[str, ...]:
        """The first path of every match: as a target, it selects the same sites again."""
        return tuple(match.path for match in self.matches)

    def __len__(self) -> int:
        return len(self.matches)

    def __iter__(self) -> Iterator[Match]:
        return iter(self.matches)

    @overload
    def __getitem__(self, index: int) -> Match: ...
    @overload
    def __getitem__(self, index: slice) -> Selection: ...
    def __getitem__(self, index: int | slice) -> Match | Selection:
        return Selection(self.model, self.matches[index]) if isinstance(index, slice) else self.matches[index]

    def first(self, n: int) -> Selection:
        """Keeps the first `n` matches."""
        return self[: self._enough("first", n)]

    def last(self, n: int) -> Selection:
        """Keeps the last `n` matches."""
        return self[len(self) - self._enough("last", n) :]

    def every(self, n: int) -> Selection:
        """Keeps the matches 0, n, 2n, ..."""
        return self[:: _valid_count("every", n)]

    def at(self, indices: Sequence[int]) -> Selection:
        """Keeps the matches at `indices`, in the order of the model."""
        n = len(self)
        if outside := [i for i in _valid_indices(indices) if not -n <= i < n]:
            raise SelectionError(
                f"indices are out of range for {n} matches.", expected=f"from {-n} to {n - 1}", got=outside
            )
        return Selection(self.model, tuple(self.matches[i] for i in sorted({i % n for i in indices})))

    def include(self, target: Target) -> Selection:
        """Keeps the matches that `target` hits too; a run is hit when one of its modules is."""
        hit = self._hit(target, "include")
        return self._kept((m for m in self if m.path in hit), "include")

    def exclude(self, target: Target) -> Selection:
        """Drops the matches that `target` hits; a run is hit when one of its modules is."""
        hit = self._hit(target, "exclude")
        return self._kept((m for m in self if m.path not in hit), "exclude")

    def where(self, predicate: Callable[[Match], bool]) -> Selection:
        """Keeps the matches for which `predicate(match)` is true."""
        return self._kept((m for m in self if predicate(m)), "where")

    def conflicts(self) -> tuple[str, ...]:
        """What makes these sites impossible to replace together, one sentence each; see `check`."""
        index = _Index(self.model)
        return tuple(dict.fromkeys([*_impossible(index, self.matches), *_clashes(self.matches)]))

    def notes(self) -> tuple[str, ...]:
        """What is worth knowing but allowed: shared, repeated and tied modules, one sentence each."""
        index = _Index(self.model)
        return tuple(dict.fromkeys([*_shared(index, self.matches), *_tied(index, self.matches)]))

    def check(self) -> None:
        """Raises `SelectionError` when the selection is empty or has conflicts."""
        if not self.matches:
            raise SelectionError("the selection is empty.", expected="at least one site", do=_SEE_ALL)
        if problems := self.conflicts():
            shown, more = problems[:_SHOWN], len(problems) - _SHOWN
            raise SelectionError(
                f"{len(self)} selected sites cannot all be replaced.",
                got="\n    ".join([*shown, *([f"... and {more} more"] if more > 0 else [])]),
                do="narrow the selection with exclude=..., first=..., or a closer pattern",
            )

    def table(self) -> str:
        """The matches as aligned plain text with their total, then the notes and conflicts."""
        whole, total = _count([self.model]), _count(m for match in self for m in match.modules)
        rows = [("index", "path", "class", "parameters", "share")]
        rows += [(str(i), _places(m), m.class_name, f"{m.parameters:,}", f"{m.share:.1%}") for i, m in enumerate(self)]
        rows.append(("total", _plural(len(self), "site"), "", f"{total:,}", f"{total / max(whole, 1):.1%}"))
        a, b, c, d, e = (max(map(len, column)) for column in zip(*rows, strict=True))
        lines = [f"{r[0]:>{a}}  {r[1]:<{b}}  {r[2]:<{c}}  {r[3]:>{d}}  {r[4]:>{e}}" for r in rows]
        for kind, sentences in (("note", self.notes()), ("conflict", self.conflicts())):
            lines += [f"{kind}: {sentence}" for sentence in sentences[:_SHOWN]]
            lines += [f"{kind}: ... and {len(sentences) - _SHOWN} more"] if len(sentences) > _SHOWN else []
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.table()

    def __repr__(self) -> str:
        return f"<Selection: {_plural(len(self), 'site')} of {type(self.model).__name__}>"

    def _enough(self, way: str, n: int) -> int:
        if _valid_count(way, n) > len(self):
            raise SelectionError(f"{way}={n} asks for more than the {_plural(len(self), 'match', 'es')}.")
        return n

    def _hit(self, target: Target, role: str) -> set[str]:
        found = _Index(self.model).find(_valid(target, role), role)
        ids = {id(module) for match in found for module in match.modules}
        hit = {m.path for m in self if not ids.isdisjoint(map(id, m.modules))}
        if not hit:
            raise SelectionError(
                f"the {role} {_describe(target)} hits none of the {_plural(len(self), 'match', 'es')}.",
                got=f"{_plural(len(found), 'match', 'es')} elsewhere: {_quoted(m.path for m in found)}",
                where=f"the selection {_quoted(self.paths)}",
            )
        return hit

    def _kept(self, matches: Iterable[Match], way: str) -> Selection:
        kept = Selection(self.model, tuple(matches))
        if not kept.matches:
            raise SelectionError(f"{way} leaves none of the {_plural(len(self), 'match', 'es')}.")
        return kept


def select(
    model: nn.Module,
    target: Target = "**",
    *,
    exclude: Target | None = None,
    first: int | None = None,
    last: int | None = None,
    every: int | None = None,
    indices: Sequence[int] | None = None,
) -> Selection:
    """Finds the modules that a target names; changes nothing.

    A target is one of:

    - a string: a glob that must match the **whole** path. `*` and `?` stay within one segment, `**` stands for any
      number of segments (none too), `[0-9]` for one character, `{a,b}` for alternatives, and `name[0:2]` at the
      end for a run of a container (`name[:-1]`, `name[2:]`). Matching takes time linear in the pattern: a glob
      becomes a regex of atomic groups, which never backtracks into an earlier star;
    - a sequence of strings: exact paths (or runs), each of which must exist;
    - a compiled regex: `fullmatch` on the path (nested quantifiers such as `(\\w+)*` are yours to avoid);
    - a class: `isinstance`; or a predicate `(path, module) -> bool`; or a `Run`; or a `Targets`.

    A module that stands at several paths is one match, hit when any of its paths is. The model itself is never a
    match. `exclude` and the narrowing arguments work as in `Targets`.

    Returns:
        The matches in the order of `model.named_modules()`, whatever the order of a sequence.

    Raises:
        SelectionError: Something matches nothing (the message names the nearest paths), or is not a target.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
        >>> select(model, "*", exclude=nn.ReLU).paths
        ('0', '2')
    """
    if not isinstance(model, nn.Module):
        raise SelectionError("select needs a model.", expected="a torch.nn.Module", got=type(model).__name__)
    targets = Targets(target, exclude=exclude, first=first, last=last, every=every, indices=indices)
    return _Index(model).select(targets)


def parent_of(model: nn.Module, path: str) -> tuple[nn.Module, str]:
    """Finds the module that holds `path` and the name under which it does, also for names with a dot.

    Raises:
        SelectionError: Nothing stands there, or the path is a run or the model itself.

    Example:
        >>> model = nn.ModuleDict({"a": nn.Sequential(nn.ReLU())})
        >>> parent_of(model, "a.0") == (model["a"], "0")
        True
    """
    if path == "":
        raise _root_error()
    found = _locate(model, path)
    if found is None:
        run = _RUN.fullmatch(path)
        raise SelectionError(
            f'no module stands at "{path}".',
            do="a run is several modules: take match.run and its container" if run else _Index(model).nearest(path),
        )
    return found


def resolve(model: nn.Module, path: str) -> nn.Module:
    """Returns the module at `path`; `""` is the model itself. Raises as `parent_of` does."""
    if path == "":
        return model
    parent, name = parent_of(model, path)
    child = parent._modules[name]
    assert child is not None
    return child


class _Index:
    """One walk over a model: every path, in order, outside of installed blends."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.modules: dict[str, nn.Module] = {}
        self.places: dict[int, list[str]] = {}  # id of a module -> all its paths, the first one first
        self.parents: dict[int, list[nn.Module]] = {}
        for path, module, parent in _walk(model):
            self.modules.setdefault(path, module)
            self.places.setdefault(id(module), []).append(path)
            self.parents.setdefault(id(module), []).extend([] if parent is None else [parent])
        self.rank = {key: i for i, key in enumerate(self.places)}
        self.total = _count([model])
        self.size = f"0 of {_plural(len(self.places) - 1, 'module')}"

    def select(self, targets: Targets) -> Selection:
        found = Selection(self.model, tuple(self.find(targets.match, "target")))
        if targets.exclude is not None:
            found = found.exclude(targets.exclude)
        if targets.indices is not None:
            return found.at(targets.indices)
        if targets.every is not None:
            return found.every(targets.every)
        if targets.first is not None:
            return found.first(targets.first)
        return found if targets.last is None else found.last(targets.last)

    def find(self, target: Target, role: str) -> list[Match]:
        """All matches of a valid target, each once, in order; raises when there is none."""
        if isinstance(target, Targets):
            return list(self.select(target))
        if isinstance(target, Run):
            found = self.runs([target.container], target.start, target.stop)
        elif isinstance(target, str) and (run := _RUN.fullmatch(target)):
            test = _predicate(run[1]) if run[1] else None
            named = [p for p, m in self.modules.items() if p and test(p, m)] if test else [""]
            found = self.runs(named or [run[1]], *_ends(run))
        elif isinstance(target, Sequence) and not isinstance(target, str):
            found = self.entries(target, role)
        else:
            test = _predicate(target)
            hits = {id(m): m for p, m in self.modules.items() if p and test(p, m)}
            found = [self.match(self.places[key], (module,)) for key, module in hits.items()]
        if not found:
            raise self.nothing(target, role)
        order = {match.path: match for match in found}
        return sorted(order.values(), key=lambda m: (self.rank[id(m.module)], len(m.modules)))

    def match(self, paths: Iterable[str], modules: tuple[nn.Module, ...]) -> Match:
        paths, parameters = tuple(paths), _count(modules)
        return Match(paths[0], paths, modules[0], modules, parameters, parameters / max(self.total, 1))
