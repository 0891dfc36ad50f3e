"""Words are compared with the end of the output, for all rows and words at once, on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from engine_reference.logits_processors.tables import sent, widened

if TYPE_CHECKING:
    from engine.interfaces.context import WorkerContext
    from engine.interfaces.logits_processor import LogitsRows
    from engine.types.plan import NewSlot

_ANY = -1


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
        """See the interface."""
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
        """See the interface."""
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
