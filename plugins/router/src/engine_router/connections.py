"""HTTP/1.1 to the servers behind: connections that are kept, answers that are passed on as they come.

What stands here is as little as a router needs, because it is on every request's way: a client library of its own
class takes a millisecond of the processor for each request, this some 50 microseconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from typing import cast
from urllib.parse import urlsplit

import httptools

from engine.types.errors import ConfigError

Headers = Sequence[tuple[bytes, bytes]]

IDLE_SECONDS = 3.0
"""How long an idle connection is used again. uvicorn closes its own after five, and a request that crosses the end of
its connection cannot be told from one over which its server died."""
CONNECT_SECONDS = 5.0
"""In which a server has to take a connection."""
MOST_BUFFERED = 256 * 1024
"""Bytes of an answer that may wait to be passed on; then the server is not read from until they are."""


class Unreachable(Exception):
    """No connection could be made: the server has seen nothing of the request."""


class Lost(Exception):
    """The connection ended before the answer did. The server may have computed."""


class Address:
    """Where a server is. Raises ConfigError for a text that is no address.

    Attributes:
        text: as given, without a slash at its end.
        path: "" or what stands before the routes.
    """

    def __init__(self, text: str) -> None:
        self.text = text.rstrip("/")
        parts = urlsplit(text if "//" in text else f"http://{text}")
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in ("http", "https") or not parts.hostname or port == -1 or parts.query or parts.fragment:
            remedy = "write it as http://host:port"
            raise ConfigError(f"stand in front of the server {text!r}", "this is no address of a server", remedy)
        self.host = parts.hostname
        self.tls = parts.scheme == "https"
        self.port = port or (443 if self.tls else 80)
        self.path = parts.path.rstrip("/")


class Connection(asyncio.Protocol):
    """One connection, with one request at a time on it. The methods beginning with `on_` are the parser's.

    Attributes:
        status, headers: of the answer, once `answered`.
        idle_since: when its last answer was complete.
    """

    transport: asyncio.Transport

    def __init__(self) -> None:
        self.idle_since = 0.0
        self.lost = False
        self._reset()

    def _reset(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self._pieces: deque[bytes] = deque()
        self._buffered = 0
        self._paused = False
        self._answered = False
        self._complete = False
        self._keep = False
        self._waiter: asyncio.Future[None] | None = None

    # -- what the transport tells --------------------------------------------------------------------------------------
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is none by its class

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.transport.abort()
        if self._buffered > MOST_BUFFERED and not self._paused:
            self._paused = True
            self.transport.pause_reading()
        self._wake()

    def connection_lost(self, error: Exception | None) -> None:
        self.lost = True
        if self._answered and not self._complete and error is None and not self._has_length():
            self._complete = True  # an answer that ends with its connection
        self._wake()

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        if self.status >= 200:
            self._answered = True
            self._keep = self._parser.should_keep_alive()
        else:  # "go on", of which the answer is still to come
            self.headers = []

    def on_body(self, data: bytes) -> None:
        self._pieces.append(data)
        self._buffered += len(data)

    def on_message_complete(self) -> None:
        self._complete = self._answered

    def _has_length(self) -> bool:
        return any(name in (b"content-length", b"transfer-encoding") for name, _ in self.headers)

    # -- what a request does -------------------------------------------------------------------------------------------
    async def ask(self, request: bytes) -> None:
        """Send a request, wait for the head of its answer. Raises Lost."""
        self._reset()
        self.transport.write(request)
        while not self._answered:
            await self._more()

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body as it comes, what waits put together. Raises Lost where it ends too early."""
        while True:
            if self._pieces:
                piece = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
                self._pieces.clear()
                self._buffered = 0
                if self._paused:
                    self._paused = False
                    self.transport.resume_reading()
                yield piece
            elif self._complete:
                return
            else:
                await self._more()

    @property
    def reusable(self) -> bool:
        """Whether its answer is complete and another request may follow."""
        return self._complete and self._keep and not self.lost and not self.transport.is_closing()

    async def _more(self) -> None:
        if self.lost:
            raise Lost
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Answer:
    """A server's answer, whose head has come. Close it, whatever became of it: an answer that is left before its end
    ends the connection, by which the server learns that nobody waits any more.

    Attributes:
        events: whether it streams events.
        content: the whole body, once `read` was called.
    """

    def __init__(self, pool: Pool, connection: Connection) -> None:
        self._pool = pool
        self._connection = connection
        self.status = connection.status
        self.headers = connection.headers
        kind = next((value for name, value in self.headers if name == b"content-type"), b"")
        self.events = kind.startswith(b"text/event-stream")
        self.content = b""
        self._pieces = connection.pieces()

    async def piece(self) -> bytes:
        """The next bytes of the body; b"" at its end. Raises Lost."""
        return await anext(self._pieces, b"")

    async def read(self) -> bytes:
        """The whole body. Raises Lost."""
        self.content = b"".join([piece async for piece in self._pieces])
        return self.content

    def close(self) -> None:
        """Idempotent."""
        self._pool.give_back(self._connection)


class Pool:
    """The connections to one server."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._idle: list[Connection] = []
        self._busy: set[Connection] = set()
        self._tls = ssl.create_default_context() if address.tls else None
        self._host = f"{address.host}:{address.port}".encode()

    async def ask(self, method: str, target: str, headers: Headers, body: bytes = b"") -> Answer:
        """Send a request, wait for the head of its answer.

        Raises Unreachable where nothing could be sent, Lost where it was sent and no answer came.
        """
        request = self._encode(method, target, headers, body)
        connection = self._kept() or await self._connect()
        self._busy.add(connection)
        try:
            await connection.ask(request)
        except BaseException:
            self.give_back(connection)
            raise
        return Answer(self, connection)

    def give_back(self, connection: Connection) -> None:
        """A request is done with it. Idempotent."""
        if connection not in self._busy:
            return
        self._busy.remove(connection)
        if connection.reusable:
            connection.idle_since = time.monotonic()
            self._idle.append(connection)
        else:
            connection.transport.abort()

    def drop(self) -> None:
        """End all that is under way: the server does not answer any more."""
        for connection in (*self._busy, *self._idle):
            connection.transport.abort()
        self._idle.clear()

    def _kept(self) -> Connection | None:
        latest = time.monotonic() - IDLE_SECONDS
        while self._idle:
            connection = self._idle.pop()
            if not connection.lost and connection.idle_since > latest:
                return connection
            connection.transport.abort()
        return None

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        name = self._address.host if self._tls else None
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                _, connection = await loop.create_connection(
                    Connection, self._address.host, self._address.port, ssl=self._tls, server_hostname=name
                )
        except OSError as error:  # TimeoutError is one
            raise Unreachable(str(error) or "no connection in time") from error
        return connection

    def _encode(self, method: str, target: str, headers: Headers, body: bytes) -> bytes:
        lines = [f"{method} {self._address.path}{target} HTTP/1.1".encode(), b"host: " + self._host]
        lines += [name + b": " + value for name, value in headers]
        if body or method not in ("GET", "HEAD"):
            lines.append(b"content-length: %d" % len(body))
        return b"\r\n".join(lines) + b"\r\n\r\n" + body


async def ask_json_bytes(pool: Pool, path: str, seconds: float) -> tuple[int, bytes]:
    """(status, body) of a GET. Raises Unreachable, Lost, TimeoutError."""
    async with asyncio.timeout(seconds):
        with contextlib.closing(await pool.ask("GET", path, ())) as answer:
            return answer.status, await answer.read()
