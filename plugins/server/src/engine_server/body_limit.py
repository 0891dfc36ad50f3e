"""Reads a request's body before the application sees the request: never more than a limit, never longer than a time,
and no JSON that would make more objects than a moment makes."""

from __future__ import annotations

import asyncio
from typing import NamedTuple

import numpy as np
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine_server.errors import APIError, refuse
from engine_server.json import LARGE

_PIECE = 2**20
_WITHOUT_BODY = frozenset({"GET", "HEAD", "OPTIONS"})


class Count(NamedTuple):
    """What a text of JSON makes when it is read.

    Args:
        objects: lists, objects and strings, names of fields among them.
        values: whatever lists and objects hold, and these themselves: at most one less than there are.
    """

    objects: int
    values: int


def count(content: bytes) -> Count:
    """What reading this would make, without making it: for what is no JSON, up to where that shows, at least as much.

    Reading keeps the interpreter until it is done, numpy does not.
    """
    opened = num_quotes = commas = 0
    inside, rest = 0, b""  # whether a string goes on, and a backslash that has lost its character
    for start in range(0, len(content), _PIECE):
        piece = (rest + content[start : start + _PIECE]).replace(rb"\\", b"")
        rest = piece[-1:] if piece.endswith(b"\\") else b""
        piece = piece.removesuffix(rest).replace(rb"\"", b"")
        bytes_ = np.frombuffer(piece, np.uint8)
        quotes = (bytes_ == ord('"')).view(np.uint8)
        outside = np.bitwise_xor.accumulate(quotes, dtype=np.uint8) == inside
        opened += int(np.count_nonzero(outside & ((bytes_ == ord("[")) | (bytes_ == ord("{")))))
        commas += int(np.count_nonzero(outside & (bytes_ == ord(","))))
        num_quotes += int(np.count_nonzero(quotes))
        inside = num_quotes & 1
    return Count(opened + num_quotes // 2, opened + commas)


MOST = Count(objects=2**15, values=2**19)
"""What a body of JSON may hold. Reading and checking so much keeps the interpreter for some 50 ms at a time."""


class BodyLimit:
    """ASGI middleware. The application gets the whole body in one message.

    A body whose declared length is over the limit is refused without being read; one of undeclared length as soon as
    it has grown too long. What a large one of JSON holds is counted in a thread, before anybody reads it.

    Args:
        app: what comes after.
        max_body: bytes.
        timeout: seconds for the whole body.
        most: that a body of JSON may hold.
    """

    def __init__(self, app: ASGIApp, *, max_body: int, timeout: float, most: Count = MOST) -> None:
        self._app = app
        self._max_body = max_body
        self._timeout = timeout
        self._most = most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve; see ASGI."""
        if scope["type"] != "http" or scope["method"] in _WITHOUT_BODY:
            return await self._app(scope, receive, send)
        declared = next((value for name, value in scope["headers"] if name == b"content-length"), None)
        if declared is not None and int(declared) > self._max_body:
            return await refuse(scope, receive, send, self._too_large(f"has {int(declared)} bytes"), close=True)
        try:
            async with asyncio.timeout(self._timeout):
                body = await self._read(receive)
        except TimeoutError:
            return await refuse(scope, receive, send, self._too_slow(), close=True)
        except APIError as error:
            return await refuse(scope, receive, send, error, close=True)
        if body is None:
            return
        if len(body) >= LARGE and _may_be_json(scope):
            try:
                self._check(await asyncio.to_thread(count, body))
            except APIError as error:
                return await refuse(scope, receive, send, error)
        await self._app(scope, _replay(body, receive), send)

    async def _read(self, receive: Receive) -> bytes | None:
        """The body; None where the client left before it was complete."""
        chunks: list[bytes] = []
        length = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            chunk = message.get("body", b"")
            length += len(chunk)
            if length > self._max_body:
                raise self._too_large("goes on")
            chunks.append(chunk)
            if not message.get("more_body", False):
                return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    def _check(self, found: Count) -> None:
        for what, held, most in zip(("texts, lists and objects", "values"), found, self._most, strict=True):
            if held > most:
                raise APIError(
                    413,
                    f"the body holds {held:,} {what}; this server takes up to {most:,}; send several smaller requests",
                    code="body_too_large",
                )

    def _too_large(self, found: str) -> APIError:
        return APIError(
            413,
            f"the body {found}; this server takes up to {self._max_body} bytes (--max-body); send a smaller request",
            code="body_too_large",
        )

    def _too_slow(self) -> APIError:
        return APIError(
            408,
            f"the body was not complete after {self._timeout:g} s (--body-timeout); send it faster, or a smaller one",
            code="body_timeout",
        )


def _may_be_json(scope: Scope) -> bool:
    declared: bytes = next((value for name, value in scope["headers"] if name == b"content-type"), b"")
    return not declared or b"json" in declared.lower()


def _replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives the body, and then what the real one gives: the client's leaving."""
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return pending.pop() if pending else await receive()

    return replayed
