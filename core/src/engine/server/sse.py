"""Server-sent events: a response that stops its source when the client goes away."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from typing import Any, NamedTuple, Protocol

import orjson
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from engine.server import errors

DONE = b"data: [DONE]\n\n"


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
        error: makes an event of an exception and the request's id.
        end: the last event; b"" for none.
    """

    error: Callable[[Exception, str], bytes]
    end: bytes


OPENAI = Dialect(lambda error, request_id: event(errors.describe(error, request_id)[1]), DONE)


async def guarded(events: AsyncGenerator[bytes], request_id: str, dialect: Dialect = OPENAI) -> AsyncIterator[bytes]:
    """The events, then the end. An error in mid-stream becomes an event, and the end."""
    try:
        async with contextlib.aclosing(events):
            async for chunk in events:
                yield chunk
    except Exception as error:
        yield dialect.error(error, request_id)
    if dialect.end:
        yield dialect.end


class EventStream(StreamingResponse):
    """Streams events; closes `sources` at its end, however it ends: also when the client left before the first byte."""

    def __init__(
        self,
        events: AsyncGenerator[bytes],
        sources: Iterable[Closable],
        request_id: str,
        dialect: Dialect = OPENAI,
    ) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(guarded(events, request_id, dialect), media_type="text/event-stream", headers=headers)
        self._sources = sources

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve; see starlette."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            for source in self._sources:
                source.close()
