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
from itertools import groupby
from typing import TypeAlias, overload

from torch import nn
from torch.nn.parameter import UninitializedParameter

from .errors import SelectionError
from .globs import compile_glob

__all__ = ["Match", "Run", "Selection", "Target", "Targets", "parent_of", "resolve", "select"]

_RUN = re.compile(r"(?s)(.*)\[(-?\d+)?:(-?\d+)?\]")
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
        if type(self.container) is not str or not (_is_int(self.start) and _is_int(self.stop)):
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
    r"""Finds the modules that a target names; changes nothing.

    A target is one of:

    - a string: a glob that must match the **whole** path. `*` and `?` stay within one segment, `**` stands for any
      number of segments (none too), `[0-9]` for one character, `{a,b}` for alternatives, and `name[0:2]` at the
      end for a run of a container (`name[:-1]`, `name[2:]`). Matching takes time linear in the pattern: a glob
      becomes a regex of atomic groups, which never backtracks into an earlier star;
    - a sequence of strings: exact paths (or runs), each of which must exist;
    - a compiled regex: `fullmatch` on the path (nested quantifiers such as `(\w+)*` are yours to avoid);
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

    def runs(self, containers: Iterable[str], start: int | None, stop: int | None) -> list[Match]:
        """The run at every container; containers that are the same object are one match at several paths."""
        found: dict[int, tuple[nn.Module, list[str]]] = {}
        for path in containers:
            module = self.model if path == "" else self.modules.get(path)
            if module is None:
                raise SelectionError(f'no module stands at "{path}".', got=self.size, do=self.nearest(path))
            if not isinstance(module, (nn.ModuleList, nn.Sequential)):
                raise SelectionError(
                    "a run is cut from a ModuleList or a Sequential.", where=path, got=type(module).__name__
                )
            found.setdefault(id(module), (module, []))[1].append(path)
        return [self.run(module, paths, start, stop) for module, paths in found.values()]

    def run(self, container: nn.Module, paths: list[str], start: int | None, stop: int | None) -> Match:
        items = list(container.children()) if len(container._modules) == len(set(container._modules.values())) else None
        length = len(container._modules)
        first, end = (0 if start is None else start), (length if stop is None else stop)
        first, end = (i + length if i < 0 else i for i in (first, end))
        if items is None or not 0 <= first < end <= length:
            raise SelectionError(
                "the run does not lie in its container."
                if items is not None
                else "the container holds one module twice, so a run of it is not clear.",
                where=paths[0] or "the model itself",
                expected=f"0 <= start < stop <= {length}",
                got=f"[{'' if start is None else start}:{'' if stop is None else stop}]",
            )
        return self.match([str(Run(path, first, end)) for path in paths], tuple(items[first:end]))

    def entries(self, names: Sequence[str], role: str) -> list[Match]:
        """Exact names; each must exist."""
        found = []
        for name in names:
            if run := _RUN.fullmatch(name):
                found += self.runs([run[1]], *_ends(run))
            elif name not in self.modules or name == "":
                raise self.nothing(name, role)
            else:
                module = self.modules[name]
                found.append(self.match(self.places[id(module)], (module,)))
        return found

    def nothing(self, target: Target, role: str) -> SelectionError:
        """The error for a target without a match."""
        test = None if isinstance(target, (Run, Targets)) or _is_names(target) else _predicate(target)
        if test is not None and not isinstance(target, (str, re.Pattern)) and test("", self.model):
            return _root_error()
        return SelectionError(
            f"the {role} {_describe(target)} matched {self.size}.",
            do=f"{self.nearest(target) if isinstance(target, str) else 'look at the paths'}; {_SEE_ALL}",
        )

    def nearest(self, path: str) -> str:
        """The closest paths, layers that differ in their number counted as one kind."""
        kinds = Counter(_NUMBER.sub("*", name) for name in self.modules if name)
        first: dict[str, str] = {}
        for name in self.modules:
            first.setdefault(_NUMBER.sub("*", name), name)
        wanted = _NUMBER.sub("*", path)
        ranked = sorted(kinds, key=lambda kind: SequenceMatcher(None, wanted, kind).ratio(), reverse=True)[:3]
        shown = [f'"{first[k]}"' + (f" (and {kinds[k] - 1} like it)" if kinds[k] > 1 else "") for k in ranked]
        return f"nearest paths: {', '.join(shown)}" if shown else "the model has no modules"


def _walk(model: nn.Module) -> Iterator[tuple[str, nn.Module, nn.Module | None]]:
    """Every (path, module, parent), also repeated ones; installed blends are not entered."""
    stack: list[tuple[str, nn.Module, nn.Module | None]] = [("", model, None)]
    while stack:
        path, module, parent = stack.pop()
        yield path, module, parent
        if getattr(type(module), "__crossfade_blend__", False):
            continue
        children = [(f"{path}.{n}" if path else n, c, module) for n, c in module._modules.items() if c is not None]
        stack.extend(reversed(children))


def _locate(model: nn.Module, path: str) -> tuple[nn.Module, str] | None:
    """Parent and name of the module at `path`. A name may hold dots, so every split is tried, short names first."""
    if path in model._modules and model._modules[path] is not None:
        return model, path
    for i, letter in enumerate(path):
        child = model._modules.get(path[:i]) if letter == "." else None
        found = None if child is None else _locate(child, path[i + 1 :])
        if found is not None:
            return found
    return None


# ---- what a target means -----------------------------------------------------------------------------------------


def _predicate(target: Target) -> Callable[[str, nn.Module], bool]:
    if isinstance(target, str):
        pattern = compile_glob(target)
        return lambda path, _: pattern.fullmatch(path) is not None
    if isinstance(target, re.Pattern):
        return lambda path, _: target.fullmatch(path) is not None
    if isinstance(target, type):
        return lambda _, module: isinstance(module, target)
    assert callable(target)
    return target


def _ends(run: re.Match[str]) -> tuple[int | None, int | None]:
    return (None if run[2] is None else int(run[2])), (None if run[3] is None else int(run[3]))


def _valid(target: object, role: str) -> Target:
    """The target, a list of names as a tuple.

    Raises:
        SelectionError: It is none of the kinds that `select` knows.
    """
    if isinstance(target, str):
        if not target:
            raise SelectionError(f"the {role} is empty.", expected="a path or pattern", do=_SEE_ALL)
        if not _RUN.fullmatch(target):
            compile_glob(target)
        return target
    if isinstance(target, type) and not issubclass(target, nn.Module):
        raise SelectionError(
            f"the {role} is a class of something else.", expected="a module class", got=target.__name__
        )
    if isinstance(target, (re.Pattern, type, Run, Targets)):
        return target
    if isinstance(target, Sequence) and not isinstance(target, (bytes, bytearray)):
        if target and all(isinstance(name, str) for name in target):
            return tuple(target)
        raise SelectionError(f"the {role} is not a list of names.", expected="one or more strings", got=repr(target))
    if callable(target) and not isinstance(target, nn.Module):
        return target
    raise SelectionError(
        f"this is no {role}.",
        expected="a glob, a list of paths, a compiled regex, a module class, a predicate, a Run or Targets",
        got=repr(target) if not isinstance(target, nn.Module) else type(target).__name__,
    )


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_names(target: object) -> bool:
    return isinstance(target, Sequence) and not isinstance(target, str)


def _valid_count(way: str, n: int) -> int:
    if not _is_int(n) or n < 1:
        raise SelectionError(f"{way} takes a whole number from 1.", got=repr(n))
    return n


def _valid_indices(indices: Sequence[int]) -> tuple[int, ...]:
    if not _is_names(indices) or not all(map(_is_int, indices)) or not indices:
        raise SelectionError("indices takes one or more whole numbers.", got=repr(indices))
    return tuple(indices)


# ---- what to know, and what cannot be ------------------------------------------------------------------------------


def _impossible(index: _Index, matches: Sequence[Match]) -> Iterator[str]:
    """Sites that cannot be replaced whatever the others are."""
    for match in matches:
        if isinstance(match.module, (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)):
            items = [f"{match.path}.{name}" for name in match.module._modules]
            yield f'"{match.path}" is a {match.class_name} without a forward; name its items ({_quoted(items)})'
        for parent in index.parents.get(id(match.module), []):
            if isinstance(parent, nn.MultiheadAttention):
                yield (
                    f'"{match.path}" is read by its MultiheadAttention through its weight and never called; '
                    "replace the whole attention"
                )
        if getattr(type(match.module), "__crossfade_blend__", False):
            yield f'"{match.path}" is already being replaced; finalize or revert first'


def _clashes(matches: Sequence[Match]) -> Iterator[str]:
    """Pairs of sites of which one holds the other."""
    owner: dict[int, Match] = {}
    for match in matches:
        for module in match.modules:
            if (other := owner.setdefault(id(module), match)) is not match:
                yield f'"{other.path}" and "{match.path}" share a module'
    for match in matches:
        for top in match.modules:
            for module in top.modules():
                inner = owner.get(id(module))
                if module is not top and inner is not None and inner is not match:
                    yield f'"{match.path}" contains "{inner.path}"'


def _shared(index: _Index, matches: Sequence[Match]) -> Iterator[str]:
    for match in matches:
        if len(match.paths) > 1:
            yield f'"{match.path}" stands at {len(match.paths)} paths; all of them are replaced'


def _tied(index: _Index, matches: Sequence[Match]) -> Iterator[str]:
    """Parameters of a site that also stand outside all sites: replacing the site severs the tie."""
    inside = {id(module) for match in matches for top in match.modules for module in top.modules()}
    outside: dict[int, str] = {}
    for path, module in index.modules.items():
        if id(module) not in inside:
            for name, parameter in module.named_parameters(recurse=False):
                outside.setdefault(id(parameter), f"{path}.{name}".lstrip("."))
    for match in matches:
        for offset, top in enumerate(match.modules):
            base = match.path if match.run is None else f"{match.run.container}.{match.run.start + offset}"
            for name, parameter in top.named_parameters():
                if id(parameter) in outside:
                    yield f'"{base}.{name}" is tied to "{outside[id(parameter)]}"; the student will not be'


# ---- words ---------------------------------------------------------------------------------------------------------


def _count(modules: Iterable[nn.Module]) -> int:
    """Elements of the modules' parameters, each tensor counted once."""
    own = {id(p): p for module in modules for p in module.parameters()}
    return sum(0 if isinstance(p, UninitializedParameter) else p.numel() for p in own.values())


def _places(match: Match) -> str:
    more = len(match.paths) - 1
    return match.path + (f" (also at {match.paths[1]}{f' and {more - 1} more' if more > 1 else ''})" if more else "")


def _plural(n: int, word: str, ending: str = "s") -> str:
    return f"{n} {word}{'' if n == 1 else ending}"


def _quoted(paths: Iterable[str]) -> str:
    names = list(paths)
    return ", ".join(f'"{name}"' for name in names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _describe(target: object) -> str:
    if isinstance(target, str):
        return f'pattern "{target}"'
    if isinstance(target, re.Pattern):
        return f"regex {target.pattern!r}"
    if isinstance(target, type):
        return f"class {target.__name__}"
    return (
        repr(target)
        if isinstance(target, (Run, Targets, tuple))
        else f"predicate {getattr(target, '__name__', target)!r}"
    )


def _root_error() -> SelectionError:
    return SelectionError(
        "the model itself cannot be a site: it has no parent in which to replace it.",
        do="wrap it (nn.ModuleDict or a module of yours that holds it), or name its children",
    )
