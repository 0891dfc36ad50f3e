"""What decoders are made of."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import lax

from engine_tpu.models.forms import Act


def widened(x: jax.Array) -> jax.Array:
    """x in float32, or in float64 if it is that already."""
    return x if x.dtype == jnp.float64 else x.astype(jnp.float32)


def product(x: jax.Array, packed: Mapping[str, jax.Array]) -> jax.Array:
    """x [T, I] @ w [O, I] transposed, added up in float32 at least; of a rounded matrix times each output's scale."""
    count, dtype = len(x), x.dtype
    if count == 1 and dtype == jnp.bfloat16:
        # XLA's processor device widens a whole matrix of bfloat16 for one row, and not for two.
        x = jnp.concatenate((x, jnp.zeros_like(x)))
    wide = jnp.float64 if dtype == jnp.float64 else jnp.float32
    out = lax.dot_general(x, packed["w"].astype(dtype), (((1,), (1,)), ((), ())), preferred_element_type=wide)[:count]
    return (out * packed["s"] if "s" in packed else out).astype(dtype)


def linear(x: jax.Array, packed: Mapping[str, jax.Array]) -> jax.Array:
    """x [T, I] -> [T, O], with the bias if there is one."""
    out = product(x, packed)
    return out + packed["b"] if "b" in packed else out


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """x [..., H] / sqrt(mean(x^2) + eps), rounded to x's dtype, times weight [H] (Zhang, Sennrich 2019)."""
    wide = widened(x)
    normed = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return normed.astype(x.dtype) * weight


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """x [T, heads, D] by cos, sin [T, 1, D / 2], in two halves."""
    first, second = jnp.split(widened(x), 2, axis=-1)
    return jnp.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1).astype(x.dtype)


def gated(gate_up: jax.Array, act: Act) -> jax.Array:
    """gate_up [T, 2 * I] -> act(gate) * up, [T, I]."""
    gate, up = jnp.split(widened(gate_up), 2, axis=-1)
    active = jax.nn.silu(gate) if act == "silu" else jax.nn.gelu(gate, approximate=act == "gelu_tanh")
    return (active * up).astype(gate_up.dtype)
