"""The device's memory of slots, and the fixed buffers that a step reads.

Slots are indexed 0 .. max_num_seqs - 1; one more, the scratch slot, stands for padding rows: its first token is 0,
and its blocks are the null page. A step's inputs are views of buffers that are allocated once, so that what was
captured on them can be replayed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from engine.interfaces.attention import AttentionBatch
from engine.interfaces.ops import StepInputs, StepTables
from engine.interfaces.platform import Platform
from engine.sampling.packed import send
from engine.types.kv import NULL_PAGE, KVGroup, KVLayout
from engine.types.plan import KnownTokens, NewBlocks, PageCopies, StepPlan

_HEADER = 4
"""int32 arrays of a step's rows."""
_PER_TOKEN = 8
"""int32 words that travel for each token, at most: where it draws, which it is and its two places; or that it is
padding; int64 each."""
_FILLING = 16
"""int32 words that alignment adds, at most."""
_PER_ROW = 20
"""int32 words of new pages that travel with a step's rows; where there are more, they go before it."""


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
        widths = [-(-max_model_len // table.tokens_per_block) for table in layout.tables]
        self.scratch_slot = max_num_seqs
        self.tables = StepTables(
            tokens=torch.zeros(slots, max_model_len + 1, dtype=torch.int32, device=device),
            blocks=tuple(torch.full((slots, width), NULL_PAGE, dtype=torch.int32, device=device) for width in widths),
            tokens_per_block=tuple(table.tokens_per_block for table in layout.tables),
        )

    def enter(self, plan: StepPlan) -> None:
        """Take in the requests that are new in this step."""
        for new in plan.new_slots:
            ids = new.token_ids
            host = torch.from_numpy(ids if ids.flags.writeable else ids.copy())  # off the wire it is read-only
            self._platform.to_device(host, self.tables.tokens[new.slot, : len(ids)])
            for table in self.tables.blocks:
                table[new.slot] = NULL_PAGE

    def take_known(self, known: KnownTokens) -> None:
        """Write tokens that another worker drew."""
        slot, position, token = send(
            self._platform, known.slot.astype(np.int64), known.position.astype(np.int64), known.token
        )
        self.tables.tokens[slot, position] = token

    @staticmethod
    def entries(blocks: Sequence[NewBlocks]) -> list[np.ndarray]:
        """What `place` takes, in parts: of each KV table the slots and indices, int64, and the pages, an even number.
        As torch takes them: on the device nothing is converted."""
        places = [np.concatenate([new.slot, new.index]).astype(np.int64).view(np.int32) for new in blocks]
        pages = [np.append(new.page, new.page[: len(new.page) % 2]) for new in blocks]
        return [array for of_table in zip(places, pages, strict=True) for array in of_table if len(array)]

    @staticmethod
    def news(blocks: Sequence[NewBlocks]) -> np.ndarray:
        """What a whole step reads in their place: int32, see `engine.interfaces.step.WholeSteps`."""
        listed = np.zeros((1 + sum(len(new.slot) for new in blocks), 4), np.int32)
        listed[0, 0], end = len(listed) - 1, 1
        for table, new in enumerate(blocks):
            start, end = end, end + len(new.slot)
            if end > start:
                listed[start:end] = np.stack(np.broadcast_arrays(table, new.slot, new.index, new.page), axis=1)
        return listed.reshape(-1)

    def place(self, entries: torch.Tensor, counts: Sequence[int]) -> None:
        """Write new pages into the block tables. entries: int32, on the device; counts: pages of each table."""
        for table, count in zip(self.tables.blocks, counts, strict=True):
            if count:
                slot, index = entries[: 4 * count].view(torch.int64).view(2, count)
                table[slot, index] = entries[4 * count : 5 * count]
                entries = entries[5 * count + count % 2 :]


@dataclass(slots=True)
class StepInputBuffers:
    """The inputs of steps with R rows and T tokens: views of the fixed buffers.

    Args:
        num_rows, num_tokens: R and T.
        tokens_per_row: where all rows have the same number, those after a row's own tokens being padding; else 0.
        inputs: for `Ops.prepare_inputs`.
        kv_index: int64 [T]; the batches'. The positions themselves where no tokens pad rows, and no drafts branch.
        batches: one for each KV group; groups of one table have the same. Their host arrays change from step to step.
        header_host: int32 numpy [4, R + 1 or more]: slot_of_row, num_computed, seq_lens and query_start_loc as they go.
        select: int64 [T], or [R] of rows of any numbers; which tokens draw, as a captured step reads them; else None.
        news: int32, device; where that begins which travels behind all this.
    """

    num_rows: int
    num_tokens: int
    tokens_per_row: int
    inputs: StepInputs
    kv_index: torch.Tensor
    batches: tuple[AttentionBatch, ...]
    header_host: np.ndarray
    select: torch.Tensor | None
    news: torch.Tensor


@dataclass(slots=True)
class Sent:
    """What of a step's host arrays is on the device, besides its frame.

    Args:
        places: int64 [2, n]; see `engine.sampling.sampler.SampledRows`.
        select: int64 [n]; None where all tokens draw.
        padding: int64; the tokens that pad rows; empty for none.
        blocks: int32; see `SlotTables.place`.
    """

    places: torch.Tensor | None
    select: torch.Tensor | None
    padding: torch.Tensor
    blocks: torch.Tensor


class StepBuffers:
    """The fixed buffers of a step's inputs. All that a step sends travels in one copy, of no more than it needs.

    Args:
        platform: the worker's.
        tables: the slots'.
        groups: of attention.
        max_rows, max_tokens: padding included.
        share: (rank, size) among those that share sequences: token p's key lies on rank p % size, at place p // size.

    Attributes:
        hidden: int64 [max_tokens], of the batches of several tokens a row; None where no drafts branch.
    """

    def __init__(
        self,
        platform: Platform,
        tables: SlotTables,
        groups: Sequence[KVGroup],
        max_rows: int,
        max_tokens: int,
        share: tuple[int, int] = (0, 1),
    ) -> None:
        self._share = share
        self._bounds = np.zeros(max_rows, np.int32)
        self._platform = platform
        self._groups = groups
        self._scratch_slot = tables.scratch_slot
        device = platform.device
        room = _HEADER * _aligned(max_rows + 1) + _PER_TOKEN * max_tokens + _PER_ROW * max_rows + _FILLING
        self._packed = torch.zeros(room, dtype=torch.int32, device=device)
        self._packed_host = torch.zeros(room, dtype=torch.int32)
        self._host = self._packed_host.numpy()
        self._counts = np.arange(max_rows + 1, dtype=np.int32)
        self._token_ids = torch.zeros(max_tokens, dtype=torch.int32, device=device)
        self._positions = torch.zeros(max_tokens, dtype=torch.int64, device=device)
        self._kv_index = torch.zeros_like(self._positions)
        self.hidden: torch.Tensor | None = None
        self._block_tables = tuple(
            torch.full((max_rows, table.shape[1]), NULL_PAGE, dtype=torch.int32, device=device)
            for table in tables.tables.blocks
        )
        self._slot_mappings = tuple(
            torch.zeros(max_tokens, dtype=torch.int64, device=device) for _ in tables.tables.blocks
        )
        # What stands in the place of block tables and slot mappings where there is no cache.
        self._uncached = torch.zeros((max_rows, 0), dtype=torch.int32, device=device), torch.zeros_like(self._positions)

    def frame(
        self, num_rows: int, num_tokens: int, tokens_per_row: int = 0, *, any_rows: bool = False
    ) -> StepInputBuffers:
        """Views for R rows and T tokens; `any_rows`: of a captured step. All frames lie on the same memory: one step
        uses one of them."""
        row = _aligned(num_rows + 1)
        end = _HEADER * row
        slot_of_row, num_computed, seq_lens, query_start_loc = self._packed[:end].view(_HEADER, row)
        header_host = self._host[:end].reshape(_HEADER, row)
        inputs = StepInputs(
            slot_of_row=slot_of_row[:num_rows],
            num_computed=num_computed[:num_rows],
            query_start_loc=query_start_loc[: num_rows + 1],
            seq_lens=seq_lens[:num_rows],
            token_ids=self._token_ids[:num_tokens],
            positions=self._positions[:num_tokens],
            block_tables=tuple(table[:num_rows] for table in self._block_tables),
            slot_mappings=tuple(mapping[:num_tokens] for mapping in self._slot_mappings),
        )
        # Queries are contiguous: a token's position is its key's place, but in trees and where ranks share sequences.
        # Those that pad a row have none.
        whole = self._share[1] == 1
        hidden = None if self.hidden is None or tokens_per_row == 1 else self.hidden[:num_tokens]
        kv_index = inputs.positions if tokens_per_row < 2 and hidden is None and whole else self._kv_index[:num_tokens]
        seq_lens_bound = header_host[2, :num_rows] if whole else self._bounds[:num_rows]
        caches: dict[int | None, tuple[torch.Tensor, torch.Tensor]] = dict(
            enumerate(zip(inputs.block_tables, inputs.slot_mappings, strict=True))
        )
        caches[None] = self._uncached[0][:num_rows], self._uncached[1][:num_tokens]
        of_table = {
            table: AttentionBatch(
                num_rows=num_rows,
                num_tokens=num_tokens,
                num_decodes=0,
                query_start_loc=inputs.query_start_loc,
                query_start_loc_host=header_host[3, : num_rows + 1],
                seq_lens=inputs.seq_lens,
                seq_lens_bound=seq_lens_bound,
                block_table=block_table,
                slot_mapping=slot_mapping,
                kv_index=kv_index,
                hidden=hidden,
                bounds_are_exact=True,  # both are sent from here
                any_rows=any_rows,
            )
            for table, (block_table, slot_mapping) in caches.items()
        }
        draws = num_tokens if tokens_per_row > 1 else num_rows if any_rows else 0
        select = self._int64(self._packed, end, draws) if draws else None
        return StepInputBuffers(
            num_rows,
            num_tokens,
            tokens_per_row,
            inputs,
            kv_index,
            tuple(of_table[group.table] for group in self._groups),
            header_host,
            select,
            self._packed[end + _aligned(2 * draws) :],
        )

    def fill(
        self,
        frame: StepInputBuffers,
        plan: StepPlan,
        blocks: Sequence[np.ndarray] = (),
        places: np.ndarray | None = None,
        select: np.ndarray | None = None,
        padding: np.ndarray | None = None,
    ) -> Sent:
        """Write the plan's rows, and padding rows up to the frame's, and send them to the device with what else the
        step sends: see `Sent`; `blocks` one after the other. The answer's tensors are the next step's memory too."""
        self._fill_header(frame, plan)
        end = frame.header_host.size
        chosen: torch.Tensor | None = None
        if select is not None:
            # A captured step reads it where its frame says; what is padding there draws at token 0.
            size = len(select) if frame.select is None else len(frame.select)
            self._int64(self._host, end, size)[: len(select)] = select
            self._int64(self._host, end, size)[len(select) :] = 0
            chosen = self._int64(self._packed, end, size)
            end += _aligned(2 * size)
        padded = end
        if padding is not None:
            self._int64(self._host, end, len(padding))[:] = padding
            end += _aligned(2 * len(padding))
        hidden = self._int64(self._packed, padded, 0 if padding is None else len(padding))
        at = end
        if places is not None:
            half = _aligned(2 * places.shape[1])
            for row, of_row in enumerate(places):
                self._int64(self._host, at + row * half, len(of_row))[:] = of_row
            end += 2 * half
        first = end
        for array in blocks:
            self._host[end : end + len(array)] = array
            end += len(array)
        self._platform.to_device(self._packed_host[:end], self._packed[:end])
        if places is None:
            return Sent(None, chosen, hidden, self._packed[first:end])
        both = self._packed[at:first].view(torch.int64).view(2, -1)[:, : places.shape[1]]
        return Sent(both, chosen, hidden, self._packed[first:end])

    @staticmethod
    def _int64(packed: Any, start: int, size: int) -> Any:
        """So many numbers of 64 bits, from this word of an array or a tensor of int32."""
        return packed[start : start + 2 * size].view(np.int64 if isinstance(packed, np.ndarray) else torch.int64)

    def place_keys(self, frame: StepInputBuffers) -> None:
        """Behind `Ops.prepare_inputs`: where queries stand among their rows' keys, and of shared sequences which keys
        are here, and where: what goes to other ranks goes to the null page."""
        inputs, (rank, size) = frame.inputs, self._share
        if frame.kv_index is not inputs.positions:
            frame.kv_index.copy_(inputs.positions)
        if size > 1:
            frame.kv_index.sub_(rank).div_(size, rounding_mode="floor")
            inputs.seq_lens.add_(size - 1 - rank).div_(size, rounding_mode="floor")
            for slots in inputs.slot_mappings:  # a block's page has the same number on all ranks
                slots.masked_fill_(slots % size != rank, NULL_PAGE).div_(size, rounding_mode="floor")

    def room_for(self, num_blocks: int) -> bool:
        """Whether `fill` takes so many new pages, all tables' together."""
        return 6 * num_blocks <= _PER_ROW * (len(self._counts) - 1)

    def _fill_header(self, frame: StepInputBuffers, plan: StepPlan) -> None:
        rows, padded, host, each = plan.num_rows, frame.num_rows, frame.header_host, frame.tokens_per_row
        host[0, :rows] = plan.slot_of_row
        host[1, :rows] = plan.num_computed
        np.add(plan.num_computed, each or plan.num_tokens, out=host[2, :rows])
        if each:
            np.multiply(self._counts[: padded + 1], each, out=host[3, : padded + 1])
        else:
            host[3, 0] = 0
            np.cumsum(plan.num_tokens, out=host[3, 1 : rows + 1])
            host[3, rows + 1 : padded + 1] = host[3, rows]
        if padded > rows:
            host[0, rows:padded] = self._scratch_slot
            host[1, rows:padded] = 0
            host[2, rows:padded] = each
        if (size := self._share[1]) > 1:
            np.floor_divide(host[2, :padded] + (size - 1 - self._share[0]), size, out=self._bounds[:padded])
        num_decodes = padded if each == 1 else plan.num_decodes if not each else 0
        for batch in frame.batches:
            batch.num_decodes = num_decodes


def copy_pages(platform: Platform, pool: torch.Tensor, copies: PageCopies) -> None:
    """Copy whole pages of the pool, uint8 [num_pages, page_bytes], in order with the work queued before and after."""
    host = torch.from_numpy(np.stack([copies.source, copies.destination]).astype(np.int64))
    places = torch.empty(host.shape, dtype=host.dtype, device=pool.device)
    platform.to_device(host, places)
    source, destination = places
    pool.index_copy_(0, destination, pool.index_select(0, source))


def _aligned(count: int) -> int:
    """int32 words of `count` and what fills them up to 16 bytes: kernels are compiled for pointers of that alignment
    and for others, and each step would have some of either."""
    return -(-count // 4) * 4
