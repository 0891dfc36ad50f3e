"""The responses that a server keeps in memory for those who come back to them, bounded in bytes and in time; and those
that are computed while nobody waits."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from engine_server.keys import KeyUsage
from engine_server.lifecycle import Lifecycle

Owner = str | None
"""Of an API key; None where the server asks for none."""


class EventLog:
    """The events of a response that is computed in the background, for clients that come back to them.

    Belongs to one event loop. An event's place is its sequence number.

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


@dataclass(frozen=True)
class StoredResponse:
    """One of them.

    Args:
        response: as it was answered.
        before: the items of the responses that it went on from, with their outputs.
        items: of its own input.
        events: by which it was, or is being, told; None where they are not kept.
    """

    response: Mapping[str, Any]
    before: Sequence[Mapping[str, Any]]
    items: Sequence[Mapping[str, Any]]
    events: EventLog | None = None

    @property
    def conversation(self) -> list[Mapping[str, Any]]:
        """All items that the next response goes on from."""
        return [*self.before, *self.items, *self.response["output"]]


class ResponseStore:
    """Nobody finds what another has stored. Where there is no more room, the oldest response of the owner who holds
    most makes way.

    Args:
        max_bytes: of all responses as JSON, each with the whole conversation before it; 0: nothing is stored.
        seconds: how long a response is kept.
        clock: seconds, never going back.
    """

    def __init__(self, max_bytes: int, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.max_bytes = max_bytes
        self._seconds = seconds
        self._clock = clock
        self._entries: dict[Owner, OrderedDict[str, tuple[StoredResponse, int, float]]] = {}
        """Of each owner, the oldest first: the response, its bytes, and when it ends."""
        self._sizes: Counter[Owner] = Counter()

    @property
    def size(self) -> int:
        """Bytes that are stored."""
        return self._sizes.total()

    def put(self, owner: Owner, stored: StoredResponse) -> None:
        """Keep a response, in the place of one with the same id. One that is larger than all room is not kept."""
        self._expire()
        size = sum(len(orjson.dumps(part)) for part in (stored.response, *stored.before, *stored.items))
        size += 0 if stored.events is None else stored.events.size
        self.delete(owner, stored.response["id"])
        entries = self._entries.setdefault(owner, OrderedDict())
        entries[stored.response["id"]] = stored, size, self._clock() + self._seconds
        self._sizes[owner] += size
        while self.size > self.max_bytes:
            largest, _ = self._sizes.most_common(1)[0]
            self._drop(largest, next(iter(self._entries[largest])))

    def get(self, owner: Owner, identity: str) -> StoredResponse | None:
        """The owner's response of that id; None where there is none, or none any more."""
        self._expire()
        entries = self._entries.get(owner)
        found = None if entries is None else entries.get(identity)
        return None if found is None else found[0]

    def delete(self, owner: Owner, identity: str) -> bool:
        """Forget a response; False where there is none. Those that went on from it stay as they are."""
        if self.get(owner, identity) is None:
            return False
        self._drop(owner, identity)
        return True

    def _expire(self) -> None:
        now = self._clock()
        for owner in list(self._entries):
            while (entries := self._entries.get(owner)) is not None:
                identity, (_, _, ends) = next(iter(entries.items()))
                if ends > now:
                    break
                self._drop(owner, identity)

    def _drop(self, owner: Owner, identity: str) -> None:
        entries = self._entries[owner]
        self._sizes[owner] -= entries.pop(identity)[1]
        if not entries:
            del self._entries[owner], self._sizes[owner]


class ResponseShelf:
    """Where routes find and leave responses: in a `ResponseStore`; several processes have theirs in the first one's."""

    def __init__(self, store: ResponseStore) -> None:
        self.max_bytes = store.max_bytes
        self._store = store

    async def put(self, owner: Owner, made: StoredResponse) -> None:
        self._store.put(owner, made)

    async def get(self, owner: Owner, identity: str) -> StoredResponse | None:
        return self._store.get(owner, identity)

    async def delete(self, owner: Owner, identity: str) -> bool:
        return self._store.delete(owner, identity)

    def log(self, identity: str) -> EventLog:
        """For the events of a response that will be computed here."""
        return EventLog()


class Background:
    """Responses that are computed while no client waits for them.

    Belongs to one event loop. What runs here counts as a request in progress: for the server, which waits for it
    before it leaves, and for the API key.
    """

    def __init__(self, lifecycle: Lifecycle) -> None:
        self._lifecycle = lifecycle
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def start(
        self, identity: str, work: Coroutine[Any, Any, None], usage: KeyUsage | None, ended: Callable[[], None]
    ) -> None:
        """Run `work`, which raises nothing, for a response and an API key; `ended` is called when it has ended."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks[identity] = task
        self._lifecycle.enter()
        if usage is not None:
            usage.hold()

        def done(_: asyncio.Task[None]) -> None:
            del self._tasks[identity]
            self._lifecycle.leave()
            if usage is not None:
                usage.leave()
            ended()

        task.add_done_callback(done)

    async def cancel(self, identity: str) -> bool:
        """Cancel it, and wait until it has ended; False where nothing of that id runs. It has always begun by then, so
        that it can tell of its end."""
        await asyncio.sleep(0)
        task = self._tasks.get(identity)
        if task is None:
            return False
        task.cancel()
        await asyncio.wait([task])
        return True
