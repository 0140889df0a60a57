"""Recipes: functions that return an `Experiment`, with the source of each value in its notes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .base import Registry
from .experiment import Evaluation, Experiment, Training

__all__ = ["CORE", "RECIPES", "recipe"]

RECIPES: Registry[Callable[[], Experiment]] = Registry("recipe")
recipe = RECIPES.add

CORE = ("dcr", "dcr+dfg", "dcr+dfg-kept", "bern", "gum", "student-only", "kd+features", "local")
COLD = {"kind": "student:Reinit", "init": {"kind": "initializer:Normal", "std": 0.02}}


def _methods(*labels: str) -> dict[str, dict[str, Any]]:
    return {label: {} for label in labels}


@recipe("digits")
def digits() -> Experiment:
    """scikit-learn's digits, a small ViT, all six attentions cold: seconds per run."""
    return Experiment(
        name="digits",
        task={"kind": "digits"},
        student=COLD,
        methods=_methods("align", "dcr+dfg", "bern", "kd+features", "student-only"),
        reference="student-only",
        training=Training(steps=200, batch_size=64, lr=5e-3, device="cpu"),
        evaluation=Evaluation(points=10, samples=None, clock="cpu", targets=(4.0, 2.0)),
        notes={
            "training.steps": "long enough for the hard swap to re-learn the task; a known counter-example to blending",
            "student": "N(0, 0.02^2), the rule of BERT and GPT-2",
        },
    )


@recipe("fashion-mnist")
def fashion_mnist() -> Experiment:
    """Fashion-MNIST, a ViT of 17 tokens that reaches 90 %, all six attentions cold: the standing benchmark."""
    rates = {label: {"lr": 3e-3} for label in ("dcr", "dcr+dfg", "bern", "gum", "student-only", "local")}
    rates["align+fade"] = {"lr": 1e-3}
    return Experiment(
        name="fashion-mnist",
        task={"kind": "fashion-mnist"},
        student=COLD,
        methods=_methods("align", "align+fade", *CORE) | rates,
        reference="kd+features",
        training=Training(steps=300, batch_size=64, lr=1e-2, device="cpu"),
        evaluation=Evaluation(points=15, samples=2000, clock="cpu", targets=(2.0, 1.0)),
        notes={
            "methods.*.lr": "tuned, four rates each on one seed: docs/results/lab.md",
            "training.weight_decay": "arXiv 2511.18670: AdamW, 0.05",
            "training.clip": "arXiv 2511.18670: 1.0",
            "task.smoothing": "arXiv 2511.18670: 0.1",
            "training.trains": "the abstract of arXiv 2511.18670 says frozen backbones; `all` trains the whole model",
            "training.steps": "ours: a short run, in which methods differ",
            "student": "N(0, 0.02^2), the rule of BERT and GPT-2; biases 0",
        },
    )


@recipe("minilm")
def minilm() -> Experiment:
    """MiniLM, a pretrained sentence encoder, on Python's reference text; all six attentions cold."""
    return Experiment(
        name="minilm",
        task={"kind": "minilm"},
        student={"kind": "student:Reinit"},
        methods=_methods("align", "align+fade", "dcr+dfg", "dcr+dfg-kept", "bern", "kd+features", "student-only"),
        reference="kd+features",
        training=Training(steps=200, batch_size=16, lr=1e-3, device="cpu"),
        evaluation=Evaluation(points=8, samples=None, interface=32, clock="cpu", targets=(0.05, 0.02)),
        notes={"student": "the model's own rule of initialisation, N(0, 0.02^2)"},
    )


@recipe("antiberty")
def antiberty() -> Experiment:
    """AntiBERTy, a masked language model of antibodies, on germline sequences; all eight attentions cold."""
    return Experiment(
        name="antiberty",
        task={"kind": "antiberty"},
        student={"kind": "student:Reinit"},
        methods=_methods("align", "align+fade", "dcr+dfg", "dcr+dfg-kept", "bern", "kd+features", "student-only"),
        reference="kd+features",
        training=Training(steps=100, batch_size=16, lr=1e-3, device="cpu"),
        evaluation=Evaluation(points=5, samples=64, interface=16, clock="cpu", targets=(5.0, 2.0)),
    )


@recipe("smollm2")
def smollm2() -> Experiment:
    """SmolLM2-135M, a causal language model, on Python's reference text; the attentions of ten layers cold."""
    return Experiment(
        name="smollm2",
        task={"kind": "smollm2"},
        student={"kind": "student:Reinit"},
        methods=_methods("align", "align+fade", "dcr+dfg", "dcr+dfg-kept", "bern", "kd+features", "student-only"),
        reference="kd+features",
        training=Training(steps=60, batch_size=4, lr=1e-3, device="cpu"),
        evaluation=Evaluation(points=4, samples=16, interface=4, clock="cpu", targets=(5.0, 2.0)),
    )


@recipe("vit-small-cifar100")
def vit_small_cifar100() -> Experiment:
    """The paper's own: ViT-Small of ImageNet, fine-tuned on CIFAR-100, all attentions re-initialised."""
    images = 50_000
    batch = 128
    return Experiment(
        name="vit-small-cifar100",
        task={"kind": "cifar100"},
        student={"kind": "student:Reinit"},
        methods=_methods(
            "dcr", "dcr+dfg", "bern", "bern+dfg", "gum", "gum+dfg", "student-only", "kd+features", "align"
        ),
        reference="student-only",
        training=Training(
            steps=50 * (images // batch),
            batch_size=batch,
            lr=5e-4,
            weight_decay=0.05,
            clip=1.0,
            warmup=500,
            precision="bf16",
            checkpoint_every=images // batch,
        ),
        evaluation=Evaluation(points=50, samples=None, targets=(5.0, 2.0, 1.0)),
        notes={
            "task": "arXiv 2511.18670: ViT-Small/16, CIFAR-100; stage 0 fine-tunes the teacher (head 6 epochs at 1e-3, "
            "then 50 epochs at 5e-4)",
            "training.lr": "arXiv 2511.18670: 5e-4",
            "training.steps": "arXiv 2511.18670: 50 epochs",
            "training.batch_size": "arXiv 2511.18670: 128",
            "training.precision": "arXiv 2511.18670: BF16",
            "training.trains": "our choice: frozen backbone, as the abstract says; `all` is the other reading",
            "training.warmup": "our choice; the source names no rate schedule",
        },
    )
