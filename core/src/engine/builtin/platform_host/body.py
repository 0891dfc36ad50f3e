"""The body of the host platform."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from engine.builtin.platform_host.memory import free_memory, peak_growth, resident_memory, total_memory
from engine.interfaces.platform import CacheMemory
from engine.types.errors import KVCacheTooSmallError

if TYPE_CHECKING:
    from engine.interfaces.context import WorkerContext

MAX_DEFAULT_POOL = 4 << 30
"""The KV pool's bytes where the user names no number, unless a quarter of the free memory is less."""


class HostFetch(NamedTuple):
    """Results that lie on the host already."""

    tensors: tuple[torch.Tensor, ...]

    def done(self) -> bool:
        """True."""
        return True

    def wait(self) -> tuple[torch.Tensor, ...]:
        """The tensors as they were asked for."""
        return self.tensors


class HostPlatformBody:
    """The processor: what is launched is done when the call returns."""

    def __init__(self, context: WorkerContext) -> None:
        self._device = torch.device(context.start.device)
        self._start = context.start

    @property
    def device(self) -> torch.device:
        """Torch's "cpu"."""
        return self._device

    def buckets(self, max_num_seqs: int) -> tuple[int, ...]:
        """None: nothing is captured, so every number of rows runs as it is."""
        return ()

    def capture(self, fn: Callable[[], None], key: Hashable) -> Callable[[], None]:
        """fn itself."""
        return fn

    def kv_cache_memory(self, largest_step: Callable[[], None], utilization: float | None) -> CacheMemory:
        """By default the smaller of 4 GiB and a quarter of what a largest step leaves free, divided by all ranks that
        share the memory: the machine has other work. With `utilization`, what weights and steps leave of that share of
        all memory, at most what is free."""
        ranks = self._start.size * self._start.data_parallel_size
        step_bytes = peak_growth(largest_step)
        left = free_memory() // ranks - step_bytes
        if utilization is None:
            return CacheMemory(min(MAX_DEFAULT_POOL // ranks, left // 4), step_bytes)
        budget = int(total_memory() * utilization) // ranks - resident_memory() - step_bytes
        return CacheMemory(min(budget, left), step_bytes)

    def allocate_pool(self, num_pages: int, page_bytes: int) -> torch.Tensor:
        """uint8 [num_pages, page_bytes], zeroed. Raises KVCacheTooSmallError."""
        # Asked first: Linux hands out zeroed memory that it does not have, and ends the process when it is used.
        free = free_memory()
        if num_pages * page_bytes > free:
            raise _no_memory(num_pages, page_bytes, f"{free:,} bytes of memory are free")
        try:
            # numpy's zeros are the system's own: a page of memory is cleared when it is first touched, not now.
            return torch.from_numpy(np.zeros((num_pages, page_bytes), np.uint8))
        except (ValueError, MemoryError) as error:
            raise _no_memory(num_pages, page_bytes, str(error).partition("\n")[0]) from error

    def to_device(self, host: torch.Tensor, out: torch.Tensor) -> None:
        """Copy at once."""
        out.copy_(host)

    def to_host(self, tensors: tuple[torch.Tensor, ...]) -> HostFetch:
        """They are there already. Each is the caller's alone: the runner makes new ones in every step."""
        return HostFetch(tensors)


def _no_memory(num_pages: int, page_bytes: int, found: str) -> KVCacheTooSmallError:
    return KVCacheTooSmallError(
        f"allocate a KV cache of {num_pages:,} pages of {page_bytes:,} bytes ({num_pages * page_bytes:,} bytes)",
        found,
        "lower --kv-cache-memory or --num-kv-pages",
    )
