"""Which place holds which expert: places are numbered through the ranks, and an expert may be at several of them.

Experts are dealt by load with the greedy that DeepSeek published (EPLB, 2025): copies go one by one to the expert whose
copies have most tokens each; then the copies, the heaviest first, each to the rank with least load that has room. One
goes to a rank that has the same expert only where no other has room.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import NamedTuple

import numpy as np

MOST_WIDTH = 12
"""Of a table: up to four copies take exactly equal turns."""


class Move(NamedTuple):
    """One step from one placement to another: what stands at `source` comes to `place`, and, where they `swap`, the
    other way too."""

    place: int
    source: int
    swap: bool


def starts_of(places: int, ranks: int) -> np.ndarray:
    """int64 [ranks + 1]: rank r has the places starts[r] .. starts[r + 1] - 1; the first ranks one more where they do
    not divide evenly."""
    least, more = divmod(places, ranks)
    return np.cumsum([0, *(least + (rank < more) for rank in range(ranks))])


def first_placement(experts: int, places: int) -> np.ndarray:
    """int32 [places]: the experts in order, then again from the first."""
    return (np.arange(places) % experts).astype(np.int32)


def table_width(copies: int) -> int:
    """Of a table in which so many copies of an expert, or fewer, take turns."""
    return max(copies, math.lcm(*range(1, min(copies, 4) + 1)))


def table_of(placement: np.ndarray, experts: int, width: int) -> np.ndarray:
    """int32 [experts, width]: the places of each expert, in turns; see operation `place_experts`."""
    table = np.empty((experts, width), np.int32)
    for expert in range(experts):
        places = np.flatnonzero(placement == expert)
        table[expert] = places[np.arange(width) % len(places)]
    return table


def balanced(load: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """int32 [places], by tokens of each expert [experts]."""
    ranks, places = len(starts) - 1, int(starts[-1])
    copies = np.ones(len(load), np.int64)
    for _ in range(places - len(load)):
        open_to = np.where(copies < ranks, load / copies, -1.0)
        copies[int(np.argmax(open_to))] += 1
    each = load / copies
    held: list[list[int]] = [[] for _ in range(ranks)]
    weight = np.zeros(ranks)
    room = np.diff(starts)
    for expert in np.argsort(-each, kind="stable").tolist():
        for _ in range(int(copies[expert])):
            fits = [rank for rank in range(ranks) if len(held[rank]) < room[rank]]
            rank = min(fits, key=lambda one: (expert in held[one], weight[one], one))
            held[rank].append(expert)
            weight[rank] += each[expert]
    return np.array([expert for mine in held for expert in mine], np.int32)


def aligned(before: np.ndarray, after: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """The same experts on the same ranks as in `after`; what a rank has `before` too stays at its place."""
    found = np.full_like(after, -1)
    for first, end in pairwise(starts.tolist()):
        left = after[first:end].tolist()
        for place in range(first, end):
            if int(before[place]) in left:
                left.remove(int(before[place]))
                found[place] = before[place]
        for place in range(first, end):
            if found[place] < 0:
                found[place] = left.pop(0)
    return found


def heaviest(load: np.ndarray, placement: np.ndarray, starts: np.ndarray) -> float:
    """Tokens of the rank that has most, where each expert's [experts] are divided over its copies."""
    each = load / np.maximum(1, np.bincount(placement, minlength=len(load)))
    return max(float(each[placement[a:b]].sum()) for a, b in pairwise(starts.tolist()))


def next_move(now: np.ndarray, wanted: np.ndarray, starts: np.ndarray) -> Move | None:
    """One that brings an expert to its place, and leaves every expert somewhere; None where all is as wanted.

    There is always one: where a place cannot be overwritten, because it has the only copy of an expert, that expert is
    wanted elsewhere, and the two places can swap.
    """
    for place in np.flatnonzero(now != wanted).tolist():
        sources = np.flatnonzero(now == wanted[place])
        leaving = sources[wanted[sources] != wanted[place]]
        if len(leaving):
            return Move(place, _nearest(place, leaving, starts), True)
        if np.count_nonzero(now == now[place]) > 1:
            return Move(place, _nearest(place, sources, starts), False)
    assert (now == wanted).all(), "an expert is wanted nowhere"
    return None


def _nearest(place: int, places: np.ndarray, starts: np.ndarray) -> int:
    """One of the same rank, if there is one; else not always the first."""
    rank = np.searchsorted(starts, place, "right")
    here = places[np.searchsorted(starts, places, "right") == rank]
    return int(here[0]) if len(here) else int(places[place % len(places)])
