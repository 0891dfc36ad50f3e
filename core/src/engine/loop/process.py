"""The engine core as a process: `python -m engine.loop.process`, with its start message on standard input.

One thread does all: it takes in what arrived, steps, and tells the news. A thread beside it would have to wait for the
interpreter while a step is planned, and the first token of a request with it. ZeroMQ's own threads send and receive.
Nothing is pickled, and multiprocessing is not used, so users need no `__main__` guard.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import cast

import msgspec
import zmq

from engine.loop.assemble import assemble_core
from engine.loop.clients import Clients
from engine.loop.engine_core import EngineCore
from engine.types import wire
from engine.types.child_process import take_start
from engine.types.errors import EngineDeadError, EngineError
from engine.types.json_log import log_as
from engine.types.messages import (
    Abort,
    Add,
    Attach,
    Beat,
    Call,
    Detach,
    Failed,
    FromCore,
    Outputs,
    ProcessStart,
    Ready,
    Reply,
    Shutdown,
    ToCore,
)
from engine.types.outputs import CoreOutput, CoreOutputs
from engine.types.request import FinishReason

log = logging.getLogger("engine.core")

CALLS = frozenset({"stats", "page_maps", "reset_prefix_cache", "check_integrity", "start_profile", "stop_profile"})
"""The core's methods that a frontend may call."""

HEALTH_SECONDS = 1.0
"""How often an idle core looks whether its workers live, and how long a core says nothing at most."""


AWAKE_SECONDS = 0.002
"""How long a core stays awake after its last step: who was answered often asks again at once, and for a core that slept
the first step takes twice as long (its code has left the caches)."""


class Inbox:
    """What the frontend sent, and what other clients did.

    Args:
        address: bound by the frontend.
    """

    def __init__(self, address: str) -> None:
        self._context = zmq.Context()
        self._socket = _socket(self._context, zmq.PULL, address)
        self._decode: Callable[[bytes], ToCore] = wire.decoder(ToCore).decode

    def get(self, timeout: float, awake: float = 0.0) -> ToCore | None:
        """The next message; None where none comes within `timeout` seconds, of which the first `awake` are not slept
        through. One that cannot be read is logged."""
        if timeout and not self._comes(awake) and not self._socket.poll(round(timeout * 1000)):
            return None
        while cast(int, self._socket.get(zmq.EVENTS)) & zmq.POLLIN:
            try:
                return self._decode(self._socket.recv(zmq.NOBLOCK))
            except msgspec.DecodeError as error:
                log.error("a message from the frontend could not be read: %s", error)
        return None

    def _comes(self, within: float) -> bool:
        until = time.perf_counter() + within
        while within and not cast(int, self._socket.get(zmq.EVENTS)) & zmq.POLLIN:
            if time.perf_counter() > until:
                return False
            os.sched_yield()
        return within > 0

    def connect(self, address: str) -> None:
        """Hear one more client, which binds this address."""
        self._socket.connect(address)

    def disconnect(self, address: str) -> None:
        """Hear one client no more; what it sent before may still come."""
        self._socket.disconnect(address)

    def close(self) -> None:
        """Hear nothing any more."""
        self._context.destroy(linger=0)


class Outbox:
    """What the frontend is told.

    Args:
        address: bound by the frontend.
    """

    def __init__(self, address: str) -> None:
        self._context = zmq.Context()  # its own, so that it can end, which waits until the last message is on its way
        self._socket = _socket(self._context, zmq.PUSH, address)
        self._socket.linger = 2000

    def put(self, message: FromCore) -> None:
        """Tell it; never blocks. Raises EngineDeadError for what cannot be told: requests would wait for ever."""
        try:
            data = wire.encode(message)
        except Exception as error:  # what a driver put into an output, say
            log.error("news could not be told to the frontend", exc_info=error)
            raise EngineDeadError("tell the frontend", f"{type(error).__name__}: {error}") from error
        self._socket.send(data)

    def drop(self) -> None:
        """Whoever was told has gone: forget what is not on its way."""
        self._context.destroy(linger=0)

    def close(self) -> None:
        """Wait until all is on its way, for a moment at most."""
        self._socket.close()
        self._context.term()


def _socket(context: zmq.Context[zmq.Socket[bytes]], kind: int, address: str) -> zmq.Socket[bytes]:
    socket = context.socket(kind)
    socket.set_hwm(0)
    socket.connect(address)
    return socket


def main() -> int:
    """Run until told to stop, or until the parent dies. Returns the process's exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
    faulthandler.enable()  # a crash says where
    if hasattr(signal, "SIGUSR1"):
        faulthandler.register(signal.SIGUSR1)  # and so does a core that hangs, when the frontend ends it
    start: ProcessStart = take_start(ProcessStart, sys.argv[1])
    log_as(start.core.worker.log_format)

    outbox = Outbox(start.outputs)
    code = 0
    core: EngineCore | None = None
    try:
        core = assemble_core(start.core, prepare=start.core.grammar_warm_up)
        gc.collect()
        gc.freeze()  # what stands now stands until the end: collections in mid-service need not look at it
        outbox.put(Ready(core.worker_ready))
        if start.core.grammar_warm_up and core.scheduler.constraints is not None:
            core.scheduler.constraints.warm_up()
        with contextlib.closing(Inbox(start.requests)) as inbox:
            step_loop(core, inbox, outbox)
    except EngineError as error:
        outbox.put(Failed(error.parts))
        code = 1
    except Exception as error:  # a bug, or the machine: the frontend must hear of it whatever it is
        log.error("the engine core ends", exc_info=error)
        outbox.put(Failed(EngineDeadError("run the engine core", f"{type(error).__name__}: {error}").parts))
        code = 1
    finally:
        outbox.close()
        if core is not None:
            core.shutdown()
    return code


def step_loop(core: EngineCore, inbox: Inbox, outbox: Outbox) -> None:
    """Take in what arrived, step, hand out the news; sleep while there is nothing to do.

    Raises EngineDeadError once the core has died, after the news of it is out, and where news cannot be told.
    """
    clients, told, awake = Clients(inbox, outbox, Outbox), time.monotonic(), 0.0
    while True:
        while True:
            message = inbox.get(0.0 if core.has_work() else clients.patience(HEALTH_SECONDS), awake)
            awake = 0.0
            if message is None and core.has_work():
                break
            if message is None:
                core.check_health()
                core.check_idle()
                clients.catch_up()
                outbox.put(Beat())
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
            outbox.put(Beat())
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
                    clients.put(Outputs(CoreOutputs(outputs=[refused])), client)
                else:
                    clients.own(client, request)
        case Abort(request_ids, client):
            core.abort(clients.owned(client, request_ids))
        case Call(call_id, method, client):
            clients.put(_answer(core, call_id, method), client)
        case Attach():
            clients.attach(message, core.stats())
        case Detach(client):
            core.abort(clients.detach(client))


def _answer(core: EngineCore, call_id: int, method: str) -> Reply:
    if method not in CALLS:
        return Reply(call_id, error=f"the core has no call {method!r}")
    try:
        return Reply(call_id, msgspec.to_builtins(getattr(core, method)()))
    except (EngineError, AssertionError) as error:
        return Reply(call_id, error=f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads that wait on sockets need no farewell
