"""A pool in a device's memory, as `store_worker` moves its pages: through pinned memory, and streams of threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np
import torch

from engine_connectors.pool_access import Get


class DeviceAccess:
    """Implements `engine_connectors.pool_access.Access`.

    Args:
        pool: uint8 [num_pages, page_bytes].
        most: pages that are filled at once.
        lend: is told of host memory that pages are filled through.
    """

    def __init__(self, pool: torch.Tensor, most: int, lend: Callable[[np.ndarray], None]) -> None:
        self._pool = pool
        self._most = most
        self._lend = lend
        self._own = threading.local()

    def memory(self, pages: int) -> np.ndarray:
        return self._pinned(pages).numpy()

    def take(self, pages: Sequence[int], rows: np.ndarray, places: Sequence[int]) -> Callable[[], None]:
        pinned = torch.from_numpy(rows)
        for page, place in zip(pages, places, strict=True):
            pinned[place].copy_(self._pool[page], non_blocking=True)
        return self.queued()

    def queued(self) -> Callable[[], None]:
        done = torch.Event(self._pool.device)
        done.record()
        return done.synchronize

    def fill(self, pages: Sequence[int], get: Get) -> list[bool]:
        """Through pinned memory and a stream of this thread's own: the pages are nobody else's until they are told."""
        own = self._own
        if not hasattr(own, "stream"):
            own.rows = self._pinned(self._most)
            self._lend(own.rows.numpy())
            own.stream = torch.Stream(self._pool.device)
        filled = get(list(own.rows.numpy()[: len(pages)]))
        with own.stream:
            for row, page, there in zip(own.rows, pages, filled, strict=False):
                if there:
                    self._pool[page].copy_(row, non_blocking=True)
        own.stream.synchronize()
        return filled

    def after(self, told: Callable[[], None]) -> None:
        told()

    def settle(self) -> None:
        pass

    def _pinned(self, pages: int) -> torch.Tensor:
        return torch.empty(pages, self._pool.shape[1], dtype=torch.uint8, pin_memory=True)
