"""The engine core as a process: `python -m engine.loop.process`, with its start message on standard input.

Three loops around one `EngineCore.step()`: a thread that receives and decodes, the step loop on the main thread, and
a thread that encodes and sends. Sockets belong to one thread each. Nothing is pickled, and multiprocessing is not
used, so users need no `__main__` guard.
"""

from __future__ import annotations

import faulthandler
import gc
import logging
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable

import msgspec
import zmq

from engine.loop.assemble import assemble_core
from engine.loop.engine_core import EngineCore
from engine.types import wire
from engine.types.child_process import take_start
from engine.types.errors import EngineDeadError, EngineError
from engine.types.json_log import log_as
from engine.types.messages import (
    Abort,
    Add,
    Beat,
    Call,
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

CALLS = frozenset({"stats", "page_map", "reset_prefix_cache", "check_integrity", "start_profile", "stop_profile"})
"""The core's methods that a frontend may call."""

HEALTH_SECONDS = 1.0
"""How often an idle core looks whether its workers live, and how long a core says nothing at most."""

Inbox = queue.SimpleQueue[ToCore | EngineDeadError]
Outbox = queue.SimpleQueue[FromCore | None]


def main() -> int:
    """Run until told to stop, or until the parent dies. Returns the process's exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
    faulthandler.enable()  # a crash says where
    if hasattr(signal, "SIGUSR1"):
        faulthandler.register(signal.SIGUSR1)  # and so does a core that hangs, when the frontend ends it
    start: ProcessStart = take_start(ProcessStart, sys.argv[1])
    log_as(start.core.worker.log_format)

    inbox: Inbox = queue.SimpleQueue()
    outbox: Outbox = queue.SimpleQueue()
    context = zmq.Context()
    sender = threading.Thread(target=_send_loop, args=(start.outputs, outbox), name="send")
    sender.start()
    code = 0
    core: EngineCore | None = None
    try:
        core = assemble_core(start.core)
        gc.collect()
        gc.freeze()  # what stands now stands until the end: collections in mid-service need not look at it
        outbox.put(Ready(core.worker_ready))
        receive = threading.Thread(
            target=_receive_loop, args=(context, start.requests, inbox), name="receive", daemon=True
        )
        receive.start()
        if start.core.grammar_warm_up and core.scheduler.constraints is not None:
            core.scheduler.constraints.warm_up()
        step_loop(core, inbox, outbox)
    except EngineError as error:
        outbox.put(Failed(error.parts))
        code = 1
    except Exception as error:  # a bug, or the machine: the frontend must hear of it whatever it is
        log.error("the engine core ends", exc_info=error)
        outbox.put(Failed(EngineDeadError("run the engine core", f"{type(error).__name__}: {error}").parts))
        code = 1
    finally:
        outbox.put(None)
        sender.join()
        if core is not None:
            core.shutdown()
    return code


def step_loop(core: EngineCore, inbox: Inbox, outbox: Outbox) -> None:
    """Take in what arrived, step, hand out the news; sleep while there is nothing to do.

    Raises EngineDeadError once the core has died, after the news of it is out, and where a thread beside it has.
    """
    told = time.monotonic()
    while True:
        while not inbox.empty() or not core.has_work():
            try:
                message = inbox.get(timeout=HEALTH_SECONDS)
            except queue.Empty:
                core.check_health()
                core.check_idle()
                outbox.put(Beat())
                continue
            if isinstance(message, Shutdown):
                return
            if isinstance(message, EngineDeadError):
                raise message
            handle(core, message, outbox)
        outputs, now = core.step(), time.monotonic()
        # Also without news of requests: metrics count every step's tokens, and end with the state of the idle core.
        if outputs.outputs or (outputs.stats is not None and outputs.stats.num_tokens) or not core.has_work():
            outbox.put(Outputs(outputs))
            told = now
        elif now - told >= HEALTH_SECONDS:
            outbox.put(Beat())
            told = now


def handle(core: EngineCore, message: ToCore, outbox: Outbox) -> None:
    """Apply one message to the core. A request that the core refuses is answered, never dropped."""
    match message:
        case Add(requests):
            for request in requests:
                try:
                    core.add_request(request)
                except EngineError as error:
                    refused = CoreOutput(
                        request_id=request.request_id, finish_reason=FinishReason.ERROR, error=error.parts
                    )
                    outbox.put(Outputs(CoreOutputs(outputs=[refused])))
        case Abort(request_ids):
            core.abort(request_ids)
        case Call(call_id, method):
            if method not in CALLS:
                outbox.put(Reply(call_id, error=f"the core has no call {method!r}"))
                return
            try:
                outbox.put(Reply(call_id, msgspec.to_builtins(getattr(core, method)())))
            except (EngineError, AssertionError) as error:
                outbox.put(Reply(call_id, error=f"{type(error).__name__}: {error}"))


def _receive_loop(context: zmq.Context, address: str, inbox: Inbox) -> None:
    socket = context.socket(zmq.PULL)
    socket.set_hwm(0)
    socket.connect(address)
    decode: Callable[[bytes], ToCore] = wire.decoder(ToCore).decode
    try:
        while True:
            try:
                inbox.put(decode(socket.recv()))
            except msgspec.DecodeError as error:
                log.error("a message from the frontend could not be read: %s", error)
    except Exception as error:  # a core that hears nothing would let every request wait for ever
        inbox.put(EngineDeadError("hear the frontend", f"{type(error).__name__}: {error}"))


def _send_loop(address: str, outbox: Outbox) -> None:
    context = zmq.Context()  # its own, so that it can end, which waits until the last message is on its way
    socket = context.socket(zmq.PUSH)
    socket.set_hwm(0)
    socket.linger = 2000
    socket.connect(address)
    while (message := outbox.get()) is not None:
        try:
            data = wire.encode(message)
        except Exception as error:  # what a driver put into an output, say; without it requests would wait for ever
            log.error("news could not be told to the frontend", exc_info=error)
            socket.send(
                wire.encode(Failed(EngineDeadError("tell the frontend", f"{type(error).__name__}: {error}").parts))
            )
            break
        socket.send(data)
    socket.close()
    context.term()


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads that wait on sockets need no farewell
