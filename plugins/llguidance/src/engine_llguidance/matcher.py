"""One request's place in its constraint."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from llguidance import LLMatcher

from engine.types.errors import InvalidRequestError


class LLGuidanceMatcher:
    """See `engine.interfaces.grammar.Matcher`.

    Args:
        handle: LLGuidance's own, at the beginning.
        ends: ids that end the sequence.
        ends_row: int32 [words]; the mask of these.
        vocab_size: ids from here on are nobody's.

    Attributes:
        row: int32 [words]; the mask for the next token, where it is known already.
    """

    __slots__ = ("_ended", "_ends", "_ends_row", "_size", "handle", "row")

    def __init__(self, handle: LLMatcher, ends: frozenset[int], ends_row: np.ndarray, vocab_size: int) -> None:
        self.handle = handle
        self._ends = ends
        self._ends_row = ends_row
        self._size = vocab_size
        self._ended = False
        self.row: np.ndarray | None = None

    def accept(self, tokens: Sequence[int]) -> int:
        count = 0
        for token in tokens:
            if self._ended or not 0 <= token < self._size:
                break
            if token in self._ends:
                if not self.handle.is_accepting():
                    break
                self._ended = True
            elif not self.handle.try_consume_tokens([token]):
                break
            self.row = None
            count += 1
        if self.handle.is_error():
            raise InvalidRequestError(
                "go on under structured_outputs",
                f"LLGuidance gave up: {reason(self.handle)}",
                "ask for something simpler, or less ambiguous",
            )
        return count

    def rollback(self, num_tokens: int) -> None:
        """The library has not heard of the end."""
        if num_tokens:
            self.handle.rollback(num_tokens - self._ended)
            self._ended = False
            self.row = None

    def forced_bytes(self) -> bytes:
        return b"" if self._ended or self.handle.is_accepting() else bytes(self.handle.compute_ff_bytes())

    @property
    def finished(self) -> bool:
        """Where the output is complete its mask says whether it may go on, and is kept for then."""
        if self._ended:
            return True
        if not self.handle.is_accepting():
            return False
        if self.handle.is_stopped():
            return not self.handle.is_error()
        if self.row is None:
            self.row = self.mask()
        return not (self.row & ~self._ends_row).any()

    def mask(self) -> np.ndarray:
        """int32 [words]; the mask for the next token, without an end that was made up."""
        bits = np.frombuffer(self.handle.compute_bitmask(), np.int32)[: self._ends_row.size].copy()
        if not self._ends and self._size % 32:
            bits.view(np.uint32)[-1] &= np.uint32((1 << self._size % 32) - 1)
        return bits

    @property
    def made_up(self) -> bool:
        """Its masks have an end that was made up, so they are not those of the engine."""
        return not self._ends


def reason(handle: LLMatcher) -> str:
    """What the library says of an error, without the state that it appends."""
    said = str(handle.get_error()).partition("<state>")[0]
    return " ".join(said.split())[:300]
