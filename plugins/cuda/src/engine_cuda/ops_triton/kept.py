"""What the filters keep of a row, found by halving: no sort.

A row is given as `items`, (its logits, values and ids of a list, whether that is meant, how many there are): a list of
items in any order, or the row as a whole. `scores` are (the largest logit, log2(e) / temperature, min_p). Every
function goes through the items once; sums are whole numbers, so that neither the order nor the number of items that
weigh nothing matters.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine_cuda.ops_triton.blocks import load_logits, relative_weight, whole
from engine_cuda.ops_triton.keys import between, half_way, key_of

LEAST: tl.constexpr = tl.constexpr(-(2**31))
MOST: tl.constexpr = tl.constexpr(2**31 - 1)
EQUAL: tl.constexpr = tl.constexpr(0)
"""A kind of item: those of the lowest key that is kept, each counted as 1."""
KEPT: tl.constexpr = tl.constexpr(1)
"""A kind of item: those that are kept, by their weight."""
RESIDUAL: tl.constexpr = tl.constexpr(2)
"""A kind of item: those that are kept, by what the draft's distribution leaves of their weight."""


@triton.jit
def _load(items, start, end, TILE: tl.constexpr):
    """(logits, tokens) of TILE items from `start` on; -inf at and past `end`."""
    row, values, ids, listed, _count = items
    offs = start + tl.arange(0, TILE)
    mask = offs < end
    if listed:
        x = tl.load(values + offs, mask=mask, other=float("-inf"))
        token = tl.load(ids + offs, mask=mask, other=0)
    else:
        x = load_logits(row, offs, mask)
        token = offs
    return x, token


@triton.jit
def reaching(items, scores, key, COUNT: tl.constexpr, SHIFT: tl.constexpr, TILE: tl.constexpr):
    """Of the items that min_p keeps (weight >= floor): (how many have at least this key, or what these weigh, int64;
    the least key of these; the largest key of the others)."""
    count = items[4]
    peak, scale, floor = scores
    measure, above, below = tl.full((), 0, tl.int64), tl.full((), MOST, tl.int32), tl.full((), LEAST, tl.int32)
    for start in range(0, count, TILE):
        x, _ = _load(items, start, count, TILE)
        weight = relative_weight(x, peak, scale)
        alive, own = (x > float("-inf")) & (weight >= floor), key_of(x)
        reached = alive & (own >= key)
        if COUNT:
            measure += tl.sum(reached.to(tl.int64), axis=0)
        else:
            measure += tl.sum(tl.where(reached, whole(weight, SHIFT), 0), axis=0)
        above = tl.minimum(above, tl.min(tl.where(reached, own, MOST), axis=0))
        below = tl.maximum(below, tl.max(tl.where(alive & (own < key), own, LEAST), axis=0))
    return measure, above, below


@triton.jit
def threshold(items, scores, low, wanted, COUNT: tl.constexpr, SHIFT: tl.constexpr, TILE: tl.constexpr):
    """The largest key such that `reaching` it measures `wanted` at least; `low` where none does.

    Halves the range of numbers and, in turn, that of keys, and takes both ends to items that there are.
    """
    high, turn = key_of(scores[0]) + 1, 0
    while low + 1 < high:
        if turn % 2 == 0:
            middle = between(low, high)
        else:
            middle = half_way(low, high)
        measure, above, below = reaching(items, scores, middle, COUNT, SHIFT, TILE)
        if measure >= wanted:
            low = above
        else:
            high = tl.maximum(below, low) + 1
        turn += 1
    return low


@triton.jit
def weigh(
    items, scores, kept, drafted, first, last, kind, PROBS: tl.constexpr, REJECT: tl.constexpr, SHIFT: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """What the items with tokens first .. last weigh together, int64, by their kind.

    kept: (key, last_equal): kept are those above the key, and those that equal it up to the token. drafted: (draft,
    probs, total): the weight of all that are kept, by which the draft's distribution (`probs`, or all of it on `draft`)
    is measured.
    """
    _row, _values, _ids, listed, count = items
    peak, scale, floor = scores
    key, last_equal = kept
    draft, probs, total = drafted
    measure = tl.full((), 0, tl.int64)
    begin, end = first, last + 1
    if listed:
        begin, end = 0, count
    for start in range(begin, end, TILE):
        x, token = _load(items, start, end, TILE)
        weight, own = relative_weight(x, peak, scale), key_of(x)
        alive = (x > float("-inf")) & (weight >= floor) & (token >= first) & (token <= last)
        mask = alive & ((own > key) | ((own == key) & (token <= last_equal)))
        amount = whole(weight, SHIFT)
        if REJECT:  # noqa: SIM102 (decided when it is compiled, the next when it runs)
            if kind == RESIDUAL:
                if PROBS:
                    q = tl.load(probs + token, mask=mask, other=0.0).to(tl.float64)
                    amount = tl.maximum(amount - (q * total.to(tl.float64)).to(tl.int64), 0)
                else:
                    amount = tl.where(token == draft, 0, amount)
        amount = tl.where(mask, amount, 0)
        if kind == EQUAL:
            amount = (alive & (own == key)).to(tl.int64)
        measure += tl.sum(amount, axis=0)
    return measure


@triton.jit
def first_above(
    items, scores, kept, drafted, vocab, target, kind, PROBS: tl.constexpr, REJECT: tl.constexpr, SHIFT: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """The first token, in order, at which the running sum of `weigh` exceeds the target; the last where none does."""
    low, high, before = tl.full((), 0, tl.int32), vocab - 1, tl.full((), 0, tl.int64)
    while low < high:
        middle = (low + high) // 2
        part = weigh(items, scores, kept, drafted, low, middle, kind, PROBS, REJECT, SHIFT, TILE)
        if before + part > target:
            high = middle
        else:
            before += part
            low = middle + 1
    return low
