"""The pool of a worker, as `store_worker` moves its pages: in host memory, or of a framework that lets the step's own
thread alone change it. What lies in a device's memory is reached by `device_access`. No torch."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import numpy as np

from engine.interfaces.kv_connector import PagedPool

Get = Callable[[Sequence[np.ndarray]], list[bool]]
"""Fills pages, uint8 [page_bytes] each, and says which are filled."""


def _nothing() -> None:
    """All that was queued is done."""


class Access(Protocol):
    """A pool, and host memory beside it. The step's thread calls `take`, `queued` and `settle`, others the rest."""

    def memory(self, pages: int) -> np.ndarray:
        """Uninitialised host memory that pages can be copied to, uint8 [pages, page_bytes]. Raises MemoryError,
        RuntimeError."""

    def take(self, pages: Sequence[int], rows: np.ndarray, places: Sequence[int]) -> Callable[[], None]:
        """Copy pages to rows[places], in order with the device's work; what is returned waits until they are there."""

    def queued(self) -> Callable[[], None]:
        """What waits until the device has done all that is queued now."""

    def fill(self, pages: Sequence[int], get: Get) -> list[bool]:
        """Fill pages that nobody else uses; which of them are. They hold what they should once `after` calls."""

    def after(self, told: Callable[[], None]) -> None:
        """Call this once what this thread has filled is in the pool."""

    def settle(self) -> None:
        """In order with the device's work: bring into the pool what was filled."""


class HostAccess:
    """A pool in host memory: threads read into it.

    Args:
        rows: the pool, uint8 [num_pages, page_bytes].
    """

    def __init__(self, rows: np.ndarray) -> None:
        self._rows = rows

    def memory(self, pages: int) -> np.ndarray:
        return np.empty((pages, self._rows.shape[1]), np.uint8)

    def take(self, pages: Sequence[int], rows: np.ndarray, places: Sequence[int]) -> Callable[[], None]:
        for page, place in zip(pages, places, strict=True):
            rows[place] = self._rows[page]
        return _nothing

    def queued(self) -> Callable[[], None]:
        return _nothing

    def fill(self, pages: Sequence[int], get: Get) -> list[bool]:
        return get([self._rows[page] for page in pages])

    def after(self, told: Callable[[], None]) -> None:
        told()

    def settle(self) -> None:
        pass


class PageAccess:
    """A `PagedPool`: what threads have read waits in host memory for the next step, whose thread writes it."""

    def __init__(self, pool: PagedPool) -> None:
        self._pool = pool
        self._waiting: deque[Callable[[], None]] = deque()

    def memory(self, pages: int) -> np.ndarray:
        return np.empty((pages, self._pool.page_bytes), np.uint8)

    def take(self, pages: Sequence[int], rows: np.ndarray, places: Sequence[int]) -> Callable[[], None]:
        content, places = self._pool.read(np.array(pages, np.int32)), list(places)

        def there() -> None:
            rows[places] = content()

        return there

    def queued(self) -> Callable[[], None]:
        return _nothing

    def fill(self, pages: Sequence[int], get: Get) -> list[bool]:
        rows = self.memory(len(pages))
        filled = get(list(rows))
        there = np.flatnonzero(filled)
        self.after(partial(self._pool.write, np.array(pages, np.int32)[there], rows[there]))
        return filled

    def after(self, told: Callable[[], None]) -> None:
        self._waiting.append(told)

    def settle(self) -> None:
        for _ in range(len(self._waiting)):  # of now: threads go on reading, and a step does not wait for them
            self._waiting.popleft()()
