"""Runs of modules as one site: k modules of a container are replaced by one.

While fading, the first place holds the blend, whose teacher is the chain of the k modules, and the other k - 1 places
pass their input through, so that the parent's loop over the container stays as it is. `finalize` then shortens the
container and puts its counters right.
"""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from . import outputs
from .blend import Blend
from .changes import Changes
from .targets import Run, resolve

__all__ = ["Chain", "PassThrough", "shorten"]

_COUNTERS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "depth", "encoder_layers", "decoder_layers")
_INDICES = ("layer_idx", "layer_index", "layer_id", "layer_number")


class Chain(nn.Module):
    """The modules of a run as one: each gets the call of the first, with the previous output as its input.

    Shapes: as the first module's input -> as the last module's output.
    """

    is_chain = True

    def __init__(self, modules: tuple[nn.Module, ...]) -> None:
        super().__init__()
        for index, module in enumerate(modules):
            self.add_module(str(index), module)
        self.training = modules[0].training

    @property
    def first_of_chain(self) -> nn.Module:
        """The module whose call the chain takes."""
        return next(self.children())

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run them in order."""
        out: Any = None
        names = outputs.argument_names(self.first_of_chain)
        for index, module in enumerate(self.children()):
            if index > 0:
                tensor = outputs.main(out, outputs.find_main(out))
                args, kwargs = outputs.set_main_input(args, kwargs, tensor, names)
            out = module(*args, **kwargs)
        return out

    def __getattr__(self, name: str) -> Any:
        """Attributes that code outside reads are those of the first module."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            first = self.__dict__.get("_modules", {}).get("0")
            if first is None or name.startswith("_") or not hasattr(first, name):
                raise
        return getattr(first, name)


class PassThrough(nn.Module):
    """Returns its input in the structure of the blocks around it; stands where a run's other modules stood.

    Args:
        blend: The blend of the run, which knows the structure.
        module: The module that stood here; plain checkpoints are loaded into it, and `revert` puts it back.
    """

    def __init__(self, blend: Blend, module: nn.Module) -> None:
        super().__init__()
        # In a tuple: neither is a submodule of this place. The module goes when the teacher is released.
        self.held: tuple[Blend, nn.Module | None] = (blend, module)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Shapes: [..., D] -> the same, in the blocks' structure."""
        blend = self.held[0]
        hidden = blend.input_of(args, kwargs)
        place = blend.main_place
        return hidden if place == "auto" else outputs.conform(hidden, place, blend.teacher_structure)

    def __getattr__(self, name: str) -> Any:
        """Attributes that code outside reads are those of the module that stood here."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            held = self.__dict__.get("held")
            source = None if held is None else held[1] or held[0].student
            if source is None or name.startswith("_") or not hasattr(source, name):
                raise
        return getattr(source, name)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Take the keys of a plain checkpoint for the module that stood here."""
        module = self.held[1]
        if module is None:
            return super()._load_from_state_dict(state_dict, prefix, *rest)
        own = {key: state_dict.pop(prefix + key) for key in module.state_dict() if prefix + key in state_dict}
        if own:
            module.load_state_dict(own)
        return super()._load_from_state_dict(state_dict, prefix, *rest)


def shorten(changes: Changes, model: nn.Module, run: Run, student: nn.Module) -> None:
    """Cut the modules of `run` down to `student`, and put counters and layer indices right.

    Counters are integer attributes of the modules above (and of their `config`) with a usual name (`num_layers`,
    `num_hidden_layers`, `depth`, ...) that equal the old length; `config.layer_types` is cut likewise. A configuration
    is copied first: other models may hold the same object.
    """
    container = resolve(model, run.container) if run.container else model
    old = list(container._modules.values())
    kept = [(i, student if i == run.start else m) for i, m in enumerate(old) if not run.start < i < run.stop]
    changes.children(container, [m for _, m in kept])
    above = [m for path, m in model.named_modules() if not path or run.container.startswith(path + ".")]
    _own_configs(changes, model, [m for m in (*above, container) if _counts(getattr(m, "config", None), len(old))])
    for holder in (*above, container):
        for owner in (holder, getattr(holder, "config", None)):
            _count(changes, owner, len(old), len(kept), run)
    for new_index, (old_index, block) in enumerate(kept):
        for module in block.modules() if block is not None else ():
            for name in _INDICES:
                if module.__dict__.get(name) == old_index != new_index:
                    changes.set(module, name, new_index)


def _own_configs(changes: Changes, model: nn.Module, holders: list[nn.Module]) -> None:
    """Give the model copies of the configurations of `holders`, and of those that hold them, at every place."""
    copies = {id(h.config): copy.copy(h.config) for h in holders}
    everywhere = [m for m in model.modules() if m.__dict__.get("config") is not None]
    for module in everywhere:  # A configuration of parts holds the part's: it has to hold the copy.
        config = module.config
        held = {name: value for name, value in getattr(config, "__dict__", {}).items() if id(value) in copies}
        if held:
            outer = copies.setdefault(id(config), copy.copy(config))
            for name, value in held.items():
                setattr(outer, name, copies[id(value)])
    for module in everywhere:
        if id(module.config) in copies:
            changes.set(module, "config", copies[id(module.config)])


def _counts(owner: object, old: int) -> bool:
    """Whether `_count` would change something."""
    own = getattr(owner, "__dict__", {})
    kinds = own.get("layer_types")
    return any(type(own.get(name)) is int and own[name] == old for name in _COUNTERS) or (
        isinstance(kinds, list) and len(kinds) == old
    )


def _count(changes: Changes, owner: object, old: int, new: int, run: Run) -> None:
    own = getattr(owner, "__dict__", {})
    for name in _COUNTERS:
        if type(own.get(name)) is int and own[name] == old:
            changes.set(owner, name, new)
    kinds = own.get("layer_types")
    if isinstance(kinds, list) and len(kinds) == old:
        changes.set(owner, "layer_types", kinds[: run.start + 1] + kinds[run.stop :])
