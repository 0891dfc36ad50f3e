"""Float32 numbers as whole ones in the same order, in which a number is found by halving."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def key_of(x):
    """int32, in the order of x; both zeros have one. x: float32, no NaN."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def number_of(key):
    """The float32 number of a key."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def between(low, high):
    """A key above `low` and below `high`, which lie at least two apart: half way between the numbers."""
    middle = key_of(0.5 * number_of(low) + 0.5 * number_of(high))
    return tl.minimum(tl.maximum(middle, low + 1), high - 1)


@triton.jit
def half_way(low, high):
    """The key half way between two. Their difference may not fit into int32."""
    return ((low.to(tl.int64) + high.to(tl.int64)) >> 1).to(tl.int32)


@triton.jit
def largest_with(keys, wanted):
    """The largest key that at least `wanted` of `keys` (a tensor) reach; int32's least if they are fewer."""
    low, high = tl.min(keys, axis=0), tl.max(keys, axis=0)
    while low < high:
        middle = half_way(low, high) + 1
        if tl.sum((keys >= middle).to(tl.int32), axis=0) >= wanted:
            low = middle
        else:
            high = middle - 1
    return low
