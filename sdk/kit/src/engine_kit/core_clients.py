"""Whom an engine core's process serves: who started it, and the API processes beside that one."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable

from msgspec.structs import replace

from engine.process.wire import Inbox, Outbox
from engine.types.messages import Attach, FromCore, ToCore
from engine.types.outputs import CoreOutput, CoreOutputs, StepStats
from engine.types.request import EngineRequest

log = logging.getLogger("engine.core")

STATE_SECONDS = 0.05
"""How often a client that has no news of its own is told of the core's state, while there is work."""


class _Client:
    """One of them; the first, 0, has no requests of its own where there are others."""

    __slots__ = ("address", "behind", "ids", "sink", "told")

    def __init__(self, address: str, sink: Outbox) -> None:
        self.address = address
        self.sink = sink
        self.ids: dict[str, None] = {}  # of its requests that have not ended
        self.told = 0.0
        self.behind = False


class Clients:
    """Whom the core serves: who started it, and the API processes beside that one; the book of who asked for what.

    Each has sockets of its own, asks for requests of its own, and is told of these alone. With no client attached,
    which is what one API process is, every message goes to who started the core, as it is. One thread.

    Args:
        inbox: hears the clients.
        outbox: tells client 0, who started the core; it attaches the others, and is told what goes to nobody else.
        connect: makes what tells a client, of its address.
        clock: seconds, never going back.
    """

    def __init__(
        self,
        inbox: Inbox[ToCore],
        outbox: Outbox,
        connect: Callable[[str], Outbox] = Outbox,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._inbox = inbox
        self._connect = connect
        self._clock = clock
        self._first = _Client("", outbox)
        self._clients = {0: self._first}
        self._owner: dict[str, int] = {}
        self._state: StepStats | None = None

    def attach(self, message: Attach, stats: StepStats | None = None) -> None:
        """Serve one more client, and tell it the core's state. One that has gone before the core came to it has taken
        the folder of its sockets with it, and is passed over."""
        try:
            self._inbox.bind(message.requests)
        except OSError as error:
            log.warning("an API process cannot be served: %s", error)
            return
        new = self._clients[message.client] = _Client(message.requests, self._connect(message.outputs))
        new.sink.put(CoreOutputs(outputs=[], stats=stats, others=len(self._owner)))

    def detach(self, client: int) -> list[str]:
        """A client has gone. Returns its requests, which nobody waits for."""
        gone = self._clients.pop(client, None)
        if gone is None:
            return []
        self._inbox.unbind(gone.address)
        gone.sink.drop()
        return list(gone.ids)

    def known(self, client: int) -> bool:
        """Whether anybody may be told: what was still on its way from a client that has gone counts no more."""
        return client in self._clients

    def own(self, client: int, request: EngineRequest) -> None:
        """The core has taken this client's request."""
        if client:
            self._owner[request.request_id] = client
            self._clients[client].ids[request.request_id] = None

    def owned(self, client: int, request_ids: Iterable[str]) -> list[str]:
        """Those of the ids that are this client's."""
        return [name for name in request_ids if self._owner.get(name, 0) == client]

    def put(self, message: FromCore, client: int = 0) -> None:
        """Tell one client."""
        if (found := self._clients.get(client)) is not None:
            found.sink.put(message)

    def tell(self, news: CoreOutputs) -> None:
        """Tell each client its own news of a step, and now and then the core's state; who is not told is behind.

        The tokens of a step (`StepStats.num_tokens`) are told to one client, so that nothing counts them twice.
        """
        if len(self._clients) == 1 and not self._owner:  # the last that left may have had some
            return self._first.sink.put(news)
        own: dict[int, list[CoreOutput]] = {}
        for output in news.outputs:
            if output.finish_reason is None:
                client = self._owner.get(output.request_id, 0)
            elif (client := self._owner.pop(output.request_id, 0)) in self._clients:
                self._clients[client].ids.pop(output.request_id, None)
            own.setdefault(client, []).append(output)
        now, stats = self._clock(), news.stats
        self._state = quiet = None if stats is None else replace(stats, num_tokens=0)
        if not own and stats is not None and stats.num_tokens:
            own[max(self._clients)] = []
        for client, one in self._clients.items():
            outputs = own.get(client)
            if outputs is None and now - one.told < STATE_SECONDS:
                one.behind = True
            elif not client or outputs is None:
                self._tell(one, outputs or [], quiet, now)
            else:
                self._tell(one, outputs, stats, now)
                stats = quiet  # the first has them

    def _tell(self, one: _Client, outputs: list[CoreOutput], stats: StepStats | None, now: float) -> None:
        one.sink.put(CoreOutputs(outputs=outputs, stats=stats, others=len(self._owner) - len(one.ids)))
        one.told = now
        one.behind = False

    def patience(self, longest: float) -> float:
        """Seconds that an idle core may wait for messages: short where somebody has to be told afterwards how it went.
        At once would cost the next request the time in which all these wake up."""
        return STATE_SECONDS if any(one.behind for one in self._clients.values()) else longest

    def catch_up(self) -> None:
        """Tell the state to those who are behind: nothing happens now."""
        for one in self._clients.values():
            if one.behind:
                self._tell(one, [], self._state, self._clock())
