"""Scheduling policy `fcfs`: first come, first served.

The order is that of the calls of `push`: each core hears of requests as they arrive.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from engine.interfaces.scheduling_policy import SchedulingPolicyCard

if TYPE_CHECKING:
    from engine.interfaces.context import CoreContext
    from engine.interfaces.scheduling_policy import Schedulable


class FCFSPolicy(SchedulingPolicyCard):
    """First come, first served; preempts the request that was admitted last."""

    body = "engine_reference.policy_fcfs:FCFS"


class FCFS:
    """The waiting queue as a linked list by id; see `engine.interfaces.scheduling_policy.SchedulingPolicy`."""

    def __init__(self, context: CoreContext) -> None:
        self._queue: OrderedDict[str, Schedulable] = OrderedDict()

    def push(self, request: Schedulable) -> None:
        self._queue[request.request_id] = request

    def push_front(self, request: Schedulable) -> None:
        self._queue[request.request_id] = request
        self._queue.move_to_end(request.request_id, last=False)

    def peek(self) -> Schedulable | None:
        return next(iter(self._queue.values()), None)

    def pop(self) -> Schedulable:
        if not self._queue:
            raise IndexError("no request is waiting")
        return self._queue.popitem(last=False)[1]

    def remove(self, request: Schedulable) -> None:
        del self._queue[request.request_id]

    def victim(self, running: Sequence[Schedulable], pages: Sequence[int]) -> Schedulable:
        """The one that was admitted last has the least to lose; of those that bring a page, where one does."""
        pairs = zip(reversed(running), reversed(pages), strict=True)
        return next((request for request, brings in pairs if brings), running[-1])

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Schedulable]:
        return iter(self._queue.values())
