"""One request's place in its automaton."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from outlines_core import Guide, Index

from engine.interfaces.grammar import MAX_ROLLBACK

FEW = 24
"""Where text is forced, the tokens that may come are its beginnings: hardly more than this."""


class OutlinesMatcher:
    """See `engine.interfaces.grammar.Matcher`.

    Args:
        index: the automaton.
        ends: ids that end the sequence.
        ends_row: int32 [words]; the mask of these.
        vocab_size: also the id of the mark that stands behind every text, see `compiler`.
        pieces: the bytes of each id.
    """

    __slots__ = ("_complete", "_ended", "_ends", "_ends_row", "_guide", "_pieces", "_row", "_size")

    def __init__(
        self,
        index: Index,
        ends: frozenset[int],
        ends_row: np.ndarray,
        vocab_size: int,
        pieces: Sequence[bytes | None],
    ) -> None:
        self._guide = Guide(index, 2 * MAX_ROLLBACK)  # twice: for what is only looked at
        self._pieces = pieces
        self._ends = ends
        self._ends_row = ends_row
        self._size = vocab_size
        self._ended = self._complete = False
        self._row: np.ndarray | None = None

    def accept(self, tokens: Sequence[int]) -> int:
        for count, token in enumerate(tokens):
            if self._ended or not 0 <= token < self._size:
                return count
            if token in self._ends:
                self.mask()
                if not self._complete:
                    return count
                self._ended = True
            elif self._guide.accepts_tokens([token]):
                self._guide.advance(token, False)
            else:
                return count
            self._row = None
        return len(tokens)

    def rollback(self, num_tokens: int) -> None:
        """The automaton has not heard of the end."""
        if num_tokens:
            self._guide.rollback_state(num_tokens - self._ended)
            self._ended = False
            self._row = None

    def forced_bytes(self) -> bytes:
        """Where every token that may come begins with the shortest of them, that one is forced."""
        forced, steps = bytearray(), 0
        while not self._ended and steps < MAX_ROLLBACK:
            tokens = self._guide.get_tokens()
            if not 0 < len(tokens) <= FEW or self._size in tokens:
                break
            pieces = {token: self._pieces[token] or b"" for token in tokens if token < len(self._pieces)}
            shortest = min(pieces, key=lambda token: len(pieces[token]), default=-1)
            if len(pieces) < len(tokens) or not all(piece.startswith(pieces[shortest]) for piece in pieces.values()):
                break
            forced += pieces[shortest]
            self._guide.advance(shortest, False)
            steps += 1
        if steps:
            self._guide.rollback_state(steps)
        return bytes(forced)

    @property
    def finished(self) -> bool:
        return self._ended or (not (self.mask() & ~self._ends_row).any() and self._complete)

    def mask(self) -> np.ndarray:
        """int32 [words]; which tokens may come next. To be read only."""
        if self._row is None:
            words = self._ends_row.size
            row = np.zeros(words + 1, np.int32)  # the mark may lie behind the last word
            self._guide.write_mask_into(row.ctypes.data, row.size, row.itemsize)
            bits, mark = row.view(np.uint32), np.uint32(1 << (self._size & 31))
            self._complete = bool(bits[self._size >> 5] & mark) and self._marked()
            bits[self._size >> 5] &= mark - np.uint32(1)
            self._row = row[:words]
            if self._complete:
                self._row |= self._ends_row
        return self._row

    def _marked(self) -> bool:
        """Whether the mark, which may come next, is the one behind the text, or a character of its own."""
        self._guide.advance(self._size, False)
        complete = bool(self._guide.is_finished())
        self._guide.rollback_state(1)
        return complete
