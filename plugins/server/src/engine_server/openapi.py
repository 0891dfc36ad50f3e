"""`/openapi.json`: what FastAPI knows of the routes, and what it cannot know: answers, errors, streams, keys."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from engine_server.answer_schemas import ANSWERS, ANTHROPIC_ERROR, ERROR
from engine_server.error_shape import speaks_anthropic
from engine_server.gate import ADMIN_PATH, OPEN_PATHS

STREAMS = frozenset(
    {
        "POST /v1/completions",
        "POST /v1/chat/completions",
        "POST /v1/messages",
        "POST /v1/responses",
        "GET /v1/responses/{identity}",
    }
)
"""What answers with server-sent events where the body, or the query, says `stream`."""
BYTES = frozenset({"POST /v1/embeddings", "POST /pooling"})
"""What answers with bytes where the body's `encoding_format` says so."""
_ERRORS = {
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
}
_OF_BODIES = (400, 404, 408, 413, 429, 499, 504)
_METRICS = "/metrics"


def describe_api(app: FastAPI, *, keys: bool, administered: bool) -> None:
    """Make the app's document complete.

    Args:
        app: with all its routes.
        keys: clients have to send a key.
        administered: there is an administrator's key.
    """

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _document(app, keys, administered)
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]  # FastAPI's documented way


def _document(app: FastAPI, keys: bool, administered: bool) -> dict[str, Any]:
    made = get_openapi(title=app.title, version=app.version, routes=app.routes)
    schemas = made.setdefault("components", {}).setdefault("schemas", {})
    for name in ("HTTPValidationError", "ValidationError"):  # FastAPI's own form of a 422, which nobody gets
        schemas.pop(name, None)
    for schema in schemas.values():
        _null_is_absent(schema)
    schemas["Error"], schemas["AnthropicError"] = ERROR, ANTHROPIC_ERROR
    made["components"]["securitySchemes"] = {
        "bearer": {"type": "http", "scheme": "bearer"},
        "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    }
    for path, operations in made["paths"].items():
        for method, operation in operations.items():
            _complete(operation, path, method.upper())
            closed = administered if path.startswith(ADMIN_PATH + "/") else keys and path not in OPEN_PATHS
            operation["security"] = [{"bearer": []}, {"x-api-key": []}] if closed else []
    return made


def _complete(operation: dict[str, Any], path: str, method: str) -> None:
    """One operation's answers."""
    answers = operation["responses"]
    answers.pop("422", None)
    if (schema := ANSWERS.get(f"{method} {path}")) is not None:
        content: dict[str, Any] = {"application/json": {"schema": schema}}
        if f"{method} {path}" in STREAMS:
            content["text/event-stream"] = {}
        if f"{method} {path}" in BYTES:
            content["application/octet-stream"] = {}
        answers["200"] = {"description": operation.get("summary", ""), "content": content}
        if path in ("/health", "/ping", "/ready"):
            answers["503"] = {"description": _ERRORS[503], "content": content}
    elif path == _METRICS:
        answers["200"] = {"description": "Prometheus' text form", "content": {"text/plain": {}}}
    name = "AnthropicError" if speaks_anthropic({"path": path}) else "Error"
    error = {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}
    for status in _errors(operation, path):
        if str(status) not in answers:
            answers[str(status)] = {"description": _ERRORS[status], "content": error}


def _errors(operation: dict[str, Any], path: str) -> list[int]:
    found = {500}
    if path not in OPEN_PATHS:
        found |= {401, 503}
    if path.startswith(ADMIN_PATH + "/"):
        found |= {403, 409}
    if "requestBody" in operation:
        found |= set(_OF_BODIES)
    if "{" in path:
        found |= {400, 404}
    return sorted(found)


def _null_is_absent(schema: dict[str, Any]) -> None:
    """A key whose value is null counts as absent (see `Body`), so that null is fine wherever nothing is."""
    required = schema.get("required", ())
    for name, given in schema.get("properties", {}).items():
        if name in required or {"type": "null"} in given.get("anyOf", ()):
            continue
        kept = {key: given.pop(key) for key in ("title", "default", "description") if key in given}
        schema["properties"][name] = {"anyOf": [given, {"type": "null"}], **kept}
