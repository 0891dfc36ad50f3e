"""The table of cosines and sines of rotary positions (Su et al. 2021), with the ways to stretch a context.

Of any framework whose module has numpy's names: `xp` is numpy, or torch, which this module does not import. The
formulas are those of transformers (`modeling_rope_utils`), term by term, so that torch's float32 tables are equal bit
by bit; for float64 models everything is computed in float64.
"""

from __future__ import annotations

import math
from typing import Any

from engine.types.errors import ConfigError
from engine_kit.model_config import RopeConfig

Array = Any
"""Of the framework `xp`."""


def check_length(rope: RopeConfig, length: int) -> None:
    """Raise ConfigError for "dynamic" scaling beyond the original length: the frequencies would depend on a request's
    final length, so that cached keys could be of no use to a longer one."""
    if rope.rope_type == "dynamic" and length > rope.max_position:
        raise ConfigError(
            f"max_model_len={length} with rope_type 'dynamic'",
            f"dynamic scaling is served up to the original length, {rope.max_position} positions",
            f"set max_model_len to at most {rope.max_position}, or use yarn scaling",
        )


def cos_sin_table(xp: Any, rope: RopeConfig, length: int, dtype: Any) -> Array:
    """[length, rotary_dim] in `dtype`, a floating dtype of xp: cosines of all frequencies, then sines, times the
    attention factor."""
    frequencies, factor = inverse_frequencies(xp, rope, length, dtype)
    angles = xp.arange(length, dtype=dtype)[:, None] * frequencies
    return xp.concatenate((xp.cos(angles) * factor, xp.sin(angles) * factor), axis=-1)


def inverse_frequencies(xp: Any, rope: RopeConfig, length: int, dtype: Any) -> tuple[Array, float]:
    """([rotary_dim / 2] radians a position, the factor for cosines and sines), where `length` positions are served.

    "longrope" has two sets of frequencies: `length` decides which of them counts.
    """
    if rope.rope_type == "longrope":
        return _longrope(xp, rope, length, dtype)
    if rope.rope_type == "yarn":
        return _yarn(xp, rope, dtype)
    theta = rope.theta
    if rope.rope_type == "dynamic":
        # Within the original length the stretch is 1, up to rounding: the same rounding as transformers'.
        stretch = (rope.factor * rope.max_position / rope.max_position) - (rope.factor - 1)
        theta = theta * stretch ** (rope.rotary_dim / (rope.rotary_dim - 2))
    frequencies = 1.0 / _powers(xp, rope, theta, dtype)
    if rope.rope_type == "linear":
        frequencies = frequencies / rope.factor
    elif rope.rope_type == "llama3":
        frequencies = _llama3(xp, rope, frequencies)
    return frequencies, 1.0


def _powers(xp: Any, rope: RopeConfig, theta: float, dtype: Any) -> Array:
    """theta ** (2 i / rotary_dim)."""
    return theta ** (xp.arange(0, rope.rotary_dim, 2, dtype=dtype) / rope.rotary_dim)


def _llama3(xp: Any, rope: RopeConfig, frequencies: Array) -> Array:
    """Llama 3.1: short wavelengths stay, long ones are stretched, those between are blended."""
    original, low, high = rope.original_max_position, rope.low_freq_factor, rope.high_freq_factor
    wavelengths = 2 * math.pi / frequencies
    stretched = xp.where(wavelengths > original / low, frequencies / rope.factor, frequencies)
    smooth = (original / wavelengths - low) / (high - low)
    blended = (1 - smooth) * stretched / rope.factor + smooth * stretched
    between = ~(wavelengths < original / high) & ~(wavelengths > original / low)
    return xp.where(between, blended, stretched)


def _longrope(xp: Any, rope: RopeConfig, length: int, dtype: Any) -> tuple[Array, float]:
    """LongRoPE (Ding et al. 2024): each dimension is stretched by a number of its own, which a search has found."""
    factors = rope.long_factors if length > rope.original_max_position else rope.short_factors
    scale = rope.attention_factor
    if scale is None:
        scale = math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_max_position)) if rope.factor > 1 else 1.0
    return 1.0 / (xp.asarray(factors, dtype=dtype) * _powers(xp, rope, rope.theta, dtype)), scale


def _yarn(xp: Any, rope: RopeConfig, dtype: Any) -> tuple[Array, float]:
    """YaRN (Peng et al. 2023): fast dimensions stay, slow ones are interpolated, a ramp between them."""
    powers = _powers(xp, rope, rope.theta, dtype)
    low, high = (_yarn_dimension(rope, rotations) for rotations in (rope.beta_fast, rope.beta_slow))
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    if low == high:
        high += 0.001
    ramp = xp.clip((xp.arange(rope.rotary_dim // 2, dtype=dtype) - low) / (high - low), 0, 1)
    keep = 1 - ramp
    frequencies = 1.0 / (rope.factor * powers) * (1 - keep) + 1.0 / powers * keep
    return frequencies, yarn_attention_factor(rope)


def _yarn_dimension(rope: RopeConfig, rotations: float) -> float:
    """The dimension that turns `rotations` times over the original length."""
    turns = rope.original_max_position / (rotations * 2 * math.pi)
    return rope.rotary_dim * math.log(turns) / (2 * math.log(rope.theta))


def yarn_attention_factor(rope: RopeConfig) -> float:
    """What yarn multiplies cosines and sines by, and so attention's scores by its square."""

    def scale(mscale: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * mscale * math.log(rope.factor) + 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return float(scale(rope.mscale) / scale(rope.mscale_all_dim))
    return scale(1.0)
