"""What a run is measured by, off the clock and without a trace in it: interfaces, gate variance, curvature, bytes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .. import metrics
from ..fade import Fade
from ..gates import uniform
from ..site import Site
from ..students.base import isolated_random
from .tasks.base import Batch, Loaded, evaluating

__all__ = ["curvature", "gate_variance", "interfaces", "saved_bytes"]


def interfaces(
    model: nn.Module, sites: Sequence[Site], originals: dict[str, nn.Module], loaded: Loaded, batch: Batch
) -> dict[str, dict[str, float]]:
    """Cosine, relative error and CKA between each student and its original, on the inputs that the student gets.

    Args:
        model: In the student view.
        sites: Its sites.
        originals: The modules that were there, by path.
        loaded: Its task.
        batch: What it is called with.
    """
    result: dict[str, dict[str, float]] = {}

    def take(site: Site) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
            student, teacher = site.blend.main_of(out), site.blend.main_of(originals[site.path](*args, **kwargs))
            mask = site.blend.mask_of(student, (args, kwargs))
            if site.blend.holds_residual:
                h = site.blend.input_of(args, kwargs)
                student, teacher = student - h, teacher - h
            result[site.path] = {
                "cosine": float(metrics.cosine(student, teacher, mask)),
                "error": float(metrics.relative_error(student, teacher, mask)),
                "cka": float(metrics.cka(student, teacher, mask)),
            }

        return hook

    hooks = [site.blend.register_forward_hook(take(site), with_kwargs=True) for site in sites]
    try:
        with evaluating(model):
            loaded.forward(model, batch)
    finally:
        for handle in hooks:
            handle.remove()
    return {path: result[path] for path in sorted(result, key=[s.path for s in sites].index)}


@contextmanager
def _gates_by_hand(fade: Fade) -> Iterator[Callable[[Sequence[float]], None]]:
    """Set every site's weight; no guidance is recorded; everything comes back."""

    def put(weights: Sequence[float]) -> None:
        for site, weight in zip(fade.sites, weights, strict=True):
            # Never as a selection: the data's noise is measured with hard gates at their alpha, too.
            site.blend.set_gate(alpha=site.alpha, weight=weight, hard=False)

    for site in fade.sites:
        site.blend.guided = site.blend.observing = False
    try:
        yield put
    finally:
        fade.ledger.clear()
        fade.seek(fade.step_count)


def gate_variance(fade: Fade, loaded: Loaded, batches: Sequence[Batch], *, draws: int, seed: int) -> dict[str, float]:
    """How much of the noise of the task loss's gradient comes from the gate.

    `gate` is E||g - E g||^2 over draws of all gates on one batch; `data` is the same over batches with every weight at
    its alpha; both are unbiased estimates over the students' parameters.

    Args:
        fade: At the step in question, teachers present.
        loaded: The task.
        batches: Some batches; the first one is the fixed one.
        draws: Of the gates.
        seed: Of these draws; the run's own are other ones.
    """
    parameters = [p for site in fade.sites for p in site.blend.student.parameters() if p.requires_grad]

    def gradient(batch: Batch) -> Tensor:
        loss = loaded.loss(loaded.forward(fade.model, batch), batch)
        found = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
        return torch.cat([g.double().flatten() for g in found])

    alphas = [site.alpha for site in fade.sites]
    with isolated_random(seed, parameters[0].device), _gates_by_hand(fade) as put:
        over_gates = []
        for draw in range(draws):
            put(
                [site.swap.gate.weight(site.alpha, uniform(seed, f"variance {site.path}", draw)) for site in fade.sites]
            )
            over_gates.append(gradient(batches[0]))
        put(alphas)
        over_data = [gradient(batch) for batch in batches]
    gate, data = _variance(over_gates), _variance(over_data)
    return {
        "alpha": sum(alphas) / len(alphas),
        "gate": gate,
        "data": data,
        "share": gate / (gate + data) if gate + data > 0.0 else 0.0,
        "squared_mean": float(torch.stack(over_data).mean(0).square().sum()),
    }


def _variance(gradients: list[Tensor]) -> float:
    # The first one is taken as the origin: gradients that are all equal then have a variance of exactly 0.
    moved = torch.stack(gradients) - gradients[0]
    return float((moved - moved.mean(0)).square().sum() / (len(gradients) - 1))


# Bounds of |psi''|: GELU's is largest at 0, where it is 2 phi(0).
CURVATURE = {nn.GELU: math.sqrt(2.0 / math.pi), nn.SiLU: 0.5, nn.Tanh: 4.0 / (3.0 * math.sqrt(3.0))}


def curvature(fade: Fade, loaded: Loaded, batch: Batch, p: float = 0.5) -> list[dict[str, Any]]:
    """How far a random gate at one site bends the mean at the next nonlinearity psi, and the bound on that.

    With Y = psi's input, z_T where the site's weight is 1 and z_S where it is 0 (other sites at their alpha), the bias
    is the sum over elements of |p psi(z_T) + (1 - p) psi(z_S) - psi(p z_T + (1 - p) z_S)|, and the bound that of
    (M / 2) p (1 - p) (z_T - z_S)^2.

    Returns:
        One row per site that has a smooth elementwise nonlinearity after it.
    """
    order: list[nn.Module] = []
    inputs: dict[int, Tensor] = {}

    def see(module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        order.append(module)
        if type(module) in CURVATURE:
            inputs[id(module)] = args[0].double()

    inside = {id(m) for site in fade.sites for m in site.blend.modules() if m is not site.blend}
    watched = [m for m in fade.model.modules() if id(m) not in inside and type(m) in CURVATURE]
    hooks = [m.register_forward_hook(see) for m in (*watched, *(site.blend for site in fade.sites))]
    rows = []
    try:
        with _gates_by_hand(fade) as put, torch.no_grad():
            alphas = [site.alpha for site in fade.sites]
            for i, site in enumerate(fade.sites):
                seen: list[dict[int, Tensor]] = []
                for weight in (1.0, 0.0):
                    order.clear()
                    inputs.clear()
                    put([*alphas[:i], weight, *alphas[i + 1 :]])
                    loaded.forward(fade.model, batch)
                    seen.append(dict(inputs))
                after = order[order.index(site.blend) + 1 :]
                psi = next((m for m in after if type(m) in CURVATURE), None)
                if psi is None:
                    continue
                z_t, z_s = seen[0][id(psi)], seen[1][id(psi)]
                function = type(psi)()
                bend = p * function(z_t) + (1 - p) * function(z_s) - function(p * z_t + (1 - p) * z_s)
                bound = 0.5 * CURVATURE[type(psi)] * p * (1 - p) * (z_t - z_s).square()
                rows.append({"site": site.path, "p": p, "bias": float(bend.abs().sum()), "bound": float(bound.sum())})
    finally:
        for handle in hooks:
            handle.remove()
    return rows


@contextmanager
def saved_bytes() -> Iterator[Callable[[], int]]:
    """Bytes of the different storages that autograd keeps for the backward pass within the block."""
    found: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield lambda: sum(found.values())
