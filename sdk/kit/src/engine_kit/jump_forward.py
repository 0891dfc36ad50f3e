"""Jump-forward decoding: text that a constraint forces is computed in one step, as drafts that need no drafter.

Behind `{"` of a schema with one property nothing can come but its name. So the name's tokens are put behind the row's
last token and computed together; each is checked under the mask of its place, so that they become output only where
they are what would have been drawn (a text can be written in several tokens, and the model may prefer others). The
answer is the same, in fewer steps. The name is from Zheng et al., "SGLang: Efficient Execution of Structured Language
Model Programs" (2024).

The forced bytes are spelled as the model spelled them last time, since the same names come again and again; new ones as
the tokenizer would, which is what a model mostly writes. What was learned of a request is kept for those alone that may
share its cached pages (`Request.root`): how many jumps succeed shows in the time of an answer, and would tell one API
key what another has been made to write. A request whose jumps fail rests for a while, by the rule in
`engine_kit.speculation`.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from engine.interfaces.grammar import MAX_ROLLBACK
from engine_kit.speculation import Speculation

if TYPE_CHECKING:
    from engine.scheduling.slots import SlotTable

logger = logging.getLogger(__name__)

MOST = 32
"""The most tokens of one jump."""
LEAST = 2
"""A row that jumps is not planned again before the result is back: one token would not be worth it."""
COST = 0.02
"""Of a token of a jump, as the rule in `engine_kit.speculation` weighs it: two jumps that fail are enough."""
CONTEXT = 4
"""Tokens before the forced ones that the tokenizer sees: where a word is cut decides how its rest is spelled."""
REMEMBERED = 4096
"""How many spellings are kept."""

assert MOST <= MAX_ROLLBACK


class JumpForward:
    """Which rows jump, and over what.

    Args:
        num_slots: slots.
        vocabulary: the bytes of each id, None for an id that stands for none; see `Tokenizer.vocabulary`.
        encode: ids of a text, without special tokens.

    Attributes:
        learned: which slots rest, and what became of all jumps.
    """

    def __init__(
        self, num_slots: int, vocabulary: Callable[[], Sequence[bytes | None]], encode: Callable[[str], list[int]]
    ) -> None:
        self.learned = Speculation(num_slots, MOST, cost=COST, least=MOST, max_rows=1)
        self._vocabulary = vocabulary
        self._encode = encode
        self._by_tokenizer = lru_cache(REMEMBERED)(self._encoded)
        self._by_model: OrderedDict[tuple[bytes, bytes], list[int]] = OrderedDict()  # by root and what is forced
        self._watched: dict[int, tuple[int, bytes]] = {}  # by slot: what was forced behind so many tokens

    def enter(self, slot: int) -> None:
        """A request enters this slot: nothing is known of it."""
        self.learned.enter(slot)
        self._watched.pop(slot, None)

    def choose(self, ready: np.ndarray, slots: SlotTable, room: int) -> dict[int, list[int]]:
        """The tokens to compute with a row's last one, by the row's place in `ready`.

        Args:
            ready: int [n]; slots that compute one token.
            room: tokens of the budget for all.
        """
        places = slots.matched[ready].nonzero()[0]
        if not places.size or room < LEAST:
            return {}
        rows = ready[places]
        most = self.learned.drafts(rows, slots, room)
        found: dict[int, list[int]] = {}
        for place, slot, k in zip(places.tolist(), rows.tolist(), most.tolist(), strict=True):
            request = slots.request(slot)
            assert request.matcher is not None
            forced, known = request.matcher.forced_bytes(), int(slots.known[slot])
            if slot in self._watched:
                self._learn(slot, slots)
            if forced:
                self._watched.setdefault(slot, (known, forced))
            if k < LEAST or not forced or request.host_tokens:
                continue
            # The matcher stands behind the tokens that are known; one more may be placed, the first of those forced.
            tokens = self._by_model.get((request.root, forced))
            if tokens is None:
                context = tuple(slots.tokens[slot, max(int(slots.prompt[slot]), known - CONTEXT) : known].tolist())
                tokens = self._by_tokenizer(request.root, context, forced)
            ahead = int(slots.placed[slot]) - known
            if len(tokens) - ahead >= LEAST:
                found[place] = tokens[ahead : ahead + k]
        return found

    def leave(self, slot: int, slots: SlotTable) -> None:
        """The slot's request ends: what it has written of something forced is how that begins."""
        if slot in self._watched:
            self._learn(slot, slots, ended=True)

    def _learn(self, slot: int, slots: SlotTable, ended: bool = False) -> None:
        """Remember how the model has spelled what was forced, once all of it has come."""
        start, wanted = self._watched[slot]
        request = slots.request(slot)
        pieces, tokens = self._vocabulary(), slots.tokens[slot, start : slots.known[slot]].tolist()
        lengths = [len(pieces[token] or b"") if token < len(pieces) else 0 for token in tokens]
        if sum(lengths) < len(wanted) and not ended:
            return
        del self._watched[slot]
        while lengths and (sum(lengths) > len(wanted) or not lengths[-1]):  # a token that goes on behind it, or the end
            lengths.pop()
        for i in range(len(lengths)):
            self._by_model[request.root, wanted] = tokens[i : len(lengths)]
            self._by_model.move_to_end((request.root, wanted))
            wanted = wanted[lengths[i] :]
        while len(self._by_model) > REMEMBERED:
            self._by_model.popitem(last=False)

    def _encoded(self, root: bytes, context: tuple[int, ...], forced: bytes) -> list[int]:
        """The tokens of the forced bytes behind these; [] where the tokenizer would not have cut the text here. (The
        root tells requests apart that may not find what was kept of each other.)"""
        pieces = self._vocabulary()
        before = b"".join(pieces[token] or b"" for token in context if token < len(pieces))
        try:
            ids = self._encode((before + forced).decode())
        except UnicodeDecodeError:
            return []
        except Exception:  # it comes token by token, and is the same
            logger.warning("the tokenizer cannot encode what a constraint forces", exc_info=True)
            return []
        # From the end: what a tokenizer puts before a text does not matter, and where the context is cut neither.
        length, start = 0, len(ids)
        while start and length < len(forced):
            start -= 1
            length += len(pieces[ids[start]] or b"") if ids[start] < len(pieces) else 0
        return ids[start:] if length == len(forced) else []
