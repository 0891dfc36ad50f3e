"""Ragged paged attention: one layer's, over rows of any number of queries. The plain XLA form, and writing the cache.

A layer's pool is [pages, 2 * Hkv, page size, D]: of each page first the heads of keys, then those of values, so that a
head's tokens lie together, in whole tiles of a TPU. Queries come in *blocks*: each holds up to Q successive tokens of
one row, so decodes (Q = 1), chunks of prompts and mixtures of them are one form.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax

_KEYS_AT_ONCE = 1 << 22
"""Elements of keys, of all blocks, that one turn of the loop gathers at most, unless these are `_LEAST_KEYS` tokens."""
_MOST_KEYS, _LEAST_KEYS = 512, 64
"""Tokens of each row, of one turn."""


class Blocks(NamedTuple):
    """The queries of a step: B blocks of up to Q tokens of one row each.

    Args:
        row: int32 [B]; of the block table.
        first: int32 [B]; its first token among the step's.
        count: int32 [B]; its tokens, 0 for padding.
        position: int32 [B]; the first token's place among its row's keys.
        place: int32 [T]; where each token of the step stands among the B * Q.
        size: Q.
    """

    row: jax.Array
    first: jax.Array
    count: jax.Array
    position: jax.Array
    place: jax.Array
    size: int


class Form(NamedTuple):
    """What attention of one layer is.

    Args:
        scale: of scores.
        window: tokens that a query sees, itself included; None: all before it.
        soft_cap: scores are squashed to +-soft_cap by tanh; None: not.
    """

    scale: float
    window: int | None = None
    soft_cap: float | None = None


def gather_queries(q: jax.Array, blocks: Blocks) -> jax.Array:
    """q [T, Hq, D] -> [B, Q, Hq, D]; what stands past a block's count may be any token's."""
    if blocks.size == 1:
        return q[:, None]
    index = blocks.first[:, None] + jnp.arange(blocks.size, dtype=jnp.int32)
    return q[jnp.minimum(index, len(q) - 1)]


def scatter_outputs(out: jax.Array, blocks: Blocks) -> jax.Array:
    """[B, Q, Hq, D] -> [T, Hq * D]."""
    flat = out.reshape(out.shape[0] * out.shape[1], -1)
    return flat if blocks.size == 1 else flat[blocks.place]


def attend(q: jax.Array, pool: jax.Array, table: jax.Array, blocks: Blocks, form: Form) -> jax.Array:
    """Attention over the cache, which holds the step's own tokens already.

    Online softmax (Milakov, Gimelshein 2018) over pieces of the rows' keys; how many pieces there are is read on the
    device, so that no bucket is needed for lengths. Every row goes through those of the longest, and of a window from
    where the row begins that sees the earliest.

    Args:
        q: [T, Hq, D], rotated. pool: [pages, 2 * Hkv, page size, D], of q's dtype or a smaller one, or bits: `held`.
        table: int32 [R, W].

    Returns [T, Hq * D] in q's dtype; scores and sums are float32, or float64 of float64.
    """
    heads, size = pool.shape[1] // 2, pool.shape[2]
    grouped = gather_queries(q, blocks)
    wide = jnp.float64 if q.dtype == jnp.float64 else jnp.float32
    count, per_block, all_heads, dim = grouped.shape
    grouped = jnp.swapaxes(grouped.reshape(count, per_block, heads, all_heads // heads, dim), 1, 2)  # [B, Hkv, Q, g, D]
    pages = _pages_at_once(count, heads, size, dim, table.shape[1])
    keys = pages * size
    of_block = jnp.pad(table, ((0, 0), (0, -table.shape[1] % pages)))[blocks.row]
    query = blocks.position[:, None] + jnp.arange(per_block, dtype=jnp.int32)  # [B, Q]: positions
    last = jnp.where(blocks.count > 0, blocks.position + blocks.count, 0)
    start = jnp.int32(0)
    if form.window is not None:
        seen = jnp.where(blocks.count > 0, blocks.position - form.window + 1, jnp.iinfo(jnp.int32).max)
        start = jnp.maximum(seen.min(), 0) // keys
    stop = (last.max() + keys - 1) // keys
    by_head = pool.reshape(-1, size, dim)
    head = jnp.arange(heads, dtype=jnp.int32)[:, None]

    def piece(turn: jax.Array, carried: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, ...]:
        most, total, out = carried
        ids = lax.dynamic_slice_in_dim(of_block, turn * pages, pages, axis=1)
        # Head by head, so that a head's tokens lie one behind the other, as products want them: [B, Hkv, keys, D].
        first = ids[:, None] * (2 * heads) + head
        k, v = (_numbers(by_head[at]).astype(q.dtype).reshape(count, heads, keys, dim) for at in (first, first + heads))
        # Keys stand first: what XLA transposes for the product are the few queries, and the scores behind it.
        scores = jnp.moveaxis(jnp.einsum("bhkd,bhqgd->bhkqg", k, grouped, preferred_element_type=wide), 2, -1)
        scores = scores * jnp.asarray(form.scale, wide)
        if form.soft_cap is not None:
            scores = jnp.tanh(scores / form.soft_cap) * form.soft_cap
        key = turn * keys + jnp.arange(keys, dtype=jnp.int32)
        seen = key <= query[:, :, None]
        if form.window is not None:
            seen &= key > query[:, :, None] - form.window
        scores = jnp.where(seen[:, None, :, None], scores, -jnp.inf)
        highest = jnp.maximum(most, scores.max(-1))
        safe = jnp.where(jnp.isneginf(highest), 0, highest)
        weights = jnp.exp(scores - safe[..., None])
        fade = jnp.exp(most - safe)
        # What lies behind a row's keys, or left its window, may be anybody's and no number, which 0 times it is too.
        there = key < last[:, None]
        if form.window is not None:
            there &= key > blocks.position[:, None] - form.window
        v = jnp.where(there[:, None, :, None], v, 0)
        more = jnp.einsum("bhqgk,bhkd->bhqgd", weights.astype(q.dtype), v, preferred_element_type=wide)
        return highest, total * fade + weights.sum(-1), out * fade[..., None] + more

    shape = grouped.shape[:4]
    none = jnp.full(shape, -jnp.inf, wide), jnp.zeros(shape, wide), jnp.zeros(grouped.shape, wide)
    if pages >= table.shape[1]:  # one piece holds all that a row may have
        _, total, out = piece(jnp.int32(0), none)
    else:
        _, total, out = lax.fori_loop(start, stop, piece, none)
    out = jnp.swapaxes(out / jnp.where(total == 0, 1, total)[..., None], 1, 2)
    return scatter_outputs(out.reshape(count, per_block, all_heads, dim).astype(q.dtype), blocks)


def _pages_at_once(blocks: int, heads: int, size: int, dim: int, width: int) -> int:
    keys = _KEYS_AT_ONCE // (blocks * heads * dim)
    keys = max(_LEAST_KEYS, min(_MOST_KEYS, keys))
    return max(1, min(keys // size, width))


class Writes(NamedTuple):
    """Where a step's tokens go: F pieces of pages. Pages of no piece are page 0's, whose content nobody reads.

    Args:
        page: int32 [F].
        token: int32 [F]; the step's token that would lie at the page's begin: may be negative, or past the last.
        low, high: int32 [F]; the places low .. high - 1 are written.
    """

    page: jax.Array
    token: jax.Array
    low: jax.Array
    high: jax.Array


def write_pages(pool: jax.Array, new: jax.Array, writes: Writes) -> jax.Array:
    """Write new [T, 2 * Hkv, D] (keys' heads, then values') page by page: a page is read, merged and put back whole."""
    size = pool.shape[2]
    place = jnp.arange(size, dtype=jnp.int32)
    tokens = jnp.clip(writes.token[:, None] + place, 0, len(new) - 1)
    merged = jnp.swapaxes(new[tokens], 1, 2)  # [F, 2 * Hkv, size, D]
    mine = (writes.low[:, None] <= place) & (place < writes.high[:, None])
    return pool.at[writes.page].set(jnp.where(mine[:, None, :, None], merged, pool[writes.page]))


def write_tokens(pool: jax.Array, new: jax.Array, page: jax.Array, place: jax.Array) -> jax.Array:
    """Write one token of each row: new [T, 2 * Hkv, D], page and place in it int32 [T]."""
    if len(page) == 1:
        # XLA makes a slice of a single update, fuses it with the gather that reads it, and copies the pool for that.
        # Another one goes where nobody reads.
        page, place, new = (jnp.concatenate((one, jnp.zeros_like(one))) for one in (page, place, new))
    return pool.at[page, :, place].set(new)


def as_stored(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """In the cache's dtype. An 8-bit float has no infinity: what is larger than its largest number becomes that."""
    if x.dtype == dtype:
        return x
    most = float(jnp.finfo(dtype).max)
    return jnp.clip(x, -most, most).astype(dtype)


def held(dtype: np.dtype, platform: str) -> np.dtype:
    """In which dtype a pool lies on a platform of JAX's: its own, or on "cpu" unsigned integers of its bits.

    XLA's processor device cannot write small floats into an array: it would widen all of the pool, write, and narrow
    it again, in every layer of every step.
    """
    return next((bits for bits, of in _BITS.items() if platform == "cpu" and of == dtype), dtype)


def _numbers(x: jax.Array) -> jax.Array:
    """What integers of a pool stand for; floats as they are."""
    return x.view(_BITS[x.dtype]) if x.dtype in _BITS else x


_BITS: Mapping[np.dtype, np.dtype] = {
    np.dtype(np.uint8): np.dtype(ml_dtypes.float8_e4m3fn),
    np.dtype(np.uint16): np.dtype(ml_dtypes.bfloat16),
}
