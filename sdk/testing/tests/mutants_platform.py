"""Platforms with one planted fault each, in the place of the reference driver's body."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from mutant_suites import suites_of

from engine.interfaces.platform import CacheMemory, CaptureKey
from engine_reference.platform_host.platform import HostPlatformBody
from engine_sdk.conformance import PlatformConformance


class DirtyPool(HostPlatformBody):
    """the pool is not zeroed"""

    def allocate_pool(self, num_pages: int, page_bytes: int) -> torch.Tensor:
        return super().allocate_pool(num_pages, page_bytes).fill_(1)


class OnePool(HostPlatformBody):
    """a second pool is the first one"""

    def allocate_pool(self, num_pages: int, page_bytes: int) -> torch.Tensor:
        size = num_pages * page_bytes
        if size > 1 << 32:
            return super().allocate_pool(num_pages, page_bytes)
        whole = self.__dict__.setdefault("whole", torch.zeros(1 << 24, dtype=torch.uint8))
        return whole[:size].view(num_pages, page_bytes)


class PaddedPages(HostPlatformBody):
    """pages are padded to 4 KiB"""

    def allocate_pool(self, num_pages: int, page_bytes: int) -> torch.Tensor:
        padded = -(-page_bytes // 4096) * 4096
        return super().allocate_pool(num_pages, padded)[:, :page_bytes]


class OtherKind(HostPlatformBody):
    """memory that cannot be had is another error than the one that was promised"""

    def allocate_pool(self, num_pages: int, page_bytes: int) -> torch.Tensor:
        if num_pages > 1 << 30:
            raise MemoryError
        return super().allocate_pool(num_pages, page_bytes)


class NoProfile(HostPlatformBody):
    """the largest step is not run"""

    def kv_cache_memory(self, largest_step: Callable[[], None], utilization: float | None) -> CacheMemory:
        return super().kv_cache_memory(lambda: None, utilization)


class ForgetsSteps(HostPlatformBody):
    """what a step takes is said to be nothing"""

    def kv_cache_memory(self, largest_step: Callable[[], None], utilization: float | None) -> CacheMemory:
        return super().kv_cache_memory(largest_step, utilization)._replace(step_bytes=0)


class IgnoresUtilization(HostPlatformBody):
    """the share of the memory that may be taken is ignored"""

    def kv_cache_memory(self, largest_step: Callable[[], None], utilization: float | None) -> CacheMemory:
        return super().kv_cache_memory(largest_step, None)


class LateCopies(HostPlatformBody):
    """the host's tensor is read when the next copy begins"""

    def to_device(self, host: torch.Tensor, out: torch.Tensor) -> None:
        pending = self.__dict__.pop("pending", None)
        if pending is not None:
            pending[1].copy_(pending[0])
        self.__dict__["pending"] = host, out


class ShortRing(HostPlatformBody):
    """staging memory is written again while the tenth copy before still reads it"""

    def to_device(self, host: torch.Tensor, out: torch.Tensor) -> None:
        super().to_device(host, out)
        ring = self.__dict__.setdefault("ring", [])
        ring.append(out)
        if len(ring) > 10:
            late = ring.pop(0)
            if late.dim() == host.dim() == 1 and late.dtype == host.dtype:
                late[:1].copy_(host[:1])


class DenseOnly(HostPlatformBody):
    """copies fill memory, not the strided buffer"""

    def to_device(self, host: torch.Tensor, out: torch.Tensor) -> None:
        out.as_strided(host.shape, torch.empty(host.shape).stride(), out.storage_offset()).copy_(host)


class Backwards(HostPlatformBody):
    """results come back in reverse order"""

    def to_host(self, tensors: tuple[torch.Tensor, ...]) -> Any:
        return super().to_host(tensors[::-1])


class OneResult(HostPlatformBody):
    """all results come back in one buffer"""

    def to_host(self, tensors: tuple[torch.Tensor, ...]) -> Any:
        buffers = self.__dict__.setdefault("buffers", {})
        shared = [buffers.setdefault((number, x.shape), torch.empty_like(x)) for number, x in enumerate(tensors)]
        return super().to_host(tuple(buffer.copy_(x) for buffer, x in zip(shared, tensors, strict=True)))


class WaitOnce(HostPlatformBody):
    """results can be waited for once"""

    def to_host(self, tensors: tuple[torch.Tensor, ...]) -> Any:
        class Once:
            def __init__(self) -> None:
                self.given = list(tensors)

            def done(self) -> bool:
                return True

            def wait(self) -> tuple[torch.Tensor, ...]:
                found, self.given = tuple(self.given), []
                return found

        return Once()


class ReplaysNothing(HostPlatformBody):
    """a captured step does nothing when it is replayed"""

    def capture(self, fn: Callable[[], None], key: CaptureKey | None, trial: Any = None) -> Callable[[], None]:
        if key is None:
            return fn
        fn()
        return lambda: None


class CapturesEverything(HostPlatformBody):
    """a step without a key is captured too"""

    def capture(self, fn: Callable[[], None], key: CaptureKey | None, trial: Any = None) -> Callable[[], None]:
        return lambda: fn()


class DescendingBuckets(HostPlatformBody):
    """buckets come largest first"""

    def buckets(self, max_num_seqs: int, tokens_per_row: int = 1) -> tuple[int, ...]:
        return (8, 4, 2, 1)


class IdleBuckets(HostPlatformBody):
    """buckets that no step needs"""

    def buckets(self, max_num_seqs: int, tokens_per_row: int = 1) -> tuple[int, ...]:
        return (1, 2, 4, 8, 16, 32)


class OtherDevice(HostPlatformBody):
    """the body's device is another than the card's"""

    @property
    def device(self) -> torch.device:
        return torch.device("meta")


class WholeRegardless(HostPlatformBody):
    """whole steps are made whatever speaks against them"""

    def whole_steps(self, ops: Any, tables: Any, parameters: Any, why_not: Any) -> Any:
        return self


class HostSteps:
    """Whole steps that are run as they are."""

    def __init__(self, ops: Any, tables: Any) -> None:
        self.ops = ops
        self.tables = tables

    def place(self, news: torch.Tensor) -> None:
        for table, slot, index, page in news.view(-1, 4)[1 : 1 + int(news[0])].tolist():
            self.tables.blocks[table][slot, index] = page

    def step(self, inputs: Any, news: torch.Tensor, compute: Callable[[], None], trial: Any) -> torch.Tensor:
        self.place(news)
        compute()
        drawn, places = self.ops.draw(trial.outputs()[-1], None), (inputs.slot_of_row.long(), inputs.seq_lens.long())
        told: torch.Tensor = self.ops.place_tokens(*drawn, self.tables.tokens, *places)
        return told

    def tell(self, tokens: torch.Tensor) -> torch.Tensor:
        return tokens

    def capture(self, *step: Any) -> Callable[[int], Any]:
        def launch(num_rows: int) -> Any:
            tokens = self.tell(self.step(*step)[:num_rows])
            return SimpleNamespace(wait=lambda: (tokens,), done=lambda: True)

        return launch


class MakesWholeSteps(HostPlatformBody):
    """Whole steps as they should be: no mutant."""

    steps: type[HostSteps] = HostSteps

    def whole_steps(self, ops: Any, tables: Any, parameters: Any, why_not: Any) -> Any:
        return None if why_not else self.steps(ops, tables)


class LatePages(MakesWholeSteps):
    """new pages of a whole step are placed behind what reads them"""

    class steps(HostSteps):
        def step(self, inputs: Any, news: torch.Tensor, compute: Callable[[], None], trial: Any) -> torch.Tensor:
            told = super().step(inputs, torch.zeros_like(news), compute, trial)
            self.place(news)
            return told


class StalePages(MakesWholeSteps):
    """pages that stand behind a whole step's own are placed, too"""

    class steps(HostSteps):
        def place(self, news: torch.Tensor) -> None:
            super().place(news.clone().index_fill_(0, torch.tensor([0]), len(news) // 4 - 1))


class OneMemory(MakesWholeSteps):
    """a whole step tells its tokens where the one before has told its own"""

    class steps(HostSteps):
        def tell(self, tokens: torch.Tensor) -> torch.Tensor:
            kept: torch.Tensor = self.__dict__.setdefault("kept", torch.zeros(99, dtype=torch.int32))
            return kept[: len(tokens)].copy_(tokens)


MUTANTS = [
    DirtyPool, OnePool, PaddedPages, OtherKind, NoProfile, ForgetsSteps, IgnoresUtilization, LateCopies, ShortRing,
    DenseOnly, Backwards, OneResult, WaitOnce, ReplaysNothing, CapturesEverything, DescendingBuckets, IdleBuckets,
    OtherDevice, WholeRegardless, LatePages, StalePages, OneMemory,
]  # fmt: skip

globals().update(suites_of(PlatformConformance, "host", MUTANTS))
