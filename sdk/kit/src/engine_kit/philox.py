"""Philox4x32-10 and the uniform numbers that the engine draws with, in numpy: the definition, not the fast path."""

from __future__ import annotations

import numpy as np

_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_LOW = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)


def philox4x32(counter: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Ten rounds of Philox4x32 (Salmon et al., SC 2011).

    Args:
        counter: uint64 [n, 4], 32 bits used of each.
        key: uint64 [n, 2], 32 bits used of each.

    Returns:
        uint64 [n, 4] with 32 random bits each.
    """
    c0, c1, c2, c3 = (counter[:, i] & _LOW for i in range(4))
    k0, k1 = key[:, 0] & _LOW, key[:, 1] & _LOW
    for _ in range(10):
        p0, p1 = _M0 * c0, _M1 * c2
        c0, c1, c2, c3 = (p1 >> _32) ^ c1 ^ k0, p1 & _LOW, (p0 >> _32) ^ c3 ^ k1, p0 & _LOW
        k0, k1 = (k0 + np.uint64(_W0)) & _LOW, (k1 + np.uint64(_W1)) & _LOW
    return np.stack([c0, c1, c2, c3], axis=1)


def uniform(seed: np.ndarray, position: np.ndarray, purpose: int) -> np.ndarray:
    """The engine's random numbers: float64 [n] in [0, 1) for uint64 seeds [n] and positions [n]."""
    seed = np.asarray(seed).astype(np.uint64)
    position = np.asarray(position).astype(np.uint64)
    zero = np.zeros_like(seed)
    words = philox4x32(
        np.stack([position, zero + np.uint64(purpose), zero, zero], axis=1),
        np.stack([seed & _LOW, seed >> _32], axis=1),
    )
    return ((words[:, 0] >> np.uint64(5)) * np.uint64(2**26) + (words[:, 1] >> np.uint64(6))) / np.float64(2**53)
