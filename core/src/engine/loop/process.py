"""The engine core as a process: `python -m engine.loop.process`, with its start message on standard input.

One thread does all: it takes in what arrived, steps, and tells the news. A thread beside it would have to wait for the
interpreter while a step is planned, and the first token of a request with it. ZeroMQ's own threads send and receive.
Nothing is pickled, and multiprocessing is not used, so users need no `__main__` guard.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from engine.loop.assemble import assemble_core
from engine.loop.engine_core import EngineCore
from engine.plugin.loading import brought
from engine.process.run import run
from engine.process.wire import Parent
from engine.types.errors import EngineDeadError, EngineError
from engine.types.messages import Abort, Add, Attach, Beat, Call, Detach, Ready, Reply, Shutdown, ToCore
from engine.types.outputs import CoreOutput, CoreOutputs
from engine.types.request import FinishReason
from engine.types.start import CoreStart

log = logging.getLogger("engine.core")

HEALTH_SECONDS = 1.0
"""How often an idle core looks whether its workers live, and how long a core says nothing at most."""
AWAKE_SECONDS = 0.002
"""How long a core stays awake after its last step: who was answered often asks again at once, and for a core that slept
the first step takes twice as long (its code has left the caches)."""


def serve(start: CoreStart, parent: Parent[ToCore]) -> int:
    """Build the engine core and run it until told to stop. Returns the exit code."""
    if start.worker.log_format != "text":
        brought("logs", f"log {start.worker.log_format}").log_as(start.worker.log_format)
    start = msgspec.structs.replace(start, worker=msgspec.structs.replace(start.worker, home=parent.directory))
    core = assemble_core(start, prepare=start.grammar_warm_up)
    parent.at_end.callback(core.shutdown)
    gc.collect()
    gc.freeze()  # what stands now stands until the end: collections in mid-service need not look at it
    if core.lockstep is not None:
        parent.inbox.watch(core.lockstep.files)
    parent.send(Ready(core.worker_ready))
    if start.grammar_warm_up and (constraints := core.scheduler.states.constraints) is not None:
        constraints.warm_up(tuple(sorted(start.worker.model.eos_token_ids)))
    step_loop(core, parent)
    return 0


def step_loop(core: EngineCore, parent: Parent[ToCore]) -> None:
    """Take in what arrived, step, hand out the news; sleep while there is nothing to do.

    Raises EngineDeadError once the core has died, after the news of it is out, and where news cannot be told.
    """
    serving = brought("core_clients", "serve clients of a core")
    clients, told, awake = serving(parent.inbox, parent.outbox), time.monotonic(), 0.0
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
                return wind_down(core)
            handle(core, message, clients)
        outputs, now = core.step(), time.monotonic()
        awake = AWAKE_SECONDS if core.lockstep is None else 0.0  # where another core may call, it is waited for both
        # Also without news of requests: metrics count every step's tokens, and end with the state of the idle core.
        if outputs.outputs or (outputs.stats is not None and outputs.stats.num_tokens) or not core.has_work():
            clients.tell(outputs)
            told = now
        elif now - told >= HEALTH_SECONDS:
            parent.send(Beat())
            told = now


def wind_down(core: EngineCore, seconds: float = 1.0) -> None:
    """Before a core's shutdown: end all requests, and step on until the others have nothing to compute either."""
    if core.lockstep is not None:
        core.abort(list(core.scheduler.requests))
        until = time.monotonic() + seconds
        with contextlib.suppress(EngineDeadError):  # it has told and logged why
            while core.has_work() and core.lockstep.gone() is None and time.monotonic() < until:
                core.step()


def handle(core: EngineCore, message: ToCore, clients: Any) -> None:
    """Apply one message to the core. A request that the core refuses is answered, never dropped.

    clients: whom it serves, see `engine_kit.core_clients`.
    """
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


if __name__ == "__main__":
    run("the engine core", CoreStart, ToCore, serve)
