"""Where the server stands between its start and its end, and how many requests are in progress, which may finish at the
end, for a time."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable, Coroutine
from typing import Any

from engine.embedding import AsyncLLM
from engine.types.errors import ShuttingDownError

ACCESS_LOG = "engine.access"
"""The name of the access log."""
ENDED_AS = "ended_as"
"""In a request's state: the status that says how an answer ended whose status had been sent before."""
FAREWELL_SECONDS = 1
"""How long answers that were cut off get to reach their clients."""


class Phase(enum.Enum):
    """What the server does with a new request: only in `SERVING` it is taken."""

    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"


class Lifecycle:
    """Belongs to one event loop.

    Attributes:
        phase: as of now.
        active: requests that were let in and whose answers have not ended.
    """

    def __init__(self) -> None:
        self.phase = Phase.STARTING
        self.active = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def enter(self) -> None:
        """A request was let in."""
        self.active += 1
        self._idle.clear()

    def leave(self) -> None:
        """Its answer has ended, however it did."""
        self.active -= 1
        if not self.active:
            self._idle.set()

    async def idle(self) -> None:
        """Wait until no request is in progress."""
        await self._idle.wait()


async def drain(
    llm: AsyncLLM, lifecycle: Lifecycle, timeout: float, at_once: asyncio.Event, say: Callable[[str], None]
) -> None:
    """Refuse new requests, wait for those in progress, cut off what is left.

    Args:
        llm: the engine.
        lifecycle: of the server.
        timeout: seconds to wait.
        at_once: set where nobody wants to wait any longer.
        say: tells the operator.
    """
    lifecycle.phase = Phase.DRAINING
    if lifecycle.active:
        say(f"finishing {lifecycle.active} requests, for {timeout:g} s at most; a second signal ends them at once")
        await first(timeout, lifecycle.idle(), at_once.wait())
    if lifecycle.active:
        say(f"cutting off {lifecycle.active} requests")
        llm.end_all(ShuttingDownError("a request in progress", "the server was stopped", "send it again"))
        await first(FAREWELL_SECONDS, lifecycle.idle())


async def first(timeout: float, *events: Coroutine[Any, Any, Any]) -> None:
    """Wait until one of these coroutines has ended, `timeout` seconds at most; the others are cancelled."""
    tasks = [asyncio.ensure_future(event) for event in events]
    await asyncio.wait(tasks, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
