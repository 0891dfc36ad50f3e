"""Every request has an id, the client's `X-Request-Id` or one made here, which stands in the answer and in the logs;
and what the access log says of it."""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections import Counter
from typing import cast

from fastapi import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.process.logs import REQUEST_ID
from engine_server.errors import speaks_anthropic
from engine_server.lifecycle import ACCESS_LOG, ENDED_AS

HEADER = b"x-request-id"
ANTHROPIC_HEADER = b"request-id"
LONGEST_LABEL = 256
"""Characters of the client's own user that are logged."""
_VALID = re.compile(rb"[A-Za-z0-9._:+/=@-]{1,128}")

log = logging.getLogger(ACCESS_LOG)


class RequestIds:
    """ASGI middleware, the outermost. An id that is too long or holds other characters than A-Z a-z 0-9 . _ : + / = @ -
    is not used: a new one is made, and the answer tells which.

    Args:
        app: what comes after.
        access_log: write a line for each request.

    Attributes:
        responses: answers by status code.
    """

    def __init__(self, app: ASGIApp, *, access_log: bool = False) -> None:
        self._app = app
        self._access_log = access_log
        self.responses: Counter[int] = Counter()

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

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                self.responses[status] += 1
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
