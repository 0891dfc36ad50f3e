"""One step's plan: what the libraries read, in buffers that stay where they are."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from engine.interfaces.attention import AttentionBatch
from engine.types.kv import KVGroup
from engine_flashattn.own_pages import name_own_pages


@dataclass(slots=True)
class FlashPlan:
    """What `FlashAttentionBody.plan` makes. Tensors of the batch are named, not copied: they stay where they are.

    Args:
        num_rows: R.
        num_tokens: of real rows; what comes after them is padding. Of a step that is captured with any rows T.
        row_tokens: the number of queries that every row has; None where rows differ.
        max_query_len: of the longest row; of a step that is captured with any rows T.
        max_seq_len: keys that a row can ever have: what its columns of the block table hold. It is what captured
            launches are told, so that they stay right for longer rows.
        query_start_loc: int32 [R + 1].
        seq_lens: int32 [R].
        key_start_loc: int32 [R + 1]; where each row's keys would begin, were they packed. Only where rows differ.
        block_table: int32 [R, max_blocks].
        slot_mapping, kv_index: int64 [T].
        tokens: int32 [T, 1, 1], ascending. padding: bool [T, 1, 1]; which of them come after the last row. Both of a
            step that is captured with any rows; None of others, where the host knows.
        first: the layer whose attention comes first in a pass; None before any came.
        schedule: what that layer's call left for those after it; the library's own.
    """

    num_rows: int
    num_tokens: int
    row_tokens: int | None
    max_query_len: int
    max_seq_len: int
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    key_start_loc: torch.Tensor | None
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    kv_index: torch.Tensor
    tokens: torch.Tensor | None = None
    padding: torch.Tensor | None = None
    first: int | None = None
    schedule: torch.Tensor | None = None

    @classmethod
    def of(cls, batch: AttentionBatch, group: KVGroup, own_pages: bool) -> FlashPlan:
        """own_pages: the table must name no page that is not the row's."""
        table = batch.block_table
        plan = cls(
            num_rows=batch.num_rows,
            num_tokens=0,
            row_tokens=None,
            max_query_len=0,
            max_seq_len=table.shape[1] * group.tokens_per_block,
            query_start_loc=batch.query_start_loc,
            seq_lens=batch.seq_lens,
            key_start_loc=None,
            block_table=torch.empty_like(table) if own_pages and table.numel() else table,
            slot_mapping=batch.slot_mapping,
            kv_index=batch.kv_index,
        )
        plan.fill(batch, group)
        return plan

    def fill(self, batch: AttentionBatch, group: KVGroup) -> None:
        """Work it out for this step, which has as many rows and tokens as the first one."""
        if batch.any_rows:
            self.num_tokens = self.max_query_len = batch.num_tokens
            if self.tokens is None or self.padding is None:
                device = batch.query_start_loc.device
                self.tokens = torch.arange(batch.num_tokens, dtype=torch.int32, device=device).view(-1, 1, 1)
                self.padding = torch.empty_like(self.tokens, dtype=torch.bool)
            torch.ge(self.tokens, batch.query_start_loc[-1], out=self.padding)
        else:
            bounds = batch.query_start_loc_host[: self.num_rows + 1]
            counts = np.diff(bounds)
            self.num_tokens = int(bounds[-1])
            self.max_query_len = int(counts.max())
            self.row_tokens = self.max_query_len if int(counts.min()) == self.max_query_len else None
        if group.kind == "encoder":
            return
        if self.block_table is not batch.block_table:
            name_own_pages(batch, group, self.block_table)
        if self.row_tokens is None:
            if self.key_start_loc is None:
                self.key_start_loc = torch.zeros(self.num_rows + 1, dtype=torch.int32, device=batch.seq_lens.device)
            torch.cumsum(batch.seq_lens, 0, dtype=torch.int32, out=self.key_start_loc[1:])
