"""What is used of the library: one of its remote connectors.

An object has always the same size, so it is stored without the description that LMCache puts before its own chunks
where the store can do without. Memory for each is its own, so whoever gives up waiting for one spoils no other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import load_engine_config_with_overrides
from lmcache.v1.memory_allocators.ad_hoc_memory_allocator import AdHocMemoryAllocator
from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.connector import CreateConnector
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

Name = tuple[str, bytes]
"""What an object is called: a prefix, and a key."""


class Connection:
    """A store. To be made, and asked, in one event loop. Answers are exceptions where a part of a question fails.

    Raises what the library raises where there is no such store, or it does not answer.

    Args:
        url, config: see `LMCacheOptions`.
        object_bytes: of each object.
    """

    def __init__(self, url: str, config: Path | None, object_bytes: int) -> None:
        overrides = {"remote_url": url, "chunk_size": 1, "local_cpu": False, "save_unfull_chunk": False}
        settings = load_engine_config_with_overrides(None if config is None else str(config), overrides)
        settings.extra_config = {**(settings.extra_config or {}), "save_chunk_meta": False}
        shape = (1, 1, 1, 1, object_bytes)
        metadata = LMCacheMetadata("engine-kv", 1, 1, 0, 0, torch.uint8, shape, chunk_size=1, role="worker")
        self._shape = metadata.get_shapes()[0]
        self._memory = LocalCPUBackend(settings, memory_allocator=AdHocMemoryAllocator("cpu"))
        self._memory.metadata = metadata  # given to it at once, it would set up metrics of a server of its own
        loop = asyncio.get_running_loop()
        self._store = CreateConnector(url, loop, self._memory, settings, metadata).getWrappedConnector()
        self._in_turns = asyncio.Lock() if url.startswith("lm:") else None

    async def exists(self, names: Sequence[Name]) -> list[bool | BaseException]:
        """Whether each is there."""
        return await self._all([partial(self._store.exists, _key(name)) for name in names])

    async def get(self, names: Sequence[Name]) -> list[np.ndarray | BaseException | None]:
        """The objects, uint8 [object_bytes]; None for one that is not there, or has another size."""
        if self._store.support_batched_get():
            objects = await self._store.batched_get([_key(name) for name in names])
        else:
            objects = await self._all([partial(self._store.get, _key(name)) for name in names])
        return [one if one is None or isinstance(one, BaseException) else self._taken(one) for one in objects]

    async def put(self, names: Sequence[Name], objects: Sequence[np.ndarray]) -> list[bool | BaseException]:
        """Keep objects, uint8 [object_bytes]."""

        async def kept(name: Name, content: np.ndarray) -> bool:
            one = self._memory.allocate(self._shape, torch.uint8, MemoryFormat.KV_2LTD)
            _bytes(one)[:] = content
            try:
                await self._store.put(_key(name), one)
            finally:
                one.ref_count_down()
            return True

        calls = [partial(kept, name, content) for name, content in zip(names, objects, strict=True)]
        return await self._all(calls)

    async def remove(self, name: Name) -> None:
        """Where the store can."""
        with suppress(NotImplementedError):
            self._store.remove_sync(_key(name))

    def _taken(self, one: Any) -> np.ndarray | None:
        content = _bytes(one) if one.get_size() == self._shape.numel() else None
        one.ref_count_down()
        return content

    async def _all(self, calls: Sequence[Callable[[], Awaitable[Any]]]) -> list[Any]:
        """The answers, or exceptions; at once, but for LMCache's own server: its client mixes up what two that ask at
        once are answered."""
        if self._in_turns is None:
            return await asyncio.gather(*(call() for call in calls), return_exceptions=True)
        async with self._in_turns:
            return [await call() for call in calls]


def _key(name: Name) -> Any:
    prefix, key = name
    return CacheEngineKey(prefix, 1, 0, int.from_bytes(key, "big"), torch.uint8)


def _bytes(one: Any) -> np.ndarray:
    """Of an object in memory."""
    found: np.ndarray = one.tensor.view(-1).numpy()
    return found
