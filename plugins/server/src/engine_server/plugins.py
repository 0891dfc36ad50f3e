"""What hook plugins add to the server: routes, middleware, metrics; and what hooks are told of a HTTP request."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, FastAPI, Request
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.plugin import HookRelay
from engine.plugin.hook_calls import Implementation
from engine.types.errors import ContractError, EngineError, HookFailedError, RequestRefusedError
from engine.types.hooks import HTTPOrigin
from engine_server.errors import APIError, describe, retry_after
from engine_server.gate import OPEN_PATHS, PAGE_METHODS
from engine_server.http_routes import EngineView, is_without_key
from engine_server.refusal import refuse

_SECRET = ("auth", "cookie", "key", "token", "secret", "password", "credential", "signature")
"""A header whose name holds one of these is nobody's business but the server's."""


def origin(request: Request) -> HTTPOrigin:
    """What hooks are told of a request that came over HTTP."""
    headers: dict[str, str] = {}
    for name, value in request.headers.items():
        if not any(word in name for word in _SECRET):
            headers[name] = f"{headers[name]}, {value}" if name in headers else value
    client = "" if request.client is None else request.client.host
    return HTTPOrigin(method=request.method, path=request.url.path, headers=headers, client=client)


# -- routes ----------------------------------------------------------------------------------------------------------
def add_routes(app: FastAPI, hooks: HookRelay, engine: EngineView) -> frozenset[str]:
    """Let plugins add routes. One that fails, or takes a route that is there, is left out with all of its own.

    Returns:
        The paths that everybody may get, with or without a key.
    """
    if not hooks.http_routes:
        return frozenset()
    opened: set[str] = set()
    for one in hooks.http_routes.listening:
        router = APIRouter()
        try:
            one.call({"router": router, "engine": engine})
            if taken := _taken(app, router):
                raise ValueError(f"the server has the route {taken} already")
            pages = _pages(router)
        except Exception as error:
            _leave_out(hooks, one, error)
        else:
            app.include_router(router)
            opened |= pages
    return frozenset(opened)


def _pages(router: APIRouter) -> set[str]:
    """The paths of the routes that ask for no key. Raises ValueError where one of them is more than a page to get."""
    paths = set()
    for route in router.routes:
        if is_without_key(getattr(route, "endpoint", None)):
            path, methods = str(getattr(route, "path", "")), set(getattr(route, "methods", None) or {"ANY"})
            if "{" in path or methods - PAGE_METHODS:
                raise ValueError(
                    f"its route {' '.join(sorted(methods))} {path} cannot be without_key: such a route takes GET alone "
                    "and has no parameters in its path"
                )
            paths.add(path)
    return paths


def _taken(app: FastAPI, router: APIRouter) -> str:
    """A route of the router that the app has; "" where there is none."""
    there = {key for route in app.routes for key in _keys(route)}
    return next((" ".join(key) for route in router.routes for key in _keys(route) if key in there), "")


def _keys(route: BaseRoute) -> list[tuple[str, str]]:
    path = str(getattr(route, "path", ""))
    return [(method, path) for method in sorted(getattr(route, "methods", None) or ("ANY",))]


def _leave_out(hooks: HookRelay, one: Implementation, error: Exception) -> None:
    one.count_failure()
    candidate = one.candidate
    hooks.leave_out(
        candidate,
        ContractError(
            f"let hook plugin '{candidate.name}' implement {one.hook}",
            f"{type(error).__name__}: {error} ({candidate.value} of {candidate.provenance})",
            f"upgrade it, or report it to its author: pip install --upgrade {candidate.distribution}",
            point=candidate.point,
            driver=candidate.name,
            distribution=candidate.provenance,
        ),
    )


# -- middleware ------------------------------------------------------------------------------------------------------
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
        self._implementation, self._layer, self._inner = implementation, layer, inner

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
    status, content = describe(error)
    headers = retry_after(error)
    await refuse(scope, receive, send, APIError(status, content["error"]["message"], code=error.code, headers=headers))
