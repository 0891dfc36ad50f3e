"""Connections within bounds, over real sockets, without an engine."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send

from engine_server import uvicorn_server
from engine_server.config import ServerConfig
from engine_server.keys import KeyRing
from engine_server.lifecycle import Lifecycle
from engine_server.uvicorn_server import MAX_HEAD_BYTES, bounded_protocol, make_server

OK = b"HTTP/1.1 200"
TOO_LARGE = b"HTTP/1.1 431"


async def answer(scope: Scope, receive: Receive, send: Send) -> None:
    message = await receive()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"%d%d" % (len(message["body"]) % 10, message["more_body"])})


@contextlib.asynccontextmanager
async def listening() -> AsyncIterator[int]:
    """The port of a server with this protocol, as `make_server` has it."""
    protocol = bounded_protocol(header_timeout=5, write_timeout=5, max_connections=10)
    config = uvicorn.Config(answer, http=protocol, lifespan="off", log_config=None, port=0)
    server = uvicorn.Server(config)
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign]
    running = asyncio.ensure_future(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    yield server.servers[0].sockets[0].getsockname()[1]
    server.should_exit = True
    await running


async def exchange(port: int, sent: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(sent)
    try:
        return await asyncio.wait_for(reader.read(), 10)
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


def head(size: int, *more: str) -> bytes:
    """A request's head with so many bytes of headers."""
    lines = ["GET / HTTP/1.1", "Host: x", "Connection: close", *more]
    used = sum(len(line) for line in lines) + 2 * len(lines)
    return "\r\n".join([*lines, "A: " + "b" * max(1, size - used), "", ""]).encode()


@pytest.mark.parametrize(
    ("sent", "begins", "count"),
    [
        (head(100), OK, 1),
        (head(MAX_HEAD_BYTES - 1000), OK, 1),
        (head(MAX_HEAD_BYTES + 1000), TOO_LARGE, 1),  # comes in one read, or in a few
        (head(MAX_HEAD_BYTES + 1000, "Content-Length: 3") + b"abc", TOO_LARGE, 1),
        (b"GET /" + b"a" * MAX_HEAD_BYTES + b" HTTP/1.1\r\nHost: x\r\n\r\n", TOO_LARGE, 1),
        (head(MAX_HEAD_BYTES + 1000) + head(100), TOO_LARGE, 1),  # what follows is not served
        (b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabc" + head(MAX_HEAD_BYTES // 2), OK, 2),
    ],
    ids=["small", "large", "too large", "with a body", "url", "with another behind it", "second of two"],
)
async def test_a_head_has_64_kib_however_it_arrives(sent: bytes, begins: bytes, count: int) -> None:
    async with listening() as port:
        told = await exchange(port, sent)
    assert told.startswith(begins) and told.count(b"HTTP/1.1 ") == count, told[:200]


async def test_a_line_about_a_client_says_which(caplog: Any) -> None:
    with caplog.at_level(logging.WARNING, "uvicorn.error"):
        async with listening() as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            address = "{}:{}".format(*writer.get_extra_info("sockname"))
            writer.write(b"no HTTP\r\n\r\n")
            assert (await reader.read()).startswith(b"HTTP/1.1 400")
            writer.close()
    (record,) = [record for record in caplog.records if "Invalid" in record.getMessage()]
    assert record.getMessage() == f"Invalid HTTP request received. (client {address})"
    assert record.fields == {"client": address}


async def test_an_upgrade_is_a_plain_request(monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    """As a WebSocket it would pass the gate without a key. Nor does it fill the log: anybody can ask for one."""
    kinds: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        kinds.append(scope["type"])
        await answer(scope, receive, send)

    monkeypatch.setattr(uvicorn_server, "create_app", lambda *_: app)
    llm: Any = SimpleNamespace(model_names=("tiny",))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = make_server(llm, ServerConfig(), Lifecycle(), KeyRing())
        running = asyncio.ensure_future(server.serve(sockets=[listener]))
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        writer.write(
            b"GET / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
            b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
        )
        assert (await asyncio.wait_for(reader.readline(), 10)).startswith(OK) and kinds == ["http"]
        assert not capfd.readouterr().err
        writer.close()
        server.should_exit = True
        await running
