"""OpenAI's API: chat, completions and models."""

from __future__ import annotations

from typing import Any

from engine.plugin import hookimpl


@hookimpl
def http_routes(router: Any) -> None:
    """Add the family's routes."""
    from engine_server.errors import WITH_BODY, faults
    from engine_server.openai import answers, chat, completions, models

    asked: dict[str, Any] = {"responses": {**faults(*WITH_BODY), 200: {"content": {"text/event-stream": {}}}}}
    router.post("/v1/chat/completions", response_model=answers.ChatCompletion, **asked)(chat.chat_completions)
    router.post("/v1/completions", response_model=answers.Completion, **asked)(completions.completions)
    router.get("/v1/models", response_model=answers.Models)(models.models)
    router.get("/v1/models/{name:path}", response_model=answers.Model, responses=faults(400, 404))(models.model)
