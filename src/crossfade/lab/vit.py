"""A small pre-norm vision transformer for images of a few hundred pixels: the host of the standing benchmarks.

timm has no such size, and a convolutional stem (Xiao et al., arXiv 2106.14881) is what lets so few tokens reach 90 % on
Fashion-MNIST. Module names follow timm: `blocks.N.attn`, `blocks.N.mlp`, `norm`, `head`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["Attention", "Block", "VisionTransformer"]


class Attention(nn.Module):
    """Multi-head self-attention with one projection for q, k, v. Shapes: [B, L, D] -> [B, L, D]."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.num_heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Attend among all tokens."""
        b, n, d = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.num_heads, d // self.num_heads).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v)
        out: Tensor = self.proj(mixed.transpose(1, 2).reshape(b, n, d))
        return out


class Block(nn.Module):
    """Pre-norm block: attention, then an MLP, each added to its input."""

    def __init__(self, width: int, heads: int, ratio: int = 4) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attn = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, ratio * width), nn.GELU(), nn.Linear(ratio * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Shapes: [B, L, D] -> [B, L, D]."""
        x = x + self.attn(self.norm1(x))
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class VisionTransformer(nn.Module):
    """Images to class scores. Shapes: [B, C, H, W] -> [B, classes].

    Args:
        size: Height and width of the images.
        channels: Of the images.
        classes: Number of classes.
        width: D, of the tokens.
        depth: Number of blocks.
        heads: Per attention.
        stem: Channels of the stem's 3x3 convolutions of stride 2 before the last one, which has `width`; the token
            grid is the image halved `len(stem) + 1` times.
        seed: Of the initial weights; the global generator is not touched.
    """

    def __init__(
        self,
        *,
        size: int,
        channels: int = 1,
        classes: int = 10,
        width: int = 96,
        depth: int = 6,
        heads: int = 3,
        stem: Sequence[int] = (24, 48),
        seed: int = 0,
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        before = channels
        for after in (*stem, width):
            layers += [nn.Conv2d(before, after, 3, stride=2, padding=1), nn.GroupNorm(1, after), nn.GELU()]
            size, before = (size + 1) // 2, after
        self.stem = nn.Sequential(*layers[:-2])  # The last one is linear: a block's norm comes next.
        self.cls = nn.Parameter(torch.zeros(1, 1, width))
        self.position = nn.Parameter(torch.zeros(1, size * size + 1, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)
        self._initialise(torch.Generator().manual_seed(seed))

    def _initialise(self, generator: torch.Generator) -> None:
        with torch.no_grad():
            for module in self.modules():
                if isinstance(module, (nn.Linear, nn.Conv2d)):
                    fan = module.weight[0].numel()
                    nn.init.trunc_normal_(module.weight, std=min(0.08, fan**-0.5), generator=generator)
                    if module.bias is not None:
                        module.bias.zero_()
            for parameter in (self.cls, self.position):
                nn.init.trunc_normal_(parameter, std=0.02, generator=generator)

    def no_weight_decay(self) -> set[str]:
        """Names that weight decay must leave alone, as timm's models tell."""
        return {"cls", "position"}

    def forward(self, image: Tensor) -> Tensor:
        """Class scores of the class token."""
        x = self.stem(image).flatten(2).mT
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], dim=1) + self.position
        for block in self.blocks:
            x = block(x)
        scores: Tensor = self.head(self.norm(x)[:, 0])
        return scores
