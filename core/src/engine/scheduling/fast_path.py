"""The decode fast path: while nobody comes or goes, a step is the one before, one token further on.

A few requests that decode on their own make most of the steps of a small model, and a step of a small model is so short
that choosing rows, pages and full blocks anew for it is felt. Between two events (somebody enters or leaves a slot, a
row needs a page, fills a block of the prefix cache, draws a stop token or reaches its limit) nothing of that changes,
and both halves of a step are a few array operations. How many steps there are before the next event is counted ahead,
so that none is looked for; for whatever is not certain the scheduler's own way is taken, which gives the same.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from engine.kv.manager import KVManager
from engine.scheduling.slots import SlotTable
from engine.types.outputs import CoreOutput
from engine.types.plan import NewBlocks, StepPlan, StepResult

MOST_ROWS = 8
"""With more rows there is hardly a step in which none of them needs a page."""

_NOBODY = np.empty(0, np.int32)


class DecodeFastPath:
    """The rows of the last plan, as long as later plans and results may be made from it.

    The rows are few: they are gone through one by one, which costs less than array operations with an index.

    Args:
        slots, kv: the scheduler's.
        vocab_size: a token beyond it is left to the scheduler's own way, which refuses it; None: not checked.

    Attributes:
        num_plans: how many plans `next_plan` can make.
        computed: told of slots and how many of their tokens the device holds, about when a block is full; None: nobody.
    """

    def __init__(self, slots: SlotTable, kv: KVManager, vocab_size: int | None = None) -> None:
        self._slots = slots
        self._kv = kv
        self._vocab_size = np.iinfo(np.int32).max if vocab_size is None else vocab_size
        self._no_blocks = [NewBlocks(slot=_NOBODY, index=_NOBODY, page=_NOBODY) for _ in kv.tables]
        self._rows = _NOBODY
        self._computed = _NOBODY
        self._num_tokens = _NOBODY
        self._samples = _NOBODY
        self._of_row: list[tuple[int, str, frozenset[int]]] = []  # slot, request, the tokens that may end it
        self.num_plans = 0
        self.computed: Callable[[np.ndarray, np.ndarray], None] | None = None
        self._num_results = 0
        self._to_cache = 0

    def end(self) -> None:
        """Somebody enters or leaves a slot, or what is known of one changes otherwise."""
        if self._of_row:
            self._rows = _NOBODY
            self._of_row = []
            self.num_plans = 0
            self._num_results = 0

    def begin(self, plan: StepPlan) -> None:
        """A plan was made the scheduler's way: of decodes alone, none of them with drafts or masks."""
        s, rows = self._slots, plan.slot_of_row
        if rows.size > MOST_ROWS:
            return self.end()
        if rows.tolist() == [slot for slot, _, _ in self._of_row]:
            plan.slot_of_row = self._rows  # so that results of the plans before are still known by it
        else:
            self._rows = rows
            self._num_tokens = plan.num_tokens
            self._samples = plan.samples
            self._of_row = [(slot, s.request_ids[slot], s.stop_ids(slot)) for slot in rows.tolist()]
            self._num_results = 0
        self._computed = s.computed[rows]
        left = [s.limit[rows] - s.placed[rows]]
        for table in self._kv.tables:
            left.append(table.num_blocks[rows] * table.tokens_per_block - self._computed)
            if table.window is not None:  # until a block leaves it
                beyond = (table.first_block[rows] + 1) * table.tokens_per_block + table.window - 1
                left.append(beyond - self._computed)
        self.num_plans = max(0, int(np.minimum.reduce(left, axis=None)))

    def empty_plan(self, step_id: int) -> StepPlan:
        """One without rows."""
        return StepPlan(
            step_id=step_id,
            slot_of_row=_NOBODY,
            num_computed=_NOBODY,
            num_tokens=_NOBODY,
            samples=_NOBODY.astype(bool),
            num_decodes=0,
            new_slots=[],
            new_blocks=self._no_blocks,
            left_slots=self._slots.take_left(),
        )

    def next_plan(self, step_id: int) -> StepPlan:
        """The plan after the last one, its tokens placed; `num_plans` is not 0."""
        s, positions = self._slots, self._computed
        self.num_plans -= 1
        self._kv.pool.tell_evictor()
        self._computed = positions + 1
        for (slot, _, _), position in zip(self._of_row, positions.tolist(), strict=True):
            s.computed[slot] = position + 1
            s.placed[slot] = position + 2
            s.last_step[slot] = step_id
        return StepPlan(
            step_id=step_id,
            slot_of_row=self._rows,
            num_computed=positions,
            num_tokens=self._num_tokens,
            samples=self._samples,
            num_decodes=len(self._of_row),
            new_slots=[],
            new_blocks=self._no_blocks,
        )

    def accept(self, plan: StepPlan, result: StepResult) -> list[CoreOutput] | None:
        """Take in a result in which nothing happens but a token for each row; None, and nothing done, where something
        might, or the result is not what it must be."""
        if not self._num_results or plan.slot_of_row is not self._rows or not _has_tokens_alone(plan, result):
            return None
        tokens: list[int] = result.tokens.tolist()
        for token, (_, _, stops) in zip(tokens, self._of_row, strict=True):
            if not 0 <= token < self._vocab_size or token in stops:
                return None
        s, outputs = self._slots, []
        for token, (slot, request_id, _) in zip(tokens, self._of_row, strict=True):
            known = s.known[slot]
            s.tokens[slot, known] = token
            s.known[slot] = known + 1
            outputs.append(CoreOutput(request_id=request_id, new_token_ids=[token]))
        self._num_results -= 1
        self._to_cache -= 1
        if not self._to_cache:
            self._cache_full_blocks()
        return outputs

    def accepted(self) -> None:
        """A result was taken in the scheduler's way: count anew how many may follow it in which nothing happens."""
        if not self._of_row:
            return
        s, rows = self._slots, self._rows
        self._num_results = max(0, int(np.minimum.reduce(s.limit[rows] - s.known[rows])) - 1)
        self._count_to_cache()

    def _cache_full_blocks(self) -> None:
        s, rows = self._slots, self._rows
        self._kv.blocks.cache_full_blocks(rows, np.minimum(s.known[rows], s.computed[rows]), s.requests, s.tokens)
        if self.computed is not None:
            self.computed(rows, s.known[rows] - 1)
        self._count_to_cache()

    def _count_to_cache(self) -> None:
        """Results until the next block is full; without a prefix cache there is none to come."""
        self._to_cache = 0
        if self._kv.enable_prefix_caching:
            s, rows, size = self._slots, self._rows, self._kv.block_size
            known = s.known[rows]
            left = size - known % size
            # A full block is cached when its last token is computed, too, perhaps one result after it is known.
            left[(left == size) & (s.computed[rows] < known)] = 1
            self._to_cache = int(np.minimum.reduce(left))


def _has_tokens_alone(plan: StepPlan, result: StepResult) -> bool:
    """Whether the result is one of this plan with a token for each row, and brings nothing else."""
    return (
        isinstance(result, StepResult)
        and result.step_id == plan.step_id
        and isinstance(result.tokens, np.ndarray)
        and result.tokens.dtype.kind == "i"
        and result.tokens.shape == plan.slot_of_row.shape
        and result.logprobs is None
        and result.num_drafts is None
        and result.prompt_logprobs is None
        and result.news is None
        and result.pooled is None
    )
