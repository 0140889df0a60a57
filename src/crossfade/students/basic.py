"""Students with the teacher's own architecture: `Copy` (warm) and `Reinit` (cold)."""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from ..errors import PlanError, StudentError
from ..registry import register
from .base import SiteInfo, deepcopy_of, isolated_random, named_tensors, site_seed

__all__ = ["Copy", "Normal", "Reinit"]


@register("student", "Copy")
@dataclass(frozen=True)
class Copy:
    """The teacher's weights again, trainable: the warm start, and the control of every experiment.

    Example:
        >>> teacher = nn.Linear(2, 2)
        >>> student = Copy()(teacher, SiteInfo("fc", 0, 1, teacher, seed=0))
        >>> torch.equal(student.weight, teacher.weight), student.weight is teacher.weight
        (True, False)
    """

    def __call__(self, teacher: nn.Module, site: SiteInfo) -> nn.Module:
        """A deep copy of the teacher."""
        return deepcopy_of(teacher)


@register("initializer", "Normal")
@dataclass(frozen=True)
class Normal:
    """Matrices from N(0, std^2), vectors called `bias` zero, norm weights one (BERT's and GPT-2's rule at 0.02)."""

    std: float = 0.02

    def __post_init__(self) -> None:
        if not self.std > 0.0:
            raise PlanError("the standard deviation must be positive.", got=self.std)

    def __call__(self, module: nn.Module) -> None:
        """Initialise the tensors that `module` itself owns."""
        is_norm = "norm" in type(module).__name__.lower()
        for name, parameter in module.named_parameters(recurse=False):
            if not parameter.is_floating_point():
                continue
            if name.endswith("bias"):
                parameter.zero_()
            elif is_norm and name == "weight":
                parameter.fill_(1.0)
            elif parameter.dim() >= 2:
                parameter.normal_(0.0, self.std)
        if getattr(module, "track_running_stats", False):
            module.reset_running_stats()  # type: ignore[operator]  # torch types attributes of a module as tensors.


@register("student", "Reinit")
@dataclass(frozen=True)
class Reinit:
    """The teacher's architecture, cold: what isolates the stability of a replacement method (arXiv 2511.18670).

    Every floating-point parameter and persistent buffer must be re-initialised; one that is left is an error, so that
    no run is secretly warm. Non-persistent buffers are derived values and stay.

    Attributes:
        init: `"model"`: the rule of the model that holds the site (`_init_weights` of transformers and timm);
            `"reset_parameters"`: each submodule's own reset, as in a fresh construction; or `Normal(std)`.
        seed: Added to the site's seed.
        keep: Globs on tensor names inside the site that are constants and keep the teacher's value.

    Example:
        >>> teacher = nn.Linear(2, 2)
        >>> student = Reinit("reset_parameters")(teacher, SiteInfo("fc", 0, 1, teacher, seed=0))
        >>> torch.equal(student.weight, teacher.weight)
        False
    """

    init: Literal["model", "reset_parameters"] | Normal = "model"
    seed: int = 0
    keep: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "keep", tuple(self.keep))
        if self.init not in ("model", "reset_parameters") and not isinstance(self.init, Normal):
            raise PlanError(
                "unknown initialisation.", expected='"model", "reset_parameters" or Normal(std)', got=repr(self.init)
            )

    def __call__(self, teacher: nn.Module, site: SiteInfo) -> nn.Module:
        """A cold copy of the teacher.

        Raises:
            StudentError: A tensor was not re-initialised, or the model has no initialisation rule.
        """
        student = deepcopy_of(teacher)
        learned = list(_learned(student))
        self._check_keep(student, site)
        cold = [(name, t) for name, t in learned if not any(fnmatch.fnmatchcase(name, k) for k in self.keep)]
        rule = self._rule(site)
        device = next((t.device for _, t in cold), torch.device("cpu"))
        with torch.no_grad(), isolated_random(site_seed(self.seed, str(site.seed)), device):
            for _, tensor in cold:
                tensor.fill_(float("nan"))  # What still holds a NaN afterwards was not initialised.
            for module in student.modules():
                rule(module)
        warm = [name for name, tensor in cold if not bool(torch.isfinite(tensor).all())]
        originals = dict(named_tensors(teacher))
        warm += [name for name, t in cold if name not in warm and _still_equal(t, originals[name])]
        if warm:
            raise StudentError(
                "the student would not be cold: these tensors are not re-initialised.",
                where=f"{site.path}: {', '.join(warm)}",
                got=f"init={self.init!r}",
                do="another init (Normal(0.02) reaches every matrix and bias), or keep=(names,) if they are constants",
            )
        return student

    def _check_keep(self, student: nn.Module, site: SiteInfo) -> None:
        names = [name for name, _ in named_tensors(student)]
        for pattern in self.keep:
            if not fnmatch.filter(names, pattern):
                raise StudentError("keep= matches no tensor.", where=site.path, got=pattern, expected=", ".join(names))

    def _rule(self, site: SiteInfo) -> Callable[[nn.Module], object]:
        if isinstance(self.init, Normal):
            return self.init
        if self.init == "reset_parameters":
            return _reset
        holders = _ancestors(site.model, site.path)
        for holder in reversed(holders):
            rule = getattr(holder, "_init_weights", None)
            if callable(rule):
                return functools.partial(rule)
        raise StudentError(
            "the model has no initialisation rule of its own (no `_init_weights` above the site).",
            where=site.path,
            got=type(site.model).__name__,
            do='Reinit("reset_parameters") or Reinit(Normal(0.02))',
        )


def _reset(module: nn.Module) -> None:
    for name in ("reset_parameters", "_reset_parameters"):
        if callable(getattr(module, name, None)):
            getattr(module, name)()
            return


def _learned(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Floating-point parameters and persistent buffers: what training has written."""
    saved = set(module.state_dict())
    return [
        (name, t) for name, t in named_tensors(module) if (t.is_floating_point() or t.is_complex()) and name in saved
    ]


def _still_equal(tensor: Tensor, original: Tensor) -> bool:
    """Equal to the teacher's, unless it is one value throughout (a bias of zeros says nothing)."""
    constant = tensor.numel() == 0 or bool((tensor == tensor.flatten()[0]).all())
    return not constant and torch.equal(tensor, original)


def _ancestors(model: nn.Module, path: str) -> list[nn.Module]:
    """The modules from the root down to the parent of `path`."""
    result = [model]
    for name, module in model.named_modules():
        if name and path.startswith(name + "."):
            result.append(module)
    return result
