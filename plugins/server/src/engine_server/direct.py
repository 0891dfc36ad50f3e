"""The one way around the framework, for requests that somebody waits for: those of a route that takes a body of JSON
and nothing else are handed to its function, and the tokens of its answer to the connection.

FastAPI's own way takes some 90 microseconds more for a chat request, a tenth of all that the server adds to its first
token: six layers of middleware, the search for the route, the resolution of its parameters.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple, get_type_hints

from fastapi import FastAPI, Request
from pydantic import BaseModel
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from engine_server.bodies import read_json
from engine_server.errors import APIError, refuse
from engine_server.middleware import OPEN_PATHS, OWN_SEND, is_for_admin
from engine_server.plugins import JSONRoute, State
from engine_server.stream import DIRECT_SEND, EXTENSION, WRITE_BODY

_KNOWN = {"request": Request, "state": State}
"""What a function may ask for beside its body."""


class Direct:
    """ASGI middleware, the innermost. The framework sees a request when its body is there; what does not fit a route's
    model goes to it too, and is refused in its words. Of a path that needs no key no body is read here. What lies below
    /admin is closed, whosever route it is, unless a middleware has found an administrator: `state["administers"]`.

    Args:
        app: the framework's, with all its routes and handlers of errors.
    """

    def __init__(self, app: FastAPI) -> None:
        self._app = app
        routes = [route for route in app.routes if isinstance(route, JSONRoute)]
        self._functions = {route.path: one for route in routes if (one := _function(route)) is not None}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve; see ASGI."""
        state = scope.setdefault("state", {})
        state[DIRECT_SEND] = send
        if scope["type"] == "http" and is_for_admin(scope["path"]) and state.get("administers") is not True:
            error = APIError(403, "this is for administrators", code="admin_key_required")
            return await refuse(scope, receive, send, error, close=True)
        if (own := state.get(OWN_SEND)) is None or scope["path"] in OPEN_PATHS:  # without a body, or without a key
            return await self._app(scope, receive, send)
        if own is send:  # no middleware of a plugin looks at what is sent
            state[WRITE_BODY] = scope.get("extensions", {}).get(EXTENSION)
        first = await receive()
        if first["type"] == "http.disconnect":  # the client has left, or the body was refused
            return
        function = self._functions.get(scope["path"]) if scope["method"] == "POST" else None
        if function is None or first.get("more_body") or not _declares_json(scope):
            return await self._app(scope, _again(first, receive), send)
        try:
            body = function.model.model_validate(await read_json(scope, first["body"]))
        except Exception:  # it does not fit, or a model's own check fails over it: the framework finds the same
            return await self._app(scope, _again(first, receive), send)
        scope["app"] = self._app
        request = Request(scope, receive)
        asked = {"body": body, "request": request, "state": self._app.state.server}
        try:
            response = await function.call(**{name: asked[name] for name in function.names})
        except Exception as error:
            response = await self._answer(request, error)
        await response(scope, receive, send)

    async def _answer(self, request: Request, error: Exception) -> Response:
        handlers = self._app.exception_handlers
        handler: Any = next(handlers[kind] for kind in type(error).__mro__ if kind in handlers)
        response: Response = await handler(request, error)
        return response


class _Function(NamedTuple):
    """A route's: what it takes as its body, and the names of all that it takes."""

    call: Callable[..., Coroutine[Any, Any, Response]]
    model: type[BaseModel]
    names: tuple[str, ...]


def _function(route: JSONRoute) -> _Function | None:
    """None for a route that asks for more than a body, the request and the state, or for no body, or that answers with
    something that FastAPI makes a response of."""
    if "POST" not in (route.methods or ()) or "{" in route.path or route.dependencies:
        return None
    parameters = inspect.signature(route.endpoint).parameters
    if not inspect.iscoroutinefunction(route.endpoint) or parameters.keys() - {"body"} - _KNOWN.keys():
        return None
    if any(parameter.default is not parameter.empty for parameter in parameters.values()):
        return None  # `Depends(...)`, or another way to read the body
    try:
        hints = get_type_hints(route.endpoint, include_extras=True)
    except (NameError, TypeError):  # what cannot be resolved, and a partial function, are FastAPI's to read
        return None
    model, answer = hints.get("body"), hints.get("return")
    if any(hints.get(name) != _KNOWN[name] for name in parameters.keys() & _KNOWN.keys()):
        return None
    if not (inspect.isclass(model) and issubclass(model, BaseModel)):
        return None
    fits = inspect.isclass(answer) and issubclass(answer, Response)
    return _Function(route.endpoint, model, tuple(parameters)) if fits else None


def _declares_json(scope: Scope) -> bool:
    declared: bytes = next((value for name, value in scope["headers"] if name == b"content-type"), b"")
    return declared.partition(b";")[0].strip() == b"application/json"


def _again(first: Message, receive: Receive) -> Receive:
    """A `receive` that gives the first message once more, and then what follows."""
    pending = [first]

    async def received() -> Message:
        return pending.pop() if pending else await receive()

    return received
