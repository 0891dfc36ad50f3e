"""Ragged paged attention as one Pallas kernel: what `engine_tpu.attention.attend` computes, with a page read once.

Each turn of the grid is one block of queries, up to Q tokens of one row, for all heads. It brings its row's pages from
the device's memory into its own, two pieces in turn, so that one is on its way while the other is computed with; how
many there are it reads from the row's length. The running maximum, sum and output stay in VMEM (Dao 2023).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from engine_tpu.attention import Blocks, Form, gather_queries, scatter_outputs

LANES = 128
"""A head's size has to be a multiple of it: the width of a TPU's registers."""
_KEYS = 128
"""Tokens of a piece, if a row has as many pages."""
_VMEM_BYTES = 32 << 20
_TABLE_BYTES = 256 << 10
"""Of a step's block table, which lies in scalar memory whole: a quarter of a TPU's, beside what else is there."""


def unsupported(head_size: int, page_size: int, itemsize: int, rows: int, length: int) -> str:
    """Why the kernel cannot serve a cache of this form; "" where it can."""
    if head_size % LANES:
        return f"heads of {head_size} elements do not fill registers of {LANES}"
    if page_size % (32 // itemsize):
        return f"pages of {page_size} tokens do not fill tiles of {32 // itemsize}: give --block-size {32 // itemsize}"
    if (table := rows * -(-length // page_size) * 4) > _TABLE_BYTES:
        return (
            f"the block table of {rows} rows of {length} tokens takes {table:,} bytes, and scalar memory has "
            f"{_TABLE_BYTES:,} for it: lower --max-num-seqs or --max-model-len, or raise --block-size"
        )
    return ""


def attend(
    q: jax.Array, pool: jax.Array, table: jax.Array, blocks: Blocks, form: Form, *, interpret: bool = False
) -> jax.Array:
    """See `engine_tpu.attention.attend`; q float32 or bfloat16. interpret: on a processor, for tests."""
    heads, size = pool.shape[1] // 2, pool.shape[2]
    grouped = gather_queries(q, blocks)
    count, per_block, all_heads, dim = grouped.shape
    group = all_heads // heads
    # Of each head of keys the queries that read it, all tokens of the block: [B, Hkv, Q * g, D].
    arranged = grouped.reshape(count, per_block, heads, group, dim).transpose(0, 2, 1, 3, 4)
    arranged = arranged.reshape(count, heads, per_block * group, dim)
    pages = max(1, min(_KEYS // size, table.shape[1]))
    kernel = partial(_kernel, form=form, group=group, width=table.shape[1], pages=pages)
    of_block = pl.BlockSpec((1, heads, per_block * group, dim), lambda b, *_: (b, 0, 0, 0))
    state = (heads, per_block * group, LANES)
    with jax.enable_x64(False):  # Mosaic has no 64-bit numbers
        out = pl.pallas_call(
            kernel,
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=4,
                grid=(count,),
                in_specs=[of_block, pl.BlockSpec(memory_space=pl.ANY)],
                out_specs=of_block,
                scratch_shapes=[
                    pltpu.VMEM((2, pages, 2 * heads, size, dim), pool.dtype),
                    pltpu.VMEM(state, jnp.float32),
                    pltpu.VMEM(state, jnp.float32),
                    pltpu.VMEM((heads, per_block * group, dim), jnp.float32),
                    pltpu.SemaphoreType.DMA((2,)),
                ],
            ),
            out_shape=jax.ShapeDtypeStruct(arranged.shape, q.dtype),
            compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",), vmem_limit_bytes=_VMEM_BYTES),
            interpret=pltpu.InterpretParams() if interpret else False,
            name="ragged_paged_attention",
        )(blocks.row, blocks.position, blocks.count, table.reshape(-1), arranged, pool)
    out = out.reshape(count, heads, per_block, group, dim).transpose(0, 2, 1, 3, 4)
    return scatter_outputs(out.reshape(count, per_block, all_heads, dim), blocks)


def _kernel(
    row_ref: Any,
    position_ref: Any,
    count_ref: Any,
    table_ref: Any,
    q_ref: Any,
    pool_ref: Any,
    out_ref: Any,
    cache_ref: Any,
    most_ref: Any,
    total_ref: Any,
    sum_ref: Any,
    sems: Any,
    *,
    form: Form,
    group: int,
    width: int,
    pages: int,
) -> None:
    """One block. cache_ref: [2, pages, 2 * Hkv, size, D], the two pieces."""
    block = pl.program_id(0)
    row, position, count = row_ref[block], position_ref[block], count_ref[block]
    _, _, two_heads, size, dim = cache_ref.shape
    keys, heads = pages * size, two_heads // 2
    last = jnp.where(count > 0, position + count, 0)
    stop = lax.div(last + (keys - 1), keys)  # of what is not negative: `//` would ask for signs
    start = jnp.int32(0) if form.window is None else lax.div(jnp.maximum(position - form.window + 1, 0), keys)

    def copies(turn: Any, slot: Any) -> list[Any]:
        first = turn * pages
        return [
            pltpu.make_async_copy(
                pool_ref.at[table_ref[row * width + jnp.minimum(first + nth, width - 1)]],
                cache_ref.at[slot, nth],
                sems.at[slot],
            )
            for nth in range(pages)
        ]

    def begin(turn: Any, slot: Any) -> None:
        for copy in copies(turn, slot):
            copy.start()

    most_ref[...] = jnp.full(most_ref.shape, -jnp.inf, jnp.float32)
    total_ref[...] = jnp.zeros(total_ref.shape, jnp.float32)
    sum_ref[...] = jnp.zeros(sum_ref.shape, jnp.float32)

    @pl.when(start < stop)
    def _first() -> None:
        begin(start, lax.rem(start, 2))

    def piece(turn: Any, _: Any) -> None:
        slot = lax.rem(turn, 2)

        @pl.when(turn + 1 < stop)
        def _next() -> None:
            begin(turn + 1, 1 - slot)

        for copy in copies(turn, slot):
            copy.wait()
        queries = q_ref.shape[2]
        query = position + lax.div(lax.broadcasted_iota(jnp.int32, (queries, keys), 0), group)
        key = turn * keys + lax.broadcasted_iota(jnp.int32, (queries, keys), 1)
        seen = key <= query
        if form.window is not None:
            seen &= key > query - form.window
        place = turn * keys + lax.broadcasted_iota(jnp.int32, (keys, dim), 0)
        there = place < last
        if form.window is not None:
            there &= place > position - form.window
        for head in range(heads):
            q = q_ref[0, head]
            k = cache_ref[slot, :, head].reshape(keys, dim).astype(q.dtype)
            v = cache_ref[slot, :, heads + head].reshape(keys, dim).astype(q.dtype)
            # What lies behind a row's keys, or left its window, may be anybody's, and no number, as 0 times that is.
            v = jnp.where(there, v, jnp.zeros_like(v))
            scores = _product(q, k, 1) * form.scale
            if form.soft_cap is not None:
                scores = jnp.tanh(scores / form.soft_cap) * form.soft_cap
            scores = jnp.where(seen, scores, -jnp.inf)
            before = most_ref[head, :, :1]
            highest = jnp.maximum(before, scores.max(axis=1, keepdims=True))
            safe = jnp.where(highest == -jnp.inf, 0.0, highest)
            weights, fade = jnp.exp(scores - safe), jnp.exp(before - safe)
            total = total_ref[head, :, :1] * fade + weights.sum(axis=1, keepdims=True)
            sum_ref[head] = sum_ref[head] * fade + _product(weights.astype(q.dtype), v, 0)
            most_ref[head] = jnp.broadcast_to(highest, most_ref.shape[1:])
            total_ref[head] = jnp.broadcast_to(total, total_ref.shape[1:])

    lax.fori_loop(start, stop, piece, None)
    for head in range(heads):
        total = total_ref[head, :, :1]
        out_ref[0, head] = (sum_ref[head] / jnp.where(total == 0.0, 1.0, total)).astype(out_ref.dtype)


def _product(a: jax.Array, b: jax.Array, dim: int) -> jax.Array:
    """a [n, m] with dimension `dim` of b, in float32. Mosaic has one way for bfloat16, and refuses another."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else lax.Precision.DEFAULT
    dims = (((1,), (dim,)), ((), ()))
    return lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)
