"""Errors take the shape of the route's protocol: OpenAI's, or on `/v1/messages` and below it Anthropic's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.types import Scope

_ANTHROPIC = "/v1/messages"
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def speaks_anthropic(scope: Scope) -> bool:
    """Whether a request's route is one of Anthropic's."""
    path: str = scope["path"]
    return path == _ANTHROPIC or path.startswith(_ANTHROPIC + "/")


def shaped(scope: Scope, status: int, content: Mapping[str, Any]) -> Mapping[str, Any]:
    """An error's JSON for the route of a request.

    Args:
        scope: the request's.
        status: of the answer.
        content: in OpenAI's shape.
    """
    if not speaks_anthropic(scope):
        return content
    return anthropic(status, content, scope.get("state", {}).get("request_id"))


def anthropic(status: int, content: Mapping[str, Any], request_id: str | None) -> dict[str, Any]:
    """`{"type": "error", "error": {"type", "message"}, "request_id"}`; in `error` also OpenAI's `param` and `code`,
    where they are set."""
    error = content["error"]
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    more = {name: error[name] for name in ("param", "code") if error.get(name) is not None}
    return {"type": "error", "error": {"type": kind, "message": error["message"], **more}, "request_id": request_id}
