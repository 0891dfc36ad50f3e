"""The events of a response that is computed in the background: kept, so that a client may come back to them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator


class EventLog:
    """Belongs to one event loop. An event's place is its sequence number.

    Attributes:
        size: bytes.
        ended: no event follows.
    """

    def __init__(self) -> None:
        self._events: list[bytes] = []
        self._news = asyncio.Event()
        self.size = 0
        self.ended = False

    def add(self, event: bytes) -> None:
        """Keep one more; whoever reads gets it."""
        self._events.append(event)
        self.size += len(event)
        self._wake()

    def end(self) -> None:
        """Nothing follows. Idempotent."""
        self.ended = True
        self._wake()

    async def read(self, start: int = 0) -> AsyncGenerator[bytes]:
        """The events from this place on, then those that come, up to the end."""
        ended = False
        while not ended:
            events, ended = await self.after(start)
            for event in events:
                yield event
            start += len(events)

    async def after(self, start: int) -> tuple[list[bytes], bool]:
        """The events from this place on, as soon as there are any, and whether none follows."""
        while len(self._events) <= start and not self.ended:
            await self._news.wait()
        return self._events[start:], self.ended

    def __len__(self) -> int:
        return len(self._events)

    def _wake(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()
