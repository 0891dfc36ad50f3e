"""Servers that are played, in the test's own event loop, and a router in front of them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

import httpx

from engine.embedding import Key, Merged
from engine_router.backends import watch
from engine_router.config import read_config
from engine_router.run import Router
from engine_server.lifecycle import Phase

PARAMS = {"do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": "p", "remote_block_ids": [1, 2]}


class Fake:
    """A server. `play` says what it does with a request: "answer", "stream" (three events), "die", "die_in_stream",
    "hang", or an HTTP status. It answers with its name and, asked to compute for another, with parameters."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.play = "answer"
        self.asked: list[dict[str, Any]] = []
        self.heads: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.left = 0
        self.looked_at = 0
        self.response_id = f"resp_{name}"
        self.go = asyncio.Event()
        self.go.set()
        self.port: int | None = None
        self.connector: tuple[str | None, dict[str, Any]] = ("tcp", {"host": "h", "port": 7})

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port or 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        self._server.close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            while head := await reader.readuntil(b"\r\n\r\n"):
                lines = head.decode().split("\r\n")
                method, path, _ = lines[0].split(" ")
                headers = {k.lower(): v for k, _, v in (line.partition(": ") for line in lines[1:]) if k}
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                if not await self._answer(method, path, headers, body, reader, writer):
                    break
        writer.close()

    async def _answer(self, method, path, headers, body, reader, writer) -> bool:
        if path == "/health":
            ranks = [{"running": 0, "waiting": 0, "kv_cache_usage": 0.0}]
            writer.write(_whole(200, {"status": "ok", "ranks": ranks}))
            return True
        if path == "/metrics":
            head = "# HELP engine:x_total About x.\n# TYPE engine:x_total counter\n"
            text = head + f'engine:x_total{{model_name="{self.name}"}} 1.0\n'
            writer.write(_whole(200, text, "text/plain"))
            return True
        if path == "/server_info":
            self.looked_at += 1
            driver, options = self.connector
            settings = {"points": {"kv_connector": driver} if driver else {}, "options": {"kv_connector": options}}
            writer.write(_whole(200, {"settings": settings}))
            return True
        data = json.loads(body) if body else {}
        self.paths.append(f"{method} {path}")
        self.asked.append(data)
        self.heads.append(headers)
        if not self.go.is_set():
            gone = asyncio.ensure_future(reader.read(1))
            going = asyncio.ensure_future(self.go.wait())
            await asyncio.wait((gone, going), return_when=asyncio.FIRST_COMPLETED)
            if gone.done():
                self.left += 1
                return False
            gone.cancel()
            await asyncio.wait((gone,))
        if self.play == "die":
            return False
        if self.play.isdigit():
            writer.write(_whole(int(self.play), {"error": {"message": self.name, "code": "x"}}))
            return True
        if data.get("stream"):
            return await self._stream(reader, writer)
        told: dict[str, Any] = {"id": self.response_id, "from": self.name, "usage": {"completion_tokens": 3}}
        if (data.get("kv_transfer_params") or {}).get("do_remote_decode"):
            told["kv_transfer_params"] = {**PARAMS, "remote_port": self.port}
        writer.write(_whole(404 if method == "GET" and self.response_id not in path else 200, told))
        return True

    async def _stream(self, reader, writer) -> bool:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        events = [f'data: {{"id":"{self.response_id}","from":"{self.name}","i":{i}}}\n\n'.encode() for i in range(3)]
        for i, event in enumerate(events):
            if i == 1 and self.play == "die_in_stream":
                half = event[:9]
                writer.write(b"%x\r\n%b\r\n" % (len(half), half))
                await writer.drain()
                return False
            if i == 1 and self.play == "hang":
                self.left += await reader.read(1) == b""
                return False
            for part in (event[:5], event[5:]):  # the end of an event comes for itself
                writer.write(b"%x\r\n%b\r\n" % (len(part), part))
            await writer.drain()
        writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
        return True


def _whole(status: int, content: Any, kind: str = "application/json") -> bytes:
    body = content.encode() if isinstance(content, str) else json.dumps(content).encode()
    return f"HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


def merged(**settings: Any) -> Merged:
    """Settings as the command line gives them; `router` and `router.OPTION` too."""
    found = Merged()
    for name, value in settings.items():
        if name == "router":
            found.set(Key("points", name), value)
        else:
            found.set(Key("settings", name), value)
    return found


@contextlib.asynccontextmanager
async def routed(
    *fakes: Fake,
    prefill: tuple[Fake, ...] = (),
    **settings: Any,
) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a router in front of these, which are started; with `prefill` they go on where those end."""
    for fake in (*fakes, *prefill):
        await fake.start()
    named = {"decode": tuple(one.url for one in fakes), "prefill": tuple(one.url for one in prefill)}
    if not prefill:
        named = {"backend": named["decode"]}
    given = merged(**named, **settings)
    router = Router(read_config(given), given)
    router.lifecycle.phase = Phase.SERVING
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        server = router.server()
        serving = asyncio.ensure_future(server.serve(sockets=[listener]))
        watching = asyncio.ensure_future(watch(router.groups, 0.02))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        async with httpx.AsyncClient(base_url=url, timeout=10) as client:
            yield client
        server.should_exit = True
        watching.cancel()
        await serving
    for backend in router.backends:
        assert backend.active == 0, f"{backend.name} has requests that nobody ended"
        backend.pool.drop()
    for fake in (*fakes, *prefill):
        await fake.stop()
