"""Server-sent events: a response that stops its source when the client goes away."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncGenerator, Callable, Iterable
from typing import Any, NamedTuple, Protocol

import orjson
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from engine_server import errors
from engine_server.disconnect import CLIENT_GONE, left
from engine_server.lifecycle import ENDED_AS

DONE = b"data: [DONE]\n\n"
EXTENSION = "engine.answer"
"""ASGI extension: what uvicorn knows of an answer."""
ANSWER, _SEND = "answer", "direct_send"


class Closable(Protocol):
    """What an event stream ends with itself."""

    def close(self) -> None:
        """Give up the work behind the stream. Idempotent."""
        ...


def event(content: Any) -> bytes:
    """One event with a JSON body."""
    return b"data: " + orjson.dumps(content) + b"\n\n"


def named_event(name: str, content: Any) -> bytes:
    """One event with a name and a JSON body."""
    return b"event: " + name.encode() + b"\n" + event(content)


class Dialect(NamedTuple):
    """How a protocol tells of an error in mid-stream, and of the end.

    Args:
        error: makes of an exception and the request's id the status that the answer would have had, and an event.
        end: the last event; b"" for none.
    """

    error: Callable[[Exception, str], tuple[int, bytes]]
    end: bytes


def _openai(error: Exception, request_id: str) -> tuple[int, bytes]:
    status, content = errors.describe(error, request_id)
    return status, event(content)


OPENAI = Dialect(_openai, DONE)


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
        dialect: see there.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes],
        sources: Iterable[Closable],
        request_id: str,
        dialect: Dialect = OPENAI,
    ) -> None:
        self.status_code, self.background = 200, None
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._events, self._sources = events, sources
        self._request_id, self._dialect = request_id, dialect

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve; see ASGI. Cancelled when the client leaves."""
        streaming = asyncio.ensure_future(self._stream(scope, send))
        leaving = asyncio.ensure_future(left(receive))
        try:
            await asyncio.wait((streaming, leaving), return_when=asyncio.FIRST_COMPLETED)
            if streaming.done():
                streaming.result()
            else:
                scope.setdefault("state", {})[ENDED_AS] = CLIENT_GONE
        finally:
            leaving.cancel()
            streaming.cancel()
            await asyncio.gather(streaming, return_exceptions=True)
            for source in self._sources:
                source.close()

    async def _stream(self, scope: Scope, send: Send) -> None:
        send_body: Send = scope.get("state", {}).get(_SEND, send)
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async with contextlib.aclosing(self._events) as events:
                async for chunk in events:
                    await send_body({"type": "http.response.body", "body": chunk, "more_body": True})
        except Exception as error:
            status, told = self._dialect.error(error, self._request_id)
            scope.setdefault("state", {})[ENDED_AS] = status
            await send_body({"type": "http.response.body", "body": told, "more_body": True})
        if self._dialect.end:
            await send_body({"type": "http.response.body", "body": self._dialect.end, "more_body": True})
        await send_body({"type": "http.response.body", "body": b"", "more_body": False})


class Direct:
    """ASGI middleware around a framework whose own layers have nothing to do with the parts of a body: a stream finds
    the way around them.

    Args:
        app: the framework's.
        alone: nobody around it has to do with them either: it may be written to the connection.
    """

    def __init__(self, app: ASGIApp, *, alone: bool) -> None:
        self._app, self._alone = app, alone

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve; see ASGI."""
        state = scope.setdefault("state", {})
        state[_SEND] = send
        if self._alone:
            state[ANSWER] = scope.get("extensions", {}).get(EXTENSION)
        await self._app(scope, receive, send)
