"""Rotary positions of models in torch: the table of `engine_kit.rotary_table`, as a layer."""

from __future__ import annotations

import torch

from engine.interfaces.model import ModelContext
from engine.modeling import Rotary
from engine_kit import rotary_table
from engine_kit.model_config import RopeConfig


def make_rotary(context: ModelContext, rope: RopeConfig) -> Rotary:
    """One for all layers that share these parameters, with a row for each of the context's `max_model_len` positions.

    "longrope" has two sets of frequencies. Which of them counts is decided by `max_model_len`, once for all requests,
    as vLLM does it: were it decided by a request's length, the keys of its first tokens would change when it grows.

    Raises ConfigError as `rotary_table.check_length`.
    """
    rotary_table.check_length(rope, context.max_model_len)
    dtype = torch.float64 if context.dtype == torch.float64 else torch.float32
    return Rotary(context, cos_sin_table(rope, context.max_model_len, dtype))


def cos_sin_table(rope: RopeConfig, length: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """[length, rotary_dim]: see `rotary_table.cos_sin_table`."""
    table: torch.Tensor = rotary_table.cos_sin_table(torch, rope, length, dtype)
    return table


def inverse_frequencies(
    rope: RopeConfig, dtype: torch.dtype = torch.float32, length: int = 0
) -> tuple[torch.Tensor, float]:
    """[rotary_dim / 2] and a factor: see `rotary_table.inverse_frequencies`."""
    found: tuple[torch.Tensor, float] = rotary_table.inverse_frequencies(torch, rope, length, dtype)
    return found
