"""Scheduling policies with one planted fault each, in the places of the reference drivers' bodies."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

from mutant_suites import suites_of

from engine_reference.policy_fcfs import FCFS
from engine_reference.policy_priority import Priority
from engine_sdk.conformance import SchedulingPolicyConformance


class LastFirst(FCFS):
    """last come, first served"""

    def peek(self) -> Any:
        return next(reversed(self._queue.values()), None)

    def pop(self) -> Any:
        if not self._queue:
            raise IndexError("no request is waiting")
        return self._queue.popitem()[1]


class BackOfTheQueue(FCFS):
    """a preempted request goes behind those that came after it"""

    def push_front(self, request: Any) -> None:
        self.push(request)


class PeeksElsewhere(FCFS):
    """peek shows the last request, pop takes the first"""

    def peek(self) -> Any:
        return next(reversed(self._queue.values()), None)


class PeekTakes(FCFS):
    """peek takes the request out"""

    def peek(self) -> Any:
        return self.pop() if self._queue else None


class LosesOnRemove(FCFS):
    """removing a request takes the one before it out as well"""

    def remove(self, request: Any) -> None:
        names = list(self._queue)
        place = names.index(request.request_id) if request.request_id in self._queue else -1
        super().remove(request)
        if place > 0:
            del self._queue[names[place - 1]]


class SilentRemove(FCFS):
    """removing a request that is not queued is no error"""

    def remove(self, request: Any) -> None:
        self._queue.pop(request.request_id, None)


class NoneForEmpty(FCFS):
    """pop of an empty queue gives None"""

    def pop(self) -> Any:
        return super().pop() if self._queue else None


class Zombies(Priority):
    """a request that was removed is served all the same"""

    def remove(self, request: Any) -> None:
        if request.request_id not in self._queued:
            raise KeyError(request.request_id)
        self._dead = {*getattr(self, "_dead", ()), request.request_id}

    def __len__(self) -> int:
        return len(self._queued) - len(getattr(self, "_dead", ()))


class ScansTheQueue(FCFS):
    """pop looks at every request"""

    def pop(self) -> Any:
        if self._queue:
            min(self._queue.values(), key=lambda request: request.arrival_time)
        return super().pop()


class ScansToRemove(FCFS):
    """remove looks at the requests from the front"""

    def remove(self, request: Any) -> None:
        for other in self._queue.values():
            if other.request_id == request.request_id:
                break
        super().remove(request)


class ForgetsInListing(FCFS):
    """the first request is left out when all are listed"""

    def __iter__(self) -> Iterator[Any]:
        return iter(list(self._queue.values())[1:])


class WrongLength(FCFS):
    """the length counts requests that have gone"""

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self._pushed = 0

    def push(self, request: Any) -> None:
        self._pushed += 1
        super().push(request)

    def __len__(self) -> int:
        return self._pushed


class InventsVictims(FCFS):
    """a waiting request is preempted"""

    def victim(self, running: Sequence[Any], pages: Sequence[int]) -> Any:
        return next(iter(self._queue.values()), running[-1])


class DrawsVictims(FCFS):
    """the victim is drawn by chance"""

    def victim(self, running: Sequence[Any], pages: Sequence[int]) -> Any:
        return random.choice(running)


class DrawsByChance(FCFS):
    """the next request is drawn by chance"""

    def push(self, request: Any) -> None:
        super().push(request)
        self._queue.move_to_end(random.choice(list(self._queue)))


class UrgentLast(Priority):
    """higher values of priority go first"""

    def _place(self, request: Any) -> tuple[float, float]:
        place = super()._place(request)
        return -place[0], place[1]


FCFS_MUTANTS = [
    LastFirst, BackOfTheQueue, PeeksElsewhere, PeekTakes, LosesOnRemove, SilentRemove, NoneForEmpty, ScansTheQueue,
    ScansToRemove, ForgetsInListing, WrongLength, InventsVictims, DrawsVictims, DrawsByChance,
]  # fmt: skip
PRIORITY_MUTANTS = [Zombies, UrgentLast]
MUTANTS = [*FCFS_MUTANTS, *PRIORITY_MUTANTS]

globals().update(suites_of(SchedulingPolicyConformance, "fcfs", FCFS_MUTANTS))
globals().update(suites_of(SchedulingPolicyConformance, "priority", PRIORITY_MUTANTS))
