"""What the first process and an API process say to each other: questions with answers, and news, both ways.

A stream socket that the API process inherits; frames are a length in 4 bytes (little-endian) and msgpack. What is sent
is heard in the order in which it was sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import itertools
import logging
import socket
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, cast

import msgspec

from engine.process import wire
from engine.types.errors import EngineDeadError, EngineError, rebuild_error

log = logging.getLogger("engine.server")

Handler = Callable[..., Any]
"""Takes what was sent; a coroutine's answer is sent when it has ended."""

_ASK, _TELL, _ANSWER, _ERROR = range(4)


class Channel(asyncio.Protocol):
    """One end. Belongs to one event loop.

    Args:
        handlers: by name, what hears the other end.
        on_end: called once, when the other end has gone.
    """

    def __init__(self, handlers: Mapping[str, Handler], on_end: Callable[[], None]) -> None:
        self._handlers, self._on_end = handlers, on_end
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()
        self._numbers = itertools.count()
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._answering: set[asyncio.Task[None]] = set()
        self._decode = msgspec.msgpack.Decoder(tuple[int, int, str, Any]).decode

    async def open(self, end: socket.socket) -> None:
        """Begin to hear, and to send."""
        end.setblocking(False)
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=end)

    def tell(self, name: str, *values: Any) -> None:
        """Send news; never blocks. What has gone hears nothing."""
        self._send(_TELL, 0, name, values)

    async def ask(self, name: str, *values: Any) -> Any:
        """Send a question, and wait for its answer, as plain data.

        Raises what the other end's handler raised, if that was an EngineError; EngineDeadError where it has gone.
        """
        number = next(self._numbers)
        answer = self._asked[number] = asyncio.get_running_loop().create_future()
        self._send(_ASK, number, name, values)
        try:
            return await answer
        finally:
            self._asked.pop(number, None)

    def close(self) -> None:
        """Send what waits, and end."""
        if self._transport is not None:
            self._transport.close()

    # -- asyncio.Protocol ----------------------------------------------------------------------------------------------
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._received += data
        while len(self._received) >= 4:
            end = 4 + int.from_bytes(self._received[:4], "little")
            if len(self._received) < end:
                return
            frame = bytes(self._received[4:end])
            del self._received[:end]
            self._take(*self._decode(frame))

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        for answer in self._asked.values():
            if not answer.done():
                answer.set_exception(_gone())
        for task in self._answering:
            task.cancel()
        self._on_end()

    # ------------------------------------------------------------------------------------------------------------------
    def _take(self, kind: int, number: int, name: str, values: Any) -> None:
        if kind in (_ANSWER, _ERROR):
            answer = self._asked.get(number)
            if answer is not None and not answer.done():
                if kind == _ANSWER:
                    answer.set_result(values)
                else:
                    answer.set_exception(rebuild_error(tuple(values)))
            return
        try:
            result = self._handlers[name](*values)
        except Exception as error:
            return self._fail(kind, number, name, error)
        if inspect.iscoroutine(result):
            task = asyncio.get_running_loop().create_task(self._finish(kind, number, name, result))
            self._answering.add(task)
            task.add_done_callback(self._answering.discard)
        elif kind == _ASK:
            self._send(_ANSWER, number, "", result)

    async def _finish(self, kind: int, number: int, name: str, work: Coroutine[Any, Any, Any]) -> None:
        try:
            result = await work
        except Exception as error:
            return self._fail(kind, number, name, error)
        if kind == _ASK:
            self._send(_ANSWER, number, "", result)

    def _fail(self, kind: int, number: int, name: str, error: Exception) -> None:
        if not isinstance(error, EngineError):
            log.error("%r between API processes failed", name, exc_info=error)
            error = EngineError(f"{name} between API processes", f"{type(error).__name__}: {error}")
        if kind == _ASK:
            self._send(_ERROR, number, "", error.parts)

    def _send(self, kind: int, number: int, name: str, values: Any) -> None:
        if self._transport is None or self._transport.is_closing():
            if (answer := self._asked.get(number)) is not None and kind == _ASK:
                answer.set_exception(_gone())
            return
        data = wire.encode((kind, number, name, values))
        with contextlib.suppress(OSError):
            self._transport.write(len(data).to_bytes(4, "little") + data)


def _gone() -> EngineDeadError:
    return EngineDeadError("ask another process of the server", "it has ended", "send the request again")
