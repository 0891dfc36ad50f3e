"""The HTTP protocol: uvicorn's, with bounds for what it leaves unbounded: the size of headers and their time."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 * 1024
_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
_TOO_SLOW = b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


def bounded_protocol(header_timeout: float) -> type[asyncio.Protocol]:
    """uvicorn's protocol class that gives clients `header_timeout` seconds for a request's headers."""

    class Bounded(HttpToolsProtocol):
        """A connection's first headers have to come within the time, counted from its beginning; later ones, counted
        from their first byte (between requests, uvicorn's own limit for idle connections holds)."""

        _deadline: asyncio.TimerHandle | None = None
        _in_head = True
        _head_bytes = 0

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._arm()

        def connection_lost(self, exc: Exception | None) -> None:
            self._disarm()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            was_in_head = self._in_head
            super().data_received(data)
            if not (was_in_head and self._in_head):
                return
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._give_up(_TOO_LARGE)

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self._in_head, self._head_bytes = True, 0
            self._arm()

        def on_headers_complete(self) -> None:
            self._in_head = False
            self._disarm()
            super().on_headers_complete()

        def _arm(self) -> None:
            if self._deadline is None:
                self._deadline = self.loop.call_later(header_timeout, self._give_up, _TOO_SLOW)

        def _disarm(self) -> None:
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

        def _give_up(self, answer: bytes) -> None:
            self._disarm()
            if not self.transport.is_closing():
                if self.cycle is None or self.cycle.response_complete:  # else it would stand within another's answer
                    self.transport.write(answer)
                self.transport.close()

    return Bounded
