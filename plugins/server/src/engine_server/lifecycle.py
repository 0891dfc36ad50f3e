"""Where the server stands between its start and its end, and how many requests are in progress."""

from __future__ import annotations

import asyncio
import enum

ACCESS_LOG = "engine.access"
"""The name of the access log."""
ENDED_AS = "ended_as"
"""In a request's state: the status that says how an answer ended whose status had been sent before."""


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
