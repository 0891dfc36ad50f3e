"""Connectors in the scheduler's hands: what they have of requests, what they are told, and what comes back.

What is loaded counts as computed at once, for the request that asked for it, but nobody else finds it before it is
confirmed: by the result of the step that fills and reads it (a synchronous load, a swapped request that comes back), or
by all ranks (an asynchronous one). So what could not be loaded has spoilt one request, which is computed again.

An asynchronous load holds pages and no slot. When it has ended its blocks are cached, and the request enters the queue:
it finds them there as any prefix, and they are kept for it until it has a slot, or somebody else needs the room.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from engine.interfaces.kv_connector import (
    LATER,
    LOOKUP_SECONDS,
    NO_PAGES,
    Found,
    Held,
    KVConnectorCard,
    KVConnectorScheduler,
    Pages,
)
from engine.kv.manager import KVManager
from engine.kv.matching import Hit
from engine.kv.reservation import StepPages
from engine.kv.swap import SwapIn, fill_blocks
from engine.plugin.candidate import Candidate
from engine.scheduling.slots import Request, SlotTable, Status
from engine.types.errors import ContractError, EngineError
from engine.types.kv import NULL_PAGE
from engine.types.plan import StepPlan, StepResult

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.002
"""How soon workers are asked for news by a plan without rows, at first; while none come, half as often each time."""
SLOWEST_POLL_SECONDS = 0.016
MOST_LOADING = 0.5
"""The share of the pool that loads under way may take together: the rest is for those that run."""

COUNTS = ("loaded_tokens", "hit_tokens", "failed_pages", "expired_holds", "errors", "late_lookups")


@dataclass(eq=False)
class Connector:
    """A connector's scheduler half at work.

    Args:
        candidate: where it comes from; its sections travel under its name.
        half: its body.
        card: its card.
        lookup_seconds: how long a request waits to be asked for, or for room for its load; then it is computed.

    Attributes:
        due: it may have a section for the next plan.
        open: asynchronous loads and holds that have not ended.
        counts: of tokens loaded, of those that prompts had of it when they were first admitted (`hit_tokens`),
            pages that failed, holds that expired, errors that it raised, and requests that waited too long.
        faults: requests over which it raised an error, since they were last ended: see `States.fail_faulty`.
    """

    candidate: Candidate
    half: KVConnectorScheduler
    card: type[KVConnectorCard]
    lookup_seconds: float = LOOKUP_SECONDS
    due: bool = False
    open: int = 0
    counts: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(COUNTS, 0)))
    faults: list[tuple[Request, EngineError]] = field(default_factory=list)

    def ask(self, request: Request, doing: str, function: Callable[..., Any], *args: Any) -> Any:
        """What the half answers; None where it raised, which is logged and counted, and ends the request if it has not
        ended."""
        self.due = True
        try:
            return function(*args)
        except Exception as error:
            asked = f"{doing} request {request.request_id!r}"
            self.counts["errors"] += 1
            self.faults.append((request, self.candidate.fault(asked, error)))
            return None


class Offer(NamedTuple):
    """What a connector has of a request: whole blocks up to `end`, beyond a hit's; 0: it is to be asked again."""

    connector: Connector
    local: Hit
    end: int
    asynchronous: bool


@dataclass(eq=False)
class Load:
    """An asynchronous load under way, into pages that a lease keeps; `failed` are those that could not be filled."""

    request: Request
    connector: Connector
    pages: list[Pages]
    num_tokens: int
    lease: int
    num_resets: int
    failed: np.ndarray = field(default_factory=NO_PAGES.copy)


class Connectors:
    """All connectors of a core, in the order in which the user named them.

    Args:
        members: these.
        kv: the pages.
        slots: of running requests.

    Attributes:
        waiting: requests with status LOADING: their load is under way, or a connector wants to be asked again.
        arriving: requests that entered a slot with pages that a step fills, until its result has come.
    """

    def __init__(self, members: Sequence[Connector], kv: KVManager, slots: SlotTable) -> None:
        self.members = members
        self.kv = kv
        self.slots = slots
        self.stores = tuple(member for member in members if member.card.stores)
        self._watching = tuple(member for member in members if member.card.watches)
        self._layerwise = tuple(member for member in self.stores if member.card.layerwise)
        self.waiting: dict[str, Request] = {}
        self.arriving: dict[Request, SwapIn] = {}
        self._loads: dict[str, Load] = {}
        self._arrived: dict[Request, Load] = {}  # of those in the queue
        self._held: dict[tuple[Connector, str], tuple[Request, int, float]] = {}  # (whose, lease, until when) by name
        self._waits: dict[Request, float] = {}  # since when those do that are to be asked for again
        self._refused: set[Request] = set()  # a load of these has failed: they are computed
        self._answer: tuple[Request, int, Connector | None, Found] | None = None  # to the last lookup
        self._told = np.zeros(slots.num_slots, np.int32)  # blocks of each slot that connectors know
        self._next_poll = 0.0
        self._patience = POLL_SECONDS

    # -- before a request has a slot ----------------------------------------------------------------------------------
    def added(self, request_id: str) -> None:
        """A request comes. Connectors know requests by name: one of this name whose pages are held is let go."""
        for member, name in [key for key in self._held if key[1] == request_id]:
            self._withdraw(member, name)

    def lookup(self, request: Request, hit: Hit, most: int) -> Offer | None:
        """What the first connector that has anything has beyond the device's blocks; None for nothing.

        Args:
            hit: of the device; pages that the plan under construction computes do not count.
            most: tokens that the request may take at all.
        """
        size, kv = self.kv.block_size, self.kv
        most -= most % size
        if not self.stores or request in self._refused or most <= hit.num_whole:
            return None
        request.num_loadable = most
        local = hit.whole_blocks()
        if any((table.pages == NULL_PAGE).any() for table in local.tables):
            local = kv.match(request.sequence(request.token_ids), most).whole_blocks()
        if (load := self._loads.get(request.request_id)) is not None:  # of an aborted request of the same name
            return self._wait(request, Offer(load.connector, local, 0, True))
        if self._answer is None or self._answer[:2] != (request, local.num_tokens):
            self._answer = request, local.num_tokens, *self._ask_all(request, local.num_tokens)
        _, start, member, found = self._answer
        if member is None:
            return None
        if found == LATER:
            self._answer = None
            return self._wait(request, Offer(member, local, 0, True))
        end = start + found.num_tokens // size * size
        if end > most and any(table.window is not None for table in kv.tables):
            return None  # of less than that, blocks may be missing
        end = min(end, most)
        if end <= hit.num_tokens:
            return None
        if found.asynchronous and self._loads:
            loading = sum(self.kv.pool.leases[load.lease].size for load in self._loads.values())
            if loading + fill_blocks(kv, local, end).hit.num_missing > MOST_LOADING * kv.pool.num_usable:
                return self._wait(request, Offer(member, local, 0, True))
        return Offer(member, local, end, found.asynchronous)

    def _wait(self, request: Request, offer: Offer) -> Offer | None:
        """The offer, to be asked again, unless the request has waited for so long that it is computed."""
        now, member = self.slots.now(), offer.connector
        if now - self._waits.setdefault(request, now) <= member.lookup_seconds:
            return offer
        logger.warning("request %s waited too long for connector %s", request.request_id, member.candidate.name)
        member.counts["late_lookups"] += 1
        self.refuse(request)
        return None

    def _ask_all(self, request: Request, num_local: int) -> tuple[Connector | None, Found]:
        """The first that finds something, and what."""
        for member in self.stores:
            found: Found | None = member.ask(request, "look up", member.half.lookup, request, num_local)
            if found is not None and (found == LATER or found.num_tokens >= self.kv.block_size):
                return member, found
        return None, Found(0)

    def begin_load(self, request: Request, offer: Offer, available: int) -> bool:
        """The request waits for what travels, or to be asked again; False where pages are short.

        available: pages that may be taken.
        """
        if offer.end:
            kv, start, end = self.kv, offer.local.num_tokens, offer.end
            filled = fill_blocks(kv, offer.local, end)
            if kv.pages_taken_by(filled.hit) > available:
                return False
            self._waits.pop(request, None)
            found = np.concatenate([table.pages for table in filled.hit.tables])
            found = found[found != NULL_PAGE]
            kv.pool.hold(found)
            taken = kv.pool.take(filled.missing)
            lease = kv.pool.lend(np.concatenate([found, *taken]), taken=True)
            pages = [Pages(i, end // kv.block_size - of.size, of) for i, of in enumerate(taken)]
            self._answer = None
            self._leave_arrived(request)
            connector, loaded = offer.connector, end - start
            faults = len(connector.faults)
            connector.ask(request, "load", connector.half.allocated, request, pages, start, end)
            if len(connector.faults) > faults:
                kv.pool.give_back(lease)
            else:
                self._loads[request.request_id] = Load(request, connector, pages, loaded, lease, kv.num_resets)
                connector.open += 1
        request.status = Status.LOADING
        self.waiting[request.request_id] = request
        return True

    def ready(self) -> list[Request]:
        """The requests that may enter the queue (again), in the order in which they came."""
        if not self.waiting:
            return []
        ready = [request for name, request in self.waiting.items() if name not in self._loads]
        for request in ready:
            del self.waiting[request.request_id]
        return ready

    def let_go(self) -> bool:
        """Keep nothing for those in the queue: who waits for room needs it more. False where nothing was kept."""
        requests = list(self._arrived)
        for request in requests:
            self._leave_arrived(request)
        return bool(requests)

    def _leave_arrived(self, request: Request) -> Load | None:
        """Keep nothing for it any more. Returns what was loaded for it; None where nothing was kept."""
        load = self._arrived.pop(request, None)
        if load is not None:
            self.kv.pool.give_back(load.lease)
        return load

    # -- in a slot ----------------------------------------------------------------------------------------------------
    def entered(self, request: Request, num_local: int, swap_in: SwapIn | None) -> tuple[Connector | None, int]:
        """The request has a slot, with so many tokens in whole blocks that the device has, and what the plan fills.
        Returns how many of the former were loaded for it, and by whom."""
        if swap_in is not None:
            self.arriving[request] = swap_in
        self._answer = None
        self._waits.pop(request, None)
        load = self._leave_arrived(request)
        connector, loaded = (None, 0) if load is None else (load.connector, min(load.num_tokens, num_local))
        self._told[request.slot] = (num_local - loaded) // self.kv.block_size
        return connector, loaded

    def fill(self, step_id: int, request: Request, swap_in: SwapIn, connector: Connector | None) -> None:
        """A plan fills pages of a request that enters a slot with it. connector: None: it was swapped, and the tier
        knows."""
        swap_in.step_id = step_id
        if connector is not None:
            size, end = self.kv.block_size, swap_in.hit.num_tokens
            start = end - swap_in.num_filled * size
            pages = self._pages(request.slot, start // size, end // size)
            connector.ask(request, "load", connector.half.allocated, request, pages, start, end)
            connector.counts["loaded_tokens"] += end - start

    def watch(self, request: Request, hit: Hit, swap_in: SwapIn | None, source: Connector | None) -> None:
        """A request has entered a slot with the plan that is made, for those who watch; see `Chunk` for the rest."""
        for member in self._watching:
            of_slot = self._pages(request.slot, 0, hit.num_whole // self.kv.block_size)
            filled = NO_PAGES if swap_in is None else swap_in.pages
            swapped = swap_in is not None and source is None
            member.ask(request, "watch", member.half.entered, request, of_slot, filled, swapped)

    def reuses(self, request: Request, blocks: Mapping[bytes, int]) -> None:
        """It reads these pages, by hashes of blocks, in the plan that is made and in later ones; likewise."""
        for member in self._watching:
            member.ask(request, "watch", member.half.reused, request, blocks)

    def planned(self, pages: StepPages) -> None:
        """What else becomes of pages with the plan, likewise."""
        for member in self._watching:
            member.half.planned(pages.new_blocks, pages.copies)
            member.due = True

    def computes(self, request: Request, start: int, end: int) -> None:
        """A plan computes these tokens of a prompt."""
        size = self.kv.block_size
        for member in () if request.reuses else self._layerwise:
            pages = self._pages(request.slot, start // size, -(-end // size))
            member.ask(request, "transfer", member.half.allocated, request, pages, start, end)

    def computed(self, slots: np.ndarray, ends: np.ndarray) -> None:
        """The device holds `ends` tokens of these slots, int [n] each: steps that computed them have ended well."""
        blocks = ends // self.kv.block_size
        for place in (blocks > self._told[slots]).nonzero()[0].tolist():
            slot, last = int(slots[place]), int(blocks[place])
            request = self.slots.requests[slot]
            if request is None or not self.kv.blocks.caches(slot):
                continue
            pages = self._pages(slot, int(self._told[slot]), last)
            self._told[slot] = last
            for member in self.stores:
                end = last * self.kv.block_size
                member.ask(request, "save", member.half.computed, request, pages, end)

    def step_done(self, plan: StepPlan) -> list[Request]:
        """A step's result has come, and its news were taken: what it filled is there, and may be cached. Returns the
        requests of which this is so."""
        there = [request for request, swap_in in self.arriving.items() if swap_in.step_id == plan.step_id]
        for request in there:
            swap_in, slot, s, kv = self.arriving.pop(request), request.slot, self.slots, self.kv
            if request.status is Status.RUNNING and swap_in.cached and swap_in.num_resets == kv.num_resets:
                kv.blocks.begin(slot, 0)
                filled = np.minimum(s.known[slot], s.computed[slot])
                kv.blocks.cache_full_blocks(np.array([slot]), np.array([filled]), s.requests, s.tokens)
        return [request for request in there if request.status is Status.RUNNING]

    def _pages(self, slot: int, first: int, last: int) -> list[Pages]:
        """The pages of blocks first .. last - 1, as far as a window still sees them."""
        tables = [(table, max(first, int(table.first_block[slot]))) for table in self.kv.tables]
        return [Pages(table.index, block, table.pages[slot, block:last].copy()) for table, block in tables]

    # -- ended --------------------------------------------------------------------------------------------------------
    def ended(self, request: Request, well: bool) -> dict[str, Any] | None:
        """A request is over; its pages, where it has a slot, are still there. Returns what its sender is told."""
        self.waiting.pop(request.request_id, None)
        self._refused.discard(request)
        self._waits.pop(request, None)
        self._leave_arrived(request)
        if self._answer is not None and self._answer[0] is request:
            self._answer = None
        params = None
        for member in self.stores:
            if not well:
                member.ask(request, "abort", member.half.aborted, request.request_id)
                continue
            pages = []
            if request.status is Status.RUNNING and not request.reuses:
                computed = int(self.slots.known[request.slot]) - 1  # nobody needs the last token's
                pages = self._pages(request.slot, 0, -(-computed // self.kv.block_size))
            held: Held = member.ask(request, "finish", member.half.finished, request, pages) or Held()
            params = params or held.params
            if held.seconds > 0 and pages:
                lease = self.kv.pool.lend(np.concatenate([of_table.pages for of_table in pages]))
                self._held[member, request.request_id] = request, lease, self.slots.now() + held.seconds
                member.open += 1
        return params

    def _give_up(self, member: Connector, request_id: str) -> None:
        """Nobody reads a request's held pages any more."""
        hold = self._held.pop((member, request_id), None)
        if hold is not None:
            member.open -= 1
            self.kv.pool.give_back(hold[1])

    def _withdraw(self, member: Connector, request_id: str) -> None:
        """Nobody is to read them any more."""
        request = self._held[member, request_id][0]
        member.ask(request, "let go of", member.half.aborted, request_id)
        self._give_up(member, request_id)

    def expire(self) -> None:
        """Give held pages back whose time has come."""
        if not self._held:
            return
        now = self.slots.now()
        for (member, request_id), (_, _, until) in list(self._held.items()):
            if until <= now:
                member.counts["expired_holds"] += 1
                self._withdraw(member, request_id)

    # -- steps --------------------------------------------------------------------------------------------------------
    @property
    def busy(self) -> bool:
        """A plan is wanted, if only to ask for news."""
        return bool(self.members) and any(member.due or member.open for member in self.members)

    def sections(self, alone: bool = False) -> dict[str, bytes] | None:
        """For the plan that is made. alone: for connectors, so not too often where there are only news to ask for."""
        if not self.busy:
            return None
        now = self.slots.now()
        if alone and now < self._next_poll and not any(member.due for member in self.members):
            return None
        sections = {}
        for member in self.members:
            if member.due or member.open:
                member.due = False
                section = member.half.plan_section()
                if section is not None or member.open:
                    sections[member.candidate.name] = section or b""
        self._next_poll = now + self._patience
        self._patience = min(2 * self._patience, SLOWEST_POLL_SECONDS)
        return sections or None

    def take_faults(self) -> list[tuple[Request, EngineError]]:
        """Over whom connectors have raised since the last call."""
        faults = []
        for member in self.members:
            if member.faults:
                faults += member.faults
                member.faults = []
        return faults

    def take(self, result: StepResult) -> np.ndarray:
        """A step's news. Returns the pages that do not hold what they should, int32 [m], without those of asynchronous
        loads.

        Raises ContractError where what a connector says is of no such form.
        """
        failed = [NO_PAGES]
        for member in self.members:
            if news := (result.news or {}).get(member.candidate.name):
                member.due = True
                self._patience = POLL_SECONDS
                told = member.half.take(news)
                if not _are_pages(told.failed, self.kv.pool.num_pages):
                    found = f"take names pages {told.failed!r:.200} of {self.kv.pool.num_pages}"
                    raise member.candidate.error(ContractError, found, "tell its author")
                if told.failed.size:
                    member.counts["failed_pages"] += told.failed.size
                    failed.append(self._fail_loads(told.failed))
                for request_id in told.loaded:
                    self._loaded(member, request_id)
                for request_id in told.sent:
                    self._give_up(member, request_id)
        return np.concatenate(failed)

    def _fail_loads(self, failed: np.ndarray) -> np.ndarray:
        """Loads under way hear of their failed pages; the others are returned."""
        for load in self._loads.values():
            mine = np.isin(failed, np.concatenate([of_table.pages for of_table in load.pages]))
            load.failed = np.append(load.failed, failed[mine])
            failed = failed[~mine]
        return failed

    def _loaded(self, member: Connector, request_id: str) -> None:
        """An asynchronous load has ended: what has come is cached. One of a request that has ended is of no use."""
        load = self._loads.pop(request_id, None)
        if load is None or load.connector is not member:
            raise member.candidate.error(
                ContractError, f"take says that {request_id!r} is loaded, which it does not load", "tell its author"
            )
        member.open -= 1
        request, kv = load.request, self.kv
        if request.status is not Status.LOADING:
            return kv.pool.give_back(load.lease)
        if load.num_resets == kv.num_resets:
            for table, first, pages in load.pages:
                good = ~np.isin(pages, load.failed)
                blocks = np.arange(first, first + pages.size)[good]
                kv.blocks.cache_loaded(table, request, request.token_ids, blocks, pages[good])
        for watching in self._watching:
            came = [
                part._replace(pages=np.where(np.isin(part.pages, load.failed), NULL_PAGE, part.pages))
                for part in load.pages
            ]
            watching.ask(request, "watch", watching.half.filled, request, came)
        if load.failed.size:
            self.refuse(request)
        member.counts["loaded_tokens"] += load.num_tokens
        self._arrived[request] = load
        return None

    def spoilt(self, failed: np.ndarray) -> list[Request]:
        """The requests of which a step should have filled these pages; what they hold is not confirmed."""
        bad = [request for request, swap_in in self.arriving.items() if np.isin(swap_in.pages, failed).any()]
        for request in bad:
            del self.arriving[request]
        return [request for request in bad if request.slot >= 0]

    def refuse(self, request: Request) -> None:
        """A load of the request was of no use: it is computed."""
        self._refused.add(request)

    def counts(self) -> tuple[tuple[str, str, int], ...]:
        """See `StepStats.kv_connectors`."""
        return tuple(
            (member.candidate.name, *count)
            for member in self.stores
            for count in {**member.counts, **member.half.counts()}.items()
        )

    def clear(self) -> None:
        """Forget all requests: the engine is dead."""
        for of in (self.waiting, self.arriving, self._loads, self._arrived, self._held, self._waits, self._refused):
            of.clear()
        for member in self.members:
            member.due = False
            member.open = 0
            member.faults.clear()

    def check_integrity(self) -> None:
        """Raise AssertionError where connectors, or what is kept of their work, contradict themselves."""
        leases = [load.lease for load in self._loads.values()] + [lease for _, lease, _ in self._held.values()]
        leases += [load.lease for load in self._arrived.values()]
        assert set(leases) <= self.kv.pool.leases.keys() and len(set(leases)) == len(leases)
        assert sum(member.open for member in self.members) == len(self._loads) + len(self._held)
        for member in self.members:
            member.half.check_integrity()

    def close(self) -> None:
        """Let go of what they hold."""
        for member in self.members:
            member.half.close()


def _are_pages(pages: object, num_pages: int) -> bool:
    if not isinstance(pages, np.ndarray) or pages.dtype.kind != "i" or pages.ndim != 1:
        return False
    return bool(((pages >= 0) & (pages < num_pages)).all())
