"""Pages as a store keeps them: what they are called, and the frame that tells whether they are whole. No torch.

A stored page is a frame of 64 bytes and the page's bytes. A page's key names everything that its content depends on:
the engine's identity, the KV table, and the block's hash, which covers its tokens and all before them. With the rank's
place it is found by engines of the same identity alone.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import NamedTuple, Protocol

import numpy as np
from xxhash import xxh3_64_intdigest

from engine.types.parallel import Parallel

KEY_BYTES = 20
_FRAME = struct.Struct(f"<8s{KEY_BYTES}sHHQQ16x")
FRAME_BYTES = _FRAME.size
_MAGIC = b"EngineK1"


class Place(NamedTuple):
    """Which rank's bytes they are.

    Args:
        tp: rank among those that share layers.
        pp: stage.
    """

    tp: int = 0
    pp: int = 0

    def __str__(self) -> str:
        return f"{self.tp}.{self.pp}"


def places_of(parallel: Parallel) -> tuple[Place, ...]:
    """All ranks'."""
    return tuple(Place(tp, pp) for pp in range(parallel.pp) for tp in range(parallel.tp))


def page_key(identity: bytes, table: int, block_hash: bytes) -> bytes:
    """The name of a block's page of one KV table, in 20 bytes, for engines of this identity (at most 64 bytes)."""
    return blake2b(block_hash, digest_size=KEY_BYTES, key=identity, salt=table.to_bytes(4, "little")).digest()


def frame(key: bytes, place: Place, page: np.ndarray) -> bytes:
    """What stands before a page: its name, size and checksum (XXH3-64, which finds accidents, not forgery).

    page: uint8 [page_bytes], in a row.
    """
    return _FRAME.pack(_MAGIC, key, place.tp, place.pp, page.size, xxh3_64_intdigest(page.data))


def is_whole(found: bytes | bytearray | memoryview, key: bytes, place: Place, page: np.ndarray) -> bool:
    """Whether a frame says that these bytes, uint8 [page_bytes], are the page of this name, and they are."""
    if len(found) != FRAME_BYTES:
        return False
    magic, its_key, tp, pp, size, checksum = _FRAME.unpack(found)
    named = magic == _MAGIC and its_key == key and place == (tp, pp) and size == page.size
    return named and bool(checksum == xxh3_64_intdigest(page.data))


class Directory(Protocol):
    """What a store has, asked by the scheduler half: one thread, or one thread beside the scheduler's."""

    def has(self, keys: Sequence[bytes]) -> Iterable[bool]:
        """Whether each of these pages is there, on all ranks. What cannot be asked is not there. Never raises. Who asks
        may stop at the first that is not there."""

    def close(self) -> None:
        """Ask no more. Idempotent."""


class Store(Protocol):
    """Whole pages of one rank by key. Several threads call it at once; it raises nothing: what fails is counted."""

    def get(self, keys: Sequence[bytes], pages: Sequence[np.ndarray]) -> list[bool]:
        """Fill pages[i], uint8 [page_bytes], with what is kept under keys[i]. False: it is not there, or not whole;
        the page may then hold anything. Pages that are not whole are removed."""

    def put(self, keys: Sequence[bytes], pages: Sequence[np.ndarray]) -> list[bool]:
        """Keep copies, each whole or not at all. False: it is not kept."""

    def touch(self, keys: Sequence[bytes]) -> None:
        """These are in use, the first most of all: they are to be given up last."""

    def counts(self) -> dict[str, int]:
        """What went wrong since start, by name."""

    def close(self) -> None:
        """Nothing is asked after this. Idempotent."""
