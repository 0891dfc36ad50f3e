"""One step's reading plan for one KV group: which pages each row reads, and which of their tokens it sees."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch

from engine.interfaces.attention import AttentionBatch
from engine.types.kv import NULL_PAGE, KVGroup

MAX_GATHERED = 1 << 24
"""Most elements of K that one chunk of decode rows gathers: bounds the memory when one long row is among short ones."""


@dataclass(frozen=True, slots=True)
class DecodeChunk:
    """Consecutive decode rows that are computed together.

    Args:
        start, stop: rows, which are also tokens.
        pages: int32 [rows * num_blocks]; what to gather, row after row.
        num_blocks, num_keys: gathered for each row; keys past `num_keys` of the last block are dropped.
        hidden: bool [rows, num_keys], True where a gathered key is not seen; None where each row sees all of them.
        blind: bool [rows], True for a row that sees none of them; None where there is none.
        distance: int64 [rows, num_keys]; from each gathered key to the query.
    """

    start: int
    stop: int
    pages: torch.Tensor
    num_blocks: int
    num_keys: int
    hidden: torch.Tensor | None
    blind: torch.Tensor | None
    distance: torch.Tensor


@dataclass(frozen=True, slots=True)
class PrefillRow:
    """A row with any number of tokens.

    Args:
        start, stop: its tokens.
        table: int32 [num_blocks]; its pages, those that left the window included (they are not read).
        kv_index: int64 [stop - start].
        hidden: int64 [stop - start], see `engine.interfaces.attention.AttentionBatch`; None for none.
    """

    start: int
    stop: int
    table: torch.Tensor
    kv_index: torch.Tensor
    hidden: torch.Tensor | None


@dataclass(slots=True)
class TorchPlan:
    """What `TorchAttentionBody.plan` makes.

    Args:
        page, offset: int64 [T]; where each token's K and V are written.
        decodes, prefills: the rows, in order.
        num_tokens: of real rows; the tokens after it are padding.
        bounds: for layers without a cache: where each row begins, and where the last one ends. They need no more.
    """

    page: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    offset: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    decodes: list[DecodeChunk] = field(default_factory=list)
    prefills: list[PrefillRow] = field(default_factory=list)
    num_tokens: int = 0
    bounds: list[int] = field(default_factory=list)

    def fill(self, batch: AttentionBatch, group: KVGroup) -> None:
        """Work the plan out for this step."""
        if group.kind == "encoder":
            self.bounds = batch.query_start_loc_host[: batch.num_rows + 1].tolist()
            self.num_tokens = self.bounds[-1]
            return
        self.page = torch.div(batch.slot_mapping, group.tokens_per_block, rounding_mode="floor")
        self.offset = batch.slot_mapping - self.page * group.tokens_per_block
        self.num_tokens = int(batch.query_start_loc_host[batch.num_rows])
        self.decodes = _decode_chunks(batch, group)
        self.prefills = _prefill_rows(batch, group)


def _decode_chunks(batch: AttentionBatch, group: KVGroup) -> list[DecodeChunk]:
    """Cut the decode rows so that rows * longest row stays within `MAX_GATHERED`."""
    if not batch.num_decodes:
        return []
    size = group.tokens_per_block
    lengths = batch.seq_lens_bound[: batch.num_decodes]
    blocks = (lengths + size - 1) // size
    if group.sliding_window is not None:
        blocks = np.minimum(blocks, (group.sliding_window + size - 2) // size + 1)
    blocks = np.maximum(blocks, 1)  # a row without keys reads the null page, and sees nothing of it
    limit = max(1, MAX_GATHERED // (size * group.num_kv_heads * group.head_size))
    if int(blocks.max()) * batch.num_decodes <= limit:
        bounds = [0, batch.num_decodes]
    else:
        bounds, widest = [0], 0
        for row, width in enumerate(blocks.tolist()):
            widest = max(widest, width)
            if row > bounds[-1] and widest * (row + 1 - bounds[-1]) > limit:
                bounds.append(row)
                widest = width
        bounds.append(batch.num_decodes)
    return [_decode_chunk(batch, group, a, b, int(blocks[a:b].max())) for a, b in pairwise(bounds)]


def _decode_chunk(batch: AttentionBatch, group: KVGroup, start: int, stop: int, num_blocks: int) -> DecodeChunk:
    size, window = group.tokens_per_block, group.sliding_window
    table, last_key = batch.block_table[start:stop], batch.kv_index[start:stop].unsqueeze(1)
    num_keys = num_blocks * size
    first_block: torch.Tensor | None = None
    if window is None:
        num_keys = max(1, int(batch.seq_lens_bound[start:stop].max()))
        key = torch.arange(num_keys, device=table.device)
        hidden = key > last_key
    else:
        first_key = (last_key - (window - 1)).clamp_(min=0)
        first_block = torch.div(first_key, size, rounding_mode="floor")
        key = torch.arange(num_keys, device=table.device) + first_block * size
        hidden = (key > last_key) | (key < first_key)
    # Elsewhere than on the CPU asking would wait for the device.
    all_seen = hidden.device.type == "cpu" and not bool(hidden.any())
    blind = None if hidden.device.type == "cpu" and bool((last_key >= 0).all()) else last_key[:, 0] < 0
    if all_seen and first_block is None:
        pages = table[:, :num_blocks]
    else:
        # A row that is shorter than the longest one reads its own last page again: what lies in the table past its
        # blocks is not to be trusted, and what it reads twice is hidden.
        block = torch.arange(num_blocks, device=table.device)
        if first_block is not None:
            block = block + first_block
        block = torch.minimum(block, torch.div(last_key, size, rounding_mode="floor"))
        pages = table.gather(1, block.clamp_(min=0))
        if blind is not None:
            pages.masked_fill_(blind.unsqueeze(1), NULL_PAGE)
    return DecodeChunk(
        start,
        stop,
        pages.reshape(-1),
        num_blocks,
        num_keys,
        None if all_seen else hidden,
        blind,
        (last_key - key).abs(),
    )


def _prefill_rows(batch: AttentionBatch, group: KVGroup) -> list[PrefillRow]:
    rows = []
    bounds = batch.query_start_loc_host.tolist()
    for row in range(batch.num_decodes, batch.num_rows):
        start, stop = bounds[row], bounds[row + 1]
        num_blocks = -(-int(batch.seq_lens_bound[row]) // group.tokens_per_block)
        table = batch.block_table[row, :num_blocks]
        hidden = None if batch.hidden is None else batch.hidden[start:stop]
        rows.append(PrefillRow(start, stop, table, batch.kv_index[start:stop], hidden))
    return rows
