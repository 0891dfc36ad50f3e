"""One step's plan: FlashInfer's own, made on the host by bounds, and the lengths and tables that its kernels read.

FlashInfer plans on the host: it divides rows over the GPU by their lengths. Exact lengths are known on the device alone
while steps are in flight, so it is given bounds. That is exact nevertheless: a kernel (of the backend "fa2") reads the
row's length from the device when it runs, and a piece that begins after the row's end is empty and weighs nothing. What
FlashInfer sends to the device as lengths is overwritten there with the exact ones.

That holds for rows of one query. Where a row has several, partial results lie one after the other, query by query: the
kernel counts a query's pieces by the exact length, what puts them together by the bound (`num_kv_chunks` in
`prefill.cuh`, `merge_indptr` in `scheduler.cuh`). So such rows are divided only where bounds are known to be exact.

The block table serves as the list of page indices as it is, row after row: row r's pages begin at r * max_blocks. A row
has max_blocks pages then, and a last page of fewer tokens than none: length = (max_blocks - 1) * page_size + last,
which the kernels compute modulo 2^32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from engine.interfaces.attention import AttentionBatch, AttentionNeed
from engine.types.errors import ConfigError
from engine.types.kv import KVGroup
from engine_flashinfer.wrappers import Wrappers

MOST_PLACES = 1 << 32
"""Places in a step's block table, which kernels count in 32 bits."""
MOST_DIVIDED = 512
"""Tokens of a step above which rows of equally many queries are not divided: there are tiles enough, and partial
results of all of them would take more memory than they are worth."""


@dataclass(frozen=True, kw_only=True)
class Form:
    """What all layers of a group share."""

    need: AttentionNeed
    group: KVGroup

    @property
    def window_left(self) -> int:
        """Keys before its own that a query sees; -1 for all."""
        return -1 if self.group.sliding_window is None else self.group.sliding_window - 1


@dataclass(slots=True)
class FlashInferPlan:
    """What `FlashInferBody.plan` makes.

    Args:
        wrapper: FlashInfer's, which has planned.
        form: the group's.
        num_tokens: of real rows; what comes after them is padding.
        row_tokens: the number of queries of every row; None where rows differ.
        planned: once is enough: nothing of the plan follows from lengths.
        slot_mapping: int64 [T]; where each token's K and V are written. The batch's own.
        row_start: int32 [R + 1]; where each row's pages begin among the indices.
        last_page_len: int32 [R]; see above.
        query_start_loc, indices: the batch's own.
    """

    wrapper: Any
    form: Form
    num_tokens: int
    row_tokens: int | None
    planned: bool
    slot_mapping: torch.Tensor
    row_start: torch.Tensor
    last_page_len: torch.Tensor
    query_start_loc: torch.Tensor
    indices: torch.Tensor

    @classmethod
    def of(cls, batch: AttentionBatch, form: Form, wrappers: Wrappers) -> FlashInferPlan:
        """For a step of R rows and T tokens. Raises ConfigError where rows are too many and may be too long."""
        rows, longest = len(batch.block_table), batch.block_table.shape[1] * form.group.tokens_per_block
        if rows * longest >= MOST_PLACES:
            raise ConfigError(
                "attention flashinfer",
                f"{rows} rows of up to {longest} tokens are more than its kernels can count",
                "lower --max-num-seqs or --max-model-len, or choose another attention driver",
            )
        device = batch.block_table.device
        counts = np.diff(batch.query_start_loc_host[: batch.num_rows + 1])
        row_tokens = int(counts[0]) if int(counts.min()) == int(counts.max()) else None
        row_start = torch.empty(rows + 1, dtype=torch.int32, device=device)
        last_page_len = torch.empty(rows, dtype=torch.int32, device=device)
        query_start_loc = batch.query_start_loc
        indices = batch.block_table.reshape(-1)
        assert indices.data_ptr() == batch.block_table.data_ptr(), "the block table's rows are not one after another"
        divided = row_tokens is not None and rows * row_tokens <= MOST_DIVIDED and _may_divide(batch, row_tokens)
        wrapper = (
            wrappers.fixed(torch.empty_like(query_start_loc), row_start, indices, last_page_len)
            if divided
            else wrappers.free()
        )
        plan = cls(
            wrapper=wrapper,
            form=form,
            num_tokens=0,
            row_tokens=row_tokens,
            planned=False,
            slot_mapping=batch.slot_mapping,
            row_start=row_start,
            last_page_len=last_page_len,
            query_start_loc=query_start_loc,
            indices=indices,
        )
        plan.fill(batch, wrappers)
        return plan

    def fill(self, batch: AttentionBatch, wrappers: Wrappers) -> None:
        """Work it out for this step, which has as many rows and tokens as the first one."""
        page_size = self.form.group.tokens_per_block
        self.num_tokens = int(batch.query_start_loc_host[batch.num_rows])
        fixed = wrappers.is_fixed(self.wrapper)
        may_divide = _may_divide(batch, self.row_tokens)
        assert may_divide or not fixed, "this plan was made for steps whose lengths the host knows"
        if fixed or not (self.planned and self.row_tokens is not None):
            self._plan_on_host(batch, wrappers, divided=fixed or (self.row_tokens is None and may_divide))
            self.planned = True
        # What the kernels read, behind the copies that FlashInfer has queued.
        width = batch.block_table.shape[1]
        torch.arange(0, (batch.num_rows + 1) * width, width, dtype=torch.int32, out=self.row_start)
        torch.sub(batch.seq_lens, (width - 1) * page_size, out=self.last_page_len)
        if not fixed:
            wrappers.point(self.wrapper, self.query_start_loc, self.row_start, self.indices, self.last_page_len)

    def _plan_on_host(self, batch: AttentionBatch, wrappers: Wrappers, divided: bool) -> None:
        page_size, need = self.form.group.tokens_per_block, self.form.need
        bounds = np.maximum(batch.seq_lens_bound[: batch.num_rows], 1).astype(np.int32)
        pages = -(-bounds // page_size)
        starts = np.zeros(batch.num_rows + 1, np.int32)
        np.cumsum(pages, out=starts[1:])
        queries = torch.from_numpy(batch.query_start_loc_host[: batch.num_rows + 1].astype(np.int32))
        wrappers.plan(
            self.wrapper,
            queries,
            torch.from_numpy(starts),
            self.indices[:0],
            torch.from_numpy(bounds - (pages - 1) * page_size),
            need.num_q_heads,
            need.num_kv_heads,
            need.head_size,
            page_size,
            causal=True,
            window_left=self.form.window_left,
            logits_soft_cap=need.soft_cap or 0.0,
            q_data_type=getattr(torch, need.dtype),
            kv_data_type=getattr(torch, need.kv_dtype),
            disable_split_kv=not divided,
            uniform_q_len=self.row_tokens if wrappers.is_fixed(self.wrapper) else None,
        )


def _may_divide(batch: AttentionBatch, row_tokens: int | None) -> bool:
    """Whether pieces of rows come together rightly."""
    return row_tokens == 1 or batch.bounds_are_exact
