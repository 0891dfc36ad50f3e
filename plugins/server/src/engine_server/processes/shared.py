"""What the API processes have together: keys with what they have used, and stored responses. The first process holds
both, whichever of the others is asked: a client may come back over any connection, and a response
outlives its maker."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import Any

import orjson

from engine_server.errors import APIError
from engine_server.keys import ApiKey, KeyRing
from engine_server.lifecycle import Lifecycle
from engine_server.processes.channel import Channel
from engine_server.responses.store import Background, EventLog, Owner, ResponseShelf, ResponseStore, StoredResponse


class SharedUsage:
    """See `engine_server.keys.OwnUsage`, which the first process has. Where nothing is `limited` nobody is asked."""

    def __init__(self, digest: bytes, limited: bool, channel: Channel) -> None:
        self._digest = digest
        self._channel = channel
        self.limited = limited
        self._uncounted = 0  # let in while there was no limit

    def enter(self) -> Awaitable[APIError | None] | None:
        if self.limited:
            return self._ask()
        self._uncounted += 1
        return None

    async def _ask(self) -> APIError | None:
        refused = await self._channel.ask("enter", self._digest)
        if refused is None:
            return None
        status, message, code, headers = refused
        return APIError(status, message, code=code, headers=headers)

    def hold(self) -> None:
        if self._uncounted:
            self._uncounted += 1
        else:
            self._channel.tell("hold", self._digest)

    def leave(self) -> None:
        if self._uncounted:
            self._uncounted -= 1
        else:
            self._channel.tell("leave", self._digest)


class SharedKeys(KeyRing):
    """The keys that the first process told of last. `asked` says whether one is asked for."""

    def __init__(self, asked: bool, admin: str | None, channel: Channel) -> None:
        super().__init__(admin=admin)
        self._asked = asked
        self._channel = channel
        self._shared: dict[bytes, SharedUsage] = {}

    def __bool__(self) -> bool:
        return self._asked

    def replace(self, table: Sequence[tuple[bytes, str, bool]]) -> None:
        """From now on these: digest (SHA-256; the key itself does not travel), name for logs, and whether anything has
        to be counted."""
        keys: dict[bytes, ApiKey] = {}
        for digest, name, limited in table:
            usage = self._shared.setdefault(digest, SharedUsage(digest, limited, self._channel))
            usage.limited = limited
            keys[digest] = ApiKey(digest, name, usage)
        self._keys = keys


LOST = "the server's process that computed this response has died; send the request again"


def sent(kept: StoredResponse) -> tuple[Any, Any, Any, bool]:
    """A response on its way to another process, and whether its events are kept."""
    return kept.response, kept.before, kept.items, kept.events is not None


# -- in an API process -------------------------------------------------------------------------------------------------
class SharedResponses(ResponseShelf):
    """Those that the first process keeps."""

    def __init__(self, max_bytes: int, channel: Channel) -> None:
        self.max_bytes = max_bytes
        self._channel = channel

    async def put(self, owner: Owner, made: StoredResponse) -> None:
        """Returns when it is kept: whoever is told of it then finds it, wherever he asks."""
        await self._channel.ask("put", owner, *sent(made))

    async def get(self, owner: Owner, identity: str) -> StoredResponse | None:
        found = await self._channel.ask("get", owner, identity)
        if found is None:
            return None
        response, before, items, logged = found
        log = _FarLog(owner, identity, self._channel) if logged else None
        return StoredResponse(response, before, items, log)

    async def delete(self, owner: Owner, identity: str) -> bool:
        return bool(await self._channel.ask("delete", owner, identity))

    def log(self, identity: str) -> EventLog:
        return _SharedLog(identity, self._channel)


class _SharedLog(EventLog):
    """Kept here for who waits here, and in the first process for all others."""

    def __init__(self, identity: str, channel: Channel) -> None:
        super().__init__()
        self._identity = identity
        self._channel = channel

    def add(self, event: bytes) -> None:
        super().add(event)
        self._channel.tell("event", self._identity, event)

    def end(self) -> None:
        super().end()
        self._channel.tell("events_end", self._identity)


class _FarLog(EventLog):
    """The events that the first process keeps."""

    def __init__(self, owner: Owner, identity: str, channel: Channel) -> None:
        super().__init__()
        self._owner = owner
        self._identity = identity
        self._channel = channel

    async def after(self, start: int) -> tuple[list[bytes], bool]:
        events, ended = await self._channel.ask("events", self._owner, self._identity, start)
        return events, ended


class SharedBackground(Background):
    """Cancels what runs in any of the processes."""

    def __init__(self, lifecycle: Lifecycle, channel: Channel) -> None:
        super().__init__(lifecycle)
        self._channel = channel

    async def cancel(self, identity: str) -> bool:
        return await super().cancel(identity) or bool(await self._channel.ask("cancel", identity))

    async def cancel_here(self, identity: str) -> bool:
        """Cancel it if it runs in this process."""
        return await super().cancel(identity)


# -- in the first process ----------------------------------------------------------------------------------------------
class KeptResponses:
    """What the first process keeps, and which of the others computes what is not finished."""

    def __init__(self, store: ResponseStore) -> None:
        self._store = store
        self._running: dict[str, tuple[int, Owner]] = {}
        self._logs: dict[str, EventLog] = {}

    def put(self, number: int, owner: Owner, response: Any, before: Any, items: Any, logged: bool) -> None:
        """Process `number` made it, or begins to."""
        identity = response["id"]
        log = self._logs.setdefault(identity, EventLog()) if logged else None
        if response["status"] == "in_progress":
            self._running[identity] = number, owner
        else:
            self._running.pop(identity, None)
        self._store.put(owner, StoredResponse(response, before, items, log))

    def get(self, owner: Owner, identity: str) -> tuple[Any, Any, Any, bool] | None:
        found = self._store.get(owner, identity)
        return None if found is None else sent(found)

    def delete(self, owner: Owner, identity: str) -> bool:
        return self._store.delete(owner, identity)

    def event(self, identity: str, event: bytes) -> None:
        """The next event of one that is computed."""
        if identity in self._logs:
            self._logs[identity].add(event)

    def events_end(self, identity: str) -> None:
        """No event follows."""
        if identity in self._logs:
            self._logs.pop(identity).end()

    async def events(self, owner: Owner, identity: str, start: int) -> tuple[list[bytes], bool]:
        """The events from `start` on, as soon as there are any, and whether they are the last."""
        found = self._store.get(owner, identity)
        if found is None or found.events is None:
            return [], True
        return await found.events.after(start)

    def runs(self, identity: str) -> int | None:
        """The process that computes it; None where nobody does."""
        found = self._running.get(identity)
        return None if found is None else found[0]

    def died(self, number: int) -> None:
        """A process has died: what it computed has failed."""
        for identity, (of, owner) in list(self._running.items()):
            if of != number:
                continue
            del self._running[identity]
            if (found := self._store.get(owner, identity)) is not None:
                error = {"code": "server_error", "message": LOST}
                failed = {**found.response, "status": "failed", "error": error}
                if (log := self._logs.get(identity)) is not None:
                    told = {"type": "response.failed", "sequence_number": len(log), "response": failed}
                    log.add(b"event: response.failed\ndata: " + orjson.dumps(told) + b"\n\n")
                self._store.put(owner, StoredResponse(failed, found.before, found.items, found.events))
            self.events_end(identity)
