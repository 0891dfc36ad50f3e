"""Thoughts that last too long are ended: the tokens that end them are the only ones that can be drawn."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from engine_reference.logits_processors.tables import sent, widened

if TYPE_CHECKING:
    from engine.interfaces.context import WorkerContext
    from engine.interfaces.logits_processor import LogitsRows
    from engine.types.plan import NewSlot

_NONE = -1
_NO_TOKEN = -2


class ThinkingBudgetBody:
    """See `engine.interfaces.logits_processor.LogitsProcessor`.

    Where the budget lies is known on the host, so a step costs something only where one of its rows stands there: then
    the output up to the budget is searched, on the device.

    Tables on the host, int64 [slots]: `_budget`; `_limit`, the place in the tokens at which it ends; `_count`, how many
    ids the end has. On the device, int64 [slots, K]: `_end` and `_begin`, filled up with `_NONE`.
    """

    def __init__(self, context: WorkerContext) -> None:
        assert context.device is not None
        self._context = context
        slots, device = context.start.max_num_seqs, context.device
        self._limit, self._budget, self._count = (np.zeros(slots, np.int64) for _ in range(3))
        self._end = torch.full((slots, 1), _NONE, dtype=torch.int64, device=device)
        self._begin = self._end.clone()

    def enter(self, new: NewSlot) -> None:
        """See the interface."""
        budget, slot = new.params.thinking_budget, new.slot
        assert budget is not None, "it uses this processor"
        self._limit[slot], self._budget[slot] = new.num_prompt_tokens + budget.tokens, budget.tokens
        self._count[slot] = len(budget.end)
        self._end = widened(self._end, (len(budget.end),), _NONE)
        self._begin = widened(self._begin, (len(budget.begin),), _NONE)
        for table, ids in ((self._end, budget.end), (self._begin, budget.begin)):
            padded = [*ids, *[_NONE] * (table.shape[1] - len(ids))]
            table[slot] = sent(self._context, np.array(padded, np.int64))

    def apply(self, logits: torch.Tensor, rows: LogitsRows) -> None:
        """See the interface."""
        behind = rows.host_num_tokens - self._limit[rows.host_slot]
        here = np.flatnonzero((behind >= 0) & (behind < self._count[rows.host_slot]))
        if not here.size:
            return
        device, host_slot = logits.device, rows.host_slot[here]
        place = sent(self._context, here)
        row = place if rows.row is None else rows.row[place]
        slot, start = rows.slot[place], rows.num_prompt[place]
        budget = sent(self._context, self._budget[host_slot])
        column = torch.arange(int(self._budget[host_slot].max()), device=device)
        at = (start.unsqueeze(1) + column).clamp_(max=rows.tokens.shape[1] - 1)
        written = rows.tokens[slot.unsqueeze(1), at].long().masked_fill_(column >= budget.unsqueeze(1), _NO_TOKEN)
        begin, end = self._begin[slot], self._end[slot]
        thinking = ((begin[:, 0] == _NONE) | _occurs(written, begin)) & ~_occurs(written, end)
        token = end.gather(1, sent(self._context, behind[here].astype(np.int64)).unsqueeze(1))
        only = torch.full((len(here), logits.shape[1]), -torch.inf, dtype=logits.dtype, device=device)
        only.scatter_(1, token, 0.0)
        logits[row] = torch.where(thinking.unsqueeze(1), only, logits[row])


def _occurs(written: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Whether ids stand one after the other in what was written: bool [m]; False where there are none.

    written: int64 [m, W], `_NO_TOKEN` behind its end; ids: int64 [m, K], `_NONE` behind theirs.
    """
    width = written.shape[1]
    padded = torch.nn.functional.pad(written, (0, ids.shape[1]), value=_NO_TOKEN)
    found = torch.ones_like(written, dtype=torch.bool)
    for j in range(ids.shape[1]):
        wanted = ids[:, j : j + 1]
        found &= (padded[:, j : j + width] == wanted) | (wanted == _NONE)
    return found.any(1) & (ids[:, 0] != _NONE)
