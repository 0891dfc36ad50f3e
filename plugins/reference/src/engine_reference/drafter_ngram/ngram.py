"""The body of the n-gram drafter.

Prompt lookup decoding (Saxena 2023, https://github.com/apoorvumang/prompt-lookup-decoding), also in transformers
(`prompt_lookup_num_tokens`) and vLLM (`ngram`): the request's last tokens are looked for earlier in its own prompt and
output, and what followed them there is proposed. The longest match wins, as in these; of equally long ones the latest,
because a text that begins to repeat itself goes on with its newest form. Where the text ends before enough tokens have
followed, the piece from the match to the end is taken to repeat.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from engine.interfaces.drafter import DraftRows, Drafts, DraftSession

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
        device = session.tokens.device
        assert self._platform is not None
        host = np.array((rows.slot, rows.num_tokens), np.int64)
        sent = torch.empty(host.shape, dtype=torch.int64, device=device)
        self._platform.to_device(torch.from_numpy(host), sent)
        slot, length = sent
        most, k = int(rows.num_tokens.max()), int(rows.num_drafts.max())
        tokens = session.tokens[slot, :most]
        start, matched = longest_match(tokens, length, self._min, self._max)
        period = (length - start).unsqueeze(1)
        drafts = tokens.gather(1, start.unsqueeze(1) + torch.arange(k, device=device) % period)
        if not self._counts:
            return Drafts(drafts)  # a row without a match proposes its first tokens, in vain
        return Drafts(drafts, np.where(matched.numpy() > 0, rows.num_drafts, 0).astype(np.int32))

    def observe(self, step: TargetStep, session: DraftSession) -> None:
        """Nothing is needed but tokens."""


def longest_match(
    tokens: torch.Tensor, length: torch.Tensor, least: int, most: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the longest suffix of each row that occurs earlier in the row goes on there; of equal ones the latest.

    Args:
        tokens: int [m, L]; row i's tokens are the first length[i]. length: int64 [m], at least 1.
        least, most: lengths of suffixes that count.

    Returns:
        (place int64 [m], 0 where nothing matches; matched int64 [m], the suffix's length, 0 for none).
    """
    width = tokens.shape[1]
    place = torch.arange(width, device=tokens.device)
    # end[i, p]: position p of row i ends an earlier occurrence of its last n tokens, for n = 1, 2, ...; the last token
    # itself is no occurrence.
    end = place < (length - 1).unsqueeze(1)
    matched, start = torch.zeros_like(length), torch.zeros_like(length)
    for n in range(1, most + 1):
        wanted = tokens.gather(1, (length - n).clamp(min=0).unsqueeze(1))
        same = tokens == wanted
        if n > 1:  # the token n - 1 places before p
            same = torch.nn.functional.pad(same, (n - 1, 0))[:, :width]
        end = end & same & (length >= n).unsqueeze(1)
        if n < least:
            continue
        last = torch.where(end, place + 1, 0).amax(dim=1)
        found = last > 0
        matched = torch.where(found, n, matched)
        start = torch.where(found, last, start)
    return start, matched
