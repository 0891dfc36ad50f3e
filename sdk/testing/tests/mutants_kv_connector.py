"""Connectors with one planted fault each, in the place of one half of the reference driver, or of the plain one."""

from __future__ import annotations

import itertools
import tempfile
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import msgspec
import numpy as np
import torch
from mutant_suites import suites_of
from plain_connector import Paged, Plain
from plain_connector_card import (
    ByLayersCard,
    HeavyHalf,
    Moody,
    OneHalf,
    PagedCard,
    PagedStoreCard,
    PlainConnector,
    PlainPeerCard,
    PlainStoreCard,
    TravellingCard,
)
from plain_connector_scheduler import PlainScheduler
from plain_peer import Frame, PlainPeer
from plain_peer_scheduler import PeerNews, PeerScheduler
from plain_store import ByLayers, PagedStore, PlainStore
from plain_store_scheduler import News, PlainStoreScheduler, Travelling

from engine.interfaces.kv_connector import Held, SwapUsage, Transferred
from engine.process import wire
from engine_reference.connector_host.scheduler_half import Copies
from engine_sdk.conformance import KVConnectorConformance
from engine_sdk.conformance.kv_connector.pair import Disturbance, Trouble


class Heavy(PlainScheduler):
    """What the card `HeavyHalf` names."""


# -- the scheduler half ----------------------------------------------------------------------------------------------
class SortsPages(PlainScheduler):
    """pages go out in order of their numbers"""

    def swap_out(self, request_id: str, pages: np.ndarray) -> bool:
        return super().swap_out(request_id, np.sort(pages))


class FirstPlaces(PlainScheduler):
    """the first places come back, whichever are asked for"""

    def swap_in(self, request_id: str, places: np.ndarray, pages: np.ndarray) -> None:
        super().swap_in(request_id, np.arange(len(places), dtype=np.int32), pages)


class ReusesAtOnce(PlainScheduler):
    """a place is given out again in the plan that still reads it"""

    def forget(self, request_id: str) -> None:
        super().forget(request_id)
        for places in self._freed:
            self._free[self._num_free : self._num_free + places.size] = places[::-1]
            self._num_free += places.size
        self._freed.clear()


class KeepsWhatFits(PlainScheduler):
    """of a request that does not fit whole, a part is kept"""

    def swap_out(self, request_id: str, pages: np.ndarray) -> bool:
        if pages.size > self._num_free > 0:
            super().swap_out(request_id, pages[: self._num_free])
            return False
        return super().swap_out(request_id, pages)


class SaysYes(PlainScheduler):
    """a request that does not fit is said to be kept"""

    def swap_out(self, request_id: str, pages: np.ndarray) -> bool:
        super().swap_out(request_id, pages[: self._num_free])
        return True


class OneMorePlace(PlainScheduler):
    """there is said to be room for one page more than the space holds"""

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self._total += 1
        self._free = np.arange(self._total - 1, -1, -1, dtype=np.int32)
        self._num_free = self._total


class RefusesTheLast(PlainScheduler):
    """the last free place is never given out"""

    def swap_out(self, request_id: str, pages: np.ndarray) -> bool:
        return pages.size < self._num_free and super().swap_out(request_id, pages)


class LeaksPlaces(PlainScheduler):
    """places of a request that comes back in part are not free again"""

    def swap_in(self, request_id: str, places: np.ndarray, pages: np.ndarray) -> None:
        self._in.append((pages, self._places[request_id][places]))
        self._places[request_id] = self._places[request_id][places]
        before = self._num_used
        self.forget(request_id)
        self._num_used = min(self._num_used, before)

    def check_integrity(self) -> None: ...


class ForgetsNothing(PlainScheduler):
    """the room of a request that ended is not given back"""

    def forget(self, request_id: str) -> None:
        self._num_used -= self._places.pop(request_id).size

    def check_integrity(self) -> None: ...


class SaysTwice(PlainScheduler):
    """decisions stay in the plans after theirs"""

    def plan_section(self) -> bytes | None:
        out = list(self._out)
        metadata = super().plan_section()
        self._out = out
        return metadata


class DropsOuts(PlainScheduler):
    """a plan that brings something in leaves out what goes out"""

    def plan_section(self) -> bytes | None:
        if self._in:
            self._out = []
        return super().plan_section()


class EmptyPlans(PlainScheduler):
    """a plan without copies has metadata"""

    def plan_section(self) -> bytes | None:
        return super().plan_section() or wire.encode(
            Copies(**dict.fromkeys(Copies.__struct_fields__, np.empty(0, np.int32)))
        )


class CountsRequests(PlainScheduler):
    """usage counts requests, not pages"""

    def usage(self) -> SwapUsage:
        return SwapUsage(len(self._places), self._total)


# -- the worker half -------------------------------------------------------------------------------------------------
class InBeforeOut(Plain):
    """what comes in is there before what goes out has left"""

    def begin(self, step_id: int, section: bytes | None) -> None:
        assert section is not None
        self._copies = self._decode(section)
        super().load(step_id)
        super().begin(step_id, section)


class KeepsViews(Plain):
    """pages are kept as views of the pool"""

    def begin(self, step_id: int, section: bytes | None) -> None:
        assert section is not None
        copies = self._copies = self._decode(section)
        for page, place in zip(copies.out_page.tolist(), copies.out_place.tolist(), strict=True):
            self._kept[place] = self._pool[page]


class WholeWords(Plain):
    """the bytes of a page behind the last 16 are left out"""

    def begin(self, step_id: int, section: bytes | None) -> None:
        super().begin(step_id, section)
        for place, page in self._kept.items():
            self._kept[place] = torch.cat(
                (page[: len(page) // 16 * 16], torch.zeros(len(page) % 16, dtype=torch.uint8))
            )


class AsNumbers(Plain):
    """pages pass through float32 arithmetic, where denormals vanish"""

    def begin(self, step_id: int, section: bytes | None) -> None:
        super().begin(step_id, section)
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

    def load(self, step_id: int) -> None:
        super().load(step_id)
        pages = self._copies.in_page
        if pages.size and pages[-1] + 1 < len(self._pool):
            self._pool[int(pages[-1]) + 1] = 0


class SwallowsLosses(Plain):
    """loads that fail are not reported"""

    def news(self) -> bytes | None:
        super().news()
        return None


class NamesPlaces(Plain):
    """loads that fail are reported by place, not by page"""

    def load(self, step_id: int) -> None:
        before = self._failed
        super().load(step_id)
        failed = self._failed[before.size :]
        self._failed = np.append(before, self._copies.in_place[np.isin(self._copies.in_page, failed)])


class FailsAll(Plain):
    """one load that fails is reported as the failure of all of the step's"""

    def load(self, step_id: int) -> None:
        before = self._failed
        super().load(step_id)
        if self._failed.size > before.size:
            self._failed = np.append(before, self._copies.in_page)


class DropsTheLastLoss(Plain):
    """of three loads that fail, or more, the last is not reported"""

    def load(self, step_id: int) -> None:
        before = self._failed.size
        super().load(step_id)
        if self._failed.size - before > 2:
            self._failed = self._failed[:-1]


class TrustsTheLastLoad(Plain):
    """a step's last load is not looked at: it never fails"""

    def load(self, step_id: int) -> None:
        super().load(step_id)
        self._failed = self._failed[self._failed != self._copies.in_page[-1:]]


class TellsAgain(Plain):
    """pages that could not be filled are told with every result"""

    def news(self) -> bytes | None:
        return self._failed.tobytes() or None


class ListsNews(Plain):
    """news are a list"""

    def news(self) -> Any:
        return list(super().news() or b"") or None


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


# -- stores ----------------------------------------------------------------------------------------------------------
class OneModel(PlainStoreScheduler):
    """a page of another model is found: keys have no identity"""

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self.identity = b""


class TellsTheFirstRank(Travelling):
    """a load has ended when the first rank says so"""

    def take(self, news: Sequence[bytes]) -> Transferred:
        for told in (msgspec.msgpack.decode(one, type=News) for one in news):
            for request_id in told.loaded:
                if self.travel.pop(request_id, 0):
                    return Transferred([request_id])
        return Transferred()


class StalePage(PlainStore):
    """a stale page: what is saved is read when it is loaded"""

    def keep(self, page: int) -> torch.Tensor:
        return self.pool[page]


class ForgetsTheLease(PlainStore):
    """the end of an aborted load is never told, and its pages stay lent"""

    def drop(self, request_id: str) -> None:
        if request_id in self.moves.drop:
            self.travel.pop(request_id, None)
        else:
            super().drop(request_id)


class LayersOutOfOrder(ByLayers):
    """a layer out of order: each gets its part when the other's turn comes"""

    def before_layer(self, site: int) -> None:
        super().before_layer(1 - site)


# -- pools of other frameworks -----------------------------------------------------------------------------------------
class WritesBeforeItReads(Paged):
    """of a pool that is no tensor: pages are filled before others are read"""

    def begin(self, step_id: int, section: bytes | None) -> None:
        assert section is not None
        self._copies = self._decode(section)
        super().load(step_id)
        super().begin(step_id, section)


class ReadsTooLate(PagedStore):
    """of a pool that is no tensor: what is saved is read when it is loaded"""

    def keep(self, page: int) -> Any:
        return lambda: super(ReadsTooLate, self).keep(page)()


class WritesFromAThread(PagedStore):
    """of a pool that is no tensor: a thread of its own fills pages"""

    def write(self, page: int, kept: Any) -> None:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(super().write, page, kept).result()


# -- from engine to engine -------------------------------------------------------------------------------------------
class BelievesAnyone(PeerScheduler):
    """pages of another model are taken: the identity that is told is not looked at"""

    def believes(self, params: dict[str, Any]) -> bool:
        return True


class HoldsForNobody(PeerScheduler):
    """a request whose pages nobody asked for is held, too"""

    def finished(self, request: Any, pages: Any) -> Held:
        return super().finished(request, pages) if request.kv_transfer else Held(None, 60.0)


class ForgetsTheHold(PeerScheduler):
    """a lease forgotten: of what it does not need the engine that goes on says nothing"""

    def leave(self, request: Any) -> None:
        self.tried.add(request.request_id)


class GivesUpForOne(PeerScheduler):
    """what is held is given back when the first rank has it, and again when the second has"""

    def take(self, news: Sequence[bytes]) -> Transferred:
        told = [msgspec.msgpack.decode(one, type=PeerNews) for one in news]
        by_transfer = {transfer: request_id for request_id, transfer in self.held.items()}
        early = [by_transfer[transfer] for one in told for transfer in one.sent if self.wanted.get(transfer, 1) > 1]
        heard = super().take(news)
        return heard._replace(sent=[*early, *heard.sent])


class CommitsBeforeTheLoad(PlainPeer):
    """a commit before the load: it is told to have ended when it begins"""

    def ask(self, fetching: Any) -> None:
        super().ask(fetching)
        self.told.fetched.append(fetching.request_id)


class StaleFrame(PlainPeer):
    """a stale frame is written where its block once belonged"""

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self.places: dict[tuple[str, int], int] = {}

    def ask(self, fetching: Any) -> None:
        self.places.update({(fetching.transfer, block): page for block, page in fetching.missing.items()})
        super().ask(fetching)

    def hear_page(self, frame: Any) -> None:
        page = torch.frombuffer(bytearray(frame.page), dtype=torch.uint8)
        self.pool[self.places[frame.transfer, frame.blocks[0]]] = page
        super().hear_page(frame)


class TrustsFrames(PlainPeer):
    """a damaged frame is written"""

    def whole(self, frame: Any) -> bool:
        return True


class ReadsOn(PlainPeer):
    """pages whose hold has run out are still sent, with what is in them by now"""

    def begin(self, step_id: int, section: bytes | None) -> None:
        offers = dict(self.offers)
        super().begin(step_id, section)
        self.offers = {**offers, **self.offers}


class WaitsForEver(PlainPeer):
    """of an engine that is gone, pages are waited for"""

    def gone(self, fetching: Any) -> bool:
        return False

    def ask(self, fetching: Any) -> None:
        fetching.question -= fetching.question > 1
        super().ask(fetching)


class WritesOn(PlainPeer):
    """an aborted load is said to have ended, and goes on"""

    def cancel(self, fetching: Any) -> None:
        self.told.fetched.append(fetching.request_id)
        fetching.request_id = ""

    def settle(self, fetching: Any) -> None:
        super().settle(fetching)
        self.told.fetched = [request_id for request_id in self.told.fetched if request_id]


class OneRanksPages(PlainPeer):
    """all ranks ask the first one of the other engine"""

    def post(self, receiver: str, frame: Any) -> None:
        others = self.living.get((receiver, 0)) if frame.kind == "want" else None
        if others is None:
            return super().post(receiver, frame)
        rank, others.rank = others.rank, self.rank  # whom it answers
        others.hear_want(frame)
        others.rank = rank
        return None


class NeverDone(PlainPeer):
    """a lease forgotten: when a load has ended, the other engine does not hear of it"""

    def post(self, receiver: str, frame: Any) -> None:
        if frame.kind != "done":
            super().post(receiver, frame)


PEERS = [BelievesAnyone, HoldsForNobody, ForgetsTheHold, GivesUpForOne]
PEER_WORKERS = [
    CommitsBeforeTheLoad, StaleFrame, TrustsFrames, ReadsOn, WaitsForEver, WritesOn, OneRanksPages, NeverDone,
]  # fmt: skip
PAGED_STORES = [ReadsTooLate, WritesFromAThread]
STORES = [OneModel]
STORE_WORKERS = [StalePage]
SCHEDULERS = [
    SortsPages, FirstPlaces, ReusesAtOnce, KeepsWhatFits, SaysYes, OneMorePlace, RefusesTheLast, LeaksPlaces,
    ForgetsNothing, SaysTwice, DropsOuts, EmptyPlans, CountsRequests,
]  # fmt: skip
WORKERS = [
    InBeforeOut, KeepsViews, WholeWords, AsNumbers, OnePool, NextPageToo, SwallowsLosses, NamesPlaces, FailsAll,
    DropsTheLastLoss, TrustsTheLastLoad, TellsAgain, ListsNews, LeavesThreads, LeavesFiles,
]  # fmt: skip
MUTANTS = [
    *SCHEDULERS, *WORKERS, *STORES, *STORE_WORKERS, TellsTheFirstRank, ForgetsTheLease, LayersOutOfOrder,
    WritesBeforeItReads, *PAGED_STORES, *PEERS, *PEER_WORKERS, OneHalf, HeavyHalf, Moody,
]  # fmt: skip


class Losing(KVConnectorConformance):
    """The suite, for a driver whose loads can be made to fail."""

    @classmethod
    def lose(cls, workers: Sequence[Any]) -> bool:
        for worker in workers:
            worker.lose()
        return True


class Between(KVConnectorConformance):
    """The suite, for a driver by which engines take pages from each other."""

    finds_by_key = False
    numbers = itertools.count()

    @classmethod
    def ends(cls) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        return {"name": f"engine {next(cls.numbers)}"}, {"name": f"engine {next(cls.numbers)}"}

    @classmethod
    def disturb(cls, workers: Sequence[Any], trouble: Trouble) -> bool:
        def damaged(frame: Frame) -> Frame:
            return frame._replace(page=bytes([~frame.page[0] & 255]) + frame.page[1:])

        for worker in workers:
            worker.disturbed = Disturbance(trouble, damaged)
        return True


class FaultyEnd(Between):
    """The mutant is the scheduler half of both engines."""

    @classmethod
    def half(cls, name: str) -> type:
        return cls.faulty if name == "core" else super().half(name)  # type: ignore[attr-defined, no-any-return]


class FaultyEndWorker(Between):
    """The mutant is the worker half of both engines."""

    @classmethod
    def half(cls, name: str) -> type:
        return cls.faulty if name == "worker" else super().half(name)  # type: ignore[attr-defined, no-any-return]


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


class TestPlainStore(Losing):
    """Loads with the step."""

    card = PlainStoreCard


class TestTravelling(Losing):
    """Loads by themselves."""

    card = TravellingCard


class TestByLayers(Losing):
    """Loads layer by layer."""

    card = ByLayersCard


class TestPaged(Losing):
    """A pool that is no tensor."""

    card = PagedCard


class TestPagedStore(Losing):
    """Loads by themselves, into a pool that is no tensor."""

    card = PagedStoreCard


class TestPlainPeer(Between):
    """From engine to engine."""

    card = PlainPeerCard


globals().update(suites_of(FaultyEnd, PlainPeerCard, PEERS))
globals().update(suites_of(FaultyEndWorker, PlainPeerCard, PEER_WORKERS))
globals().update(suites_of(FaultyCore, PlainStoreCard, STORES))
globals().update(suites_of(FaultyCore, TravellingCard, [TellsTheFirstRank]))
globals().update(suites_of(FaultyWorker, PlainStoreCard, STORE_WORKERS))
globals().update(suites_of(FaultyWorker, TravellingCard, [ForgetsTheLease]))
globals().update(suites_of(FaultyWorker, ByLayersCard, [LayersOutOfOrder]))
globals().update(suites_of(FaultyWorker, PagedCard, [WritesBeforeItReads]))
globals().update(suites_of(FaultyWorker, PagedStoreCard, PAGED_STORES))
globals().update(suites_of(FaultyCore, PlainConnector, SCHEDULERS))
globals().update(suites_of(FaultyWorker, PlainConnector, WORKERS))
globals().update(suites_of(Losing, PlainConnector, [OneHalf, HeavyHalf, Moody]))
