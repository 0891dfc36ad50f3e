"""Host memory as large as `swap_space` allows, and the copies between it and the pool."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch

from engine.builtin.connector_host.metadata import Copies
from engine.interfaces.kv_connector import KVTransferResult
from engine.types import wire
from engine.types.errors import KVCacheTooSmallError

if TYPE_CHECKING:
    from engine.interfaces.context import WorkerContext

_NO_PAGES = np.empty(0, np.int32)


class HostWorker:
    """See `engine.interfaces.kv_connector.KVConnectorWorker`. Copies never fail: memory is there or the start ends."""

    def __init__(self, context: WorkerContext) -> None:
        self._num_places = context.start.swap_space // context.start.layout.page_bytes
        self._platform = context.platform
        self._decode = wire.decoder(Copies).decode
        self._pool = self._host = torch.empty(0, 0, dtype=torch.uint8)

    def register(self, pool: torch.Tensor) -> None:
        """See the interface."""
        self._pool = pool
        num_bytes = self._num_places * pool.shape[1]
        try:
            if pool.device.type == "cpu" and self._platform is not None:
                self._host = self._platform.allocate_pool(self._num_places, pool.shape[1])  # which looks what is free
            else:  # pinned, so that copies keep their order with the device's work and nobody waits for them
                pinned = pool.device.type != "cpu"
                self._host = torch.empty(self._num_places, pool.shape[1], dtype=torch.uint8, pin_memory=pinned)
        except (KVCacheTooSmallError, RuntimeError) as error:
            found = error.found if isinstance(error, KVCacheTooSmallError) else str(error).partition("\n")[0]
            raise KVCacheTooSmallError(
                f"allocate a swap space of {self._num_places:,} pages ({num_bytes:,} bytes)",
                found,
                "lower --swap-space",
            ) from error

    def save(self, metadata: bytes) -> None:
        """See the interface."""
        copies = self._decode(metadata)
        for page, place, count in _runs(copies.out_page, copies.out_place):
            self._host[place : place + count].copy_(self._pool[page : page + count], non_blocking=True)

    def start_load(self, step_id: int, metadata: bytes) -> None:
        """See the interface."""
        copies = self._decode(metadata)
        for page, place, count in _runs(copies.in_page, copies.in_place):
            self._pool[page : page + count].copy_(self._host[place : place + count], non_blocking=True)

    def step_result(self, step_id: int) -> KVTransferResult:
        """See the interface."""
        return KVTransferResult(_NO_PAGES)


def _runs(pages: np.ndarray, places: np.ndarray) -> Iterator[tuple[int, int, int]]:
    """(first page, first place, count) of copies that lie in a row on both sides."""
    if not pages.size:
        return
    breaks = np.flatnonzero((np.diff(pages) != 1) | (np.diff(places) != 1)) + 1
    starts = np.concatenate([[0], breaks])
    counts = np.diff(np.append(starts, pages.size))
    yield from zip(pages[starts].tolist(), places[starts].tolist(), counts.tolist(), strict=True)
