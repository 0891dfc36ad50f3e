"""The gate, and what asks for keys, around a small application, without a server."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

import httpx
from fastapi import FastAPI
from starlette.types import Receive, Scope, Send

from engine_server.keys import KeyRing
from engine_server.lifecycle import Lifecycle
from engine_server.middleware import Dispatch, Keys


class Echo:
    """Answers with the body; waits for `go` first."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.go.set()
        self.bodies: list[bytes] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.go.wait()
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        self.bodies.append(body)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body})


def gate(
    echo: Echo,
    lifecycle: Lifecycle,
    keys: KeyRing | None = None,
    pages: Collection[str] = (),
) -> httpx.AsyncClient:
    routes = FastAPI()
    routes.mount("/", echo)
    dispatch = Dispatch(routes, lifecycle=lifecycle, shutdown_timeout=7.5, pages=pages)
    app = Keys(dispatch, KeyRing() if keys is None else keys, pages)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x")
