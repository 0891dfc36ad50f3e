"""Errors in OpenAI's shape, `{"error": {"message", "type", "param", "code"}}`, with the status that clients expect."""

from __future__ import annotations

import logging
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from engine.server.json import JSON
from engine.types.errors import EngineDeadError, EngineError, InvalidRequestError, KVCacheTooSmallError, TokenizerError

log = logging.getLogger("engine.server")


class APIError(Exception):
    """An error to be answered as it stands.

    Args:
        status: HTTP status.
        message: for people.
        param: the request's field that is at fault, where one is.
        code: for programs, e.g. "model_not_found".
    """

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code


def body(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """The JSON of an error."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def describe(error: Exception) -> tuple[int, dict[str, Any]]:
    """(status, JSON) of any exception; what is not foreseen is logged, and told without its inner text."""
    match error:
        case APIError():
            return error.status, body(error.status, str(error), error.param, error.code)
        case InvalidRequestError() | TokenizerError() | KVCacheTooSmallError():
            return 400, body(400, str(error), _parameter(error), error.code)
        case EngineDeadError():
            return 503, body(503, str(error), code=error.code)
        case EngineError():
            return 500, body(500, str(error), code=error.code)
    log.error("unforeseen error", exc_info=error)
    return 500, body(500, "internal error; the server's log has the details", code="internal_error")


def _parameter(error: EngineError) -> str | None:
    """`temperature` of "temperature=nan": sampling errors begin with the parameter that they are about."""
    name, equals, _ = error.asked.partition("=")
    return name if equals and name.isidentifier() else None


def install(app: FastAPI) -> None:
    """Answer every error of the app in OpenAI's shape."""

    async def on_error(_: Request, error: Exception) -> JSON:
        status, content = describe(error)
        return JSON(content, status)

    async def on_http(request: Request, error: Exception) -> JSON:
        assert isinstance(error, HTTPException)
        message = error.detail
        if error.status_code == 404:
            message = f"no such route: {request.method} {request.url.path}"
        return JSON(body(error.status_code, message), error.status_code, headers=error.headers)

    async def on_validation(_: Request, error: Exception) -> JSON:
        assert isinstance(error, RequestValidationError)
        return JSON(validation_body(error), 400)

    app.add_exception_handler(APIError, on_error)
    app.add_exception_handler(EngineError, on_error)
    app.add_exception_handler(Exception, on_error)
    app.add_exception_handler(HTTPException, on_http)
    app.add_exception_handler(RequestValidationError, on_validation)


def validation_body(error: RequestValidationError) -> dict[str, Any]:
    """The first fault of a body that does not fit its model, by the field's name."""
    first = error.errors()[0]
    path = ".".join(str(part) for part in first["loc"] if part != "body")
    if first["type"] == "json_invalid":
        return body(
            400, f"the body is not valid JSON: {first.get('ctx', {}).get('error', first['msg'])}", code="invalid_json"
        )
    if first["type"] == "extra_forbidden":
        return body(400, f"the parameter {path!r} is not supported by this server", path, "unsupported_parameter")
    if first["type"] == "missing" and not path:
        return body(400, "the request has no body", code="invalid_request")
    found = "" if first["type"] == "missing" else f" (found {first.get('input')!r:.80})"
    return body(400, f"{path or 'body'}: {first['msg']}{found}", path or None, "invalid_request")
