"""What hook plugins, ours and strangers', add to the server: routes, pages for everybody, and middleware."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from fastapi import APIRouter, FastAPI
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from engine.plugin import HookRelay
from engine.plugin.hooks import Implementation
from engine.types.errors import ConfigError, ContractError, EngineError, HookFailedError, RequestRefusedError
from engine.types.kv import PageMap
from engine.types.outputs import StepStats
from engine_server.bodies import JSONRoute
from engine_server.errors import ANY_ROUTE, APIError, describe, faults, refuse, retry_after
from engine_server.keys import KeyRing
from engine_server.middleware import ADMIN_PATH, OPEN_PATHS, PAGE_METHODS, has_begun
from engine_server.state import Others

if TYPE_CHECKING:
    from engine_kit.async_llm import AsyncLLM

Endpoint = TypeVar("Endpoint", bound=Callable[..., Any])


class ServerView:
    """A server, as its plugins see it, its own too. From the event loop's thread.

    Args:
        llm: the engine.
        responses: is counted up: answers by status code.
        keys: the API keys that clients must have, and the administrator's.
        others: the API processes beside this one; None: there are none.

    Attributes:
        pages: paths that everybody may get, with or without a key; complete when the server is put together.
    """

    def __init__(self, llm: AsyncLLM, responses: Counter[int], keys: KeyRing, others: Others | None = None) -> None:
        self.llm = llm
        self.responses = responses
        self.others = others
        self.pages: set[str] = set()
        self._keys = keys
        self._taken = False

    def stats(self) -> StepStats | None:
        """What the engine cores told last, as of one core; None before the first step. Free."""
        return self.llm.last_stats

    async def page_maps(self) -> list[PageMap]:
        """The pages of each engine core that lives, in the order of their ranks, copied between two steps: some
        microseconds of the core's time for each 10,000 pages.

        Raises:
            EngineDeadError: the last core has died.
        """
        return msgspec.convert(await self.llm.call("page_maps"), list[PageMap])

    def take_keys(self) -> KeyRing:
        """The keys that the server was told of, for the middleware that asks for them: whoever takes them sees to it
        that nobody is let in without."""
        self._taken = True
        return self._keys

    def check_keys(self) -> None:
        """Raise ConfigError where there are keys, and nobody asks for them."""
        if (self._keys or self._keys.administered) and not self._taken:
            raise ConfigError(
                f"ask for {'API keys' if self._keys else 'a key of administrators'}",
                "no plugin at work does: hooks:api_keys is left out, or broken",
                "let it in, or install another; or leave out --api-key, --api-key-file and --admin-key",
            )


def without_key(endpoint: Endpoint) -> Endpoint:
    """Mark the function of a route that a hook plugin adds: it is served to everybody, also while the model loads, and
    counts in no key's limits. For files that hold nothing secret, such as a page and its scripts; nothing that asks
    the engine for anything belongs there. The route takes GET (and HEAD) alone and has no parameters in its path; a
    plugin that marks another is left out, with a warning. Above it stands the router's decorator:

        @router.get("/page.css")
        @without_key
        def style() -> Response: ...
    """
    endpoint.engine_without_key = True  # type: ignore[attr-defined]
    return endpoint


def add_routes(app: FastAPI, hooks: HookRelay, server: ServerView) -> None:
    """Let plugins add routes, this package's families first. One that fails, or takes a route that is there, is left
    out with all of its own."""
    listening = hooks.http_routes.listening if hooks.http_routes else []
    for one in sorted(listening, key=lambda one: not one.candidate.value.startswith(f"{__package__}.")):
        router = APIRouter(route_class=JSONRoute, responses=faults(*ANY_ROUTE))
        try:
            one.call({"router": router, "server": server})
            if taken := _taken(app, router):
                raise ValueError(f"the server has the route {taken} already")
            pages = _pages(router)
        except Exception as error:
            _leave_out(hooks, one, error)
        else:
            app.router.routes += router.routes  # an included router would be asked twice for every request
            server.pages |= pages
    # Last, those with parameters in their path, which alone may take what is another's.
    app.router.routes.sort(key=lambda route: not isinstance(route, Route) or "{" in route.path)


def _pages(router: APIRouter) -> set[str]:
    """The paths of the routes that ask for no key. Raises ValueError where one of them is more than a page to get."""
    paths = set()
    for route in router.routes:
        if getattr(getattr(route, "endpoint", None), "engine_without_key", False) is True:
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
    contract = ContractError(
        f"let hook plugin '{candidate.name}' implement {one.hook}",
        f"{type(error).__name__}: {error} ({candidate.value} of {candidate.provenance})",
        f"upgrade it, or report it to its author: pip install --upgrade {candidate.distribution}",
        **candidate.blame,
    )
    hooks.leave_out(candidate, contract)


def describe_keys(app: FastAPI, keys: KeyRing) -> None:
    """Say in the app's OpenAPI document which of its routes ask for a key."""
    make = app.openapi

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            made = make()
            made.setdefault("components", {})["securitySchemes"] = {
                "bearer": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            }
            for path, operations in made["paths"].items():
                for operation in operations.values():
                    closed = path not in OPEN_PATHS and bool(keys)
                    if path.startswith(ADMIN_PATH + "/"):
                        closed = keys.administered
                    operation["security"] = [{"bearer": []}, {"x-api-key": []}] if closed else []
                    if path in OPEN_PATHS:
                        operation["responses"].pop("401", None)
        return make()

    app.openapi = document  # type: ignore[method-assign]  # FastAPI's documented way


# -- middleware --------------------------------------------------------------------------------------------------------
def wrap(app: ASGIApp, hooks: HookRelay, server: ServerView) -> ASGIApp:
    """Put the middleware of plugins around the routes; without any, the app as it is."""
    if not hooks.http_middleware:
        return app
    wrapped: ASGIApp = hooks.http_middleware(app, Guarded, server=server)
    return wrapped


class Guarded:
    """A plugin's middleware that fails closed: `layer`, the application that it made around `inner`. Where it failed to
    make one, every request is refused."""

    def __init__(self, implementation: Implementation, layer: Any, inner: ASGIApp) -> None:
        self._implementation = implementation
        self._layer = layer
        self._inner = inner

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._layer is None:
            if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
                return await self._inner(scope, receive, send)
            missing = HookFailedError(
                f"decide about a request with {self._implementation.who}",
                "it could not be set up when the server started",
                "the log of the server has the details; mend the plugin, or uninstall it",
            )
            return await _answer(scope, receive, send, missing)
        try:
            await self._layer(scope, receive, send)
        except Exception as error:
            if scope["type"] != "http" or has_begun(scope):  # also what a route raised: its answer is out
                raise
            known = isinstance(error, (RequestRefusedError, HookFailedError))
            await _answer(scope, receive, send, error if known else self._implementation.failed(error))


async def _answer(scope: Scope, receive: Receive, send: Send, error: Exception) -> None:
    assert isinstance(error, EngineError)
    status, told = describe(error)
    await refuse(scope, receive, send, APIError(status, told.message, code=error.code, headers=retry_after(error)))
