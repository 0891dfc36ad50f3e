"""What every request passes before the middleware of plugins and the routes: it gets an id and a line in the access
log, is taken only while the server serves, and its body is read within limits."""

from __future__ import annotations

import asyncio
import logging
import math
import re
import time
import uuid
from collections import Counter
from collections.abc import Collection
from typing import NamedTuple, cast

import numpy as np
from fastapi import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.process.logs import REQUEST_ID
from engine_server.bodies import LARGE
from engine_server.errors import APIError, refuse, speaks_anthropic
from engine_server.lifecycle import ACCESS_LOG, ENDED_AS, Lifecycle, Phase

HEADER = b"x-request-id"
ANTHROPIC_HEADER = b"request-id"
OWN_SEND = "own_send"
"""In the state of a request with a body: the `send` that the server gives to the middleware of plugins."""
LONGEST_LABEL = 256
"""Characters of the client's own user that are logged."""
_BEGUN = "answer_begun"
_VALID = re.compile(rb"[A-Za-z0-9._:+/=@-]{1,128}")

log = logging.getLogger(ACCESS_LOG)


class RequestIds:
    """ASGI middleware, the outermost. An id that is too long or holds other characters than A-Z a-z 0-9 . _ : + / = @ -
    is not used: a new one is made, and the answer tells which.

    Args:
        app: what comes after.
        responses: is counted up: answers by status code.
        access_log: write a line for each request.
    """

    def __init__(self, app: ASGIApp, responses: Counter[int], *, access_log: bool = False) -> None:
        self._app = app
        self._responses = responses
        self._access_log = access_log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve; see ASGI."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        sent = next((value for name, value in scope["headers"] if name == HEADER), None)
        made = sent is None or _VALID.fullmatch(sent) is None
        identity = uuid.uuid4().hex.encode() if sent is None or made else sent
        # Two requests may carry the same id; inside, each needs its own.
        unique = identity.decode() + ("" if made else f"-{uuid.uuid4().hex[:8]}")
        scope.setdefault("state", {}).update(request_id=identity.decode(), unique_id=unique)
        status = 0
        began = time.perf_counter()
        state = scope["state"]

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                self._responses[status] += 1
                state[_BEGUN] = True
                names = (HEADER, ANTHROPIC_HEADER) if speaks_anthropic(scope) else (HEADER,)
                message["headers"] = [*message.get("headers", ()), *((name, identity) for name in names)]
            await send(message)

        context = REQUEST_ID.set(identity.decode())
        try:
            await self._app(scope, receive, send_with_id)
        except Exception:
            if 0 < status < 400:  # a plugin's stream: the client was told otherwise
                scope["state"][ENDED_AS] = 500
            raise
        finally:
            if self._access_log:
                seconds = time.perf_counter() - began
                ended_as = scope["state"].get(ENDED_AS)
                status = ended_as or status
                client = "{}:{}".format(*scope["client"]) if scope.get("client") else "-"
                line = f"{client} {scope['method']} {scope['path']} {status or 'left'} {seconds:.3f} s"
                fields = {
                    "client": client,
                    "method": scope["method"],
                    "path": scope["path"],
                    "status": status or None,
                    "seconds": round(seconds, 6),
                }
                if ended_as is not None:
                    line, fields["in_stream"] = f"{line}, in mid-stream", True
                if user := scope["state"].get("end_user"):
                    line, fields["user"] = f"{line}, for {user}", user
                shown = line.encode("unicode_escape").decode()
                log.info("%s %s", identity.decode(), shown, extra={"fields": fields})
            REQUEST_ID.reset(context)


def has_begun(scope: Scope) -> bool:
    """Whether the answer to a request has begun."""
    return _BEGUN in scope["state"]


def request_id(request: Request) -> str:
    """The id that the answer carries."""
    return cast(str, request.scope["state"]["request_id"])


def engine_id(request: Request, prefix: str) -> str:
    """An id for the engine and for the answer's `id`, as OpenAI's look, e.g. "chatcmpl-3f2a..."; it contains the
    request's, and is used once."""
    return f"{prefix}-{request.scope['state']['unique_id']}"


def note(request: Request, *users: str | None, cache_salt: str | None = None) -> None:
    """Remember of a request whom the client names as its own user (the first that is given), for the access log, and
    the salt of its prompts in the prefix cache, beside that of its API key."""
    state = request.scope.setdefault("state", {})
    if user := next(filter(None, users), None):
        state["end_user"] = user[:LONGEST_LABEL]
    if cache_salt is not None:
        state["own_salt"] = cache_salt


OPEN_PATHS = frozenset({"/health", "/load", "/metrics", "/ping", "/ready", "/version"})
"""Answered always and to everybody: what load balancers and monitors look at."""
PAGE_METHODS = frozenset({"GET", "HEAD"})
"""With which everybody gets the pages of plugins that are marked `without_key`."""
ADMIN_PATH = "/admin"
"""What lies below it is for whoever has the administrator's key, and for nobody else."""
STARTING_RETRY_SECONDS = 5


class Gate:
    """ASGI middleware that takes requests only while the server serves, and counts those in progress.

    Args:
        app: what comes after.
        lifecycle: the server's.
        shutdown_timeout: seconds that the server may take to leave; a refused client is told to come back then.
        pages: paths that everybody may get at any time.
    """

    def __init__(
        self, app: ASGIApp, *, lifecycle: Lifecycle, shutdown_timeout: float, pages: Collection[str] = ()
    ) -> None:
        self._app = app
        self._lifecycle = lifecycle
        self._pages = pages
        self._leaving_seconds = max(1, math.ceil(shutdown_timeout))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve; see ASGI."""
        if scope["type"] != "http" or is_open(scope, self._pages):
            return await self._app(scope, receive, send)
        if self._lifecycle.phase is not Phase.SERVING:
            return await refuse(scope, receive, send, self._later(), close=True)
        self._lifecycle.enter()
        try:
            await self._app(scope, receive, send)
        finally:
            self._lifecycle.leave()

    def _later(self) -> APIError:
        why, seconds, code = "the model is being loaded", STARTING_RETRY_SECONDS, "starting"
        if self._lifecycle.phase is Phase.DRAINING:
            why, seconds, code = "the server is shutting down", self._leaving_seconds, "shutting_down"
        headers = {"Retry-After": str(seconds)}
        return APIError(503, f"{why}; try again in {seconds} s", code=code, headers=headers)


def is_open(scope: Scope, pages: Collection[str]) -> bool:
    """Whether a request is answered always and to everybody."""
    path: str = scope["path"]
    return path in OPEN_PATHS or (path in pages and scope["method"] in PAGE_METHODS and not is_for_admin(path))


def is_for_admin(path: str) -> bool:
    """Whether a path lies below ADMIN_PATH."""
    return path == ADMIN_PATH or path.startswith(ADMIN_PATH + "/")


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
    """ASGI middleware. Whoever asks for the body first gets all of it in one message.

    A body whose declared length is over the limit is refused without being read; one of undeclared length as soon as
    it has grown too long. What a large one of JSON holds is counted in a thread, before anybody reads it. Where the
    body is refused, that is the answer, whatever else is sent; who asked for the body is told that the client has left.

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
        asked = answered = refused = False

        async def limited() -> Message:
            nonlocal asked, refused
            if asked or answered:
                return await receive()
            asked = True
            body: bytes | None = None
            try:
                body = await self._body(scope, receive)
                if body is None:
                    return {"type": "http.disconnect"}
                if len(body) >= LARGE and _may_be_json(scope):
                    self._check(await asyncio.to_thread(count, body))
            except APIError as error:
                refused = True
                await refuse(scope, receive, send, error, close=body is None)
                return {"type": "http.disconnect"}
            return {"type": "http.request", "body": body, "more_body": False}

        async def unless_refused(message: Message) -> None:
            nonlocal answered
            answered = True
            if not refused:
                await send(message)

        scope.setdefault("state", {})[OWN_SEND] = unless_refused
        await self._app(scope, limited, unless_refused)

    async def _body(self, scope: Scope, receive: Receive) -> bytes | None:
        """None where the client left before it was complete. Raises the APIError that refuses it."""
        declared = next((value for name, value in scope["headers"] if name == b"content-length"), None)
        if declared is not None and int(declared) > self._max_body:
            raise self._too_large(f"has {int(declared)} bytes")
        try:
            async with asyncio.timeout(self._timeout):
                return await self._read(receive)
        except TimeoutError:
            raise APIError(
                408,
                f"the body was not complete after {self._timeout:g} s (--body-timeout); send it faster, or a smaller "
                "one",
                code="body_timeout",
            ) from None

    async def _read(self, receive: Receive) -> bytes | None:
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


def _may_be_json(scope: Scope) -> bool:
    declared: bytes = next((value for name, value in scope["headers"] if name == b"content-type"), b"")
    return not declared or b"json" in declared.lower()
