"""Processors that honour fields of `SamplingParams`, on tables with a row for each slot."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from engine.interfaces.context import WorkerContext
    from engine.interfaces.logits_processor import LogitsRows
    from engine.types.plan import NewSlot

_ANY = -1
_NONE = -1
_NO_TOKEN = -2


def sent(context: WorkerContext, array: np.ndarray) -> torch.Tensor:
    """A copy on the device, which the host does not wait for."""
    assert context.platform is not None
    host = torch.from_numpy(np.ascontiguousarray(array))
    out = torch.empty(host.shape, dtype=host.dtype, device=context.device)
    context.platform.to_device(host, out)
    return out


def widened(table: torch.Tensor, shape: tuple[int, ...], fill: int) -> torch.Tensor:
    """`table` [slots, ...], or a copy in which each dimension but the first holds at least `shape`, filled up.

    Widths grow to powers of two, so that a table is copied a few times in an engine's life.
    """
    if all(have >= want for have, want in zip(table.shape[1:], shape, strict=True)):
        return table
    grown = [
        have if have >= want else 1 << (want - 1).bit_length()
        for have, want in zip(table.shape[1:], shape, strict=True)
    ]
    out = torch.full((table.shape[0], *grown), fill, dtype=table.dtype, device=table.device)
    out[tuple(slice(0, size) for size in table.shape)] = table
    return out


class AllowedTokenIdsBody:
    """See `engine.interfaces.logits_processor.LogitsProcessor`. A byte an id and slot, from first use."""

    def __init__(self, context: WorkerContext) -> None:
        assert context.device is not None
        self._shape = context.start.max_num_seqs, context.start.model.vocab_size
        self._context = context
        self._forbidden: torch.Tensor | None = None

    def enter(self, new: NewSlot) -> None:
        if self._forbidden is None:
            self._forbidden = torch.zeros(self._shape, dtype=torch.bool, device=self._context.device)
        forbidden = np.ones(self._shape[1], np.bool_)
        forbidden[np.array(new.params.allowed_token_ids, np.int64)] = False
        self._forbidden[new.slot] = sent(self._context, forbidden)

    def apply(self, logits: torch.Tensor, rows: LogitsRows) -> None:
        assert self._forbidden is not None
        forbidden = self._forbidden[rows.slot]
        if rows.row is None:
            logits.masked_fill_(forbidden, -torch.inf)
        else:
            logits[rows.row] = logits[rows.row].masked_fill_(forbidden, -torch.inf)


class BadWordsBody:
    """See `engine.interfaces.logits_processor.LogitsProcessor`. The rule is vLLM's (`ops/bad_words.py`): a word's last
    token is masked where the output, the prompt not counted, ends in its other tokens.

    Tables: `_prefix` int32 [slots, W, P], the tokens before the last, aligned to the end, `_ANY` before them;
    `_length` int32 [slots, W], how many these are; `_last` int64 [slots, W]; -1 in `_length` marks an unused place.
    """

    def __init__(self, context: WorkerContext) -> None:
        assert context.device is not None
        self._context = context
        slots, device = context.start.max_num_seqs, context.device
        self._prefix = torch.full((slots, 0, 0), _ANY, dtype=torch.int32, device=device)
        self._length = torch.full((slots, 0), -1, dtype=torch.int32, device=device)
        self._last = torch.zeros(slots, 0, dtype=torch.int64, device=device)

    def enter(self, new: NewSlot) -> None:
        words = new.params.bad_words_token_ids
        self._widen(len(words), max(map(len, words)) - 1)
        count, width = self._prefix.shape[1:]
        prefix = np.full((count, width), _ANY, np.int32)
        length, last = np.full(count, -1, np.int32), np.zeros(count, np.int64)
        for place, ids in enumerate(words):
            if len(ids) > 1:
                prefix[place, width - len(ids) + 1 :] = ids[:-1]
            length[place], last[place] = len(ids) - 1, ids[-1]
        for table, entry in ((self._prefix, prefix), (self._length, length), (self._last, last)):
            table[new.slot] = sent(self._context, entry)

    def apply(self, logits: torch.Tensor, rows: LogitsRows) -> None:
        length, last = self._length[rows.slot], self._last[rows.slot]
        num_output = (rows.num_tokens - rows.num_prompt).unsqueeze(1)
        match = (length >= 0) & (length <= num_output)
        width = self._prefix.shape[2]
        if width:
            place = rows.num_tokens.unsqueeze(1) + torch.arange(-width, 0, device=logits.device)
            ending = rows.tokens[rows.slot.unsqueeze(1), place.clamp_(min=0)].unsqueeze(1)  # [m, 1, P]
            prefix = self._prefix[rows.slot]
            match &= ((prefix == ending) | (prefix == _ANY)).all(dim=2)
        # Added, not set: an unused place names id 0, which another word of the row may forbid.
        minus = torch.zeros_like(match, dtype=logits.dtype).masked_fill_(match, -torch.inf)
        row = torch.arange(len(logits), device=logits.device) if rows.row is None else rows.row
        logits.index_put_((row.unsqueeze(1), last), minus, accumulate=True)

    def _widen(self, words: int, prefix: int) -> None:
        """Make room for so many words with so many tokens before the last."""
        old = self._prefix
        self._prefix = widened(old, (words, prefix), _ANY)
        if (moved := self._prefix.shape[2] - old.shape[2]) and old.shape[1] and old.shape[2]:
            self._prefix = self._prefix.roll(moved, dims=2)  # the old columns stood first; they are the last now
        self._length = widened(self._length, (words,), -1)
        self._last = widened(self._last, (words,), 0)


class LogitBiasBody:
    """See `engine.interfaces.logits_processor.LogitsProcessor`. Values are float32; padding adds 0 to id 0."""

    def __init__(self, context: WorkerContext) -> None:
        assert context.device is not None
        self._context = context
        slots = context.start.max_num_seqs
        self._ids = torch.zeros(slots, 0, dtype=torch.int64, device=context.device)
        self._values = torch.zeros(slots, 0, dtype=torch.float32, device=context.device)

    def enter(self, new: NewSlot) -> None:
        bias = new.params.logit_bias
        assert bias is not None
        self._ids = widened(self._ids, (len(bias),), 0)
        self._values = widened(self._values, (len(bias),), 0)
        self._ids[new.slot], self._values[new.slot] = 0, 0
        self._ids[new.slot, : len(bias)] = sent(self._context, np.array(list(bias), np.int64))
        self._values[new.slot, : len(bias)] = sent(self._context, np.array(list(bias.values()), np.float32))

    def apply(self, logits: torch.Tensor, rows: LogitsRows) -> None:
        """An id stands once in a slot's table, but for padding: the sum has one order."""
        row = torch.arange(len(logits), device=logits.device) if rows.row is None else rows.row
        values = self._values[rows.slot].to(logits.dtype)
        logits.index_put_((row.unsqueeze(1), self._ids[rows.slot]), values, accumulate=True)


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
        self._limit = np.zeros(slots, np.int64)
        self._budget = np.zeros(slots, np.int64)
        self._count = np.zeros(slots, np.int64)
        self._end = torch.full((slots, 1), _NONE, dtype=torch.int64, device=device)
        self._begin = self._end.clone()

    def enter(self, new: NewSlot) -> None:
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
