"""Where pages are short: who goes on, who is preempted, and what becomes of the pages.

A preempted request is computed again, or the swap tier keeps its pages until there is room for them. The queue of the
swapped ones has the policy's order. A request leaves its pages when it is preempted and enters that queue when no step
under way names it any more; its tokens that return meanwhile are kept, as with every preempted request.
"""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING

import numpy as np

from engine.kv.manager import KVManager
from engine.kv.swap import SwapIn, SwapRecord, find_swapped, swap_out
from engine.scheduling.loading import Connector
from engine.scheduling.slots import Request, SlotTable, Status

if TYPE_CHECKING:
    from engine.interfaces.scheduling_policy import SchedulingPolicy

logger = logging.getLogger(__name__)

WARN_EVERY = 50
"""The first preemption is told, and then every fiftieth."""


class Preemptions:
    """How often requests lost their pages, by what became of these.

    Attributes:
        num_swapped: kept by the swap tier.
        num_recomputed: given up, to be computed again.
        num_swap_full: of those recomputed, the ones that the swap tier had no room for.
    """

    def __init__(self) -> None:
        self.num_swapped = 0
        self.num_recomputed = 0
        self.num_swap_full = 0

    @property
    def total(self) -> int:
        """Since start, by all modes."""
        return self.num_swapped + self.num_recomputed

    def count(self, request_id: str, swapped: bool, swap_full: bool = False) -> None:
        """A request was preempted; `swap_full`: it should have been swapped, and there was no room."""
        self.num_swapped += swapped
        self.num_recomputed += not swapped
        self.num_swap_full += swap_full
        if self.total % WARN_EVERY == 1:
            logger.warning(
                "request %s is preempted by mode %s because there is not enough KV cache space; this costs throughput. "
                "Raise --kv-cache-memory, or lower --max-num-seqs. Cumulative preemptions: %d",
                request_id,
                "swap" if swapped else "recompute",
                self.total,
            )
        if swap_full and self.num_swap_full % WARN_EVERY == 1:
            logger.warning(
                "the swap space is full: request %s will be computed again instead. Raise --swap-space. So far: %d",
                request_id,
                self.num_swap_full,
            )


def oldest_that_fit(order: np.ndarray, need: np.ndarray, available: int) -> np.ndarray:
    """bool [n]; the rows that need no page, and the longest admitted of the others for which pages are there.

    Args:
        order: int [n]; of admission.
        need: bool [tables, n]; which rows need a page.
        available: pages.
    """
    oldest = np.argsort(order)
    pages = np.count_nonzero(need, axis=0)[oldest]
    keep = np.empty(order.size, bool)
    keep[oldest] = (np.cumsum(pages) <= available) | (pages == 0)
    return keep


class Swapping:
    """The swap tier in the scheduler's hands.

    Args:
        kv: the pages.
        connector: one that swaps.
        queue: a policy of its own, for the swapped requests alone.
    """

    def __init__(self, kv: KVManager, connector: Connector, queue: SchedulingPolicy[Request]) -> None:
        self.kv = kv
        self.connector = connector
        self._half = connector.half
        self.queue = queue
        self._records: dict[str, SwapRecord] = {}
        self._distrusted: set[str] = set()

    def __len__(self) -> int:
        """Requests that wait in the queue."""
        return len(self.queue)

    # -- out ----------------------------------------------------------------------------------------------------------
    def may(self, request: Request) -> bool:
        """Whether a request is swapped when it is preempted: not where a load failed it, or it might never get on; nor
        where it pools, since what the worker has summed up of its hidden states lies in no page."""
        return request.pooling is None and request.request_id not in self._distrusted

    def distrust(self, request: Request) -> None:
        """What was loaded for the request was of no use: give up what is kept of it, and compute it again each time."""
        self._distrusted.add(request.request_id)
        self._forget(request)

    def swap_out(self, request: Request, slots: SlotTable) -> bool | None:
        """Keep a running request's pages, which are then given back. False where the tier has no room, None where it
        failed: the request will end."""
        slot = request.slot
        assert not slots.drafts[slot], "how much of it is computed is not known yet"
        record, pages = swap_out(self.kv, slot, int(slots.computed[slot]))
        taken: bool | None = self.connector.ask(request, "swap", self._half.swap_out, request.request_id, pages)
        if taken is None:
            with contextlib.suppress(Exception):  # perhaps it has kept some of them; why it ends is told already
                self._half.forget(request.request_id)
        if not taken:
            return taken
        self._records[request.request_id] = record
        return True

    def keeps(self, request: Request) -> bool:
        """Whether a preempted request was swapped out."""
        return request.request_id in self._records

    def ended(self, request: Request) -> None:
        """The request ended, in whatever state."""
        if request.status is Status.SWAPPED:
            self.queue.remove(request)
        self._distrusted.discard(request.request_id)
        self._forget(request)

    def _forget(self, request: Request) -> None:
        if self._records.pop(request.request_id, None) is not None:
            self.connector.ask(request, "forget", self._half.forget, request.request_id)

    # -- back ---------------------------------------------------------------------------------------------------------
    def find(self, request: Request) -> SwapIn:
        """What the cache still has of the first of the queue, and what would have to be loaded."""
        return find_swapped(self.kv, self._records[request.request_id], request.sequence(request.token_ids))

    def swapped_in(self, request: Request, swap_in: SwapIn) -> None:
        """The request has its pages: have what is missing loaded into them before this step computes."""
        faults = len(self.connector.faults)
        self.connector.ask(request, "swap back", self._half.swap_in, request.request_id, swap_in.places, swap_in.pages)
        if len(self.connector.faults) == faults:  # else what it keeps of the request is given up when that ends
            del self._records[request.request_id]

    def clear(self) -> None:
        """Forget all requests: the engine is dead."""
        for request in list(self.queue):
            self.queue.remove(request)
        self._records.clear()
        self._distrusted.clear()

    def check_integrity(self, idle: bool) -> None:
        """Raise AssertionError where something is kept when there are no requests."""
        assert not idle or not (self._records or self._distrusted)
