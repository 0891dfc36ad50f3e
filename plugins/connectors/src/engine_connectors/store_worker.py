"""The worker half of connectors that keep pages by key: threads that read into the pool and write from a buffer.

A step never waits for the store. Pages to be kept are copied into the buffer when their plan begins, before anything is
computed; where the buffer is full, they are not kept. Pages to be filled belong to requests that wait until the core
has heard that they are. No torch, but for a pool in a device's memory.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from engine.interfaces.kv_connector import KVConnectorWorker, PagedPool
from engine.process import wire
from engine.types.errors import KVCacheTooSmallError
from engine_connectors.pages import Place, Store
from engine_connectors.pool_access import Access, HostAccess, PageAccess
from engine_connectors.store_scheduler import Load, Loaded, News, Section

if TYPE_CHECKING:
    import torch

    from engine.interfaces.context import WorkerContext

logger = logging.getLogger(__name__)

_BATCH_BYTES = 4 << 20
_BATCH_PAGES = 64
"""What a thread reads or writes at once: so much, and so many pages, at most."""
_MOST_SLOTS = 1 << 20
"""Of the buffer, however small pages are: a stage that caches nothing has pages of no byte."""
_LAST_WRITES_SECONDS = 10.0
"""How long an engine that ends waits for pages that are to be written."""
_LOAD, _SAVE, _STOP = range(3)
"""In this order a thread takes what there is to do."""


def place_of(context: WorkerContext) -> Place:
    """This rank's."""
    stage, tp_rank = divmod(context.start.place.rank, context.start.parallel.tp)
    return Place(tp_rank, stage)


class _UnderWay:
    """A load on this rank: how many pages are not there yet, and those that cannot be had."""

    def __init__(self, number: int, left: int) -> None:
        self.number = number
        self.left = left
        self.failed: list[int] = []


class StoreWorker(KVConnectorWorker):
    """See there.

    Args:
        store: of this rank's pages.
        threads: that read and write.
        buffer: bytes of host memory for pages that wait to be written.
    """

    def __init__(self, store: Store, threads: int, buffer: int) -> None:
        self._store = store
        self._buffer_bytes = buffer
        self._decode = wire.decoder(Section).decode
        self._jobs: queue.PriorityQueue[tuple[int, int, Callable[[], None] | None]] = queue.PriorityQueue()
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._loaded: list[Loaded] = []
        self._dropped: list[bytes] = []
        self._told_counts: dict[str, int] = {}
        self._threads = [
            threading.Thread(target=self._work, name=f"kv-store-{number}", daemon=True) for number in range(threads)
        ]
        self._section: Section | None = None
        self._closed = False

    def register(self, pool: torch.Tensor | PagedPool) -> None:
        """Host memory for the buffer is taken as it is needed."""
        page_bytes = max(1, pool.page_bytes if isinstance(pool, PagedPool) else pool.shape[1])
        self._per_batch = max(1, min(_BATCH_PAGES, _BATCH_BYTES // page_bytes))
        slots = min(_MOST_SLOTS, max(1, self._buffer_bytes // page_bytes))
        self._access = self._access_to(pool)
        try:
            self._buffer = self._access.memory(slots)
        except (MemoryError, RuntimeError) as error:
            asked = f"allocate {self._buffer_bytes:,} bytes of host memory for pages to be kept"
            raise KVCacheTooSmallError(asked, str(error).partition("\n")[0], "lower --kv-connector.buffer") from error
        self._free = deque(range(slots))
        self.lend(self._buffer)
        for thread in self._threads:
            thread.start()

    def _access_to(self, pool: torch.Tensor | PagedPool) -> Access:
        if isinstance(pool, PagedPool):
            return PageAccess(pool)
        if pool.device.type == "cpu":
            rows = pool.numpy()
            self.lend(rows)
            return HostAccess(rows)
        from engine_connectors.device_access import DeviceAccess  # it imports torch, which need not be there

        return DeviceAccess(pool, self._per_batch, self.lend)

    def lend(self, memory: np.ndarray) -> None:
        """The store's pages, uint8 [n, page_bytes], will lie in this host memory: for those that have to know."""

    def begin(self, step_id: int, section: bytes | None) -> None:
        """Copy what is to be kept."""
        self._section = None if section is None else self._decode(section)
        if self._section is not None and self._section.save_keys:
            self._save(self._section.save_keys, self._section.save_pages.tolist())

    def load(self, step_id: int) -> None:
        """Let the threads begin with what is to be filled."""
        self._access.settle()
        if self._section is not None:
            for load in self._section.loads:
                self._read(load)
            if self._section.used:
                self._later(_SAVE, partial(self._store.touch, self._section.used))

    def news(self) -> bytes | None:
        """Loads that ended, pages that are not kept, and what was counted."""
        counts = self._store.counts()
        with self._lock:
            if not self._loaded and not self._dropped and counts == self._told_counts:
                return None
            new = {name: count - self._told_counts.get(name, 0) for name, count in counts.items()}
            told = News(loaded=self._loaded, dropped=self._dropped, counts=new)
            self._told_counts = counts
            self._loaded = []
            self._dropped = []
        return wire.encode(told)

    def close(self) -> None:
        """What was to be kept is written first, as far as that goes in ten seconds. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for _ in self._threads:
            self._later(_STOP, None)
        until = time.monotonic() + _LAST_WRITES_SECONDS
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(0.0, until - time.monotonic()))
        self._store.close()

    # -- out -----------------------------------------------------------------------------------------------------------
    def _save(self, keys: Sequence[bytes], pages: Sequence[int]) -> None:
        n = min(len(keys), len(self._free))
        slots = [self._free.popleft() for _ in range(n)]
        for first in range(0, n, self._per_batch):
            some = slice(first, min(n, first + self._per_batch))
            copied = self._access.take(pages[some], self._buffer, slots[some])
            self._later(_SAVE, partial(self._put, keys[some], slots[some], copied))
        if n < len(keys):
            with self._lock:
                self._dropped += keys[n:]

    def _put(self, keys: Sequence[bytes], slots: Sequence[int], copied: Callable[[], None]) -> None:
        kept = [False] * len(keys)
        try:
            copied()
            kept = self._store.put(keys, [self._buffer[slot] for slot in slots])
        finally:
            self._free.extend(slots)
            with self._lock:
                self._dropped += [key for key, there in zip(keys, kept, strict=True) if not there]

    # -- in ------------------------------------------------------------------------------------------------------------
    def _read(self, load: Load) -> None:
        pages = load.pages.tolist()
        under_way = _UnderWay(load.number, len(pages))
        before = self._access.queued()
        for first in range(0, len(pages), self._per_batch):
            some = slice(first, first + self._per_batch)
            self._later(_LOAD, partial(self._get, under_way, load.keys[some], pages[some], before))

    def _get(
        self, under_way: _UnderWay, keys: Sequence[bytes], pages: Sequence[int], before: Callable[[], None]
    ) -> None:
        filled = [False] * len(keys)
        try:
            before()  # steps, and copies out, that still use these pages on the device
            filled = self._access.fill(pages, partial(self._store.get, keys))
        finally:
            self._access.after(partial(self._ended, under_way, keys, pages, filled))

    def _ended(self, under_way: _UnderWay, keys: Sequence[bytes], pages: Sequence[int], filled: list[bool]) -> None:
        with self._lock:
            under_way.failed += [page for page, there in zip(pages, filled, strict=True) if not there]
            self._dropped += [key for key, there in zip(keys, filled, strict=True) if not there]
            under_way.left -= len(pages)
            if not under_way.left:
                failed = np.array(under_way.failed, np.int32)
                self._loaded.append(Loaded(number=under_way.number, failed=failed))

    # -- threads -------------------------------------------------------------------------------------------------------
    def _later(self, kind: int, job: Callable[[], None] | None) -> None:
        self._jobs.put((kind, next(self._numbers), job))

    def _work(self) -> None:
        while (job := self._jobs.get()[2]) is not None:
            try:
                job()
            except Exception:
                logger.exception("the KV store failed")
