"""What the kernels read of a step: addresses in the batch's own memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from engine.interfaces.attention import AttentionBatch
from engine_cpu._native import PagedCache
from engine_cpu.dtypes import DTYPES

BLOCK = 16
"""Tokens of a block where there is no cache, and keys and values are laid out for one layer after the other."""


@dataclass(slots=True)
class CpuPlan:
    """What `CpuAttentionBody.plan` makes. Of addresses, and of what keeps them valid.

    Args:
        num_rows, num_tokens: R and T.
        query_start_loc, block_table, slot_mapping, kv_index, hidden: addresses; kv_index 0: each query sees its whole
            row; hidden 0: there are no trees.
        table_stride: int32 from one row of the table to the next.
        whole: of layers without a cache.
        kept: what lies at the addresses.
    """

    num_rows: int
    num_tokens: int
    query_start_loc: int
    block_table: int
    table_stride: int
    slot_mapping: int
    kv_index: int
    hidden: int
    whole: WholeRows | None
    kept: tuple[Any, ...]

    @classmethod
    def of(cls, batch: AttentionBatch, without_cache: bool) -> CpuPlan:
        """For batches of as many rows and tokens as this one."""
        whole = WholeRows(batch.num_rows, batch.num_tokens) if without_cache else None
        return cls(batch.num_rows, batch.num_tokens, 0, 0, 0, 0, 0, 0, whole, ())

    def fill(self, batch: AttentionBatch) -> None:
        """Take the batch's addresses, which are those of the last one where it lies in the same memory."""
        whole = self.whole
        table, slots = (batch.block_table, batch.slot_mapping) if whole is None else (whole.table, whole.slots)
        self.query_start_loc = batch.query_start_loc.data_ptr()
        self.block_table = table.data_ptr()
        self.table_stride = table.stride(0)
        self.slot_mapping = slots.data_ptr()
        self.kv_index = batch.kv_index.data_ptr() if whole is None else 0
        self.hidden = 0 if batch.hidden is None else batch.hidden.data_ptr()
        self.kept = (batch.query_start_loc, table, slots, batch.kv_index, batch.hidden)
        if whole is not None:
            whole.fill(batch)


class WholeRows:
    """Blocks for a step's keys and values of one layer, for rows that are whole. Every row begins with a new block.

    Args:
        num_rows, num_tokens: R and T.

    Attributes:
        slots: int64 [T]; table: int32 [R, max_blocks].
    """

    def __init__(self, num_rows: int, num_tokens: int) -> None:
        self._most_blocks = num_tokens // BLOCK + num_rows + 1  # the last is for padding
        self.slots = torch.empty(num_tokens, dtype=torch.int64)
        self.table = torch.zeros(num_rows, -(-num_tokens // BLOCK) or 1, dtype=torch.int32)
        self._pages: torch.Tensor | None = None
        self._cache: PagedCache | None = None

    def fill(self, batch: AttentionBatch) -> None:
        """Give out the blocks."""
        bounds = batch.query_start_loc_host[: batch.num_rows + 1].astype(np.int64)
        counts = np.diff(bounds)
        blocks = -(-counts // BLOCK)
        first = np.cumsum(blocks) - blocks
        slots, table = self.slots.numpy(), self.table.numpy()
        np.add(first[:, None], np.arange(table.shape[1]), out=table, casting="unsafe")
        slots[: bounds[-1]] = np.repeat(first * BLOCK - bounds[:-1], counts) + np.arange(bounds[-1])
        slots[bounds[-1] :] = (self._most_blocks - 1) * BLOCK

    def cache(self, k: torch.Tensor) -> PagedCache:
        """The blocks in the form of k [T, num_kv_heads, head_size]; the same memory for all layers."""
        _, heads, size = k.shape
        if self._cache is None or self._pages is None or self._pages.shape[1:] != (heads, 2, BLOCK * size):
            self._pages = torch.empty(self._most_blocks, heads, 2, BLOCK * size, dtype=k.dtype)
            self._cache = PagedCache(
                DTYPES[k.dtype], self._pages.data_ptr(), self._pages.stride(0) * k.itemsize, heads, size, BLOCK
            )
        return self._cache
