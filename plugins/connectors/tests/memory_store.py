"""A store in memory, for several engines of one process, which may be slow and lose pages; and requests without one."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from hashlib import sha256
from types import SimpleNamespace
from typing import Any

import numpy as np

from engine.interfaces.context import SystemClock
from engine.interfaces.kv_connector import Pages
from engine.types.kv import KVLayout, KVTable
from engine.types.parallel import Parallel

BLOCK = 4


class MemoryStore:
    """A store and its directory. Where `gate` is not set, it waits for it."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.kept: dict[bytes, np.ndarray] = {}
        self.used: list[bytes] = []
        self.gate = threading.Event()
        self.gate.set()
        self.seconds = seconds
        self.broken = False
        self.closed = False

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        self.gate.wait()
        return [key in self.kept for key in keys]

    def get(self, keys: Sequence[bytes], pages: Sequence[np.ndarray]) -> list[bool]:
        self._take_time()
        for key, page in zip(keys, pages, strict=True):
            if key in self.kept:
                page[:] = self.kept[key]
        return self.has(keys)

    def put(self, keys: Sequence[bytes], pages: Sequence[np.ndarray]) -> list[bool]:
        self._take_time()
        self.kept |= {key: page.copy() for key, page in zip(keys, pages, strict=True)}
        return [True] * len(keys)

    def touch(self, keys: Sequence[bytes]) -> None:
        self.used += keys

    def counts(self) -> dict[str, int]:
        return {"kept": len(self.kept)}

    def close(self) -> None:
        self.closed = True

    def _take_time(self) -> None:
        self.gate.wait()
        time.sleep(self.seconds)
        if self.broken:
            raise OSError("the store is broken")


class Request:
    """A request as connectors see it."""

    def __init__(self, request_id: str, num_tokens: int, salt: str = "") -> None:
        self.request_id = request_id
        self.token_ids = np.arange(num_tokens, dtype=np.int32)
        self.num_prompt_tokens = num_tokens
        self.num_loadable = (num_tokens - 1) // BLOCK * BLOCK
        self.kv_transfer: dict[str, Any] | None = None
        self._hashes = [sha256(f"{salt}{number}".encode()).digest()[:16] for number in range(num_tokens // BLOCK)]

    def block_keys(self, table: int) -> list[bytes]:
        return self._hashes


def core_context(*windows: int | None, parallel: Parallel | None = None, **more: Any) -> Any:
    """One table for each window."""
    tables = tuple(
        KVTable(index=index, kind="full" if window is None else "sliding", window=window, tokens_per_block=BLOCK)
        for index, window in enumerate(windows)
    )
    layout = KVLayout(block_size=BLOCK, page_bytes=64, tables=tables, groups=())
    more = {"identity": b"me", "parallel": parallel or Parallel(), "clock": SystemClock(), "options": None, **more}
    return SimpleNamespace(layout=layout, **more)


def pages_of(*pages: Sequence[int], first: int = 0) -> list[Pages]:
    """Of each table, from block `first` on."""
    return [Pages(table, first, np.array(some, np.int32)) for table, some in enumerate(pages)]
