"""The ledger: what the forward passes of one model leave for the optimizer step, as values.

Guidance terms, metrics and finiteness flags go in, the padding mask of the current forward comes out. All blends of a
model share one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .errors import NonFiniteError, StateError

__all__ = ["Ledger", "Term"]


@dataclass(frozen=True)
class Term:
    """One call's contribution: 0-dim float32 tensors. `error` carries the gradient, the rest is detached.

    Attributes:
        error: Sum over valid positions of the guidance error.
        positions: Number of valid positions.
        power: Sum over valid positions of the teacher's mean square (calibrates the relative reduction), while it is
            not fixed.
    """

    error: Tensor
    positions: Tensor
    power: Tensor | None = None


class Ledger:
    """What the forward passes of one model leave for the step: padding mask in, guidance terms and metrics out.

    A copy of a model gets an empty ledger of its own: terms belong to the graph of the original.
    """

    def __init__(self) -> None:
        self.mask: Tensor | None = None
        self.recorded_mask: Tensor | None = None
        self.explicit: Tensor | None = None
        self.terms: dict[str, list[Term]] = {}
        self.similarities: dict[str, list[Tensor]] = {}
        self.finite: dict[str, Tensor] = {}
        self._masks: list[Tensor | None] = []
        self._masks_read = False

    def begin_forward(self, mask: Tensor | None, records: bool) -> None:
        """Take the padding mask of the forward that begins; the user's explicit one wins.

        Args:
            mask: [B, L], 1 = a real token, or None.
            records: Whether it will be followed by a backward, whose recomputation asks for this mask again. An
                evaluation in between must not take its place.
        """
        self.mask = mask if self.explicit is None else self.explicit
        if records:
            if self._masks_read:
                self._masks, self._masks_read = [], False
            self.recorded_mask = self.mask
            self._masks.append(self.mask)

    def read(self) -> dict[str, list[Term]]:
        """The guidance terms since the last read; they are forgotten here."""
        terms, self.terms = self.terms, {}
        self._masks_read = True
        return terms

    def check_recomputation(self, site: str) -> None:
        """Refuse to recompute (gradient checkpointing) when the mask of that forward cannot be told.

        Raises:
            StateError: Two forwards with different masks preceded this backward.
        """
        first, *rest = self._masks or [None]
        if not all(_same_mask(first, other) for other in rest):
            raise StateError(
                "gradient checkpointing recomputes a forward whose padding mask is no longer known.",
                where=site,
                expected="one forward per fade.guidance() and backward",
                got=f"{len(self._masks)} forwards with different masks",
                do="run the backward (and read fade.guidance()) after each forward",
            )

    def watch(self, site: str, *values: Tensor) -> None:
        """Remember, without a device synchronisation, whether `values` were finite."""
        ok = torch.stack([torch.isfinite(v.detach()).all() for v in values]).all()
        self.finite[site] = ok & self.finite[site] if site in self.finite else ok

    def check_step(self, guidance: Mapping[str, Tensor], step: int) -> None:
        """Before the optimizer moves: guidance was read, and everything watched is finite.

        One device synchronisation for all sites.

        Args:
            guidance: The last guidance value of each site, 0-dim.
            step: For the message.

        Raises:
            StateError: Terms were recorded but never read.
            NonFiniteError: A teacher, student or guidance value is not finite.
        """
        unread = [path for path, terms in self.terms.items() if terms]
        if unread:
            raise StateError(
                "guidance was recorded but not added to the loss.",
                where=", ".join(unread[:3]),
                expected="loss = task_loss + fade.guidance(), before the backward",
            )
        flags = dict(self.finite)
        for path, value in guidance.items():
            finite = torch.isfinite(value)
            flags[path] = finite & flags[path] if path in flags else finite
        if flags and not bool(torch.stack([flag.to("cpu") for flag in flags.values()]).all()):
            self.clear()  # The step is lost; the next one must not be judged by it.
            raise NonFiniteError(
                "a teacher, student or guidance value is not finite; the optimizer has not moved.",
                where=", ".join(path for path, flag in flags.items() if not bool(flag)),
                got=f"step {step}",
                do="look at the inputs of this site; lower the rate, or clip the gradients",
            )

    def forget_skipped(self) -> None:
        """Drop measurements of a step that never came (a gradient scaler skipped it, the user left it out)."""
        self.similarities, self.finite = {}, {}

    def clear(self) -> None:
        """Forget everything that belongs to the step that ends."""
        self.terms, self.similarities, self.finite = {}, {}, {}
        self._masks_read = True

    def __deepcopy__(self, memo: dict[int, Any]) -> Ledger:
        """An empty ledger, one for all blends of the copy."""
        memo[id(self)] = fresh = Ledger()
        return fresh

    def __getstate__(self) -> dict[str, Any]:
        """Nothing: graphs are not written to files."""
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """An empty ledger."""
        self.__init__()  # type: ignore[misc]  # The state of a fresh one is all there is.


def _same_mask(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b or (a is not None and b is not None and torch.equal(a, b))
