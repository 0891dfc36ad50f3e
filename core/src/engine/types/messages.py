"""What the frontend and the core's process say to each other, by `engine.process`."""

from __future__ import annotations

from typing import Any

import msgspec

from engine.types.outputs import CoreOutputs
from engine.types.request import EngineRequest
from engine.types.start import WorkerReady


class Add(msgspec.Struct, frozen=True, tag="add", omit_defaults=True):
    """Requests to queue, in order. They are admitted together: the n samples of one prompt are never told apart. The
    `client` asks, and is told of them: 0, who started the process, or one that was attached."""

    requests: list[EngineRequest]
    client: int = 0


class Abort(msgspec.Struct, frozen=True, tag="abort", omit_defaults=True):
    """Requests to end, in whatever state they are; unknown ids, and those of other clients, are passed over."""

    request_ids: list[str]
    client: int = 0


class Call(msgspec.Struct, frozen=True, tag="call", omit_defaults=True):
    """A question to the core, answered by a `Reply` with the same id.

    Args:
        method, args: see `engine.loop.engine_core.EngineCore.call`; the arguments are plain data.
        client: who asks.
    """

    call_id: int
    method: str
    client: int = 0
    args: list[Any] = []


class Attach(msgspec.Struct, frozen=True, tag="attach"):
    """One more client, with sockets of its own. Only client 0 says so.

    Args:
        client: its number, from 1 on, which nobody had before.
        requests: the address that the core binds and reads from; outputs: the one that the client does.
    """

    client: int
    requests: str
    outputs: str


class Detach(msgspec.Struct, frozen=True, tag="detach"):
    """A client has gone: its requests end, and nobody is told of them. Only client 0 says so."""

    client: int


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """Stop now; what still runs is dropped."""


ToCore = Add | Abort | Call | Attach | Detach | Shutdown


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The core stands: what its workers answered."""

    worker: WorkerReady


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


FromCore = Ready | CoreOutputs | Reply | Beat | Failed
