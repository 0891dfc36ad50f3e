"""Host memory as large as `swap_space` allows, and the copies between it and the pool. No torch, but for its pools."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Protocol

import numpy as np

from engine.interfaces.kv_connector import KVConnectorWorker, PagedPool
from engine.process import wire
from engine.types.errors import KVCacheTooSmallError
from engine_kit.host_memory import zeroed_pool
from engine_reference.connector_host.scheduler_half import Copies

if TYPE_CHECKING:
    import torch

    from engine.interfaces.context import WorkerContext


class PageCopies(Protocol):
    """Copies between pages of the pool and places of host memory, int32 [n] each, in order with the device's work."""

    def out(self, pages: np.ndarray, places: np.ndarray) -> None:
        """From the pool."""

    def back(self, pages: np.ndarray, places: np.ndarray) -> None:
        """Into the pool."""

    def taken(self) -> None:
        """A step's result is there: the oldest's with `out` of which this was not told yet."""


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
        self._pages: PageCopies | None = None
        self._copies: Copies | None = None
        self._lost: list[int] = []

    def register(self, pool: torch.Tensor | PagedPool) -> None:
        if not self._num_places:
            return
        page_bytes = pool.page_bytes if isinstance(pool, PagedPool) else pool.shape[1]
        try:
            if isinstance(pool, PagedPool):
                self._pages = PoolCopies(pool, self._num_places)
            else:
                from engine_reference.connector_host.tensors import TensorCopies  # torch, which need not be there

                self._pages = TensorCopies(pool, self._num_places, self.chunk_bytes, self._platform)
        except (KVCacheTooSmallError, RuntimeError) as error:
            found = error.found if isinstance(error, KVCacheTooSmallError) else str(error).partition("\n")[0]
            raise KVCacheTooSmallError(
                f"allocate a swap space of {self._num_places:,} pages ({self._num_places * page_bytes:,} bytes)",
                found,
                "lower --swap-space",
            ) from error

    def begin(self, step_id: int, section: bytes | None) -> None:
        self._copies = None if section is None else self._decode(section)
        if self._copies is not None and self._pages is not None:
            self._pages.out(self._copies.out_page, self._copies.out_place)

    def load(self, step_id: int) -> None:
        if self._copies is not None:
            if self._pages is not None:
                self._pages.back(self._copies.in_page, self._copies.in_place)
            self._lost += self._copies.lost.tolist()

    def news(self) -> bytes | None:
        """Pages whose content had made room before they were to be filled, as int32."""
        if self._pages is not None:
            self._pages.taken()
        lost = np.array(self._lost, np.int32)
        self._lost.clear()
        return lost.tobytes() or None


class PoolCopies:
    """Implements `PageCopies` for a `PagedPool`. What leaves it comes to host memory behind the step; a step waits for
    it only where it reads it back, or where so much leaves that it would lie in host memory twice.

    Raises KVCacheTooSmallError where the memory cannot be had.
    """

    turn_bytes = 1 << 24
    """Of pages that move together, unless one is larger."""
    most_turns = 4
    """On their way to host memory: more wait for the first of them."""

    def __init__(self, pool: PagedPool, places: int) -> None:
        self._pool = pool
        self._host = zeroed_pool(places, pool.page_bytes)
        self._per_turn = max(1, self.turn_bytes // pool.page_bytes)
        self._coming: deque[tuple[np.ndarray, Callable[[], np.ndarray]]] = deque()
        self._come = 0
        self._ends: deque[int] = deque()
        """Of each step whose result was not taken: how many turns have come when its own have."""

    def out(self, pages: np.ndarray, places: np.ndarray) -> None:
        for turn in self._turns(pages):
            self._coming.append((places[turn], self._pool.read(pages[turn])))
            self._take(len(self._coming) - self.most_turns)
        self._ends.append(self._come + len(self._coming))

    def back(self, pages: np.ndarray, places: np.ndarray) -> None:
        if any(np.isin(places, coming).any() for coming, _ in self._coming):
            self._take(len(self._coming))
        for turn in self._turns(pages):
            self._pool.write(pages[turn], self._host[places[turn]])

    def taken(self) -> None:
        if self._ends:
            self._take(self._ends.popleft() - self._come)

    def _turns(self, pages: np.ndarray) -> Iterator[slice]:
        for first in range(0, pages.size, self._per_turn):
            yield slice(first, first + self._per_turn)

    def _take(self, turns: int) -> None:
        """So many, in order: a later one may fill a place anew."""
        for _ in range(turns):
            places, content = self._coming.popleft()
            self._host[places] = content()
            self._come += 1
