"""What Whisper writes of a window, cut at its timestamps."""

from __future__ import annotations

from typing import NamedTuple


class Cut(NamedTuple):
    """A piece of a window's output: from `start` to `end`, in steps of 20 ms from the window's beginning."""

    start: int
    end: int
    tokens: list[int]


def cut(tokens: list[int], first: int, steps: int) -> tuple[list[Cut], int]:
    """The pieces, and how many steps of the window are done with: what follows the last complete piece is read again.

    Args:
        tokens: the window's output, without the end of the text.
        first: the id of <|0.00|>.
        steps: of the window that are sound.
    """
    stamps = [token >= first for token in tokens]
    bounds = [place for place in range(1, len(tokens)) if stamps[place - 1] and stamps[place]]
    if not bounds:
        last = next((token - first for token in reversed(tokens) if token >= first), 0)
        return [Cut(0, last or steps, tokens)], steps
    complete = stamps[-1] and not stamps[-2]
    """One timestamp at the end says that nobody speaks behind it."""
    if complete:
        bounds.append(len(tokens))
    pieces, begin = [], 0
    for bound in bounds:
        piece = tokens[begin:bound]
        pieces.append(Cut(piece[0] - first, piece[-1] - first, piece))
        begin = bound
    # Where the first piece is empty its end is its beginning, and the window would be read for ever.
    return pieces, steps if complete else min(pieces[-1].end, steps) or steps
