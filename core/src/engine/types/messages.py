"""What the frontend and the core's process say to each other, over two one-way sockets, through `engine.types.wire`."""

from __future__ import annotations

from typing import Any

import msgspec

from engine.types.outputs import CoreOutputs
from engine.types.request import EngineRequest
from engine.types.start import CoreStart, WorkerReady


class ProcessStart(msgspec.Struct, frozen=True, kw_only=True):
    """The first and only message on the pipe to a new core process, whose argument is the directory where the sockets
    lie. The pipe then stays open: its end means that the parent has died, and the process removes the directory.

    Args:
        core: how to build the engine core.
        requests: the address that the process reads from (the frontend binds it).
        outputs: the address that it writes to (the frontend binds it).
    """

    core: CoreStart
    requests: str
    outputs: str


class Add(msgspec.Struct, frozen=True, tag="add"):
    """Requests to queue, in order. They are admitted together: siblings of one prompt are never told apart."""

    requests: list[EngineRequest]


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """Requests to end, in whatever state they are; unknown ids are passed over."""

    request_ids: list[str]


class Call(msgspec.Struct, frozen=True, tag="call"):
    """A question to the core, answered by a `Reply` with the same id."""

    call_id: int
    method: str


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """Stop now; what still runs is dropped."""


ToCore = Add | Abort | Call | Shutdown


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The core stands: what its workers answered."""

    worker: WorkerReady


class Outputs(msgspec.Struct, frozen=True, tag="outputs"):
    """News of one step."""

    outputs: CoreOutputs


class Reply(msgspec.Struct, frozen=True, tag="reply"):
    """The answer to a `Call`; `error` is empty where it went well."""

    call_id: int
    value: Any = None
    error: str = ""


class Beat(msgspec.Struct, frozen=True, tag="beat"):
    """The step loop goes round: told when there was nothing else to tell for a while."""


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The core could not start, or ended: the typed error as (code, asked, found, remedy)."""

    error: tuple[str, str, str, str]


FromCore = Ready | Outputs | Reply | Beat | Failed
