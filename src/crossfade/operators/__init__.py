"""Attention operators: from q, k and v to the output. Each file holds one, its card and a plain float64 reference."""

from .base import OPERATORS, Card, Operator, check_call, operator
from .grouped import Grouped, pool_heads
from .linear import LinearAttention
from .linformer import Linformer
from .performer import Performer
from .window import Window, WindowLinear

__all__ = [
    "OPERATORS",
    "Card",
    "Grouped",
    "LinearAttention",
    "Linformer",
    "Operator",
    "Performer",
    "Window",
    "WindowLinear",
    "check_call",
    "operator",
    "pool_heads",
]
