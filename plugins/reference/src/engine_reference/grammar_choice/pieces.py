"""The vocabulary, by bytes."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence


class Pieces:
    """Which ids stand for some bytes, and whether any token begins with them.

    Args:
        vocabulary: the bytes of each id, None for an id that stands for none.
        vocab_size: ids from here on cannot be drawn.
    """

    def __init__(self, vocabulary: Sequence[bytes | None], vocab_size: int) -> None:
        self._ids: dict[bytes, list[int]] = {}
        for token, piece in enumerate(vocabulary[:vocab_size]):
            if piece:
                self._ids.setdefault(piece, []).append(token)
        self._sorted = sorted(self._ids)

    def ids(self, piece: bytes) -> Sequence[int]:
        """The ids of exactly these bytes; several where a vocabulary spells one text in several ways."""
        return self._ids.get(piece, ())

    def some_begins(self, piece: bytes) -> bool:
        """Whether some token begins with these bytes, or is these."""
        place = bisect_left(self._sorted, piece)
        return place < len(self._sorted) and self._sorted[place].startswith(piece)
