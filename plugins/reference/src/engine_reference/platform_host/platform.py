"""The body of the host platform."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch

from engine.interfaces.platform import CacheMemory, CaptureKey, Trial
from engine_kit.host_memory import cache_memory, zeroed_pool

if TYPE_CHECKING:
    from engine.interfaces.context import WorkerContext


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

    def buckets(self, max_num_seqs: int, tokens_per_row: int = 1) -> tuple[int, ...]:
        """None: nothing is captured, so every number of rows runs as it is."""
        return ()

    def capture(self, fn: Callable[[], None], key: CaptureKey | None, trial: Trial | None = None) -> Callable[[], None]:
        """fn itself."""
        return fn

    def kv_cache_memory(self, largest_step: Callable[[], None], utilization: float | None) -> CacheMemory:
        """See `engine_kit.host_memory.cache_memory`."""
        return cache_memory(largest_step, utilization, self._start.seat.sharers)

    def allocate_pool(self, num_pages: int, page_bytes: int) -> torch.Tensor:
        """uint8 [num_pages, page_bytes], zeroed. Raises KVCacheTooSmallError."""
        return torch.from_numpy(zeroed_pool(num_pages, page_bytes))

    def to_device(self, host: torch.Tensor, out: torch.Tensor) -> None:
        """Copy at once."""
        out.copy_(host)

    def to_host(self, tensors: tuple[torch.Tensor, ...]) -> HostFetch:
        """They are there already. Each is the caller's alone: the runner makes new ones in every step."""
        return HostFetch(tensors)
