"""Attention with linear biases (Press, Smith, Lewis 2022): how much each head takes away for a token's distance."""

from __future__ import annotations

import math

import torch

from engine.interfaces.model import ModelContext
from engine.modeling.parallel import even


def bloom_slopes(heads: int) -> list[float]:
    """The paper's: 2 ** (-8 i / n) for i = 1 .. n, where n, the number of heads, is a power of 2. Else those of the
    next lower power, and then every second one of the next higher."""
    power = 2 ** math.floor(math.log2(heads))
    own = [2.0 ** (-8 * i / power) for i in range(1, power + 1)]
    return own + [2.0 ** (-4 * i / power) for i in range(1, 2 * (heads - power), 2)]


def mpt_slopes(heads: int, largest: float) -> list[float]:
    """MPT's: 2 ** (-largest i / n) with n the next higher power of 2; where that is not the number of heads, first
    every second one, then those between."""
    power = 2 ** math.ceil(math.log2(heads))
    own = [2.0 ** (-largest * i / power) for i in range(1, power + 1)]
    return own if power == heads else (own[1::2] + own[::2])[:heads]


def on_this_rank(context: ModelContext, slopes: list[float]) -> torch.Tensor:
    """float32 [heads of this rank]."""
    heads = even(len(slopes), context, "the heads that slopes are for")
    return torch.tensor(slopes[heads.start : heads.start + heads.length], dtype=torch.float32, device=context.device)
