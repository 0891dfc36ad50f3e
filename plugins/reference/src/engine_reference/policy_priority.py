"""Scheduling policy `priority`: the most urgent request first.

A heap whose entries die when their request is taken out.

A request's place is fixed when it arrives, also with ageing: to wait `aging_seconds` for each level is to have arrived
that much earlier, so `arrival_time + priority * aging_seconds` orders requests at any later time alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field

from engine.interfaces.scheduling_policy import SchedulingPolicyCard

if TYPE_CHECKING:
    from engine.interfaces.context import CoreContext
    from engine.interfaces.scheduling_policy import Schedulable

_Place = tuple[float, float]


class PriorityOptions(BaseModel):
    """Options of `priority`.

    Attributes:
        aging_seconds: how long a request waits until it goes before one that is a level more urgent and came just now;
            None: for ever, so that urgent traffic may starve the rest.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    aging_seconds: float | None = Field(default=None, gt=0.0, le=1e6)


class PriorityPolicy(SchedulingPolicyCard):
    """The lowest `priority` value first, then first come, first served; preempts the other way round."""

    priority = -10  # chosen by name: without priorities in the requests it is `fcfs` at a higher cost
    orders_by_priority = True
    Options = PriorityOptions
    body = "engine_reference.policy_priority:Priority"


class Priority:
    """See `engine.interfaces.scheduling_policy.SchedulingPolicy`."""

    def __init__(self, context: CoreContext) -> None:
        options: PriorityOptions = context.options
        self._aging = options.aging_seconds
        self._heap: list[tuple[_Place, int, str]] = []
        self._queued: dict[str, tuple[int, Schedulable]] = {}
        """By id: the number of the request's entry, and the request."""
        self._count = 0

    def push(self, request: Schedulable) -> None:
        self._count += 1
        self._enter(request, self._count)

    def push_front(self, request: Schedulable) -> None:
        """Before those of its own place; a more urgent one still goes before it."""
        self._count += 1
        self._enter(request, -self._count)

    def peek(self) -> Schedulable | None:
        while self._heap:
            _, number, request_id = self._heap[0]
            entry = self._queued.get(request_id)
            if entry is not None and entry[0] == number:
                return entry[1]
            heappop(self._heap)
        return None

    def pop(self) -> Schedulable:
        request = self.peek()
        if request is None:
            raise IndexError("no request is waiting")
        heappop(self._heap)
        del self._queued[request.request_id]
        return request

    def remove(self, request: Schedulable) -> None:
        del self._queued[request.request_id]
        if len(self._heap) > 2 * len(self._queued) + 64:
            self._heap = [entry for entry in self._heap if self._queued.get(entry[2], (0,))[0] == entry[1]]
            heapify(self._heap)

    def victim(self, running: Sequence[Schedulable], pages: Sequence[int]) -> Schedulable:
        """The least urgent; of equals the one that was admitted last. Of those that bring a page, where one does."""
        brings = any(pages)
        able = [i for i, n in enumerate(pages) if n or not brings]
        return running[max(able, key=lambda i: (self._place(running[i]), i))]

    def __len__(self) -> int:
        return len(self._queued)

    def __iter__(self) -> Iterator[Schedulable]:
        return (request for _, request in self._queued.values())

    def _enter(self, request: Schedulable, number: int) -> None:
        self._queued[request.request_id] = number, request
        heappush(self._heap, (self._place(request), number, request.request_id))

    def _place(self, request: Schedulable) -> _Place:
        if self._aging is None:
            return request.priority, request.arrival_time
        return request.arrival_time + request.priority * self._aging, 0.0
