"""Who is let in: nobody before the model is loaded or once the server is leaving, nobody without a key that fits, and
with each key no more than it may ask for."""

from __future__ import annotations

import math
from collections.abc import Collection

from starlette.types import ASGIApp, Receive, Scope, Send

from engine_server.errors import APIError, refuse
from engine_server.keys import AdminKey, ApiKey, KeyRing
from engine_server.lifecycle import Lifecycle, Phase

OPEN_PATHS = frozenset({"/health", "/load", "/metrics", "/ping", "/ready", "/version"})
"""Answered always and to everybody: what load balancers and monitors look at."""
PAGE_METHODS = frozenset({"GET", "HEAD"})
"""With which everybody gets the pages of plugins that are marked `without_key`."""
ADMIN_PATH = "/admin"
"""What lies below it is for whoever has the administrator's key, and for nobody else."""
STARTING_RETRY_SECONDS = 5


class Gate:
    """ASGI middleware.

    Args:
        app: what comes after.
        lifecycle: the server's; the gate counts the requests that it lets in.
        keys: those that fit; an empty ring lets everybody in.
        shutdown_timeout: seconds that the server may take to leave; a refused client is told to come back then.
        pages: paths of plugins that everybody may get.
        admin: the administrator's key; without one, nobody may administer.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        lifecycle: Lifecycle,
        keys: KeyRing,
        shutdown_timeout: float,
        admin: AdminKey | None = None,
        pages: Collection[str] = (),
    ) -> None:
        self._app = app
        self._lifecycle = lifecycle
        self._keys = keys
        self._admin = admin or AdminKey()
        self._pages = frozenset(pages)
        self._leaving_seconds = max(1, math.ceil(shutdown_timeout))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve; see ASGI."""
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            return await self._app(scope, receive, send)
        administers = scope["path"] == ADMIN_PATH or scope["path"].startswith(ADMIN_PATH + "/")
        if self._is_page(scope) and not administers:
            return await self._app(scope, receive, send)
        headers = dict(reversed(scope["headers"]))  # of several with one name the first counts
        sent = headers.get(b"authorization", b""), headers.get(b"x-api-key")
        key = self._keys.find(*sent) if self._keys else None
        error = self._no_administrator(sent, key) if administers else self._no_key(key)
        error = error or self._not_serving()
        if administers:
            key = None
            scope.setdefault("state", {}).update(administers=error is None)
        if error is None and key is not None:
            entered = key.usage.enter()
            error = entered if entered is None or isinstance(entered, APIError) else await entered
        if error is not None:
            return await refuse(scope, receive, send, error, close=True)
        if key is not None:
            scope.setdefault("state", {}).update(api_key=key.name, cache_salt=key.cache_salt, key_usage=key.usage)
        self._lifecycle.enter()
        try:
            await self._app(scope, receive, send)
        finally:
            self._lifecycle.leave()
            if key is not None:
                key.usage.leave()

    def _is_page(self, scope: Scope) -> bool:
        return scope["path"] in self._pages and scope["method"] in PAGE_METHODS

    def _no_key(self, key: ApiKey | None) -> APIError | None:
        if self._keys and key is None:
            return _unknown("no valid API key was sent")
        return None

    def _no_administrator(self, sent: tuple[bytes, bytes | None], key: ApiKey | None) -> APIError | None:
        if not self._admin:
            found = "this server has no routes for administrators; start it with --admin-key to have them"
            return APIError(403, found, code="admin_disabled")
        if self._admin.fits(*sent):
            return None
        if key is not None:
            return APIError(403, "an API key does not open this; send the administrator's", code="admin_key_required")
        return _unknown("the administrator's key was not sent")

    def _not_serving(self) -> APIError | None:
        if self._lifecycle.phase is Phase.STARTING:
            return _later("the model is being loaded", STARTING_RETRY_SECONDS, "starting")
        if self._lifecycle.phase is Phase.DRAINING:
            return _later("the server is shutting down", self._leaving_seconds, "shutting_down")
        return None


def _unknown(why: str) -> APIError:
    return APIError(
        401,
        f"{why}; send one as 'Authorization: Bearer <key>'",
        code="invalid_api_key",
        headers={"WWW-Authenticate": "Bearer"},
    )


def _later(why: str, seconds: int, code: str) -> APIError:
    return APIError(503, f"{why}; try again in {seconds} s", code=code, headers={"Retry-After": str(seconds)})
