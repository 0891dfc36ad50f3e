"""The engine core as a process: `python -m engine.loop.process`, with its start message on standard input.

One thread does all: it takes in what arrived, steps, and tells the news. A thread beside it would have to wait for the
interpreter while a step is planned, and the first token of a request with it. ZeroMQ's own threads send and receive.
Nothing is pickled, and multiprocessing is not used, so users need no `__main__` guard.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from engine.loop.assemble import assemble_core
from engine.loop.engine_core import EngineCore
from engine.plugin.loading import brought
from engine.process.run import run
from engine.process.wire import Inbox, Outbox, Parent
from engine.types.errors import EngineError
from engine.types.messages import Abort, Add, Attach, Beat, Call, Detach, FromCore, Ready, Reply, Shutdown, ToCore
from engine.types.outputs import CoreOutput, CoreOutputs, StepStats
from engine.types.request import EngineRequest, FinishReason
from engine.types.start import CoreStart

log = logging.getLogger("engine.core")

HEALTH_SECONDS = 1.0
"""How often an idle core looks whether its workers live, and how long a core says nothing at most."""
AWAKE_SECONDS = 0.002
"""How long a core stays awake after its last step: who was answered often asks again at once, and for a core that slept
the first step takes twice as long (its code has left the caches)."""
STATE_SECONDS = 0.05
"""How often a client that has no news of its own is told of the core's state, while there is work."""


def serve(start: CoreStart, parent: Parent[ToCore]) -> int:
    """Build the engine core and run it until told to stop. Returns the exit code."""
    if start.worker.log_format != "text":
        brought("logs", f"log {start.worker.log_format}").log_as(start.worker.log_format)
    core = assemble_core(start, prepare=start.grammar_warm_up)
    parent.at_end.callback(core.shutdown)
    gc.collect()
    gc.freeze()  # what stands now stands until the end: collections in mid-service need not look at it
    parent.send(Ready(core.worker_ready))
    if start.grammar_warm_up and (constraints := core.scheduler.states.constraints) is not None:
        constraints.warm_up(tuple(sorted(start.worker.model.eos_token_ids)))
    step_loop(core, parent)
    return 0


def step_loop(core: EngineCore, parent: Parent[ToCore]) -> None:
    """Take in what arrived, step, hand out the news; sleep while there is nothing to do.

    Raises EngineDeadError once the core has died, after the news of it is out, and where news cannot be told.
    """
    clients, told, awake = Clients(parent.inbox, parent.outbox), time.monotonic(), 0.0
    while True:
        while True:
            message = parent.receive(0.0 if core.has_work() else clients.patience(HEALTH_SECONDS), awake)
            awake = 0.0
            if message is None and core.has_work():
                break
            if message is None:
                core.check_health()
                core.check_idle()
                clients.catch_up()
                parent.send(Beat())
                continue
            if isinstance(message, Shutdown):
                return
            handle(core, message, clients)
        outputs, now, awake = core.step(), time.monotonic(), AWAKE_SECONDS
        # Also without news of requests: metrics count every step's tokens, and end with the state of the idle core.
        if outputs.outputs or (outputs.stats is not None and outputs.stats.num_tokens) or not core.has_work():
            clients.tell(outputs)
            told = now
        elif now - told >= HEALTH_SECONDS:
            parent.send(Beat())
            told = now


def handle(core: EngineCore, message: ToCore, clients: Clients) -> None:
    """Apply one message to the core. A request that the core refuses is answered, never dropped."""
    match message:
        case Add(requests, client):
            for request in requests if clients.known(client) else ():
                try:
                    core.add_request(request)
                except EngineError as error:
                    refused = CoreOutput(
                        request_id=request.request_id, finish_reason=FinishReason.ERROR, error=error.parts
                    )
                    clients.put(CoreOutputs(outputs=[refused]), client)
                else:
                    clients.own(client, request)
        case Abort(request_ids, client):
            core.abort(clients.owned(client, request_ids))
        case Call(call_id, method, client, args):
            clients.put(_answer(core, call_id, method, args), client)
        case Attach():
            clients.attach(message, core.stats())
        case Detach(client):
            core.abort(clients.detach(client))


def _answer(core: EngineCore, call_id: int, method: str, args: Sequence[Any]) -> Reply:
    try:
        return Reply(call_id, msgspec.to_builtins(core.call(method, *args)))
    except (EngineError, AssertionError, AttributeError, TypeError) as error:  # the last: other arguments than it takes
        return Reply(call_id, error=f"{type(error).__name__}: {error}")


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


if __name__ == "__main__":
    run("the engine core", CoreStart, ToCore, serve)
