"""The way past the framework's layers for requests that have nothing to ask of them: a third of what the server does
before a request is on its way."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any, get_type_hints

import orjson
from fastapi import APIRouter, FastAPI, Request
from pydantic import BaseModel, ValidationError
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from engine_server.json import LARGE, PARSED, JSONRequest, JSONRoute

_ARGUMENTS = frozenset({"body", "request", "state"})


@dataclass(frozen=True)
class _Short:
    """A route that takes nothing but a body of JSON, and, if it likes, the request and the server's state."""

    endpoint: Callable[..., Awaitable[Response]]
    model: type[BaseModel]
    takes_request: bool


class Shortcut:
    """ASGI middleware, the innermost: hands well-formed bodies to routes, errors to the application's handlers.

    Whatever is not as well-formed as that goes the framework's way, which finds the words for it: so both answer alike.

    Args:
        app: `app.state.server` is set before the first request.
        routers: of the routes that may have a short way; the application has them too.
    """

    def __init__(self, app: FastAPI, routers: Iterable[APIRouter]) -> None:
        self._app = app
        routes = [route for router in routers for route in router.routes if isinstance(route, JSONRoute)]
        self._routes = {route.path: short for route in routes if (short := _short(route)) is not None}

    @property
    def paths(self) -> frozenset[str]:
        """Those that have a short way."""
        return frozenset(self._routes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve; see ASGI. The body comes in one message."""
        short = self._routes.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if short is None or not _declares_json(scope):
            return await self._app(scope, receive, send)
        message = await receive()
        try:
            content: bytes = message["body"]
            large = len(content) >= LARGE
            body = await asyncio.to_thread(_read, short, scope, content) if large else _read(short, scope, content)
        except (KeyError, orjson.JSONDecodeError, ValidationError, RecursionError):
            return await self._app(scope, _again(message, receive), send)
        scope["app"] = self._app
        request = JSONRequest(scope, receive, send)
        asked: dict[str, Any] = {"body": body, "state": self._app.state.server}
        if short.takes_request:
            asked["request"] = request
        try:
            response = await short.endpoint(**asked)
        except Exception as error:
            response = await self._answer(request, error)
        await response(scope, receive, send)

    async def _answer(self, request: Request, error: Exception) -> Response:
        handlers = self._app.exception_handlers
        handler: Any = next(handlers[kind] for kind in type(error).__mro__ if kind in handlers)
        response: Response = await handler(request, error)
        error.__traceback__ = None  # an instance may be raised again and again
        return response


def _short(route: JSONRoute) -> _Short | None:
    """None for a route that asks for more than `_ARGUMENTS`, or has parts in its path."""
    names = inspect.signature(route.endpoint).parameters.keys()
    if route.methods != {"POST"} or "{" in route.path or route.dependencies or not names <= _ARGUMENTS:
        return None
    model = get_type_hints(route.endpoint).get("body")
    if not (inspect.isclass(model) and issubclass(model, BaseModel)) or "state" not in names:
        return None
    return _Short(route.endpoint, model, "request" in names)


def _read(short: _Short, scope: Scope, content: bytes) -> BaseModel:
    scope[PARSED] = data = orjson.loads(content)
    return short.model.model_validate(data)


def _declares_json(scope: Scope) -> bool:
    declared: bytes = next((value for name, value in scope["headers"] if name == b"content-type"), b"")
    return declared.partition(b";")[0].strip() == b"application/json"


def _again(message: Message, receive: Receive) -> Receive:
    """A `receive` that gives a message which was taken, and then what the real one gives."""
    pending = [message]

    async def received() -> Message:
        return pending.pop() if pending else await receive()

    return received
