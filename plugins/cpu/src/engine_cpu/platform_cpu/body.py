"""The body of the platform `cpu`: the host's memory, and captured decode steps."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch

from engine.interfaces.platform import CacheMemory, CaptureKey, Trial
from engine.types.errors import ContractError
from engine_cpu._native import keep_freed_memory
from engine_cpu.platform_cpu.capture import capture
from engine_kit.host_memory import cache_memory, zeroed_pool

if TYPE_CHECKING:
    from engine.interfaces.context import WorkerContext
    from engine_cpu.platform_cpu.card import CpuPlatformOptions

logger = logging.getLogger(__name__)

MOST_ROWS = 64
"""Of a captured step. With more of them the step takes so long that Python is the least of it."""
MOST_DRAFTED = 16
"""Tokens of a captured step with drafts. There is one for each number of drafts, and each is tried at start; drafts are
for few rows at a time."""


class HostFetch(NamedTuple):
    """Results that lie on the host already."""

    tensors: tuple[torch.Tensor, ...]

    def done(self) -> bool:
        """True."""
        return True

    def wait(self) -> tuple[torch.Tensor, ...]:
        """The tensors as they were asked for."""
        return self.tensors


class CpuPlatformBody:
    """See `engine.interfaces.platform.Platform`. What is launched is done when the call returns."""

    def __init__(self, context: WorkerContext) -> None:
        options: CpuPlatformOptions = context.options
        self._start = context.start
        self._mode = options.capture
        self._device = torch.device(context.start.device)
        if options.threads != "auto":
            torch.set_num_threads(options.threads)  # the other drivers' bodies, built after this one, ask for it

    @property
    def device(self) -> torch.device:
        """Torch's "cpu"."""
        return self._device

    def buckets(self, max_num_seqs: int, tokens_per_row: int = 1) -> tuple[int, ...]:
        """One, of as many rows as there can be, up to 64 tokens, or up to 16 with drafts: a replay computes those rows
        that count."""
        most = MOST_ROWS if tokens_per_row == 1 else MOST_DRAFTED // tokens_per_row
        return () if self._mode == "never" or not most else (min(max_num_seqs, most),)

    def capture(
        self, fn: Callable[[], None], key: CaptureKey | None, trial: Trial | None = None
    ) -> Callable[..., None]:
        """Recorded as native calls; `fn` itself, with a warning, where that cannot be done and the
        option `capture` does not insist."""
        if key is None or self._mode == "never":
            return fn
        try:
            return capture(fn, key.rows, trial)
        except ContractError as error:
            if self._mode == "always":
                raise
            logger.warning("decode steps are not captured: %s", error.found)
            return fn

    def kv_cache_memory(self, largest_step: Callable[[], None], utilization: float | None) -> CacheMemory:
        """See `engine_kit.host_memory.cache_memory`."""
        return cache_memory(largest_step, utilization, self._start.seat.sharers)

    def allocate_pool(self, num_pages: int, page_bytes: int) -> torch.Tensor:
        """uint8 [num_pages, page_bytes], zeroed. Raises KVCacheTooSmallError.

        From here on the process keeps what its steps free: the weights, whose loading takes memory once, are there.
        """
        keep_freed_memory()
        return torch.from_numpy(zeroed_pool(num_pages, page_bytes))

    def to_device(self, host: torch.Tensor, out: torch.Tensor) -> None:
        """Copy at once."""
        out.copy_(host)

    def to_host(self, tensors: tuple[torch.Tensor, ...]) -> HostFetch:
        """They are there already. Each is the caller's alone: the runner makes new ones in every step."""
        return HostFetch(tensors)
