"""Errors, with the status that clients expect, in the shape of the route's protocol: OpenAI's, or on `/v1/messages` and
below it Anthropic's."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import reprlib
from collections.abc import Mapping
from typing import Any, Literal

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from engine.types.errors import (
    EngineDeadError,
    EngineError,
    HookFailedError,
    InvalidRequestError,
    KVCacheTooSmallError,
    RankDeadError,
    RequestRefusedError,
    RequestTimeoutError,
    TokenizerError,
)
from engine_server.bodies import JSON, Answer, dumps

log = logging.getLogger("engine.server")

_TYPES = {404: "not_found_error", 429: "rate_limit_error"}
_ANTHROPIC = "/v1/messages"
_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
LINGER_BYTES = 2**20
LINGER_SECONDS = 1.0
"""How much more of a body is taken and thrown away after the answer: closing a connection with unread data makes the
client's system drop the answer that it has not read yet."""


# -- what is answered --------------------------------------------------------------------------------------------------
class ErrorDetail(Answer):
    """What is wrong.

    Args:
        message: for people.
        type: the kind of error, in OpenAI's words.
        param: the request's field that is at fault, where one is.
        code: for programs, e.g. "model_not_found".
    """

    message: str
    type: str
    param: str | None
    code: str | None


class Error(Answer):
    """OpenAI's shape."""

    error: ErrorDetail


class AnthropicErrorDetail(Answer):
    """What is wrong; OpenAI's `param` and `code` where they are set."""

    type: str
    message: str
    param: str | None = None
    code: str | None = None


class AnthropicError(Answer):
    """Anthropic's shape."""

    type: Literal["error"]
    error: AnthropicErrorDetail
    request_id: str | None


_MEANINGS: Mapping[int | str, str] = {
    400: "the request is wrong, or asks for what this server does not do",
    401: "no key, or none that fits",
    403: "for administrators",
    404: "no such model, response or route",
    408: "the body came too slowly",
    409: "it does not fit what is going on",
    413: "the body is too large",
    429: "too many requests, or too many that wait",
    499: "the client has gone",
    500: "a fault of this server",
    503: "not serving: starting, leaving, or its engine is dead",
    504: "the request's deadline has passed",
    "4XX": "refused, by a plugin for example",
}
ANY_ROUTE = (401, 500, 503, "4XX")
"""What every route may answer."""
WITH_BODY = (400, 404, 408, 413, 429, 499, 504)
"""What a route that takes a body may answer too."""


def faults(*statuses: int | str, shape: type[Answer] = Error) -> dict[int | str, dict[str, Any]]:
    """The error answers of a route, for FastAPI's `responses`."""
    return {status: {"model": shape, "description": _MEANINGS[status]} for status in statuses}


def speaks_anthropic(scope: Scope) -> bool:
    """Whether a request's route is one of Anthropic's."""
    path: str = scope["path"]
    return path == _ANTHROPIC or path.startswith(_ANTHROPIC + "/")


def shaped(scope: Scope, status: int, error: ErrorDetail) -> Answer:
    """An error's JSON for the route of a request."""
    if not speaks_anthropic(scope):
        return Error(error=error)
    return anthropic(status, error, scope.get("state", {}).get("request_id"))


def anthropic(status: int, error: ErrorDetail, request_id: str | None) -> AnthropicError:
    """An error's JSON for Anthropic's clients."""
    kind = _ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    more = {name: value for name in ("param", "code") if (value := getattr(error, name)) is not None}
    detail = AnthropicErrorDetail(type=kind, message=error.message, **more)
    return AnthropicError(type="error", error=detail, request_id=request_id)


# -- errors and what is said of them -----------------------------------------------------------------------------------
class APIError(Exception):
    """An error to be answered as it stands, with these headers. See `ErrorDetail`."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code or ("invalid_request" if status == 400 else None)
        self.headers = dict(headers or {})


def invalid(parameter: str, why: str) -> APIError:
    """A 400 about a parameter, which its text begins with."""
    return APIError(400, f"{parameter}: {why}", param=parameter)


def try_again(status: int, why: str, seconds: int, code: str) -> APIError:
    """A refusal that says when to come back."""
    return APIError(status, f"{why}; try again in {seconds} s", code=code, headers={"Retry-After": str(seconds)})


def retry_after(error: Exception) -> dict[str, str]:
    """The header of a refusal that says when to come back."""
    if isinstance(error, RequestRefusedError) and error.retry_after is not None:
        return {"Retry-After": str(max(0, math.ceil(error.retry_after)))}
    return {}


def detail(status: int, message: str, param: str | None = None, code: str | None = None) -> ErrorDetail:
    """What is said of an error."""
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return ErrorDetail(message=message, type=kind, param=param, code=code)


def describe(error: Exception, request_id: str = "") -> tuple[int, ErrorDetail]:
    """(status, what is said) of any exception; what is not foreseen is logged, and told without its inner text."""
    match error:
        case APIError():
            return error.status, detail(error.status, str(error), error.param, error.code)
        case InvalidRequestError() | TokenizerError() | KVCacheTooSmallError():
            return 400, detail(400, str(error), _parameter(error), error.code)
        case RequestRefusedError():
            return error.status, detail(error.status, str(error), code=error.code)
        case EngineDeadError() | RankDeadError() | HookFailedError():
            return 503, detail(503, str(error), code=error.code)
        case RequestTimeoutError():
            return 504, detail(504, str(error), code=error.code)
        case EngineError():
            log.error("request %s: %s", request_id, error)
            return 500, detail(500, str(error), code=error.code)
        case RecursionError():  # only the client's JSON is as deep as that
            return 400, detail(400, "the body is nested too deeply; send flatter data", code="invalid_request")
    log.error("request %s: unforeseen error", request_id, exc_info=error)
    return 500, detail(500, "internal error; the server's log has the details", code="internal_error")


def _parameter(error: EngineError) -> str | None:
    """`temperature` of "temperature=nan", `structured_outputs.regex` of "structured_outputs.regex='('": sampling
    errors begin with the parameter that they are about."""
    name, equals, _ = error.asked.partition("=")
    return name if equals and all(part.isidentifier() for part in name.split(".")) else None


def install(app: FastAPI) -> None:
    """Answer every error of the app, in the shape of its route."""

    def answer(request: Request, status: int, error: ErrorDetail, headers: Mapping[str, str] | None = None) -> JSON:
        return JSON(shaped(request.scope, status, error), status, headers=None if headers is None else dict(headers))

    async def on_error(request: Request, error: Exception) -> JSON:
        status, told = describe(error, request.scope["state"]["request_id"])
        headers = error.headers if isinstance(error, APIError) else None
        if isinstance(error, RequestTimeoutError):
            headers = {"x-should-retry": "false"}  # or OpenAI's client would try again, where time is up
        if isinstance(error, RequestRefusedError):
            headers = retry_after(error)
        error.__traceback__ = None  # an instance may be raised again and again
        return answer(request, status, told, headers)

    async def on_http(request: Request, error: Exception) -> JSON:
        assert isinstance(error, HTTPException)
        message = error.detail
        if error.status_code == 404:
            message = f"no such route: {request.method} {request.url.path[:200]}"
        elif error.status_code == 405:
            message = f"{request.url.path[:200]} takes no {request.method}"
        return answer(request, error.status_code, detail(error.status_code, message), error.headers)

    async def on_validation(request: Request, error: Exception) -> JSON:
        assert isinstance(error, RequestValidationError)
        return answer(request, 400, _first_fault(error))

    for kind in (APIError, EngineError, RecursionError, Exception):
        app.add_exception_handler(kind, on_error)
    app.add_exception_handler(HTTPException, on_http)
    app.add_exception_handler(RequestValidationError, on_validation)


def _first_fault(error: RequestValidationError) -> ErrorDetail:
    """The first fault of a body that does not fit its model, by the field's name."""
    first = error.errors()[0]
    kind, found, context = first["type"], first.get("input"), first.get("ctx", {})
    # Below a field's name stand list indices, and the names of a union's branches, which mean nothing to a client.
    place = [part for part in first["loc"] if part != "body"]
    name = str(place[0]) if place else ""
    if kind == "json_invalid":
        return detail(400, f"the body is not valid JSON: {context.get('error', first['msg'])}", code="invalid_json")
    if kind == "unsupported_parameter":
        return detail(400, first["msg"], context["name"], kind)
    if kind == "missing" and not name:
        return detail(400, "the request has no body; send a JSON object", code="invalid_request")
    if kind == "missing":
        return detail(400, f"{name} is missing; send it", name, "invalid_request")
    if not name and isinstance(found, (bytes, bytearray)):
        message = "the body is not declared as JSON; send 'Content-Type: application/json'"
        return detail(400, message, code="invalid_json")
    shown = "" if kind == "value_error" else f" (found {_SHORT.repr(found)})"
    where = ".".join([name, *(str(part) for part in place[1:] if isinstance(part, int))]) or "the body"
    return detail(400, f"{where}: {first['msg']}{shown}", name or None, "invalid_request")


_SHORT = reprlib.Repr()


# -- answers given before a request's body was read --------------------------------------------------------------------
async def refuse(scope: Scope, receive: Receive, send: Send, error: APIError, *, close: bool = False) -> None:
    """Answer a request whose body has not been read to its end with an error. With `close` the connection ends, and the
    rest of the body is not waited for."""
    status, told = describe(error)
    body = dumps(shaped(scope, status, told))
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    headers += [(name.lower().encode(), value.encode()) for name, value in error.headers.items()]
    if close:
        headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": close})
    if close:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINGER_SECONDS):
                await _discard(receive)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _discard(receive: Receive) -> None:
    seen = 0
    while seen < LINGER_BYTES:
        message = await receive()
        if message["type"] == "http.disconnect" or not message.get("more_body", False):
            return
        seen += len(message.get("body", b""))
