"""Names for prefixes: each block's hash covers its tokens, everything before them, and what else tells requests apart.

Chained hashing of blocks as in vLLM's automatic prefix caching. What is hashed, for a block:

    the parent's hash, the ids as little-endian int32

and for what stands before a sequence's first block: the adapter's id, the cache salt and the key of the encoder's
input or of embeddings, if any. The function is XXH3-128, which is not made to resist forgery, or SHA-256, which is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from hashlib import sha256
from types import MappingProxyType
from typing import Protocol

import numpy as np
from xxhash import xxh3_128_digest

Digest = Callable[[bytes], bytes]
"""From bytes to their hash."""


def _sha256(data: bytes) -> bytes:
    return sha256(data).digest()


HASH_FUNCTIONS: Mapping[str, Digest] = MappingProxyType({"xxhash": xxh3_128_digest, "sha256": _sha256})
"""By their names in `--prefix-caching-hash-algo`."""


class Hashed(Protocol):
    """A sequence with the hashes of its full blocks, as far as they were needed, and its root; see `root_hash`."""

    hashes: list[bytes]
    root: bytes
    lora_id: str | None


def root_hash(
    cache_salt: str | None, lora_id: str | None = None, digest: Digest = xxh3_128_digest, beside: str | None = None
) -> bytes:
    """The hash that stands before a sequence's first block: equal for requests that may share pages.

    Args:
        cache_salt: requests with different salts share nothing.
        lora_id: of the adapter that computes the keys and values; None for the model alone.
        beside: the key of what the encoder reads, or of embeddings that are given.
    """
    parts = b""
    for name, value in ((b"lora", lora_id), (b"salt", cache_salt), (b"encoder", beside)):
        if value is not None:
            data = value.encode("utf-8", "surrogatepass")
            parts += b"%s %d " % (name, len(data)) + data
    return digest(parts)


def extend_hashes(
    hashes: list[bytes], root: bytes, tokens: np.ndarray, block_size: int, *, digest: Digest = xxh3_128_digest
) -> None:
    """Append the hashes of the full blocks that `hashes` does not cover yet, in place.

    Args:
        hashes: one a block, as far as they are known.
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
        parent = digest(parent + data[offset : offset + step])
        hashes.append(parent)


def partial_hash(parent: bytes, tokens: np.ndarray, *, digest: Digest = xxh3_128_digest) -> bytes:
    """The hash of tokens, int32 [n], that fill a block only in part; parent: what stands before them."""
    return digest(parent + tokens.astype("<i4", copy=False).tobytes())
