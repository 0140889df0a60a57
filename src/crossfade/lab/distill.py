"""Distillation from a full forward of the original model, for the KD baselines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .. import metrics
from ..site import Site
from .inputs import InputError
from .methods import Distill
from .tasks.base import Batch, Loaded

__all__ = ["Distiller"]


class Distiller:
    """The original beside the student network; the same batch object reaches both, and the original is in eval mode.

    Args:
        loaded: The task; its model is the original.
        sites: Of the student network.
        settings: Weights and temperature.
    """

    def __init__(self, loaded: Loaded, sites: Sequence[Site], settings: Distill, original: nn.Module) -> None:
        self.loaded, self.sites, self.settings, self.original = loaded, sites, settings, original
        self._features: dict[str, dict[str, Tensor]] = {"student": {}, "original": {}}
        self._masks: dict[str, Tensor | None] = {}
        self._hooks: list[Any] = []
        self._cached: dict[int, Tensor] = {}
        self._caching = settings.cache and settings.features == 0.0 and loaded.fixed
        if settings.features > 0.0:
            for site in sites:
                module = original.get_submodule(site.path)
                for hooked, which in ((site.blend, "student"), (module, "original")):
                    self._hooks.append(hooked.register_forward_hook(self._take(site, which), with_kwargs=True))

    def _take(self, site: Site, which: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
            main = self._features[which][site.path] = site.blend.main_of(out)
            if which == "student":
                self._masks[site.path] = site.blend.mask_of(main, (args, kwargs))

        return hook

    def outputs(self, batch: Batch, index: Tensor) -> Tensor:
        """The original's output for a batch, from the cache if it may be kept."""
        if self._caching and all(int(i) in self._cached for i in index):
            return torch.stack([self._cached[int(i)] for i in index])
        with torch.no_grad():
            found = self.loaded.forward(self.original, batch)
        if self._caching:
            self._cached |= {int(i): row for i, row in zip(index, found, strict=True)}
        return found

    def loss(self, output: Tensor, batch: Batch, index: Tensor) -> Tensor:
        """The weighted distillation loss, 0-dim.

        Args:
            output: Of the student network on `batch`; its site outputs were seen by the hooks.
            batch: The batch itself.
            index: The samples in it.

        Raises:
            InputError: The two models do not answer in the same shape (another vocabulary, say).
        """
        original = self.outputs(batch, index)
        if original.shape != output.shape:
            raise InputError(
                "student network and original answer in different shapes, so they cannot be compared.",
                expected=tuple(original.shape),
                got=tuple(output.shape),
                do="use models of the same vocabulary or classes",
            )
        total = self.settings.logits * self.loaded.distance(output, original, batch, self.settings.temperature)
        for site in self.sites if self.settings.features > 0.0 else ():
            student, teacher = (self._features[which][site.path] for which in ("student", "original"))
            error = metrics.relative_error(student, teacher, self._masks[site.path])
            total = total + self.settings.features * error
        for features in self._features.values():
            features.clear()
        return total

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
