"""The events of one request, on the shortest way: what the engine tells is written to the connection at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from starlette.types import Scope, Send

from engine.embedding import RequestStream
from engine.types.outputs import RequestOutput
from engine_server import sse
from engine_server.sse import EventStream


class Flow(Protocol):
    """Whether the client reads."""

    write_paused: bool


class Answer(Protocol):
    """What uvicorn knows of an answer."""

    flow: Flow
    transport: Any
    disconnected: bool
    response_complete: bool
    chunked_encoding: bool | None


class Events(Protocol):
    """Makes the events of one request."""

    def opening(self) -> bytes:
        """Those before the first token."""
        ...

    def told(self, output: RequestOutput) -> bytes:
        """Those that an output brings; may be none."""
        ...

    def closing(self) -> bytes:
        """Those after the last token."""
        ...


class TokenStream(EventStream):
    """As `EventStream`. While nothing waits to be sent and the client reads, an output becomes an event and is handed
    to the connection in the moment it is told, without waking a task; else the task sends what waits, put together.

    Args:
        events: of this request.
        stream: its outputs; closed at the end.
        request_id: for errors.
    """

    def __init__(self, events: Events, stream: RequestStream, request_id: str) -> None:
        super().__init__(self._sent_by_task(events, stream), (stream,), request_id)
        self._made, self._stream_of = events, stream

    async def _stream(self, scope: Scope, send: Send) -> None:
        write = _writer(scope)
        if write is not None:
            told = self._made.told

            def sink(output: RequestOutput) -> bool:
                return write(told, output)

            self._stream_of.sink = sink
        await super()._stream(scope, send)

    @staticmethod
    async def _sent_by_task(events: Events, stream: RequestStream) -> Any:
        if opening := events.opening():
            yield opening
        async for output in stream:
            if told := events.told(output):
                yield told
        if closing := events.closing():
            yield closing


def _writer(scope: Scope) -> Callable[[Callable[[RequestOutput], bytes], RequestOutput], bool] | None:
    """Writes events to the connection, and says whether it did; None where that is not possible: behind a plugin's
    middleware, which may change a body, and in servers that are not ours."""
    answer: Answer | None = scope.get("state", {}).get(sse.ANSWER)
    if answer is None:
        return None
    flow, transport = answer.flow, answer.transport

    def write(told: Callable[[RequestOutput], bytes], output: RequestOutput) -> bool:
        if flow.write_paused or not answer.chunked_encoding:
            return False
        events = told(output)
        if events and not answer.disconnected:
            transport.write(b"%x\r\n%b\r\n" % (len(events), events))
        return True

    return write
