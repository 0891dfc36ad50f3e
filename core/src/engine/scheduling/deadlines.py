"""Deadlines: which requests have run out of time. Costs nothing while no request has one."""

from __future__ import annotations

import time
from collections.abc import Callable
from heapq import heapify, heappop, heappush

from engine.scheduling.request import Request, Status
from engine.types.errors import RequestTimeoutError


class Deadlines:
    """A heap of deadlines. An entry dies with its request; dead ones are swept out when they are the greater part.

    Args:
        clock: seconds that only grow, so that setting the machine's time forward or back ends nobody.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._heap: list[tuple[float, int, Request]] = []
        self._count = 0
        self._alive = 0

    def __len__(self) -> int:
        """Unfinished requests with a deadline."""
        return self._alive

    def add(self, request: Request, timeout: float) -> None:
        """The request has to end in so many seconds."""
        self._count += 1
        self._alive += 1
        heappush(self._heap, (self.clock() + timeout, self._count, request))

    def ended(self) -> None:
        """A request with a deadline is FINISHED."""
        self._alive -= 1
        if not self._alive:
            self._heap.clear()
        elif len(self._heap) > 2 * self._alive + 64:
            self._heap = [entry for entry in self._heap if entry[2].status is not Status.FINISHED]
            heapify(self._heap)

    def late(self) -> list[Request]:
        """Unfinished requests whose deadline has passed; the caller ends them."""
        late, now = [], self.clock()
        while self._heap and self._heap[0][0] <= now:
            _, _, request = heappop(self._heap)
            if request.status is not Status.FINISHED:
                late.append(request)
        return late

    def clear(self) -> None:
        """Forget all."""
        self._heap.clear()
        self._alive = 0


def timed_out(request: Request) -> RequestTimeoutError:
    """The error that a late request ends with."""
    done = max(0, request.num_tokens - request.num_prompt_tokens)
    return RequestTimeoutError(
        f"finish request {request.request_id!r} in {request.timeout:g} s",
        f"after that time {done} of its output tokens were there",
        "give it more time, or ask for fewer tokens; where it waited, the engine has more work than it can do",
    )
