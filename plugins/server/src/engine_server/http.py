"""The HTTP protocol: uvicorn's, with bounds for what it leaves unbounded: how many connections there are, the size of
headers and their time, and the time that a client may take to read."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import MutableMapping
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from engine_server.sse import EXTENSION

MAX_HEAD_BYTES = 64 * 1024
_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
_TOO_SLOW = b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
_TOO_MANY = b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


class _OfClient(logging.LoggerAdapter):
    """Uvicorn's log; each line says which client it is about."""

    def __init__(self, logger: logging.Logger, client: tuple[str, int]) -> None:
        super().__init__(logger, {"fields": {"client": f"{client[0]}:{client[1]}"}})
        self._address = f"{client[0].partition('%')[0]}:{client[1]}"

    @property
    def level(self) -> int:
        """The log's, which uvicorn looks at."""
        return self.logger.level

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """See logging."""
        return f"{msg} (client {self._address})", {**kwargs, "extra": self.extra}


def bounded_protocol(header_timeout: float, write_timeout: float, max_connections: int) -> type[asyncio.Protocol]:
    """uvicorn's protocol class, with limits.

    Args:
        header_timeout: seconds that clients have for a request's headers.
        write_timeout: seconds that a client may take nothing of what waits for it; then it is cut off.
        max_connections: what comes beyond is answered with 503 and closed.
    """

    class Bounded(HttpToolsProtocol):
        """A connection's first headers have to come within the time, counted from its beginning; later ones, counted
        from their first byte (between requests, uvicorn's own limit for idle connections holds).

        While a client does not read, at most what asyncio buffers (64 KiB) and one event wait for it: the rest of an
        answer is put together when it can be sent. That too ends, once nothing was taken for a time.
        """

        _deadline: asyncio.TimerHandle | None = None
        _stall: asyncio.TimerHandle | None = None
        _unsent = 0
        _in_head = True
        _head_bytes = 0
        _refused = False

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            if self.client is not None:
                self.logger = _OfClient(self.logger, self.client)  # type: ignore[assignment]
            if len(self.connections) > max_connections:
                self._give_up(_TOO_MANY)
            self._arm()

        def connection_lost(self, exc: Exception | None) -> None:
            self._disarm()
            self._end_stall()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            if self._refused:
                return
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
            if self._refused:
                return
            # A head that came in one read, with what follows it, was not counted until now.
            if len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers) > MAX_HEAD_BYTES:
                return self._give_up(_TOO_LARGE)
            self._in_head = False
            self._disarm()
            self._end_stall()  # what is written from now on would look like a client that does not read
            super().on_headers_complete()
            self.scope["extensions"] = {EXTENSION: self.cycle}  # type: ignore[dict-item]

        def on_body(self, body: bytes) -> None:
            if not self._refused:
                super().on_body(body)

        def on_message_complete(self) -> None:
            if not self._refused:
                super().on_message_complete()

        def pause_writing(self) -> None:
            super().pause_writing()
            self._watch_writing()

        def resume_writing(self) -> None:
            self._end_stall()
            super().resume_writing()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if self._num_unsent():  # nobody waits for it to be taken, and `close` would do so for ever
                self._watch_writing()

        def _arm(self) -> None:
            if self._deadline is None:
                self._deadline = self.loop.call_later(header_timeout, self._give_up, _TOO_SLOW)

        def _disarm(self) -> None:
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

        def _give_up(self, answer: bytes) -> None:
            self._refused = True  # what still comes, within the same read too, is not looked at
            self._disarm()
            if not self.transport.is_closing():
                if self.cycle is None or self.cycle.response_complete:  # else it would stand within another's answer
                    self.transport.write(answer)
                self.transport.close()
                self._watch_writing()

        def _watch_writing(self) -> None:
            """Nothing is written from now on until the client has read: what waits can only become less."""
            if self._stall is None and (unsent := self._num_unsent()):
                self._unsent = unsent
                self._stall = self.loop.call_later(write_timeout, self._look_at_writing)

        def _look_at_writing(self) -> None:
            self._stall = None
            if 0 < self._num_unsent() < self._unsent:
                self._watch_writing()
            elif self._num_unsent():
                self.transport.abort()

        def _end_stall(self) -> None:
            if self._stall is not None:
                self._stall.cancel()
                self._stall = None

        def _num_unsent(self) -> int:
            with contextlib.suppress(RuntimeError):  # uvloop's, of a connection that has just closed
                return self.transport.get_write_buffer_size()
            return 0

    return Bounded
