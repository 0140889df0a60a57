"""Which modules to replace: list, count, narrow and explain them before anything is touched.

A *site* is one place of replacement: a module, under every path at which it stands, or a contiguous run of modules
of one container. Nothing here changes a model, and nothing here looks inside an installed blend.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import accumulate, groupby
from typing import TypeAlias, overload

from torch import nn
from torch.nn.parameter import UninitializedParameter

from .errors import SelectionError
from .globs import Run, compile_glob, is_int, nearest, split_run

__all__ = ["Match", "Run", "Selection", "Target", "Targets", "parent_of", "resolve", "select"]

_SEE_ALL = "see every path with print(crossfade.select(model))"
_SHOWN = 6  # notes and conflicts that a table prints before it only counts them


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
        for name, role in (("match", "target"), ("exclude", "exclude")):
            if name == "match" or self.exclude is not None:
                object.__setattr__(self, name, _valid(getattr(self, name), role))
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
        container, start, stop = split_run(self.path) or ("", None, None)
        return None if start is None or stop is None else Run(container, start, stop)

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
        index  path     class   parameters   share
            0  0        Linear          20   66.7%
            1  2        Linear          10   33.3%
        total  2 sites                  30  100.0%
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
            raise SelectionError(f"indices are out of range for {n} matches.", expected=f"{-n} to {n - 1}", got=outside)
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
        return tuple(dict.fromkeys([*_impossible(_Index(self.model), self.matches), *_clashes(self.matches)]))

    def notes(self) -> tuple[str, ...]:
        """What is worth knowing but allowed: shared, repeated and tied modules, one sentence each."""
        return tuple(dict.fromkeys(_worth_knowing(_Index(self.model), self.matches)))

    def check(self) -> None:
        """Raises `SelectionError` when the selection is empty or has conflicts."""
        if not self.matches:
            raise SelectionError("the selection is empty.", expected="at least one site", do=_SEE_ALL)
        if problems := self.conflicts():
            raise SelectionError(
                f"{_plural(len(self), 'selected site')} cannot all be replaced.",
                got="\n    ".join(_shorten(problems)),
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
            lines += [f"{kind}: {sentence}" for sentence in _shorten(sentences)]
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
        if split_run(path):
            hint = "take its container from match.run, or match.modules"
            raise SelectionError(f'"{path}" is a run, not one module.', do=hint)
        raise _Index(model).missing(path)
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
        self.named = list(_walk(model))  # every (path, module) but the model itself
        self.modules: dict[str, nn.Module] = {"": model}  # path -> the first module that has it
        self.places: dict[int, list[str]] = {id(model): [""]}  # id of a module -> all its paths, the first one first
        for path, module in self.named:
            self.modules.setdefault(path, module)
            self.places.setdefault(id(module), []).append(path)
        self.rank = {key: i for i, key in enumerate(self.places)}
        self.total = _count([model])
        self.size = f"0 of {_plural(len(self.places) - 1, 'module')}"

    def select(self, targets: Targets) -> Selection:
        found = Selection(self.model, tuple(self.find(targets.match, "target")))
        found = found if targets.exclude is None else found.exclude(targets.exclude)
        found = found if targets.indices is None else found.at(targets.indices)
        found = found if targets.every is None else found.every(targets.every)
        found = found if targets.first is None else found.first(targets.first)
        return found if targets.last is None else found.last(targets.last)

    def find(self, target: Target, role: str) -> list[Match]:
        """All matches of a valid target, each once, in order; raises when there is none."""
        if isinstance(target, Targets):
            return list(self.select(target))
        if isinstance(target, Run):
            found = [self.run(self.module(target.container), target.start, target.stop)]
        elif isinstance(target, tuple):
            found = [self.entry(name, role) for name in target]
        elif isinstance(target, str) and (run := split_run(target)):
            path, start, stop = run
            containers = self.hits(path) if path else [self.model]
            found = [self.run(container, start, stop) for container in containers or [self.module(path)]]
        else:
            found = [self.match(self.places[id(module)], (module,)) for module in self.hits(target)]
        if not found:
            raise self.nothing(target, role)
        order = {(self.rank[id(match.module)], len(match.modules), match.path): match for match in found}
        return [order[key] for key in sorted(order)]

    def hits(self, target: Target) -> list[nn.Module]:
        test = _predicate(target)
        return list({id(module): module for path, module in self.named if test(path, module)}.values())

    def entry(self, name: str, role: str) -> Match:
        """What stands under an exact name."""
        if run := split_run(name):
            return self.run(self.module(run[0]), *run[1:])
        if name == "":
            raise _root_error()
        if name not in self.modules:
            raise self.nothing(name, role, exact=True)
        module = self.modules[name]
        return self.match(self.places[id(module)], (module,))

    def match(self, paths: Iterable[str], modules: tuple[nn.Module, ...]) -> Match:
        paths, parameters = tuple(paths), _count(modules)
        return Match(paths[0], paths, modules[0], modules, parameters, parameters / max(self.total, 1))

    def run(self, container: nn.Module, start: int | None, stop: int | None) -> Match:
        """The run of a container, at every path of the container."""
        paths, names = self.places[id(container)], list(container._modules)
        where, length = paths[0] or "the model itself", len(names)
        if not isinstance(container, (nn.ModuleList, nn.Sequential)):
            kind = type(container).__name__
            raise SelectionError("a run is cut from a ModuleList or a Sequential.", where=where, got=kind)
        if names != [str(i) for i in range(length)]:
            raise SelectionError("a run needs items that are numbered from 0.", where=where, got=_quoted(names))
        first, end = (0 if start is None else start), (length if stop is None else stop)
        first, end = (i + length if i < 0 else i for i in (first, end))
        if not 0 <= first < end <= length:
            raise SelectionError(
                "the run does not lie in its container.",
                where=where,
                expected=f"0 <= start < stop <= {length}",
                got=f"[{'' if start is None else start}:{'' if stop is None else stop}]",
            )
        items = tuple(container._modules[str(i)] for i in range(first, end))
        return self.match([str(Run(path, first, end)) for path in paths], items)

    def module(self, path: str) -> nn.Module:
        if path not in self.modules:
            raise self.missing(path)
        return self.modules[path]

    def missing(self, path: str) -> SelectionError:
        return SelectionError(f'no module stands at "{path}".', got=self.size, do=self.near(path))

    def nothing(self, target: Target, role: str, *, exact: bool = False) -> SelectionError:
        """The error for a target without a match."""
        if isinstance(target, type) and isinstance(self.model, target):
            return _root_error()
        if isinstance(target, type):
            kinds = nearest(target.__name__, (type(module).__name__ for _, module in self.named))
            hint = f"nearest classes: {kinds or 'none'}"
        elif exact and isinstance(target, str) and re.search(r"[*?\[{]", target):
            hint = "a sequence holds exact paths; give a pattern as a string by itself"
        elif isinstance(target, (str, re.Pattern)):
            hint = self.near(target if isinstance(target, str) else target.pattern.replace("\\", ""))
        else:
            hint = "look at the paths"
        what = f'path "{target}"' if exact else _describe(target)
        return SelectionError(f"the {role} {what} matched {self.size}.", do=f"{hint}; {_SEE_ALL}")

    def near(self, path: str) -> str:
        names = nearest(path, (name for name, _ in self.named))
        return f"nearest paths: {names}" if names else "the model has no modules"


def _walk(module: nn.Module, above: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Every (path, module) below, also repeated ones; installed blends are not entered."""
    if not _is_blend(module):
        for name, child in module._modules.items():
            if child is not None:
                yield above + name, child
                yield from _walk(child, f"{above}{name}.")


def _is_blend(module: nn.Module) -> bool:
    return getattr(type(module), "__crossfade_blend__", False)


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


def _valid(target: object, role: str) -> Target:
    """The target, a list of names as a tuple.

    Raises:
        SelectionError: It is none of the kinds that `select` knows.
    """
    if isinstance(target, str):
        run = split_run(target)
        if not target:
            raise _root_error()
        if glob := run[0] if run else target:
            compile_glob(glob)
        return target
    if isinstance(target, (re.Pattern, Run, Targets)) or (isinstance(target, type) and issubclass(target, nn.Module)):
        return target
    if isinstance(target, Sequence) and target and all(isinstance(name, str) for name in target):
        return tuple(target)
    if callable(target) and not isinstance(target, (nn.Module, type)):
        return target
    raise SelectionError(
        f"this is no {role}.",
        expected="a glob, a list of one or more paths, a compiled regex, a module class, a predicate, a Run or Targets",
        got=repr(target) if not isinstance(target, nn.Module) else type(target).__name__,
    )


def _valid_count(way: str, n: int) -> int:
    if not is_int(n) or n < 1:
        raise SelectionError(f"{way} takes a whole number from 1.", got=repr(n))
    return n


def _valid_indices(indices: object) -> tuple[int, ...]:
    if not isinstance(indices, Sequence) or not indices or not all(map(is_int, indices)):
        raise SelectionError("indices takes one or more whole numbers.", got=repr(indices))
    return tuple(indices)


# ---- what to know, and what cannot be ------------------------------------------------------------------------------


def _impossible(index: _Index, matches: Sequence[Match]) -> Iterator[str]:
    """Sites that cannot be replaced whatever the others are."""
    stock = nn.MultiheadAttention.forward  # the quantizable subclass has its own, which calls the children
    attentions = (m for _, m in [("", index.model), *index.named] if getattr(type(m), "forward", None) is stock)
    read = {id(child) for attention in attentions for child in attention.children()}
    for match in matches:
        for path, module in _parts(match, match.paths):
            found = _locate(index.model, path)
            if found is None or found[0]._modules[found[1]] is not module:
                yield f'"{path}" leads to another module: the model has changed, or a dot in a name makes two paths one'
        for module in match.modules:
            if not ("forward" in vars(module) or getattr(type(module), "forward", None) is not nn.Module.forward):
                items = _quoted(f"{match.path}.{name}" for name in module._modules)
                yield f'"{match.path}" is a {match.class_name} without a forward; name its items ({items or "none"})'
            if id(module) in read:
                yield f'"{match.path}" is read by its MultiheadAttention and never called; replace the whole attention'
            if _is_blend(module):
                yield f'"{match.path}" is already being replaced; finalize or revert first'
            places = index.places.get(id(module), [])
            if match.run is not None and len(places) > len(match.paths):
                yield f'"{match.path}" has a module at more places ({_quoted(places)}); a run would replace only one'


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


def _worth_knowing(index: _Index, matches: Sequence[Match]) -> Iterator[str]:
    """Sites at several paths, and their parameters that also stand outside all sites: replacing severs the tie."""
    for match in matches:
        if len(match.paths) > 1:
            yield f'"{match.path}" stands at {len(match.paths)} paths; all of them are replaced'
    inside = {path for match in matches for path, _ in _parts(match, match.paths)}
    outside: dict[int, str] = {}
    for path, module in index.modules.items():
        if inside.isdisjoint(accumulate(path.split("."), "{}.{}".format)):
            for name, parameter in module.named_parameters(recurse=False):
                outside.setdefault(id(parameter), f"{path}.{name}".lstrip("."))
    for match in matches:
        for path, top in _parts(match, match.paths[:1]):
            for name, parameter in top.named_parameters():
                if id(parameter) in outside:
                    yield f'"{path}.{name}" is tied to "{outside[id(parameter)]}"; the student will not be'


def _parts(match: Match, paths: Sequence[str]) -> Iterator[tuple[str, nn.Module]]:
    """Path and module of everything in a site: itself, or the modules of its run."""
    for path in paths:
        run = split_run(path)
        for i, module in enumerate(match.modules, run[1] or 0 if run else 0):
            yield (f"{run[0]}.{i}".lstrip(".") if run else path), module


# ---- words ---------------------------------------------------------------------------------------------------------


def _count(modules: Iterable[nn.Module]) -> int:
    """Elements of the modules' parameters, each tensor counted once."""
    own = {id(p): p for module in modules for p in module.parameters()}
    return sum(0 if isinstance(p, UninitializedParameter) else p.numel() for p in own.values())


def _shorten(sentences: Sequence[str]) -> list[str]:
    more = len(sentences) - _SHOWN
    return [*sentences[:_SHOWN], *([f"... and {more} more"] if more > 0 else [])]


def _places(match: Match) -> str:
    more = len(match.paths) - 1
    return match.path + (f" (also at {match.paths[1]}{f' and {more - 1} more' if more > 1 else ''})" if more else "")


def _plural(n: int, word: str, ending: str = "s") -> str:
    return f"{n} {word}{'' if n == 1 else ending}"


def _quoted(paths: Iterable[str]) -> str:
    names = list(paths)
    return ", ".join(f'"{name}"' for name in names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _describe(target: Target) -> str:
    if isinstance(target, str):
        return f'pattern "{target}"'
    if isinstance(target, re.Pattern):
        return f"regex {target.pattern!r}"
    if isinstance(target, type):
        return f"class {target.__name__}"
    return f"predicate {getattr(target, '__name__', target)!r}" if callable(target) else repr(target)


def _root_error() -> SelectionError:
    return SelectionError(
        "the model itself cannot be a site: it has no parent in which to replace it.",
        do='wrap it, as in nn.Sequential(model), and name "0"; or name its children',
    )
