"""The body of the suffix drafter.

Suffix decoding (Oliaro, Jia, Campos, Qiao: "SuffixDecoding: extreme speculative decoding for emerging AI applications",
NeurIPS 2025), as chains: the longest end of a request's text that stands earlier in it, or in an answer that was given
before, is continued as it most often was. Agents that ask nearly the same again and again, edits and extraction gain
most.

Tokens are looked up on the host. Where the table of tokens lies there, too, that takes 20 to 40 microseconds a row. On
another device `propose` waits for the tokens of the step before; a request that had drafts there has none under way.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.interfaces.drafter import DraftRows, Drafts, DraftSession
from engine_drafters.suffix.history import FinishedAnswers, RequestText
from engine_kit.host_drafts import library_of, on_host, sent_beside

if TYPE_CHECKING:
    from engine.interfaces.context import WorkerContext
    from engine.interfaces.step import TargetStep
    from engine.types.plan import NewSlot

_AHEAD = 8
"""Tokens that are compared to choose among places, whatever number is wanted."""
_LEAD = 8
"""Tokens of the prompt that are remembered with an answer: what its first tokens followed."""
_STEP_TOKENS = 4096
"""That one step reads in, of prompts and finished answers: 5 microseconds each. A longer prompt takes several steps,
and has no drafts before."""


class SuffixDrafterBody:
    """Follows each request's text in automata, on the host."""

    def __init__(self, context: WorkerContext) -> None:
        self._options = context.options
        self._platform = context.platform
        self._answers = FinishedAnswers(self._options.max_tokens, self._options.max_depth)
        self._requests: dict[int, RequestText] = {}

    def enter(self, new: NewSlot) -> None:
        """See `engine.interfaces.drafter.Drafter.enter`."""
        options, tokens = self._options, array("i", new.token_ids.astype(np.int32).tobytes())
        answered = max(new.num_prompt_tokens, len(tokens))  # resumed: what it had was remembered when it left
        self._requests[new.slot] = RequestText(
            tokens, answered, new.cache_salt, options.max_own_tokens, options.max_depth
        )

    def leave(self, slot: int, num_tokens: int, session: DraftSession) -> None:
        """The answer is remembered; on another device as far as it is known here."""
        request = self._requests.pop(slot)
        if (table := on_host(session.tokens)) is not None:
            _extend(request.tokens, table[slot, len(request.tokens) : num_tokens])
        answer = request.tokens[request.num_answered : num_tokens]
        if answer:
            lead = request.tokens[max(0, request.num_answered - _LEAD) : request.num_answered]
            self._answers.add(request.salt, lead + answer)

    def propose(self, rows: DraftRows, session: DraftSession) -> Drafts:
        """See `engine.interfaces.drafter.Drafter.propose`."""
        options = self._options
        requests = [self._requests[slot] for slot in rows.slot.tolist()]
        self._read_tokens(requests, rows, session)
        budget = _STEP_TOKENS
        found = np.zeros((len(requests), int(rows.num_drafts.max())), np.int32)
        counts = np.zeros(len(requests), np.int32)
        for i, (request, wanted) in enumerate(zip(requests, rows.num_drafts.tolist(), strict=True)):
            budget, all_read = request.read(budget, self._answers.volumes(request.salt))
            if all_read:
                drafts = request.drafts(wanted, _AHEAD, options.min_match, options.max_factor, options.min_probability)
                found[i, : len(drafts)] = drafts
                counts[i] = len(drafts)
        self._answers.settle(budget)
        return Drafts(sent_beside(session.tokens, found, self._platform), counts)

    def _read_tokens(self, requests: list[RequestText], rows: DraftRows, session: DraftSession) -> None:
        """Add what the rows' requests were given since they were last asked for."""
        slots, lengths, table = rows.slot.tolist(), rows.num_tokens.tolist(), on_host(session.tokens)
        where: Any = session.tokens if table is None else table
        pieces = [where[slot, len(r.tokens) : n] for r, slot, n in zip(requests, slots, lengths, strict=True)]
        if table is None:
            assert self._platform is not None
            (flat,) = self._platform.to_host((library_of(session.tokens).cat(pieces),)).wait()
            pieces = [piece.numpy() for piece in flat.split([len(piece) for piece in pieces])]
        for request, piece in zip(requests, pieces, strict=True):
            _extend(request.tokens, piece)

    def observe(self, step: TargetStep, session: DraftSession) -> None:
        """Nothing is needed but tokens."""


def _extend(tokens: array[int], more: np.ndarray) -> None:
    tokens.frombytes(more.astype(np.int32).tobytes())
