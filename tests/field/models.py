"""Tiny models of the field cases, and the few lines that most of them share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad

import crossfade
from crossfade.students import Reinit

WIDTH, CLASSES = 8, 3


class Mixer(nn.Module):
    """A token mixer: every position sees the mean of the (real) others. Shapes: [B, L, D] -> [B, L, D]."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.q, self.o = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is None:
            mean = x.mean(1, keepdim=True)
        else:
            weight = mask.to(x.dtype).unsqueeze(-1)
            mean = (x * weight).sum(1, keepdim=True) / weight.sum(1, keepdim=True).clamp_min(1.0)
        return self.o(torch.tanh(self.q(x) + mean))


class Block(nn.Module):
    def __init__(self, attn: nn.Module) -> None:
        super().__init__()
        self.attn, self.norm = attn, nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return x + self.attn(self.norm(x), mask=mask)


class Net(nn.Module):
    """Blocks and a head over features [B, L, D]; `attention_mask` [B, L] has 1 for a real token."""

    def __init__(self, layers: int = 2, attn: Callable[[], nn.Module] = Mixer) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(attn()) for _ in range(layers))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x, attention_mask)
        if attention_mask is None:
            return self.head(x.mean(1))
        weight = attention_mask.to(x.dtype).unsqueeze(-1)
        return self.head((x * weight).sum(1) / weight.sum(1).clamp_min(1.0))


class Holder(nn.Module):
    """A parent with one child `fc` that it calls in a way of its own."""

    def __init__(self, fc: nn.Module, call: Callable[[nn.Module, Tensor], Any] | None = None) -> None:
        super().__init__()
        self.fc, self.call = fc, call

    def forward(self, x: Tensor) -> Any:
        return self.fc(x) if self.call is None else self.call(self.fc, x)


def seeded(make: Callable[[], nn.Module], seed: int = 0) -> Any:
    """What `make` builds under a seed; the global random state stays."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


def net(layers: int = 2, attn: Callable[[], nn.Module] = Mixer, seed: int = 0) -> Net:
    """The same model for the same arguments."""
    return seeded(lambda: Net(layers, attn), seed)


def data(step: int = 0, size: int = 4, length: int = 5) -> tuple[Tensor, Tensor]:
    """Features [B, L, D] and labels [B] that depend on the step alone."""
    dice = torch.Generator().manual_seed(1000 + step)
    return torch.randn(size, length, WIDTH, generator=dice), torch.randint(CLASSES, (size,), generator=dice)


def plan(**settings: Any) -> crossfade.Plan:
    """All mixers of a `Net` by cold ones, fading linearly, unless told otherwise."""
    cold = {"targets": "blocks.*.attn", "student": Reinit("reset_parameters")}
    return crossfade.Plan(**(cold | {"gate": crossfade.Deterministic("linear")} | settings))


def another() -> Callable[[nn.Module, Any], nn.Module]:
    """A factory of mixers with weights of their own."""
    return lambda teacher, site: Mixer()


def adamw(fade: crossfade.Fade, lr: float = 1e-2) -> torch.optim.AdamW:
    """An attached optimizer with momentum and decay, which moves a parameter even at gradient zero."""
    optimizer = torch.optim.AdamW(fade.parameter_groups(weight_decay=0.1), lr=lr)
    fade.attach(optimizer)
    return optimizer


def train(model: nn.Module, fade: crossfade.Fade, optimizer: Any, steps: Sequence[int]) -> None:
    """Some optimizer steps on the data of their numbers."""
    for step in steps:
        x, y = data(step)
        (cross_entropy(model(x), y) + fade.guidance()).backward()
        optimizer.step()
        optimizer.zero_grad()


def values(module: nn.Module) -> dict[str, Tensor]:
    """Copies of all parameters and buffers by name."""
    return {n: t.detach().clone() for n, t in [*module.named_parameters(), *module.named_buffers()]}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """Bit equality by name."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def tiny_bert(**settings: Any) -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=32,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=32,
        num_labels=CLASSES,
        **settings,
    )
    return seeded(lambda: BertForSequenceClassification(config))


def tiny_llama(**settings: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=32,
        max_position_embeddings=32,
        use_cache=False,
        **settings,
    )
    return seeded(lambda: LlamaForCausalLM(config))


def tiny_vit(**settings: Any) -> nn.Module:
    import timm

    sizes = {"img_size": 16, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2, "num_classes": CLASSES}
    return seeded(lambda: timm.models.VisionTransformer(**(sizes | settings)))


def tokens(lengths: Sequence[int] = (5, 3), total: int = 5) -> dict[str, Tensor]:
    """Token ids and their padding mask, as a tokenizer would give them."""
    dice = torch.Generator().manual_seed(7)
    ids = torch.randint(1, 32, (len(lengths), max(lengths)), generator=dice)  # The same tokens whatever the padding.
    ids = pad(ids, (0, total - max(lengths)))
    mask = (torch.arange(total)[None, :] < torch.tensor(lengths)[:, None]).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


def logits(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output.logits
