"""How a route gets its body and the server's state; and how plugins add routes, this package's own families too."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Coroutine
from typing import Annotated, Any, get_type_hints

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from engine.plugin import HookRelay
from engine.plugin.hook_calls import Implementation
from engine.types.errors import ContractError
from engine_server.errors import ANY_ROUTE, faults
from engine_server.gate import ADMIN_PATH, OPEN_PATHS, PAGE_METHODS
from engine_server.http_routes import EngineView, is_without_key
from engine_server.json import JSONRequest
from engine_server.state import ServerState, state_of

State = Annotated[ServerState, Depends(state_of)]
"""What a route declares to get the server's state."""


class JSONRoute(APIRoute):
    """A route whose body is read by `JSONRequest`.

    A coroutine function `(body, request, state) -> Response`, or one of fewer of these, gets them without FastAPI's
    resolution of dependencies, which is half of the framework's time. A body that does not fit goes that way too, and
    is refused in its words.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        resolve = super().get_route_handler()
        model, names = self._body_model(), inspect.signature(self.endpoint).parameters.keys()

        async def handle(request: Request) -> Response:
            request = JSONRequest(request.scope, request.receive)
            if model is None or not _declares_json(request):
                return await resolve(request)
            try:
                body = model.model_validate(await request.json())
            except (json.JSONDecodeError, ValidationError):
                return await resolve(request)
            asked = {"body": body, "request": request, "state": request.app.state.server}
            response: Response = await self.endpoint(**{name: asked[name] for name in names})
            return response

        return handle

    def _body_model(self) -> type[BaseModel] | None:
        """None for a route that asks for more than a body, the request and the state, or for no body, or that answers
        with something that FastAPI makes a response of."""
        parameters = inspect.signature(self.endpoint).parameters
        names, known = parameters.keys(), {"request": Request, "state": State}
        if self.dependencies or not inspect.iscoroutinefunction(self.endpoint) or names - {"body"} - known.keys():
            return None
        if any(parameter.default is not parameter.empty for parameter in parameters.values()):
            return None  # `Depends(...)`, or another way to read the body
        try:
            hints = get_type_hints(self.endpoint, include_extras=True)
        except (NameError, TypeError):  # what cannot be resolved, and a partial function, are FastAPI's to read
            return None
        if any(hints.get(name) != known[name] for name in names & known.keys()):
            return None
        model, answer = hints.get("body"), hints.get("return")
        if not (inspect.isclass(model) and issubclass(model, BaseModel)):
            return None
        return model if inspect.isclass(answer) and issubclass(answer, Response) else None


def _declares_json(request: Request) -> bool:
    return request.headers.get("content-type", "").partition(";")[0].strip() == "application/json"


def add_routes(app: FastAPI, hooks: HookRelay, engine: EngineView) -> frozenset[str]:
    """Let plugins add routes, this package's families first. One that fails, or takes a route that is there, is left
    out with all of its own.

    Returns:
        The paths that everybody may get, with or without a key.
    """
    opened: set[str] = set()
    listening = hooks.http_routes.listening if hooks.http_routes else []
    for one in sorted(listening, key=lambda one: not one.candidate.value.startswith(f"{__package__}.")):
        router = APIRouter(route_class=JSONRoute, responses=faults(*ANY_ROUTE))
        try:
            one.call({"router": router, "engine": engine})
            if taken := _taken(app, router):
                raise ValueError(f"the server has the route {taken} already")
            pages = _pages(router)
        except Exception as error:
            _leave_out(hooks, one, error)
        else:
            app.router.routes += router.routes  # an included router would be asked twice for every request
            opened |= pages
    app.router.routes.sort(key=_turn)
    return frozenset(opened)


def _turn(route: BaseRoute) -> int:
    """When a route is asked whether a request is its own: first those that may stream, as somebody waits for the first
    token; last those with parameters in their path, which alone may take what is another's."""
    if not isinstance(route, Route) or "{" in route.path:
        return 2
    answer = route.responses.get(200, {}) if isinstance(route, APIRoute) else {}
    return 0 if "text/event-stream" in answer.get("content", ()) else 1


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


def describe_keys(app: FastAPI, *, keys: bool, administered: bool) -> None:
    """Say in the app's OpenAPI document which routes ask for a key.

    Args:
        app: with all its routes.
        keys: clients have to send one.
        administered: there is an administrator's.
    """
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
                    closed = administered if path.startswith(ADMIN_PATH + "/") else keys and path not in OPEN_PATHS
                    operation["security"] = [{"bearer": []}, {"x-api-key": []}] if closed else []
                    if path in OPEN_PATHS:
                        operation["responses"].pop("401", None)
        return make()

    app.openapi = document  # type: ignore[method-assign]  # FastAPI's documented way
