"""Routed experts (Shazeer et al. 2017): tokens sorted by expert, and one product for all groups of them.

Over a mesh either each expert is divided, as a dense block is, or experts are dealt whole (expert parallel).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from engine_tpu.models.forms import ExpertForm
from engine_tpu.models.layers import gated, widened
from engine_tpu.weights import AXIS, Matrices, Params, Tensors, rows


def load_experts(make: Matrices, tensors: Tensors, form: ExpertForm, size: int, name: str) -> Params:
    """A layer's: "router" [E, H] in float32 at least; "first" [E, H, 2 * I], gates before ups, and "last" [E, I, H]."""
    shards, count = make.shards, form.count
    wide = np.dtype(np.float64 if shards.dtype == np.float64 else np.float32)
    router = make.take(tensors, f"{name}.gate.weight", (count, size))
    shapes = (form.inner, size), (form.inner, size), (size, form.inner)
    gates, ups, downs = (
        [make.take(tensors, f"{name}.experts.{one}.{part}.weight", shape) for one in range(count)]
        for part, shape in zip(form.parts, shapes, strict=True)
    )

    def first(expert: int, part: int | None) -> np.ndarray:
        """Of one expert [2 * I, H], or a device's part of it."""
        both = gates[expert], ups[expert]
        return np.concatenate(both if part is None else [rows(one, part, shards.size) for one in both])

    def last(expert: int, part: int | None) -> np.ndarray:
        """Of one expert [H, I], or a device's part of it."""
        each = form.inner // shards.size
        return downs[expert] if part is None else downs[expert][:, part * each : (part + 1) * each]

    return {
        "router": shards.whole(router, wide),
        "first": make.stacked(count, (2 * form.inner, size), first, 1),
        "last": make.stacked(count, (size, form.inner), last, 2),
    }


def routed(packed: Params, x: jax.Array, form: ExpertForm) -> jax.Array:
    """x [T, H] -> [T, H]: of this device's experts, or its part of all; to be added up over the mesh."""
    scores = jax.nn.softmax(widened(x).astype(packed["router"].dtype) @ packed["router"].T, axis=-1)
    weights, ids = lax.top_k(scores, form.top_k)
    if form.renormalise:
        weights = weights / weights.sum(axis=-1, keepdims=True)
    flat, mine = ids.reshape(-1).astype(jnp.int32), len(packed["first"]["w"])
    if mine < form.count:  # experts of other devices stand behind all of this one's, in no group
        flat = flat - lax.axis_index(AXIS).astype(jnp.int32) * mine
        flat = jnp.where((flat >= 0) & (flat < mine), flat, mine)
    order = jnp.argsort(flat, stable=True)
    expert = flat[order]
    sizes = (flat[:, None] == jnp.arange(mine, dtype=jnp.int32)).sum(axis=0, dtype=jnp.int32)
    inner = gated(_grouped(x[order // form.top_k], packed["first"], sizes, expert), "silu")
    given = jnp.where((expert < mine)[:, None], _grouped(inner, packed["last"], sizes, expert), 0)
    each = jnp.zeros_like(given).at[order].set(given).reshape(len(x), form.top_k, -1)
    return (each * weights[:, :, None].astype(weights.dtype)).sum(axis=1).astype(x.dtype)


def _grouped(x: jax.Array, packed: Params, sizes: jax.Array, expert: jax.Array) -> jax.Array:
    """x [n, I], sorted by expert, by matrices [E, I, O], added up in float32 at least; times the scales [E, O] of
    rounded ones."""
    wide = jnp.float64 if x.dtype == jnp.float64 else jnp.float32
    # A TPU's grouped product has one way for bfloat16, and refuses another.
    precision = lax.Precision.DEFAULT if x.dtype == jnp.bfloat16 else lax.Precision.HIGHEST
    out = lax.ragged_dot(x, packed["w"].astype(x.dtype), sizes, precision=precision, preferred_element_type=wide)
    if "s" in packed:
        out = out * packed["s"][jnp.minimum(expert, len(packed["s"]) - 1)]
    return out.astype(x.dtype)
