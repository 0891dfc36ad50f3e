"""The logits processor `whisper`, on tables with a row for each slot."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from engine_audio.card import KEY, read

if TYPE_CHECKING:
    from engine.interfaces.context import WorkerContext
    from engine.interfaces.logits_processor import LogitsRows
    from engine.types.plan import NewSlot


class WhisperRulesBody:
    """See `engine.interfaces.logits_processor.LogitsProcessor` and `engine_audio.card.Rules`. Two bytes an id and slot,
    from first use.

    Tables: `_never`, `_not_first` bool [slots, V]; `_numbers` int64 [slots, 3], the first timestamp (V: none), the end,
    the last timestamp that may be the first.
    """

    def __init__(self, context: WorkerContext) -> None:
        assert context.device is not None
        self._context = context
        self._vocab = context.start.model.vocab_size
        slots = context.start.max_num_seqs
        self._shape = slots, self._vocab
        self._never: torch.Tensor | None = None
        self._not_first: torch.Tensor | None = None
        self._numbers = torch.zeros(slots, 3, dtype=torch.int64, device=context.device)

    def enter(self, new: NewSlot) -> None:
        rules = read((new.params.extra_args or {})[KEY])
        if self._never is None or self._not_first is None:
            self._never = torch.zeros(self._shape, dtype=torch.bool, device=self._context.device)
            self._not_first = torch.zeros_like(self._never)
        for table, ids in ((self._never, rules.suppress), (self._not_first, rules.begin_suppress)):
            forbidden = np.zeros(self._vocab, np.bool_)
            forbidden[np.array(ids, np.int64)] = True
            table[new.slot] = self._sent(forbidden)
        first = self._vocab if rules.first_timestamp is None else rules.first_timestamp
        last = self._vocab if rules.max_initial is None else first + rules.max_initial
        self._numbers[new.slot] = self._sent(np.array([first, rules.end or 0, last], np.int64))

    def apply(self, logits: torch.Tensor, rows: LogitsRows) -> None:
        assert self._never is not None
        assert self._not_first is not None
        chosen = logits if rows.row is None else logits[rows.row]
        at_first = (rows.num_tokens == rows.num_prompt).unsqueeze(1)
        never = self._never[rows.slot] | (self._not_first[rows.slot] & at_first)
        chosen.masked_fill_(never | self._against_timestamps(rows), -torch.inf)
        first = self._numbers[rows.slot, 0].unsqueeze(1)
        stamp = torch.arange(self._vocab, device=logits.device) >= first
        # Shares of the same sum are compared, so the logits tell as much as probabilities. Without timestamps the
        # left side is -inf, and nothing is forbidden.
        together = torch.logsumexp(chosen.masked_fill(~stamp, -torch.inf), dim=1, keepdim=True)
        likeliest = chosen.masked_fill(stamp, -torch.inf).amax(dim=1, keepdim=True)
        chosen.masked_fill_(~stamp & (together > likeliest), -torch.inf)
        if rows.row is not None:
            logits[rows.row] = chosen

    def _against_timestamps(self, rows: LogitsRows) -> torch.Tensor:
        """bool [m, V]; what the places of timestamps forbid; nothing of a request without them."""
        first, end, last_initial = (one.unsqueeze(1) for one in self._numbers[rows.slot].unbind(1))
        num_tokens, num_prompt = rows.num_tokens.unsqueeze(1), rows.num_prompt.unsqueeze(1)
        ids = torch.arange(self._vocab, device=first.device)
        tokens = rows.tokens[rows.slot]
        place = torch.arange(tokens.shape[1], device=first.device)
        written = (place >= num_prompt) & (place < num_tokens) & (tokens >= first)
        latest = tokens.masked_fill(~written, -1).amax(dim=1, keepdim=True)  # they never decrease
        num_output = num_tokens - num_prompt
        stamp_last, stamp_before = (self._is_written(written, num_tokens - back) for back in (1, 2))
        opens, ends = stamp_last & (stamp_before | (num_output < 2)), stamp_last & ~stamp_before & (num_output > 1)
        least = torch.where(latest < 0, first, torch.where(ends, latest, latest + 1))
        stamp, at_first = ids >= first, num_output == 0
        forbidden = stamp & ((ids < least) | opens | (at_first & (ids > last_initial)))
        forbidden |= ~stamp & (at_first | (ends & (ids < end)) | (ids == first - 1))
        return forbidden & (first < self._vocab)

    @staticmethod
    def _is_written(written: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        """bool [m, 1]; False where the place lies before the table."""
        return written.gather(1, place.clamp(min=0)) & (place >= 0)

    def _sent(self, array: np.ndarray) -> torch.Tensor:
        assert self._context.platform is not None
        host = torch.from_numpy(array)
        out = torch.empty(host.shape, dtype=host.dtype, device=self._context.device)
        self._context.platform.to_device(host, out)
        return out
