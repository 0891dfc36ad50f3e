"""Rotary positions (Su et al. 2021) without torch: the table of cosines and sines, made in float64 and rounded once.

The ways to stretch a context are those of `engine_kit.rotary`, which says where each comes from.
"""

from __future__ import annotations

import math

import numpy as np

from engine.types.errors import ConfigError
from engine_kit.model_config import RopeConfig


def cos_sin_table(rope: RopeConfig, length: int) -> np.ndarray:
    """float64 [length, rotary_dim]: cosines of all frequencies, then sines, times the attention factor.

    Raises ConfigError for "dynamic" scaling beyond the original length, where cached keys could be of no use to a
    longer request.
    """
    if rope.rope_type == "dynamic" and length > rope.max_position:
        raise ConfigError(
            f"max_model_len={length} with rope_type 'dynamic'",
            f"dynamic scaling is served up to the original length, {rope.max_position} positions",
            f"set max_model_len to at most {rope.max_position}, or use yarn scaling",
        )
    frequencies, factor = inverse_frequencies(rope, length)
    angles = np.arange(length, dtype=np.float64)[:, None] * frequencies
    return np.concatenate((np.cos(angles), np.sin(angles)), axis=1) * factor


def inverse_frequencies(rope: RopeConfig, length: int) -> tuple[np.ndarray, float]:
    """(float64 [rotary_dim / 2], radians a position; the factor for cosines and sines), for so many positions."""
    powers = rope.theta ** (np.arange(0, rope.rotary_dim, 2) / rope.rotary_dim)
    plain = 1.0 / powers
    if rope.rope_type == "linear":
        return plain / rope.factor, 1.0
    if rope.rope_type == "llama3":
        return _llama3(rope, plain), 1.0
    if rope.rope_type == "longrope":
        factors = np.array(rope.long_factors if length > rope.original_max_position else rope.short_factors)
        return plain / factors, _longrope_factor(rope)
    if rope.rope_type == "yarn":
        keep = 1 - _yarn_ramp(rope)
        return plain / rope.factor * (1 - keep) + plain * keep, _yarn_factor(rope)
    return plain, 1.0


def _llama3(rope: RopeConfig, plain: np.ndarray) -> np.ndarray:
    original, low, high = rope.original_max_position, rope.low_freq_factor, rope.high_freq_factor
    wavelengths = 2 * math.pi / plain
    smooth = np.clip((original / wavelengths - low) / (high - low), 0, 1)
    return (1 - smooth) * plain / rope.factor + smooth * plain


def _longrope_factor(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    return math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_max_position)) if rope.factor > 1 else 1.0


def _yarn_ramp(rope: RopeConfig) -> np.ndarray:
    def dimension(rotations: float) -> float:
        turns = rope.original_max_position / (rotations * 2 * math.pi)
        return rope.rotary_dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    high += 0.001 if low == high else 0
    return np.clip((np.arange(rope.rotary_dim // 2) - low) / (high - low), 0, 1)


def _yarn_factor(rope: RopeConfig) -> float:
    def scale(mscale: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * mscale * math.log(rope.factor) + 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return scale(rope.mscale) / scale(rope.mscale_all_dim)
    return scale(1.0)
