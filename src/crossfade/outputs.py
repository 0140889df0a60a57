"""Mix, compare and copy what modules return and take: tensors inside tuples, lists, dicts and dataclasses.

Only the *main* tensor of an output is blended; whatever else the teacher returns (attention weights, caches) is passed
on as it is, so that the caller finds the structure that it always got.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .errors import OutputError, StateError

__all__ = [
    "Where",
    "cast_main",
    "conform",
    "describe",
    "detach",
    "feed",
    "find_main",
    "main",
    "main_input",
    "map_tensors",
    "mask_argument",
    "mix",
    "once",
    "pack",
    "padding_mask",
    "refuse_caches",
    "same_structure",
    "select_exact",
    "set_main",
    "set_main_input",
    "skeleton",
    "tensors",
    "unpack",
    "valid_positions",
]

Where = int | str | None
"""Place of the main tensor: None (the output is the tensor), an index, or a key / field name."""

_ADDITIVE_LIMIT = -9999.0  # Libraries write -1e4, -1e9, the dtype's minimum or -inf for "not attended".
_MAIN_KEYS = ("last_hidden_state", "hidden_states", "sample", "logits")


def find_main(output: Any, declared: Where | str = "auto", site: str = "") -> Where:
    """The place of the main tensor in `output`.

    Args:
        output: What a module returned.
        declared: `"auto"`, or the index or key that the user names.
        site: Module path, for the message.

    Raises:
        OutputError: Nothing there is a floating-point tensor, or the choice is not clear.

    Example:
        >>> find_main((torch.zeros(2), None)), find_main(torch.zeros(2)), find_main({"logits": torch.zeros(2)})
        (0, None, 'logits')
    """
    if declared != "auto":
        return declared
    if isinstance(output, Tensor):
        return None
    if isinstance(output, (tuple, list)) and output and isinstance(output[0], Tensor):
        return 0
    fields = _fields(output)
    if fields is not None:
        held = [key for key, value in fields.items() if isinstance(value, Tensor)]
        for key in _MAIN_KEYS:
            if key in held:
                return key
        if len(held) == 1:
            return held[0]
    raise OutputError(
        "cannot tell which tensor of this output is to be blended.",
        where=site or None,
        expected="a tensor, a tuple or list that begins with one, or a mapping with one clear main tensor",
        got=describe(output),
        do="name it in the swap: output=INDEX or output=KEY",
    )


def _normal(output: Any, where: Where) -> Where:
    """One name for each place: a positive index in a tuple or list, a key elsewhere."""
    if isinstance(output, (tuple, list)):
        if isinstance(where, str) and where in getattr(output, "_fields", ()):
            return int(output._fields.index(where))  # type: ignore[union-attr]  # a named tuple
        return where + len(output) if isinstance(where, int) and where < 0 else where
    fields = _fields(output)
    if isinstance(where, int) and fields is not None and type(output) is not dict:
        keys = [key for key, value in fields.items() if value is not None]
        return keys[where] if -len(keys) <= where < len(keys) else where
    return where


def main(output: Any, where: Where, site: str = "") -> Tensor:
    """The main tensor at `where`.

    Raises:
        OutputError: There is no tensor at that place, or a single number.
    """
    where = _normal(output, where)
    try:
        source: Any = (_fields(output) or {}) if isinstance(where, str) else output
        value = output if where is None else source[where]
    except (KeyError, IndexError, TypeError):
        value = None
    if not isinstance(value, Tensor):
        place = "the output itself" if where is None else f"entry {where!r}"
        raise OutputError("there is no tensor to blend.", where=site or None, expected=place, got=describe(output))
    if value.dim() == 0:
        raise OutputError(
            "this site returns a single number, which has no channels to compare.",
            where=site or None,
            expected="a tensor [..., D]",
            do="replace the modules inside it",
        )
    return value


def set_main(output: Any, where: Where, tensor: Tensor | None) -> Any:
    """`output` with another main tensor. Containers are rebuilt, never written to."""
    where = _normal(output, where)
    if where is None:
        return tensor
    if isinstance(output, tuple):
        items: list[Any] = [tensor if i == where else item for i, item in enumerate(output)]
        return type(output)(*items) if hasattr(output, "_fields") else tuple(items)
    if isinstance(output, list):
        return [tensor if i == where else item for i, item in enumerate(output)]
    result = copy.copy(output)
    if isinstance(result, MutableMapping):
        result.__setitem__(where, tensor)
    else:
        object.__setattr__(result, str(where), tensor)
    return result


def skeleton(output: Any) -> Any:
    """`output` with every tensor gone: the structure that a caller expects, without holding memory.

    Containers keep their kind; everything but None, numbers and strings inside becomes None.
    """
    if isinstance(output, tuple):
        items = [_plain(item) for item in output]
        return type(output)(*items) if hasattr(output, "_fields") else tuple(items)
    if isinstance(output, list):
        return [_plain(item) for item in output]
    if type(output) is dict:
        return {key: _plain(item) for key, item in output.items()}
    fields = _fields(output)
    if fields is None:
        return None
    result = copy.copy(output)
    for key, item in fields.items():
        if isinstance(result, MutableMapping):
            result.__setitem__(key, _plain(item))
        else:
            object.__setattr__(result, key, _plain(item))
    return result


def pack(skeleton: Any) -> Any:
    """A skeleton as plain data: `{"tuple": [...]}`, `{"list": [...]}`, `{"dict": {...}}` or a scalar.

    Raises:
        OutputError: It holds a class of its own (a dataclass).
    """
    if skeleton is None or isinstance(skeleton, (bool, int, float, str)):
        return skeleton
    if type(skeleton) in (tuple, list):
        return {type(skeleton).__name__: [pack(item) for item in skeleton]}
    if type(skeleton) is dict:
        return {"dict": {str(key): pack(item) for key, item in skeleton.items()}}
    raise OutputError("this output structure cannot be written to a file.", got=type(skeleton).__name__)


def unpack(data: Any) -> Any:
    """The inverse of `pack`."""
    if not isinstance(data, Mapping):
        return data
    ((kind, items),) = data.items()
    if kind == "dict":
        return {key: unpack(item) for key, item in items.items()}
    return (tuple if kind == "tuple" else list)(unpack(item) for item in items)


def cast_main(output: Any, where: Where, dtype: torch.dtype | None) -> Any:
    """`output` with its main tensor in another dtype; None changes nothing."""
    if dtype is None:
        return output
    if isinstance(output, Tensor):
        return output.to(dtype)
    return set_main(output, where, main(output, where).to(dtype))


def conform(output: Any, where: Where, structure: Any) -> Any:
    """A student's `output` in the teacher's `structure` (a `skeleton`): only a bare tensor needs help.

    The extras of the structure are None then: the student has none to give.
    """
    if where is None or not isinstance(output, Tensor):
        return output
    return set_main(structure, where, output)


def same_structure(student: Any, teacher: Any) -> bool:
    """Whether the student may answer for the teacher: the same container, or a bare tensor."""
    if isinstance(student, Tensor):
        return True
    if isinstance(teacher, (tuple, list)):
        return isinstance(student, type(teacher)) and len(student) == len(teacher)
    return type(student) is type(teacher)


def mix(teacher: Tensor, student: Tensor, weight: Tensor) -> Tensor:
    """`weight * teacher + (1 - weight) * student` with a 0-dim float32 weight strictly inside (0, 1).

    The two-product form is exact at both ends, `s + w (t - s)` is not; `torch.lerp` is exact too and reads each
    operand once. In half precision the products are formed in float32 and rounded once each, and the output keeps the
    teacher's dtype (a 0-dim weight does not promote).

    Shapes: teacher, student [...] -> [...].
    """
    if student.dtype != teacher.dtype:
        student = student.to(teacher.dtype)
    if teacher.dtype == weight.dtype:
        return torch.lerp(student, teacher, weight)
    return weight * teacher + (1.0 - weight) * student


def select_exact(teacher: Tensor, student: Tensor, weight: Tensor) -> Tensor:
    """The teacher's output where `weight` is 1, the student's where it is 0.

    Unlike a product with 0 this keeps a NaN of the other branch out of the output.
    """
    return torch.where(weight > 0.5, teacher, student.to(teacher.dtype))


def feed(model: Callable[..., Any], batch: Any) -> Any:
    """Call `model` on a batch: keywords from a mapping, positions from a tuple or list, else one argument.

    A batch may also be a function of the model, for calls that need more.

    Raises:
        OutputError: The model's forward does not take such a call (labels in the batch are the usual cause).
    """
    if callable(batch) and not isinstance(batch, Tensor):
        return batch(model)
    kwargs = batch if isinstance(batch, Mapping) else {}
    args = () if isinstance(batch, Mapping) else tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)
    try:
        inspect.signature(getattr(model, "forward", model)).bind(*args, **kwargs)
    except TypeError as error:
        raise OutputError(
            f"the model cannot be called with this batch: {error}.",
            expected="a mapping of keywords, a tuple or list of positional arguments, or the one argument",
            got=describe(batch),
            do="leave labels out: a function of the model as batch, lambda m: m(x), or forward= where it is offered",
        ) from None
    return model(*args, **kwargs)


def tensors(value: Any) -> Iterator[Tensor]:
    """Every tensor in nested tuples, lists, mappings and dataclasses, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors(item)
    else:
        for item in (_fields(value) or {}).values():
            yield from tensors(item)


def map_tensors(value: Any, fn: Callable[[Tensor], Any]) -> Any:
    """`value` rebuilt with `fn` of every tensor. Objects that are no containers are passed on as they are."""
    if isinstance(value, Tensor):
        return fn(value)
    if isinstance(value, tuple):
        items = [map_tensors(item, fn) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, list):
        return [map_tensors(item, fn) for item in value]
    if type(value) is dict:
        return {key: map_tensors(item, fn) for key, item in value.items()}
    fields = _fields(value)
    if fields is None:
        return value
    result = copy.copy(value)
    for key, item in fields.items():
        if isinstance(result, MutableMapping):
            result.__setitem__(key, map_tensors(item, fn))
        else:
            object.__setattr__(result, key, map_tensors(item, fn))
    return result


def detach(value: Any) -> Any:
    """`value` with its tensors cut from the graph."""
    return map_tensors(value, once(Tensor.detach))


def once(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """`fn` that gives one result for one tensor, so that `attn(x, x, x)` still gets one tensor three times."""
    seen: dict[int, tuple[Tensor, Tensor]] = {}

    def remembered(tensor: Tensor) -> Tensor:
        if id(tensor) not in seen:
            seen[id(tensor)] = (tensor, fn(tensor))
        return seen[id(tensor)][1]

    return remembered


def refuse_caches(value: Any, site: str) -> None:
    """A key/value cache has one owner; while both modules run, both would append to it.

    Found by type, not by argument name (libraries rename it): a class called `Cache` anywhere above it.

    Raises:
        StateError: There is one in the call.
    """
    if isinstance(value, (tuple, list)):
        for item in value:
            refuse_caches(item, site)
    elif isinstance(value, dict):
        refuse_caches(tuple(value.values()), site)
    elif not isinstance(value, (Tensor, bool, int, float, str)) and any(
        base.__name__ == "Cache" for base in type(value).__mro__
    ):
        raise StateError(
            "a key/value cache reached a site where teacher and student both run: both would write to it.",
            where=site,
            got=type(value).__name__,
            do='model.config.use_cache = False while fading; generate under fade.view("student") or "teacher"',
        )


def padding_mask(kwargs: Mapping[str, Any], like: Tensor) -> Tensor | None:
    """The padding mask in a site's own call, for models whose forward shows none. Shapes: like [B, L, D] -> [B, L].

    Read are `key_padding_mask` / `src_key_padding_mask` (torch: True = padding) and `attention_mask` as 2-D (1 = a real
    token), 4-D bool (True = attend) or 4-D additive: a key that no query may see is padding.
    """
    for name in ("key_padding_mask", "src_key_padding_mask"):
        mask = kwargs.get(name)
        if isinstance(mask, Tensor) and mask.shape == like.shape[:2]:
            return ~mask if mask.dtype == torch.bool else mask == 0
    mask = kwargs.get("attention_mask")
    if not isinstance(mask, Tensor) or like.dim() < 3 or not 2 <= mask.dim() <= 4:
        return None
    allowed = _attended(mask)
    fits = allowed.shape[-1] == like.shape[1] and allowed.shape[0] in (1, like.shape[0])
    return allowed.expand(like.shape[:2]) if fits else None


def _attended(mask: Tensor) -> Tensor:
    """Which keys any query may see. Shapes: mask [B, L], [B, Q, L] or [B, H, Q, L] -> [B, L] bool.

    Additive masks hold 0 where a key is attended and large negative numbers where it is not: floating ones with a row
    per query, and those of two dimensions that hold a negative number.
    """
    if mask.is_floating_point() and mask.dim() > 2:
        allowed = mask > _ADDITIVE_LIMIT
    elif mask.is_floating_point():
        allowed = torch.where((mask < 0).any(), mask > _ADDITIVE_LIMIT, mask != 0)
    else:
        allowed = mask != 0
    for _ in range(mask.dim() - 2):
        allowed = allowed.any(dim=1)
    return allowed


def mask_argument(names: Sequence[str], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    """The padding mask among the arguments of a model's forward. Returns [B, L], 1 = a real token, or None.

    `attention_mask` may be 0/1, bool or additive, with two to four dimensions: a key that no query may see is padding.

    Args:
        names: Parameter names of the forward, in order.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
    """
    given = dict(zip(names, args, strict=False)) | dict(kwargs)
    mask = given.get("attention_mask")
    if isinstance(mask, Tensor) and 2 <= mask.dim() <= 4:
        return mask if mask.dim() == 2 and not mask.is_floating_point() else _attended(mask)
    mask = given.get("src_key_padding_mask")  # torch.nn: True = padding.
    if isinstance(mask, Tensor) and mask.dim() == 2 and mask.dtype == torch.bool:
        return ~mask
    return None


def argument_names(module: nn.Module) -> tuple[str, ...]:
    """The arguments of a module's `forward`, in the order in which it declares them."""
    try:
        return tuple(inspect.signature(module.forward).parameters)
    except (TypeError, ValueError):  # Compiled code may have none.
        return ()


def main_input(args: tuple[Any, ...], kwargs: Mapping[str, Any], site: str = "", names: Sequence[str] = ()) -> Tensor:
    """The tensor that a module transforms: `hidden_states=`, else the first floating tensor of the call.

    Args:
        args: Positions of the call.
        kwargs: Keywords of the call.
        site: Module path, for the message.
        names: The module's `argument_names`: first is what the module declares first, in whatever order it came.

    Raises:
        OutputError: The call holds no floating-point tensor.
    """
    declared = [kwargs[name] for name in ("hidden_states", *names) if name in kwargs]
    before = declared[:1] if "hidden_states" in kwargs else []
    for value in (*before, *args, *declared, *kwargs.values()):
        if isinstance(value, Tensor) and value.is_floating_point():
            return value
    raise OutputError(
        "the site needs a floating-point tensor in its call.", where=site or None, got=describe((args, dict(kwargs)))
    )


def set_main_input(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], tensor: Tensor, names: Sequence[str] = ()
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same call with another tensor to transform (see `main_input`)."""
    old = main_input(args, kwargs, names=names)
    done = False

    def swap(value: Any) -> Any:
        nonlocal done
        if value is old and not done:
            done = True
            return tensor
        return value

    named = kwargs.get("hidden_states") is old
    changed = {key: tensor if named and key == "hidden_states" else value for key, value in kwargs.items()}
    if named:
        return args, changed
    return tuple(swap(value) for value in args), {key: swap(value) for key, value in changed.items()}


def valid_positions(mask: Tensor | None, like: Tensor, site: str = "") -> Tensor | None:
    """The padding mask of a main tensor as bool, True = a real token.

    Shapes: mask [B, L] (0/1, bool, additive) or [1, L] with like [B, L, D] -> [B, L]; None -> None (all count).

    Raises:
        OutputError: The mask does not fit the tensor's leading dimensions.
    """
    if mask is None:
        return None
    if mask.dim() == 2 < like.dim() and mask.shape[0] == 1:
        mask = mask.expand(like.shape[0], -1)
    if not 1 <= mask.dim() < like.dim() or mask.shape != like.shape[: mask.dim()]:
        raise OutputError(
            "the padding mask does not fit this site's output.",
            where=site or None,
            expected=f"a mask of shape {list(like.shape[:-1])} (1 = a real token)",
            got=f"{list(mask.shape)} for an output of shape {list(like.shape)}",
            do="give the right one with fade.mask(mask), or count every position: guidance with mask=False",
        )
    if mask.is_floating_point():  # With a negative number it is additive.
        return torch.where((mask < 0).any(), mask > _ADDITIVE_LIMIT, mask != 0)
    return mask if mask.dtype == torch.bool else mask != 0


def describe(value: Any) -> str:
    """A short account of a nested value: kinds, shapes and dtypes."""
    if isinstance(value, Tensor):
        return f"Tensor{list(value.shape)}:{str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, (tuple, list)):
        return f"{type(value).__name__}({', '.join(describe(item) for item in value)})"
    fields = _fields(value)
    if fields is not None:
        return f"{type(value).__name__}({', '.join(f'{key}={describe(item)}' for key, item in fields.items())})"
    return repr(value) if value is None or isinstance(value, (bool, int, float, str)) else type(value).__name__


def _fields(value: Any) -> dict[str, Any] | None:
    """The named entries of a mapping, a named tuple or a dataclass instance; None for anything else."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return dict(zip(value._fields, value, strict=True))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    return None


def _plain(value: Any) -> Any:
    return value if isinstance(value, (bool, int, float, str)) else None
