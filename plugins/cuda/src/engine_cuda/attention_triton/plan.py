"""What the kernels read of a step of one KV group: the batch's own buffers, and the table of items made of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton

from engine.interfaces.attention import AttentionBatch
from engine.types.kv import KVGroup
from engine_cuda.attention_triton.items import AT_ONCE, FIELDS, ROWS, plan_kernel
from engine_cuda.attention_triton.tiles import Tiles


@dataclass(frozen=True, slots=True)
class WorkList:
    """The items of one launch of the attention kernel.

    Args:
        is_long: rows of more tokens than a short unit has; else those of up to so many.
        tiles: of the kernel.
        queries: of a unit, at most.
        wave: items that run at once; 0: keys are not divided.
        bound: items that there is room for, and programs of each head.
        items: int32 [bound, FIELDS].
    """

    is_long: bool
    tiles: Tiles
    queries: int
    wave: int
    bound: int
    items: torch.Tensor

    @property
    def slots(self) -> int:
        """Partial results that there is room for: as many as a plan can have chunks of divided units."""
        return max(1, 2 * self.wave)


@dataclass(frozen=True, slots=True)
class Division:
    """How a group's steps are divided.

    Args:
        short, long: tiles for rows of few tokens, and of many.
        group_size: query heads of a KV head, as far as it is known: more or fewer are slower, not wrong.
        wave_short, wave_long: items that run at once; 0: keys are not divided.
    """

    short: Tiles
    long: Tiles
    group_size: int
    wave_short: int
    wave_long: int

    def queries(self, one_each: bool) -> tuple[int, int]:
        """Queries of a short unit and of a long one. Short extends of up to 8 tokens, drafts for instance, cost what a
        decode does: their keys are read once for all of them."""
        tiles, short = self.short, 1
        if not one_each:
            short = max(1, tiles.rows // self.group_size, min(8, tiles.most_rows // self.group_size))
        return short, max(short, self.long.rows // self.group_size)


class TritonPlan:
    """One step of one group. See `engine.interfaces.attention.AttentionBackend.plan`.

    Which kernels a plan launches follows from the tokens of its rows, as the host knows them: short rows, long ones, or
    both, as always where the plan is kept for any rows. How large the grids are follows from the number of rows and
    tokens.

    Attributes:
        batch: whose buffers are read.
        lists: one for each launch.
        one_each: every row has one token.
    """

    __slots__ = ("_division", "_items", "_queries", "_window", "batch", "cached", "lists", "one_each")

    def __init__(self, batch: AttentionBatch, group: KVGroup, division: Division) -> None:
        rows, tokens = batch.num_rows, batch.num_tokens
        self.cached = group.kind != "encoder"
        self.one_each = rows == tokens and not batch.any_rows
        self._division = division
        self._window = group.sliding_window or 0
        self._queries = short, long = division.queries(self.one_each)
        # A virtual row of padding tokens comes last.
        bound_short = rows + 1 + division.wave_short
        bound_long = tokens // long + min(rows + 1, tokens // (short + 1)) + division.wave_long
        has_short, has_long = self._kinds(batch)
        self._items = torch.empty(
            (bound_short * has_short + bound_long * has_long, FIELDS), dtype=torch.int32, device=batch.seq_lens.device
        )
        first = bound_short * has_short
        lists = []
        if has_short:
            lists.append(WorkList(False, division.short, short, division.wave_short, bound_short, self._items[:first]))
        if has_long:
            lists.append(WorkList(True, division.long, long, division.wave_long, bound_long, self._items[first:]))
        self.lists = tuple(lists)

    def _kinds(self, batch: AttentionBatch) -> tuple[bool, bool]:
        """Whether there are short rows, and long ones; padding tokens are a row too. Both where a captured step's rows
        are others from step to step."""
        if batch.any_rows or self.one_each:
            return True, not self.one_each
        bounds = batch.query_start_loc_host[: batch.num_rows + 1]
        counts = np.append(np.diff(bounds), batch.num_tokens - bounds[-1])
        is_long = counts > self._queries[0]
        return bool((counts[~is_long] > 0).any()), bool(is_long.any())

    def fill(self, batch: AttentionBatch) -> None:
        """Divide the step's work, on the device."""
        has_short, has_long = self._kinds(batch)
        for wanted, is_long in ((has_short, False), (has_long, True)):
            assert not wanted or any(work.is_long == is_long for work in self.lists), (
                "this plan was made for a step whose rows have other numbers of tokens, and not for any_rows"
            )
        self.batch = batch
        if not self.lists:
            return
        bounds = {work.is_long: work.bound for work in self.lists}
        division = self._division
        short, long = division.short, division.long
        plan_kernel[(batch.num_rows + 2, len(self.lists))](
            self._items,
            (batch.query_start_loc, batch.seq_lens, batch.kv_index, batch.hidden),
            batch.num_rows,
            batch.num_tokens,
            self._window,
            int(self.lists[0].is_long),
            self._queries,
            (short.keys, long.keys),
            (short.least, long.least),
            (short.most, long.most),
            (division.wave_short, division.wave_long),
            bounds.get(False, 0),
            bounds.get(True, 0),
            CACHED=self.cached,
            ONE=self.one_each,
            TREE=self.cached and batch.hidden is not None,
            BQ=triton.next_power_of_2(max(work.queries for work in self.lists)),
            ROWS=ROWS,
            AT_ONCE=AT_ONCE,
            FIELDS=FIELDS,
            num_warps=4,
        )
