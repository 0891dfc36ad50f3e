"""The published random numbers (`engine.interfaces.ops`), inside kernels."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def random_bits(seed, position, purpose):
    """uint64: 53 random bits, u * 2^53 for the u of `engine_kit.philox.uniform`. seed, position: int64.

    Philox4x32-10 (Salmon et al., SC 2011): words of 32 bits, held in 64.
    """
    low = tl.full((), 0xFFFFFFFF, tl.uint64)
    m0, m1 = tl.full((), 0xD2511F53, tl.uint64), tl.full((), 0xCD9E8D57, tl.uint64)
    w0, w1 = tl.full((), 0x9E3779B9, tl.uint64), tl.full((), 0xBB67AE85, tl.uint64)
    bits = seed.to(tl.uint64, bitcast=True)
    k0, k1 = bits & low, bits >> 32
    c0, c1 = position.to(tl.uint64, bitcast=True) & low, tl.full((), purpose, tl.uint64)
    c2, c3 = tl.full((), 0, tl.uint64), tl.full((), 0, tl.uint64)
    for _ in tl.static_range(10):
        p0, p1 = m0 * c0, m1 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & low, (p0 >> 32) ^ c3 ^ k1, p0 & low
        k0, k1 = (k0 + w0) & low, (k1 + w1) & low
    return (c0 >> 5 << 26) + (c1 >> 6)


@triton.jit
def share_of(total, bits):
    """floor(u * total) for bits = u * 2^53: exact. total: int64 below 2^63."""
    return tl.umulhi(bits << 11, total.to(tl.uint64)).to(tl.int64)
