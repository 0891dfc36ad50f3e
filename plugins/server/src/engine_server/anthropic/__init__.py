"""Anthropic's API: messages."""

from __future__ import annotations

from typing import Any

from engine.plugin import hookimpl


@hookimpl
def http_routes(router: Any) -> None:
    """Add the family's routes."""
    from engine_server.anthropic import answer, routes
    from engine_server.errors import ANY_ROUTE, WITH_BODY, AnthropicError, faults

    wrong = faults(*ANY_ROUTE, *WITH_BODY, shape=AnthropicError)
    streamed: dict[int | str, Any] = {**wrong, 200: {"content": {"text/event-stream": {}}}}
    router.post("/v1/messages", response_model=answer.Message, responses=streamed)(routes.messages)
    router.post("/v1/messages/count_tokens", response_model=answer.TokenCount, responses=wrong)(routes.count)
