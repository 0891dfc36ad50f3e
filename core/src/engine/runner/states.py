"""States of fixed size, as Mamba's layers keep them: where a step finds and leaves them in the pool.

A row goes on with the state in the page of the token before its first. It leaves one in the page of each block that it
ends, where prefixes are found, and one after its last token, where its next step looks. After drafts it leaves that
after the last draft that counts: until then those after each of them are kept beside the pool.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from engine.interfaces.attention import AttentionBatch, AttentionLayer, AttentionNeed, CaptureLevel
from engine.interfaces.model import StateBatch
from engine.interfaces.platform import Platform
from engine.runner.attention import AttentionLayers, LayerAttention
from engine.sampling.packed import send
from engine.types.kv import ALIGNMENT, KVGroup
from engine.types.model import KVSpec
from engine.types.plan import StepPlan


class StatePlan(NamedTuple):
    """A group's plan of a step.

    Args:
        batch: what layers see.
        drafted: int64 [3, d], device; of each row with drafts its place among the rows that draw, its first token's
            place among the states kept beside the pool, and its number of computed tokens. None where none has drafts.
        blocks: int32 [d, blocks]; their block tables.
    """

    batch: StateBatch
    drafted: torch.Tensor | None = None
    blocks: torch.Tensor | None = None


class StateBackend:
    """All states of a worker. Stands where attention's drivers do, for layers of kind "state".

    Args:
        platform: the worker's.
        specs: `WorkerStart.sites`.
        num_ranks: over which states are divided.

    Attributes:
        step: whose drafts the next plans are for; the runner sets it.
    """

    capture_level: CaptureLevel = "decode"

    def __init__(self, platform: Platform, specs: Sequence[KVSpec], num_ranks: int) -> None:
        self._platform = platform
        self._specs = specs
        self._num_ranks = num_ranks
        self._sites: list[LayerStates] = []
        self.step: StepPlan | None = None

    def site(self, attention: AttentionLayers, layer: int) -> LayerStates:
        """The states of the model's layer of this index. Raises ContractError for one of another stage."""
        given, site = attention.given(layer, 0.0, kind="state")
        attention.sites[site] = made = LayerStates(given, self, attention.plans)
        self._sites.append(made)
        return made

    def cache(self, need: AttentionNeed, group: KVGroup, pages: torch.Tensor) -> dict[str, torch.Tensor]:
        """A layer's states, [pages, *shape] each, in its bytes of each page: uint8 [pages, layer_bytes]."""
        found, start = {}, 0
        for state in self._specs[group.sites[0]].states:
            shape, dtype = list(state.shape), getattr(torch, state.dtype)
            if state.divided_dim is not None:
                shape[state.divided_dim] //= self._num_ranks
            end = start + math.prod(shape) * dtype.itemsize
            found[state.name] = pages[:, start:end].view(dtype).view(-1, *shape)
            start = -(-end // ALIGNMENT) * ALIGNMENT
        return found

    def restore(self, counts: torch.Tensor) -> None:
        """Put back the states after the last draws that count. counts: int32 [m], of each row that draws."""
        for site in self._sites:
            site.restore(counts)

    def plan(self, batch: AttentionBatch, group: KVGroup, earlier: StatePlan | None = None) -> StatePlan:
        """Where the step's rows find and leave their states. `earlier` is refilled: that of a captured decode step."""
        size, query_start_loc = group.tokens_per_block, batch.query_start_loc_host.astype(np.int64)
        ends, lengths = batch.seq_lens_bound.astype(np.int64), np.diff(query_start_loc)
        starts = ends - lengths
        before = np.where(starts > 0, (starts - 1) // size, -1)
        counts = (ends - 1) // size - starts // size + 1
        row = np.repeat(np.arange(batch.num_rows), counts)
        block = np.arange(row.size) - np.repeat(np.cumsum(counts) - counts - starts // size, counts)
        write_at = query_start_loc[row] + np.minimum((block + 1) * size, ends[row]) - 1 - starts[row]
        rows, drafted = np.empty(0, np.int64), np.empty((3, 0), np.int64)
        if self.step is not None and self.step.num_drafts is not None:
            rows = np.flatnonzero(self.step.num_drafts)
            of_draws = np.cumsum(self.step.samples)[rows] - 1
            drafted = np.stack([of_draws, np.cumsum(lengths[rows]) - lengths[rows], starts[rows]])
            kept = [np.arange(*query_start_loc[one : one + 2]) for one in rows.tolist()]
            write_at = np.concatenate([write_at, *kept])
        sent = send(self._platform, before, row, block, write_at, rows, drafted)
        table = batch.block_table
        page = table.gather(1, sent[0].clamp(min=0)[:, None])[:, 0].long()
        found = StateBatch(
            query_start_loc=batch.query_start_loc,
            query_start_loc_host=batch.query_start_loc_host,
            read=torch.where(sent[0] < 0, -1, page),
            write=table[sent[1], sent[2]].long(),
            write_at=sent[3],
            write_at_host=write_at,
        )
        if earlier is not None:
            earlier.batch.read.copy_(found.read)
            earlier.batch.write.copy_(found.write)
            return earlier
        return StatePlan(found, sent[5], table[sent[4]]) if rows.size else StatePlan(found)


class LayerStates(LayerAttention):
    """One layer's states. Implements `engine.interfaces.model.StateSite`."""

    __slots__ = ("_kept", "pool")

    def __init__(self, layer: AttentionLayer, backend: StateBackend, plans: list[Any]) -> None:
        super().__init__(layer, backend, plans)
        self._kept: dict[str, torch.Tensor] = {}
        self.pool: dict[str, torch.Tensor] = {}

    def bind(self, cache: dict[str, torch.Tensor]) -> None:
        """Give it its views of the pool."""
        self.pool = cache

    @property
    def batch(self) -> StateBatch:
        """The step's."""
        found: StateBatch = self._plans[self.layer.group.index].batch
        return found

    def load(self, name: str) -> torch.Tensor:
        """The states with which the step's rows begin, [R, *shape]: zeros where a sequence does."""
        read = self.batch.read
        states = self.pool[name].index_select(0, read.clamp(min=0))
        return states.masked_fill_((read < 0).view(-1, *[1] * (states.ndim - 1)), 0)

    def save(self, name: str, states: torch.Tensor) -> None:
        """Keep the states after the tokens `batch.write_at`, [m, *shape]."""
        pool, write = self.pool[name], self.batch.write
        pool.index_copy_(0, write, states[: len(write)].to(pool.dtype))
        self._kept[name] = states[len(write) :]

    def restore(self, counts: torch.Tensor) -> None:
        """See `StateBackend.restore`."""
        plan: StatePlan = self._plans[self.layer.group.index]
        if plan.drafted is None or plan.blocks is None:
            return
        place, first, computed = plan.drafted
        last = counts[place].long().clamp(min=1) - 1
        block = (computed + last) // self.layer.group.tokens_per_block
        page = plan.blocks.gather(1, block[:, None])[:, 0].long()
        for name, kept in self._kept.items():
            pool = self.pool[name]
            pool.index_copy_(0, page, kept.index_select(0, first + last).to(pool.dtype))
