"""Masks of rows with drafts: one for each position whose draws may count.

What a position of a row may draw depends on the drafts before it. So a matcher is led along its row's drafts, tells its
mask at each place, and is led back: it has heard of nothing. Behind a draft that the constraint does not allow, or that
ends the request, no draw counts, and there is no mask. The matchers go along together, place by place, so that a driver
fills the masks of a place for all of them at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from engine.types.errors import EngineError

if TYPE_CHECKING:
    from engine.interfaces.grammar import Matcher

Fill = Callable[[list["Matcher"], np.ndarray, np.ndarray], None]
"""Writes the masks of matchers, none twice, into these rows, int32 [m], of int32 [rows, words]."""


class DraftedRow(NamedTuple):
    """A constrained row.

    Args:
        matcher: behind the tokens before the drafts.
        drafts: of the row, perhaps none.
        stops: ids that end the request: nothing is drawn behind them.
    """

    matcher: Matcher
    drafts: Sequence[int]
    stops: frozenset[int]


class DraftMasks(NamedTuple):
    """The masks of some rows.

    Args:
        counts: int64 [m]; of each row, at least 1.
        bits: int32 [sum of counts, words]; row by row, position by position.
        failed: by the row's place: the error with which its matcher gave up. It has no place to go back to.
    """

    counts: np.ndarray
    bits: np.ndarray
    failed: dict[int, EngineError]


def draft_masks(rows: Sequence[DraftedRow], words: int, fill: Fill) -> DraftMasks:
    """The masks of each row's positions, as far as draws there may count.

    Args:
        words: of a mask.
        fill: the driver's.
    """
    most = np.array([1 + len(row.drafts) for row in rows], np.int64)
    start = np.cumsum(most) - most
    bits = np.empty((int(most.sum()), words), np.int32)
    counts = np.zeros(len(rows), np.int64)
    failed: dict[int, EngineError] = {}
    going = list(range(len(rows)))
    while going:
        places = (start + counts)[going].astype(np.int32)
        fill([rows[i].matcher for i in going], places, bits)
        counts[going] += 1
        going = [
            i for i, at in zip(going, places.tolist(), strict=True) if _goes_on(rows[i], i, counts, bits[at], failed)
        ]
    for i, row in enumerate(rows):
        if counts[i] > 1 and i not in failed:
            row.matcher.rollback(int(counts[i]) - 1)
    if counts.sum() < most.sum():
        place = np.arange(most.sum()) - start.repeat(most)
        bits = bits[place < counts.repeat(most)]
    return DraftMasks(counts, bits, failed)


def _goes_on(row: DraftedRow, i: int, counts: np.ndarray, mask: np.ndarray, failed: dict[int, EngineError]) -> bool:
    """Lead the matcher over its next draft; False where there is no place behind it at which a draw may count."""
    place = int(counts[i]) - 1
    if place == len(row.drafts):
        return False
    token = row.drafts[place]
    if token in row.stops or not mask[token >> 5] >> (token & 31) & 1:
        return False
    try:
        if not row.matcher.accept([token]):
            return False
    except EngineError as error:
        failed[i] = error
        return False
    if row.matcher.finished:
        row.matcher.rollback(1)
        return False
    return True
