"""Host memory as large as `swap_space` allows, and the copies between it and the pool."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch

from engine.interfaces.kv_connector import KVConnectorWorker
from engine.process import wire
from engine.types.errors import KVCacheTooSmallError
from engine_reference.connector_host.scheduler_half import Copies

if TYPE_CHECKING:
    from engine.interfaces.context import WorkerContext


class HostWorker(KVConnectorWorker):
    """See there. Copies never fail: memory is there or the start ends."""

    chunk_bytes = 1 << 28
    """Of pinned memory in one piece, at most: torch rounds each up to a power of two, and a large swap space in one
    piece could take twice its size."""

    def __init__(self, context: WorkerContext) -> None:
        page_bytes = context.start.layout.page_bytes
        self._num_places = context.start.swap_space // page_bytes if page_bytes else 0  # a stage that caches nothing
        self._platform = context.platform
        self._decode = wire.decoder(Copies).decode
        self._pool = torch.empty(0, 0, dtype=torch.uint8)
        self._host: list[torch.Tensor] = []
        self._copies: Copies | None = None
        self._lost: list[int] = []
        self._per_chunk = 1

    def register(self, pool: torch.Tensor) -> None:
        self._pool = pool
        if not self._num_places:
            return
        num_bytes = self._num_places * pool.shape[1]
        try:
            if pool.device.type == "cpu" and self._platform is not None:
                self._per_chunk = self._num_places
                self._host = [self._platform.allocate_pool(self._num_places, pool.shape[1])]  # which looks what is free
            else:  # pinned, so that copies keep their order with the device's work and nobody waits for them
                self._per_chunk = max(1, self.chunk_bytes // pool.shape[1])
                pinned = pool.device.type != "cpu"
                self._host = [
                    torch.empty(min(self._per_chunk, left), pool.shape[1], dtype=torch.uint8, pin_memory=pinned)
                    for left in range(self._num_places, 0, -self._per_chunk)
                ]
        except (KVCacheTooSmallError, RuntimeError) as error:
            found = error.found if isinstance(error, KVCacheTooSmallError) else str(error).partition("\n")[0]
            raise KVCacheTooSmallError(
                f"allocate a swap space of {self._num_places:,} pages ({num_bytes:,} bytes)",
                found,
                "lower --swap-space",
            ) from error

    def begin(self, step_id: int, section: bytes | None) -> None:
        self._copies = None if section is None else self._decode(section)
        if self._copies is not None:
            for pages, host in self._pairs(self._copies.out_page, self._copies.out_place):
                host.copy_(pages, non_blocking=True)

    def load(self, step_id: int) -> None:
        if self._copies is not None:
            for pages, host in self._pairs(self._copies.in_page, self._copies.in_place):
                pages.copy_(host, non_blocking=True)
            self._lost += self._copies.lost.tolist()

    def news(self) -> bytes | None:
        """Pages whose content had made room before they were to be filled, as int32."""
        lost = np.array(self._lost, np.int32)
        self._lost.clear()
        return lost.tobytes() or None

    def _pairs(self, pages: np.ndarray, places: np.ndarray) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Pages of the pool and places in host memory, those that lie in a row on both sides together."""
        if not self._num_places:
            return
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
