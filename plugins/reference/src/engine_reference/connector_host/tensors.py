"""Host memory beside a pool of torch's, and the copies between them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from engine.interfaces.platform import Platform


class TensorCopies:
    """Implements `engine_reference.connector_host.worker_half.PageCopies`: in order with the device's work.

    Args:
        pool: uint8 [num_pages, page_bytes].
        places: of host memory, one page each.
        chunk_bytes: of pinned memory in one piece, at most.
        platform: allocates memory where the pool is the processor's.

    Raises KVCacheTooSmallError, RuntimeError where the memory cannot be had.
    """

    def __init__(self, pool: torch.Tensor, places: int, chunk_bytes: int, platform: Platform | None) -> None:
        self._pool = pool
        self._per_chunk = places
        if pool.device.type == "cpu" and platform is not None:
            self._host = [platform.allocate_pool(places, pool.shape[1])]  # which looks what is free
            return
        self._per_chunk = max(1, chunk_bytes // pool.shape[1])
        pinned = pool.device.type != "cpu"  # so that nobody waits for the copies
        self._host = [
            torch.empty(min(self._per_chunk, left), pool.shape[1], dtype=torch.uint8, pin_memory=pinned)
            for left in range(places, 0, -self._per_chunk)
        ]

    def out(self, pages: np.ndarray, places: np.ndarray) -> None:
        for of_pool, of_host in self._pairs(pages, places):
            of_host.copy_(of_pool, non_blocking=True)

    def back(self, pages: np.ndarray, places: np.ndarray) -> None:
        for of_pool, of_host in self._pairs(pages, places):
            of_pool.copy_(of_host, non_blocking=True)

    def taken(self) -> None:
        pass

    def _pairs(self, pages: np.ndarray, places: np.ndarray) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Pages of the pool and places in host memory, those that lie in a row on both sides together."""
        for page, place, count in _runs(pages, places, self._per_chunk):
            chunk, first = divmod(place, self._per_chunk)
            yield self._pool[page : page + count], self._host[chunk][first : first + count]


def _runs(pages: np.ndarray, places: np.ndarray, per_chunk: int) -> Iterator[tuple[int, int, int]]:
    """(first page, first place, count) of copies that lie in a row on both sides, in one chunk of places."""
    if not pages.size:
        return
    apart = (np.diff(pages) != 1) | (np.diff(places) != 1) | (np.diff(places // per_chunk) != 0)
    breaks = np.flatnonzero(apart) + 1
    starts = np.concatenate([[0], breaks])
    counts = np.diff(np.append(starts, pages.size))
    yield from zip(pages[starts].tolist(), places[starts].tolist(), counts.tolist(), strict=True)
