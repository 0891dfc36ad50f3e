"""Block tables that name pages of the row alone.

The libraries read whole tiles of keys and values, and give those that a query does not see the weight 0. Before a
sliding window, and for some libraries after the row's end, a tile reaches over entries of the table that are stale:
their pages may be another's by now, and hold anything, NaN too, which the weight 0 does not hide. Such entries are
replaced by the row's first page in the window, or by its last one. What these hold is finite (see
`engine_flashattn.write`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.interfaces.attention import AttentionBatch
from engine.types.kv import KVGroup

COLUMNS = 128


def name_own_pages(batch: AttentionBatch, group: KVGroup, out: torch.Tensor) -> None:
    """Fill out int32 [R, max_blocks] with the batch's table. One launch."""
    table = batch.block_table
    _own_pages[(batch.num_rows,)](
        (table, out),
        batch.query_start_loc,
        batch.seq_lens,
        (table.stride(0), out.stride(0)),
        table.shape[1],
        group.tokens_per_block,
        group.sliding_window or 0,
        COLUMNS=COLUMNS,
        num_warps=1,
    )


@triton.jit
def _own_pages(
    tables,  # the batch's, and the one to fill
    query_start_loc,
    seq_lens,
    strides,  # of their rows
    width,
    per_block,
    window,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    seq_len = tl.load(seq_lens + row)
    queries = tl.load(query_start_loc + row + 1) - tl.load(query_start_loc + row)
    last = tl.maximum(seq_len - 1, 0) // per_block
    first = tl.where(window > 0, tl.maximum(seq_len - queries - window + 1, 0) // per_block, 0)
    first = tl.minimum(first, last)
    table = tables[0] + row * strides[0]
    out = tables[1] + row * strides[1]
    for start in range(0, width, COLUMNS):
        offs_n = start + tl.arange(0, COLUMNS)
        mask = offs_n < width
        # A column outside the row's own reads the nearest one inside.
        nearest = tl.minimum(tl.maximum(offs_n, first), last)
        page = tl.load(table + nearest, mask=mask, other=0)
        tl.store(out + offs_n, page, mask=mask)
