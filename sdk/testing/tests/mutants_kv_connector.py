"""Connectors with one planted fault each, in the place of one half of the reference driver, or of the plain one."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from mutant_suites import suites_of
from plain_connector import Plain
from plain_connector_card import HeavyHalf, Moody, OneHalf, PlainConnector

from engine.interfaces.kv_connector import KVTransferResult, SwapUsage
from engine.process import wire
from engine_reference.connector_host.scheduler_half import Copies, HostScheduler
from engine_sdk.conformance import KVConnectorConformance


class Heavy(HostScheduler):
    """What the card `HeavyHalf` names."""


# -- the scheduler half ----------------------------------------------------------------------------------------------
class SortsPages(HostScheduler):
    """pages go out in order of their numbers"""

    def swap_out(self, request_id: str, pages: np.ndarray) -> bool:
        return super().swap_out(request_id, np.sort(pages))


class FirstPlaces(HostScheduler):
    """the first places come back, whichever are asked for"""

    def swap_in(self, request_id: str, places: np.ndarray, pages: np.ndarray) -> None:
        super().swap_in(request_id, np.arange(len(places), dtype=np.int32), pages)


class ReusesAtOnce(HostScheduler):
    """a place is given out again in the plan that still reads it"""

    def forget(self, request_id: str) -> None:
        super().forget(request_id)
        for places in self._freed:
            self._free[self._num_free : self._num_free + places.size] = places[::-1]
            self._num_free += places.size
        self._freed.clear()


class KeepsWhatFits(HostScheduler):
    """of a request that does not fit whole, a part is kept"""

    def swap_out(self, request_id: str, pages: np.ndarray) -> bool:
        if pages.size > self._num_free > 0:
            super().swap_out(request_id, pages[: self._num_free])
            return False
        return super().swap_out(request_id, pages)


class SaysYes(HostScheduler):
    """a request that does not fit is said to be kept"""

    def swap_out(self, request_id: str, pages: np.ndarray) -> bool:
        super().swap_out(request_id, pages[: self._num_free])
        return True


class OneMorePlace(HostScheduler):
    """there is said to be room for one page more than the space holds"""

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self._total += 1
        self._free, self._num_free = np.arange(self._total - 1, -1, -1, dtype=np.int32), self._total


class RefusesTheLast(HostScheduler):
    """the last free place is never given out"""

    def swap_out(self, request_id: str, pages: np.ndarray) -> bool:
        return pages.size < self._num_free and super().swap_out(request_id, pages)


class LeaksPlaces(HostScheduler):
    """places of a request that comes back in part are not free again"""

    def swap_in(self, request_id: str, places: np.ndarray, pages: np.ndarray) -> None:
        self._in.append((pages, self._places[request_id][places]))
        self._places[request_id] = self._places[request_id][places]
        before = self._num_used
        self.forget(request_id)
        self._num_used = min(self._num_used, before)

    def check_integrity(self) -> None: ...


class ForgetsNothing(HostScheduler):
    """the room of a request that ended is not given back"""

    def forget(self, request_id: str) -> None:
        self._num_used -= self._places.pop(request_id).size

    def check_integrity(self) -> None: ...


class SaysTwice(HostScheduler):
    """decisions stay in the plans after theirs"""

    def plan_metadata(self) -> bytes | None:
        out = list(self._out)
        metadata = super().plan_metadata()
        self._out = out
        return metadata


class DropsOuts(HostScheduler):
    """a plan that brings something in leaves out what goes out"""

    def plan_metadata(self) -> bytes | None:
        if self._in:
            self._out = []
        return super().plan_metadata()


class EmptyPlans(HostScheduler):
    """a plan without copies has metadata"""

    def plan_metadata(self) -> bytes | None:
        return super().plan_metadata() or wire.encode(
            Copies(**dict.fromkeys(Copies.__struct_fields__, np.empty(0, np.int32)))
        )


class CountsRequests(HostScheduler):
    """usage counts requests, not pages"""

    def usage(self) -> SwapUsage:
        return SwapUsage(len(self._places), self._total)


# -- the worker half -------------------------------------------------------------------------------------------------
class InBeforeOut(Plain):
    """what comes in is there before what goes out has left"""

    def save(self, metadata: bytes) -> None:
        super().start_load(-1, metadata)
        super().save(metadata)


class KeepsViews(Plain):
    """pages are kept as views of the pool"""

    def save(self, metadata: bytes) -> None:
        copies = self._decode(metadata)
        for page, place in zip(copies.out_page.tolist(), copies.out_place.tolist(), strict=True):
            self._kept[place] = self._pool[page]


class WholeWords(Plain):
    """the bytes of a page behind the last 16 are left out"""

    def save(self, metadata: bytes) -> None:
        super().save(metadata)
        for place, page in self._kept.items():
            self._kept[place] = torch.cat(
                (page[: len(page) // 16 * 16], torch.zeros(len(page) % 16, dtype=torch.uint8))
            )


class AsNumbers(Plain):
    """pages pass through float32 arithmetic, where denormals vanish"""

    def save(self, metadata: bytes) -> None:
        super().save(metadata)
        for page in self._kept.values():
            numbers = page[: len(page) // 4 * 4].view(torch.float32)
            numbers.copy_(torch.where(numbers.abs() < torch.finfo(torch.float32).smallest_normal, 0.0, numbers))


class OnePool(Plain):
    """all ranks of a process keep pages in one dictionary"""

    shared: ClassVar[dict[int, torch.Tensor]] = {}

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self._kept = self.shared


class NextPageToo(Plain):
    """the page after the last one that is filled is overwritten"""

    def start_load(self, step_id: int, metadata: bytes) -> None:
        super().start_load(step_id, metadata)
        pages = self._decode(metadata).in_page
        if pages.size and pages[-1] + 1 < len(self._pool):
            self._pool[int(pages[-1]) + 1] = 0


class SwallowsLosses(Plain):
    """loads that fail are not reported"""

    def step_result(self, step_id: int) -> KVTransferResult:
        super().step_result(step_id)
        return KVTransferResult(np.empty(0, np.int32))


class NamesPlaces(Plain):
    """loads that fail are reported by place, not by page"""

    def start_load(self, step_id: int, metadata: bytes) -> None:
        super().start_load(step_id, metadata)
        copies, failed = self._decode(metadata), self._failed[step_id]
        self._failed[step_id] = copies.in_place[np.isin(copies.in_page, failed)]


class FailsAll(Plain):
    """one load that fails is reported as the failure of all of the step's"""

    def start_load(self, step_id: int, metadata: bytes) -> None:
        super().start_load(step_id, metadata)
        if self._failed[step_id].size:
            self._failed[step_id] = self._decode(metadata).in_page


class DropsTheLastLoss(Plain):
    """of three loads that fail, or more, the last is not reported"""

    def start_load(self, step_id: int, metadata: bytes) -> None:
        super().start_load(step_id, metadata)
        if self._failed[step_id].size > 2:
            self._failed[step_id] = self._failed[step_id][:-1]


class TrustsTheLastLoad(Plain):
    """a step's last load is not looked at: it never fails"""

    def start_load(self, step_id: int, metadata: bytes) -> None:
        super().start_load(step_id, metadata)
        pages = self._decode(metadata).in_page
        self._failed[step_id] = self._failed[step_id][self._failed[step_id] != pages[-1:]]


class LastResult(Plain):
    """a result is that of the last load, whatever step is asked for"""

    def start_load(self, step_id: int, metadata: bytes) -> None:
        super().start_load(step_id, metadata)
        pages = self._decode(metadata).in_page
        self._failed = {step: np.empty(0, np.int32) if step == step_id else pages for step in (*self._failed, step_id)}


class ListsLosses(Plain):
    """pages that could not be filled are a list"""

    def step_result(self, step_id: int) -> Any:
        return KVTransferResult(super().step_result(step_id).failed_pages.tolist())


class LeavesThreads(Plain):
    """leaked thread: one waits for work for ever"""

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        threading.Thread(target=threading.Event().wait, daemon=True).start()


class LeavesFiles(Plain):
    """leaked file: what pages are written to stays open"""

    opened: ClassVar[list[Any]] = []

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self.opened.append(tempfile.TemporaryFile())  # noqa: SIM115


SCHEDULERS = [
    SortsPages, FirstPlaces, ReusesAtOnce, KeepsWhatFits, SaysYes, OneMorePlace, RefusesTheLast, LeaksPlaces,
    ForgetsNothing, SaysTwice, DropsOuts, EmptyPlans, CountsRequests,
]  # fmt: skip
WORKERS = [
    InBeforeOut, KeepsViews, WholeWords, AsNumbers, OnePool, NextPageToo, SwallowsLosses, NamesPlaces, FailsAll,
    DropsTheLastLoss, TrustsTheLastLoad, LastResult, ListsLosses, LeavesThreads, LeavesFiles,
]  # fmt: skip
MUTANTS = [*SCHEDULERS, *WORKERS, OneHalf, HeavyHalf, Moody]


class Losing(KVConnectorConformance):
    """The suite, for a driver whose loads can be made to fail."""

    @classmethod
    def lose(cls, workers: Sequence[Any]) -> bool:
        for worker in workers:
            worker.lose()
        return True


class FaultyCore(Losing):
    """The mutant is the scheduler half."""

    @classmethod
    def half(cls, name: str) -> type:
        return cls.faulty if name == "core" else super().half(name)  # type: ignore[attr-defined, no-any-return]


class FaultyWorker(Losing):
    """The mutant is the worker half."""

    @classmethod
    def half(cls, name: str) -> type:
        return cls.faulty if name == "worker" else super().half(name)  # type: ignore[attr-defined, no-any-return]


class TestPlain(Losing):
    """What the mutants are made of passes."""

    card = PlainConnector


globals().update(suites_of(FaultyCore, PlainConnector, SCHEDULERS))
globals().update(suites_of(FaultyWorker, PlainConnector, WORKERS))
globals().update(suites_of(Losing, PlainConnector, [OneHalf, HeavyHalf, Moody]))
