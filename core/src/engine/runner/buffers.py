"""The device's memory of slots, and the fixed buffers that a step reads.

Slots are indexed 0 .. max_num_seqs - 1; one more, the scratch slot, stands for padding rows: its tokens are 0 and its
blocks are the null page. A step's inputs are views of buffers that are allocated once, so that what was captured on
them can be replayed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from engine.interfaces.attention import AttentionBatch
from engine.interfaces.ops import StepInputs, StepTables
from engine.interfaces.platform import Platform
from engine.types.kv import NULL_PAGE, KVLayout
from engine.types.plan import StepPlan


class SlotTables:
    """Each slot's tokens and block tables, on the device.

    Args:
        platform: the worker's.
        layout: of the KV pool.
        max_num_seqs, max_model_len: the slots, and the tokens of one.
    """

    def __init__(self, platform: Platform, layout: KVLayout, max_num_seqs: int, max_model_len: int) -> None:
        self._platform = platform
        device, slots = platform.device, max_num_seqs + 1
        widths = [-(-max_model_len // group.tokens_per_block) for group in layout.groups]
        self.scratch_slot = max_num_seqs
        self.tables = StepTables(
            tokens=torch.zeros(slots, max_model_len + 1, dtype=torch.int32, device=device),
            blocks=tuple(torch.full((slots, width), NULL_PAGE, dtype=torch.int32, device=device) for width in widths),
            tokens_per_block=tuple(group.tokens_per_block for group in layout.groups),
        )

    def apply(self, plan: StepPlan) -> None:
        """Take in the requests and the pages that are new in this step."""
        for new in plan.new_slots:
            self._platform.to_device(host_tensor(new.token_ids), self.tables.tokens[new.slot, : len(new.token_ids)])
            for table in self.tables.blocks:
                table[new.slot] = NULL_PAGE
        for table, blocks in zip(self.tables.blocks, plan.new_blocks, strict=True):
            if len(blocks.slot):
                entries = torch.empty(3, len(blocks.slot), dtype=torch.int32, device=self._platform.device)
                self._platform.to_device(torch.from_numpy(np.stack([blocks.slot, blocks.index, blocks.page])), entries)
                table[entries[0].long(), entries[1].long()] = entries[2]


@dataclass(slots=True)
class Frame:
    """The inputs of steps with R rows and T tokens: views of the fixed buffers.

    Args:
        num_rows, num_tokens: R and T.
        inputs: for `Ops.prepare_inputs`.
        batches: one for each KV group, then for each that keeps nothing. Their host arrays change from step to step.
        query_start_loc_host, seq_lens_bound: these host arrays: numpy int32 [R + 1] and [R].
    """

    num_rows: int
    num_tokens: int
    inputs: StepInputs
    batches: tuple[AttentionBatch, ...]
    query_start_loc_host: np.ndarray
    seq_lens_bound: np.ndarray


class StepBuffers:
    """The fixed buffers of a step's inputs.

    Args:
        platform: the worker's.
        tables: the slots'.
        max_rows, max_tokens: padding included.
        num_uncached: groups of layers that keep nothing.
    """

    def __init__(
        self, platform: Platform, tables: SlotTables, max_rows: int, max_tokens: int, num_uncached: int = 0
    ) -> None:
        self._platform, self._scratch_slot = platform, tables.scratch_slot
        device = platform.device
        # slot_of_row, num_computed, seq_lens and query_start_loc travel in one copy a step.
        self._packed = torch.zeros(4, max_rows + 1, dtype=torch.int32, device=device)
        self._packed_host = torch.zeros(4, max_rows + 1, dtype=torch.int32)
        self._host = self._packed_host.numpy()
        self._counts = np.arange(max_rows + 1, dtype=np.int32)
        self._token_ids = torch.zeros(max_tokens, dtype=torch.int32, device=device)
        self._positions = torch.zeros(max_tokens, dtype=torch.int64, device=device)
        self._block_tables = tuple(
            torch.full((max_rows, table.shape[1]), NULL_PAGE, dtype=torch.int32, device=device)
            for table in tables.tables.blocks
        )
        self._slot_mappings = tuple(
            torch.zeros(max_tokens, dtype=torch.int64, device=device) for _ in tables.tables.blocks
        )
        # What stands in the place of block tables and slot mappings where there is no cache.
        self._uncached = (
            (torch.zeros((max_rows, 0), dtype=torch.int32, device=device), torch.zeros_like(self._positions)),
        ) * num_uncached

    def frame(self, num_rows: int, num_tokens: int) -> Frame:
        """Views for R rows and T tokens. All frames lie on the same memory: one step uses one of them."""
        inputs = StepInputs(
            slot_of_row=self._packed[0, :num_rows],
            num_computed=self._packed[1, :num_rows],
            query_start_loc=self._packed[3, : num_rows + 1],
            seq_lens=self._packed[2, :num_rows],
            token_ids=self._token_ids[:num_tokens],
            positions=self._positions[:num_tokens],
            block_tables=tuple(table[:num_rows] for table in self._block_tables),
            slot_mappings=tuple(mapping[:num_tokens] for mapping in self._slot_mappings),
        )
        query_start_loc, seq_lens_bound = self._host[3, : num_rows + 1], self._host[2, :num_rows]
        caches = [
            *zip(inputs.block_tables, inputs.slot_mappings, strict=True),
            *((table[:num_rows], mapping[:num_tokens]) for table, mapping in self._uncached),
        ]
        batches = tuple(
            AttentionBatch(
                num_rows=num_rows,
                num_tokens=num_tokens,
                num_decodes=0,
                query_start_loc=inputs.query_start_loc,
                query_start_loc_host=query_start_loc,
                seq_lens=inputs.seq_lens,
                seq_lens_bound=seq_lens_bound,
                block_table=block_table,
                slot_mapping=slot_mapping,
                kv_index=inputs.positions,  # queries are contiguous: a token's position is its key's place
            )
            for block_table, slot_mapping in caches
        )
        return Frame(num_rows, num_tokens, inputs, batches, query_start_loc, seq_lens_bound)

    def fill(self, frame: Frame, plan: StepPlan) -> None:
        """Write the plan's rows, and padding rows of one token each up to the frame's, and send them to the device."""
        rows, padded, host = plan.num_rows, frame.num_rows, self._host
        host[0, :rows] = plan.slot_of_row
        host[1, :rows] = plan.num_computed
        np.add(plan.num_computed, plan.num_tokens, out=host[2, :rows])
        if frame.num_tokens == padded:
            host[3, : padded + 1] = self._counts[: padded + 1]  # one token a row
        else:
            host[3, 0] = 0
            np.cumsum(plan.num_tokens, out=host[3, 1 : rows + 1])
        if padded > rows:
            host[0, rows:padded] = self._scratch_slot
            host[1, rows:padded] = 0
            host[2, rows:padded] = 1
            if frame.num_tokens != padded:
                host[3, rows + 1 : padded + 1] = host[3, rows] + self._counts[1 : padded - rows + 1]
        self._platform.to_device(self._packed_host, self._packed)
        num_decodes = plan.num_decodes + padded - rows
        for batch in frame.batches:
            batch.num_decodes = num_decodes


def host_tensor(array: np.ndarray) -> torch.Tensor:
    """A tensor on the array's memory; on a copy where the array came off the wire and is read-only."""
    return torch.from_numpy(array if array.flags.writeable else array.copy())
