"""Answers that come bit by bit, as server-sent events; and what happens where the client goes away before their end.

The events of one request take the way around the framework (`engine_server.middleware.Dispatch`): what the engine tells
is written to the connection at once, where nobody stands between.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import uuid
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable
from typing import Any, Protocol, TypeVar

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from engine.embedding import RequestStream
from engine.types.outputs import RequestOutput
from engine_server import errors
from engine_server.bodies import dumps
from engine_server.lifecycle import ENDED_AS

T = TypeVar("T")
WriteBody = Callable[[Callable[[RequestOutput], bytes], RequestOutput], bool]
"""Writes what a function makes of an output to the connection, unless the client does not read; returns whether."""

CLIENT_GONE = 499
"""The status of an answer that nobody reads any more: the access log does."""
DONE = b"data: [DONE]\n\n"
EXTENSION = "engine.write_body"
"""ASGI extension: the connection's `WriteBody` for this request's answer."""
WRITE_BODY = "write_body"
"""In a request's state: the connection's `WriteBody`, where nothing is in the way."""
DIRECT_SEND = "direct_send"
"""In a request's state: the `send` outside of the framework."""


# -- a client that goes away -------------------------------------------------------------------------------------------
class ClientGone(Exception):
    """The client closed the connection before the answer was ready."""


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run `work`; cancel it when the client disconnects. Raises ClientGone then."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_left(receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        watch.cancel()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)  # else what it raised meanwhile would be logged as lost


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


# -- events -----------------------------------------------------------------------------------------------------------
def event(content: Any) -> bytes:
    """One event with a JSON body."""
    return b"data: " + dumps(content) + b"\n\n"


def named_event(name: str, content: Any) -> bytes:
    """One event with a name and a JSON body."""
    return b"event: " + name.encode() + b"\n" + event(content)


TellError = Callable[[Exception, str], tuple[int, bytes]]
"""How a protocol tells of an error in mid-stream: of it, and of the request's id, it makes the status that the answer
would have had, and the last events."""


def openai_error(error: Exception, request_id: str) -> tuple[int, bytes]:
    status, told = errors.describe(error, request_id)
    return status, event(errors.Error(error=told)) + DONE


class PreparedEvent:
    """Events that differ in one text, put together from bytes that were made once.

    Args:
        make: the event's JSON body with this text in it.
    """

    def __init__(self, make: Callable[[str], Any]) -> None:
        mark = uuid.uuid4().hex  # occurs nowhere else
        self._before, self._after = event(make(mark)).split(orjson.dumps(mark))

    def __call__(self, text: str) -> bytes:
        """The event with this text."""
        return b"".join((self._before, orjson.dumps(text), self._after))


class EventStream(Response):
    """Streams events; closes `sources` at its end, however it ends: also when the client left before the first byte.

    An error in mid-stream becomes an event, and the end. `state[ENDED_AS]` of its scope then has the status that says
    so, for the access log; 499 where the client left.

    Args:
        events: the bytes of one or several events at a time.
        sources: see above.
        request_id: for errors.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes],
        sources: Iterable[RequestStream],
        request_id: str,
        tell_error: TellError = openai_error,
    ) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._events = events
        self._sources = sources
        self._request_id = request_id
        self._tell_error = tell_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Cancelled when the client leaves."""
        try:
            await until_disconnect(receive, self._stream(scope, send))
        except ClientGone:
            scope.setdefault("state", {})[ENDED_AS] = CLIENT_GONE
        finally:
            for source in self._sources:
                source.close()

    async def _stream(self, scope: Scope, send: Send) -> None:
        send_body: Send = scope.get("state", {}).get(DIRECT_SEND, send)
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async with contextlib.aclosing(self._events) as events:
                async for chunk in events:
                    await send_body({"type": "http.response.body", "body": chunk, "more_body": True})
        except Exception as error:
            status, told = self._tell_error(error, self._request_id)
            scope.setdefault("state", {})[ENDED_AS] = status
            await send_body({"type": "http.response.body", "body": told, "more_body": True})
        await send_body({"type": "http.response.body", "body": b"", "more_body": False})


class Events(Protocol):
    """Makes the events of one request: those before the first token, those that an output brings (maybe none), those
    after the last token."""

    def opening(self) -> bytes: ...
    def told(self, output: RequestOutput) -> bytes: ...
    def closing(self) -> bytes: ...


class TokenStream(EventStream):
    """As `EventStream`, of one request. While nothing waits to be sent and the client reads, an output becomes an event
    and is handed to the connection in the moment it is told, without waking a task; else the task sends what waits, put
    together."""

    def __init__(self, events: Events, stream: RequestStream, request_id: str) -> None:
        super().__init__(self._sent_by_task(events, stream), (stream,), request_id)
        self._told = events.told
        self._source = stream

    async def _stream(self, scope: Scope, send: Send) -> None:
        write: WriteBody | None = scope.get("state", {}).get(WRITE_BODY)
        if write is not None:  # else behind a plugin's middleware, which may change a body, or in a server not ours
            self._source.sink = functools.partial(write, self._told)
        await super()._stream(scope, send)

    @staticmethod
    async def _sent_by_task(events: Events, stream: RequestStream) -> Any:
        if opening := events.opening():
            yield opening
        async for output in stream:
            if told := events.told(output):
                yield told
        yield events.closing() + DONE
