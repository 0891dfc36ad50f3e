"""The middleware that hook plugins put around the routes."""

from __future__ import annotations

from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.plugin import HookRelay
from engine.plugin.hook_calls import Implementation
from engine.types.errors import EngineError, HookFailedError, RequestRefusedError
from engine_server.errors import APIError, describe, refuse, retry_after
from engine_server.gate import OPEN_PATHS


def wrap(app: ASGIApp, hooks: HookRelay) -> ASGIApp:
    """Put the middleware of plugins around the routes; without any, the app as it is."""
    if not hooks.http_middleware:
        return app
    wrapped: ASGIApp = hooks.http_middleware(app, Guarded)
    return wrapped


class Guarded:
    """A plugin's middleware that fails closed.

    Args:
        implementation: whose it is.
        layer: the application that it made; None where it failed to make one: every request is refused then.
        inner: what it is around.
    """

    def __init__(self, implementation: Implementation, layer: Any, inner: ASGIApp) -> None:
        self._implementation = implementation
        self._layer = layer
        self._inner = inner

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve; see ASGI."""
        if scope["type"] != "http":
            await (self._inner if self._layer is None else self._layer)(scope, receive, send)
            return
        if self._layer is None:
            if scope["path"] in OPEN_PATHS:
                return await self._inner(scope, receive, send)
            return await _answer(scope, receive, send, self._missing())
        begun = False

        async def watched(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self._layer(scope, receive, watched)
        except Exception as error:
            if begun:  # also what a route raised: its answer is out
                raise
            known = isinstance(error, (RequestRefusedError, HookFailedError))
            await _answer(scope, receive, send, error if known else self._implementation.failed(error))

    def _missing(self) -> HookFailedError:
        return HookFailedError(
            f"decide about a request with {self._implementation.who}",
            "it could not be set up when the server started",
            "the log of the server has the details; mend the plugin, or uninstall it",
        )


async def _answer(scope: Scope, receive: Receive, send: Send, error: Exception) -> None:
    assert isinstance(error, EngineError)
    status, told = describe(error)
    await refuse(scope, receive, send, APIError(status, told.message, code=error.code, headers=retry_after(error)))
