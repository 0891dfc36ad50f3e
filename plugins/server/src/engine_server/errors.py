"""Errors in OpenAI's shape, `{"error": {"message", "type", "param", "code"}}`, with the status that clients expect."""

from __future__ import annotations

import logging
import math
import reprlib
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

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
from engine_server.error_shape import shaped
from engine_server.json import JSON
from engine_server.request_id import request_id

log = logging.getLogger("engine.server")

_TYPES = {404: "not_found_error", 429: "rate_limit_error"}


class APIError(Exception):
    """An error to be answered as it stands.

    Args:
        status: HTTP status.
        message: for people.
        param: the request's field that is at fault, where one is.
        code: for programs, e.g. "model_not_found".
        headers: to be sent with it.
    """

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
        self.status, self.param, self.code = status, param, code or ("invalid_request" if status == 400 else None)
        self.headers = dict(headers or {})


def retry_after(error: Exception) -> dict[str, str]:
    """The header of a refusal that says when to come back."""
    if isinstance(error, RequestRefusedError) and error.retry_after is not None:
        return {"Retry-After": str(max(0, math.ceil(error.retry_after)))}
    return {}


def body(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """The JSON of an error."""
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def describe(error: Exception, request_id: str = "") -> tuple[int, dict[str, Any]]:
    """(status, JSON) of any exception; what is not foreseen is logged, and told without its inner text."""
    match error:
        case APIError():
            return error.status, body(error.status, str(error), error.param, error.code)
        case InvalidRequestError() | TokenizerError() | KVCacheTooSmallError():
            return 400, body(400, str(error), _parameter(error), error.code)
        case RequestRefusedError():
            return error.status, body(error.status, str(error), code=error.code)
        case EngineDeadError() | RankDeadError() | HookFailedError():
            return 503, body(503, str(error), code=error.code)
        case RequestTimeoutError():
            return 504, body(504, str(error), code=error.code)
        case EngineError():
            log.error("request %s: %s", request_id, error)
            return 500, body(500, str(error), code=error.code)
        case RecursionError():  # only the client's JSON is as deep as that
            return 400, body(400, "the body is nested too deeply; send flatter data", code="invalid_request")
    log.error("request %s: unforeseen error", request_id, exc_info=error)
    return 500, body(500, "internal error; the server's log has the details", code="internal_error")


def _parameter(error: EngineError) -> str | None:
    """`temperature` of "temperature=nan", `structured_outputs.regex` of "structured_outputs.regex='('": sampling
    errors begin with the parameter that they are about."""
    name, equals, _ = error.asked.partition("=")
    return name if equals and all(part.isidentifier() for part in name.split(".")) else None


def install(app: FastAPI) -> None:
    """Answer every error of the app, in the shape of its route."""

    def answer(request: Request, status: int, content: Any, headers: Mapping[str, str] | None = None) -> JSON:
        return JSON(shaped(request.scope, status, content), status, headers=None if headers is None else dict(headers))

    async def on_error(request: Request, error: Exception) -> JSON:
        status, content = describe(error, request_id(request))
        headers = error.headers if isinstance(error, APIError) else None
        if isinstance(error, RequestTimeoutError):
            headers = {"x-should-retry": "false"}  # or OpenAI's client would try again, where time is up
        if isinstance(error, RequestRefusedError):
            headers = retry_after(error)
        return answer(request, status, content, headers)

    async def on_http(request: Request, error: Exception) -> JSON:
        assert isinstance(error, HTTPException)
        message = error.detail
        if error.status_code == 404:
            message = f"no such route: {request.method} {request.url.path[:200]}"
        elif error.status_code == 405:
            message = f"{request.url.path[:200]} takes no {request.method}"
        return answer(request, error.status_code, body(error.status_code, message), error.headers)

    async def on_validation(request: Request, error: Exception) -> JSON:
        assert isinstance(error, RequestValidationError)
        return answer(request, 400, validation_body(error))

    app.add_exception_handler(APIError, on_error)
    app.add_exception_handler(EngineError, on_error)
    app.add_exception_handler(RecursionError, on_error)
    app.add_exception_handler(Exception, on_error)
    app.add_exception_handler(HTTPException, on_http)
    app.add_exception_handler(RequestValidationError, on_validation)


def validation_body(error: RequestValidationError) -> dict[str, Any]:
    """The first fault of a body that does not fit its model, by the field's name."""
    first = error.errors()[0]
    kind, found, context = first["type"], first.get("input"), first.get("ctx", {})
    # Below a field's name stand list indices, and the names of a union's branches, which mean nothing to a client.
    place = [part for part in first["loc"] if part != "body"]
    name = str(place[0]) if place else ""
    if kind == "json_invalid":
        return body(400, f"the body is not valid JSON: {context.get('error', first['msg'])}", code="invalid_json")
    if kind == "unsupported_parameter":
        return body(400, first["msg"], context["name"], kind)
    if kind == "missing" and not name:
        return body(400, "the request has no body; send a JSON object", code="invalid_request")
    if kind == "missing":
        return body(400, f"{name} is missing; send it", name, "invalid_request")
    if not name and isinstance(found, (bytes, bytearray)):
        return body(400, "the body is not declared as JSON; send 'Content-Type: application/json'", code="invalid_json")
    shown = "" if kind == "value_error" else f" (found {_SHORT.repr(found)})"
    where = ".".join([name, *(str(part) for part in place[1:] if isinstance(part, int))]) or "the body"
    return body(400, f"{where}: {first['msg']}{shown}", name or None, "invalid_request")


_SHORT = reprlib.Repr()
