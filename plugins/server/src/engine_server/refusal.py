"""Answers given before a request's body was read."""

from __future__ import annotations

import asyncio
import contextlib

import orjson
from starlette.types import Receive, Scope, Send

from engine_server import errors
from engine_server.error_shape import shaped

LINGER_BYTES = 2**20
LINGER_SECONDS = 1.0
"""How much more of a body is taken and thrown away after the answer: closing a connection with unread data makes the
client's system drop the answer that it has not read yet."""


async def refuse(scope: Scope, receive: Receive, send: Send, error: errors.APIError, *, close: bool = False) -> None:
    """Answer with an error.

    Args:
        scope, receive, send: of the request, whose body has not been read to its end.
        error: what to say.
        close: end the connection, and do not wait for the rest of the body.
    """
    status, content = errors.describe(error)
    body = orjson.dumps(shaped(scope, status, content))
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    headers += [(name.lower().encode(), value.encode()) for name, value in error.headers.items()]
    if close:
        headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": close})
    if close:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINGER_SECONDS):
                await _discard(receive)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _discard(receive: Receive) -> None:
    seen = 0
    while seen < LINGER_BYTES:
        message = await receive()
        if message["type"] == "http.disconnect" or not message.get("more_body", False):
            return
        seen += len(message.get("body", b""))
