"""OpenAI's newer API, whose responses the server may keep."""

from __future__ import annotations

from typing import Any

from engine.plugin import hookimpl


@hookimpl
def http_routes(router: Any) -> None:
    """Add the family's routes."""
    from engine_server.errors import WITH_BODY, faults
    from engine_server.responses import answer, routes

    events: dict[int | str, Any] = {200: {"content": {"text/event-stream": {}}}}
    kept, one = faults(400, 404), "/v1/responses/{identity}"
    router.post("/v1/responses", response_model=answer.ResponseAnswer, responses=faults(*WITH_BODY) | events)(
        routes.respond
    )
    router.get(one, response_model=answer.ResponseAnswer, responses=kept | events)(routes.retrieve)
    router.delete(one, response_model=answer.Deleted, responses=kept)(routes.delete)
    router.post(f"{one}/cancel", response_model=answer.ResponseAnswer, responses=kept)(routes.cancel)
    router.get(f"{one}/input_items", response_model=answer.InputItems, responses=kept)(routes.input_items)
