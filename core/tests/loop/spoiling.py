"""A `PagedWorker` for which one token is no number, and whose logits then are none either."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from paged_worker import VOCAB, PagedWorker

from engine.types.plan import BROKEN, StepPlan, StepResult

POISON = VOCAB
"""The token: it is never drawn."""
SPOILT = np.uint64(2**64 - 1)
"""In a cell: NaN."""


class SpoilingWorker(PagedWorker):
    """The cell of a poisonous token is spoilt, and so is what is computed from it.

    keeps_promise: what a query does not see has no effect on it. False: a row of a step that computes or sees anything
        spoilt spoils all that it computes in this step, as attention does that multiplies by 0 what is not seen.
    """

    keeps_promise = True

    def execute(self, plan: StepPlan) -> Any:
        self._bad: np.ndarray | None = None
        return super().execute(plan)

    def _read(self, plan: StepPlan, g: int, positions: np.ndarray, ends: np.ndarray) -> np.ndarray:
        group, first = self.layout.groups[g], self.first[g]
        size, window = group.tokens_per_block, group.sliding_window
        slots = np.repeat(plan.slot_of_row, plan.num_tokens)
        pages = self.block_tables[group.table][slots, positions // size]
        if self._bad is None:
            self._bad = self.tokens[slots, positions] == POISON
        rows = [slice(end - n, end) for end, n in zip(ends.tolist(), plan.num_tokens.tolist(), strict=True)]
        while True:
            before = int(self._bad.sum())
            self._widen(rows)
            self.cells[pages[self._bad], first + positions[self._bad] % size] = SPOILT
            sees = self._bad.copy()
            for slot, mine in zip(plan.slot_of_row.tolist(), rows, strict=True):
                for i, place in enumerate(positions[mine].tolist(), mine.start):
                    seen = np.arange(0 if window is None else max(0, place - window + 1), place + 1)
                    pages_seen = self.block_tables[group.table][slot, seen // size]
                    sees[i] |= (self.cells[pages_seen, first + seen % size] == SPOILT).any()
            self._bad = sees
            if self.keeps_promise or int(sees.sum()) == before:
                break
        self._widen(rows)
        return super()._read(plan, g, positions, ends)

    def _widen(self, rows: list[slice]) -> None:
        assert self._bad is not None
        for mine in rows:
            if not self.keeps_promise and self._bad[mine].any():
                self._bad[mine] = True

    def _sample(self, plan: StepPlan, states: np.ndarray, ends: np.ndarray, masks: Any) -> StepResult:
        result = super()._sample(plan, states, ends, masks)
        assert self._bad is not None
        drafts = np.zeros(plan.num_rows, int) if plan.num_drafts is None else plan.num_drafts
        broken = [self._bad[end - 1 - k : end].any() for end, k in zip(ends.tolist(), drafts.tolist(), strict=True)]
        tokens = result.tokens.reshape(plan.num_rows, -1)
        tokens[broken & plan.samples] = [BROKEN, *[-1] * (tokens.shape[1] - 1)]
        return msgspec.structs.replace(result, tokens=tokens.reshape(result.tokens.shape))


class CarelessWorker(SpoilingWorker):
    """One whose attention breaks the promise."""

    keeps_promise = False
