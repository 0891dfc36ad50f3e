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
    """x [T, I] @ w [O, I] transposed; of a rounded matrix times each output's scale, in float32 at least."""
    weight = packed["w"]
    if "s" not in packed:
        return lax.dot_general(x, weight, (((1,), (1,)), ((), ())))
    scale = packed["s"]
    out = lax.dot_general(x, weight.astype(x.dtype), (((1,), (1,)), ((), ())), preferred_element_type=scale.dtype)
    return (out * scale).astype(x.dtype)


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
