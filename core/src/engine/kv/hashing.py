"""Names for prefixes: each block's hash covers its tokens, everything before them, and the request's salt.

Chained hashing of blocks as in vLLM's automatic prefix caching; the function is XXH3-128 over little-endian int32 ids.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from xxhash import xxh3_128_digest


class Hashed(Protocol):
    """A sequence with the hashes of its full blocks, as far as they were needed, and its root."""

    hashes: list[bytes]
    root: bytes


def root_hash(cache_salt: str | None) -> bytes:
    """The hash that stands before a sequence's first block: equal for requests that may share pages."""
    return xxh3_128_digest(b"" if cache_salt is None else b"salt " + cache_salt.encode("utf-8", "surrogatepass"))


def extend_hashes(hashes: list[bytes], root: bytes, tokens: np.ndarray, block_size: int) -> None:
    """Append the hashes of the full blocks that `hashes` does not cover yet, in place.

    Args:
        hashes: one a block, 16 bytes each, as far as they are known.
        root: of the sequence.
        tokens: int32 [n]; the sequence from its start. A last, partly filled block is left out.
        block_size: tokens of one block.
    """
    start, end = len(hashes), len(tokens) // block_size
    if start >= end:
        return
    data = tokens[start * block_size : end * block_size].astype("<i4", copy=False).tobytes()
    step = 4 * block_size
    parent = hashes[-1] if hashes else root
    for offset in range(0, len(data), step):
        parent = xxh3_128_digest(parent + data[offset : offset + step])
        hashes.append(parent)
