"""Who is let in: nobody before the model is loaded or once the server is leaving, nobody without a key that fits."""

from __future__ import annotations

import hashlib
import hmac
import math
from collections.abc import Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from engine.server.errors import APIError
from engine.server.lifecycle import Lifecycle, Phase
from engine.server.refusal import refuse

OPEN_PATHS = frozenset({"/health", "/metrics", "/version"})
"""Answered always and to everybody: what load balancers and monitors look at."""
STARTING_RETRY_SECONDS = 5


class Gate:
    """ASGI middleware.

    Args:
        app: what comes after.
        lifecycle: the server's; the gate counts the requests that it lets in.
        api_keys: those that fit; empty lets everybody in.
        shutdown_timeout: seconds that the server may take to leave; a refused client is told to come back then.
    """

    def __init__(self, app: ASGIApp, *, lifecycle: Lifecycle, api_keys: Sequence[str], shutdown_timeout: float) -> None:
        self._app, self._lifecycle = app, lifecycle
        self._digests = [_digest(key.encode()) for key in api_keys]
        self._leaving_seconds = max(1, math.ceil(shutdown_timeout))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve; see ASGI."""
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            return await self._app(scope, receive, send)
        if (error := self._refusal(scope)) is not None:
            return await refuse(receive, send, error, close=True)
        self._lifecycle.enter()
        try:
            await self._app(scope, receive, send)
        finally:
            self._lifecycle.leave()

    def _refusal(self, scope: Scope) -> APIError | None:
        if self._digests and not self._knows(scope):
            return APIError(
                401,
                "no valid API key was sent; send one as 'Authorization: Bearer <key>'",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        if self._lifecycle.phase is Phase.STARTING:
            return _later("the model is being loaded", STARTING_RETRY_SECONDS, "starting")
        if self._lifecycle.phase is Phase.DRAINING:
            return _later("the server is shutting down", self._leaving_seconds, "shutting_down")
        return None

    def _knows(self, scope: Scope) -> bool:
        """Compared by digest, with every key, in constant time: the time tells nothing about any of them."""
        sent = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, key = sent.partition(b" ")
        digest = _digest(key.strip())
        fits = [hmac.compare_digest(digest, known) for known in self._digests]
        return any(fits) and scheme.lower() == b"bearer"


def _later(why: str, seconds: int, code: str) -> APIError:
    return APIError(503, f"{why}; try again in {seconds} s", code=code, headers={"Retry-After": str(seconds)})


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
