"""The body of the n-gram drafter.

Prompt lookup decoding (Saxena 2023, https://github.com/apoorvumang/prompt-lookup-decoding), also in transformers
(`prompt_lookup_num_tokens`) and vLLM (`ngram`): the request's last tokens are looked for earlier in its own prompt and
output, and what followed them there is proposed. The longest match wins, as in these; of equally long ones the latest,
because a text that begins to repeat itself goes on with its newest form. Where the text ends before enough tokens have
followed, the piece from the match to the end is taken to repeat.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from engine.interfaces.drafter import DraftRows, Drafts, DraftSession
from engine_kit.host_drafts import library_of, sent_beside

if TYPE_CHECKING:
    from engine.interfaces.context import WorkerContext
    from engine.interfaces.step import TargetStep
    from engine.types.plan import NewSlot


class NgramDrafterBody:
    """Looks all rows up at once, in the device's table of tokens. Keeps nothing between steps."""

    def __init__(self, context: WorkerContext) -> None:
        self._min = context.options.min_match
        self._max = context.options.max_match
        # Counts make a step shorter, but asking for them makes the host wait where the device is another one.
        self._platform = context.platform
        self._counts = context.device is None or context.device.type == "cpu"

    def enter(self, new: NewSlot) -> None:
        """Nothing is kept: the table has it all."""

    def leave(self, slot: int, num_tokens: int, session: DraftSession) -> None:
        """Nothing is kept."""

    def propose(self, rows: DraftRows, session: DraftSession) -> Drafts:
        """See `engine.interfaces.drafter.Drafter.propose`."""
        host = np.array((rows.slot, rows.num_tokens), np.int64)
        slot, length = sent_beside(session.tokens, host, self._platform)
        most, k = int(rows.num_tokens.max()), int(rows.num_drafts.max())
        tokens = session.tokens[slot, :most]
        start, matched = longest_match(tokens, length, self._min, self._max)
        period = (length - start)[:, None]
        drafts = tokens[_arange(len(slot), tokens)[:, None], start[:, None] + _arange(k, tokens) % period]
        if not self._counts:
            return Drafts(drafts)  # a row without a match proposes its first tokens, in vain
        return Drafts(drafts, np.where(np.asarray(matched) > 0, rows.num_drafts, 0).astype(np.int32))

    def observe(self, step: TargetStep, session: DraftSession) -> None:
        """Nothing is needed but tokens."""


def longest_match(tokens: Any, length: Any, least: int, most: int) -> tuple[Any, Any]:
    """Where the longest suffix of each row that occurs earlier in the row goes on there; of equal ones the latest.

    Args: torch's or numpy's, both of one library.
        tokens: int [m, L]; row i's tokens are the first length[i]. length: int64 [m], at least 1.
        least, most: lengths of suffixes that count.

    Returns:
        (place int64 [m], 0 where nothing matches; matched int64 [m], the suffix's length, 0 for none).
    """
    width, library = tokens.shape[1], library_of(tokens)
    place, row = _arange(width, tokens), _arange(len(tokens), tokens)
    # end[i, p]: position p of row i ends an earlier occurrence of its last n tokens, for n = 1, 2, ...; the last token
    # itself is no occurrence.
    end = place < (length - 1)[:, None]
    matched, start = library.zeros_like(length), library.zeros_like(length)
    for n in range(1, most + 1):
        same = tokens == tokens[row, (length - n).clip(min=0)][:, None]
        end[:, n - 1 :] &= same[:, : max(0, width - n + 1)]  # the token n - 1 places before p
        end[:, : n - 1] = False
        end &= (length >= n)[:, None]
        if n < least:
            continue
        last = library.amax(library.where(end, place + 1, 0), 1)
        found = last > 0
        matched = library.where(found, n, matched)
        start = library.where(found, last, start)
    return start, matched


def _arange(count: int, like: Any) -> Any:
    """int64 [count], of the same library and device."""
    return np.arange(count) if isinstance(like, np.ndarray) else library_of(like).arange(count, device=like.device)
