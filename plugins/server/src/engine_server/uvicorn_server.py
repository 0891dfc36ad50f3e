"""uvicorn, as every process that takes connections runs it: with bounds for what it leaves unbounded (how many
connections there are, the size of headers and their time, the time that a client may take to read)."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import socket
import ssl
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any, TypeVar

import uvicorn
from uvicorn.config import LOGGING_CONFIG
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from engine_kit.async_llm import AsyncLLM
from engine_kit.logs import logs_json
from engine_server.adapters import ServedAdapters
from engine_server.app import create_app
from engine_server.certificate import CertificateWatch
from engine_server.config import ServerConfig
from engine_server.keys import KeyRing
from engine_server.lifecycle import FAREWELL_SECONDS, Lifecycle
from engine_server.state import Others
from engine_server.stream import EXTENSION

T = TypeVar("T")
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
        return f"{msg} (client {self._address})", {**kwargs, "extra": self.extra}


def bounded_protocol(header_timeout: float, write_timeout: float, max_connections: int) -> type[asyncio.Protocol]:
    """uvicorn's protocol class, with limits: seconds that clients have for a request's headers; seconds that a client
    may take nothing of what waits for it, before it is cut off; connections: what comes beyond is answered with 503."""

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
            self._in_head = True
            self._head_bytes = 0
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
            extensions: Any = {EXTENSION: functools.partial(self.write_body, self.cycle)}
            self.scope["extensions"] = extensions

        def on_body(self, body: bytes) -> None:
            if not self._refused:
                super().on_body(body)

        def on_message_complete(self) -> None:
            if not self._refused:
                super().on_message_complete()

        def _unsupported_upgrade_warning(self) -> None:
            """It is answered as a plain request. uvicorn would have the operator install what serves WebSockets."""

        @staticmethod
        def write_body(cycle: RequestResponseCycle, make: Callable[[T], bytes], value: T) -> bool:
            """Write what `make` makes of the value to the connection, as the next chunk of an answer that has begun.

            Returns whether it was made and written: not where the client does not read what waits for it already.
            """
            if cycle.flow.write_paused or not cycle.chunked_encoding:
                return False
            data = make(value)
            if data and not cycle.disconnected:
                cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
            return True

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


class Server(uvicorn.Server):
    """uvicorn's, which leaves signals to us: its own handling would end the process before the engine. While it serves,
    it takes the certificate anew when its files change."""

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        config = self.config
        certfile, keyfile = (None if file is None else str(file) for file in (config.ssl_certfile, config.ssl_keyfile))
        watch = CertificateWatch(certfile, keyfile, lambda: config.ssl if config.loaded else None)
        renewing = asyncio.ensure_future(watch.run())
        try:
            await super().serve(sockets)
        finally:
            renewing.cancel()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def make_server(
    llm: AsyncLLM,
    settings: ServerConfig,
    lifecycle: Lifecycle,
    keys: KeyRing,
    others: Others | None = None,
    adapters: ServedAdapters | None = None,
) -> Server:
    """The server around `engine_server.app.create_app`, whose arguments these are."""
    # Several processes share the connections that may be open; each takes its part.
    connections = -(-settings.max_connections // settings.api_workers)
    config = uvicorn.Config(
        create_app(llm, settings, lifecycle, keys, others, adapters),
        http=bounded_protocol(settings.header_timeout, settings.write_timeout, connections),
        ws="none",  # the gate, the limits and the timeouts know HTTP alone
        log_level="warning",
        access_log=False,
        server_header=False,
        log_config=None if logs_json() else LOGGING_CONFIG,  # its own writes text
        timeout_graceful_shutdown=FAREWELL_SECONDS,
        lifespan="off",
        ssl_certfile=settings.ssl_certfile,
        ssl_keyfile=settings.ssl_keyfile,
        ssl_ca_certs=settings.ssl_ca_certs,
        ssl_cert_reqs=ssl.CERT_NONE if settings.ssl_ca_certs is None else ssl.CERT_REQUIRED,
    )
    return Server(config)
