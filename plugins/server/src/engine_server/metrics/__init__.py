"""What the server has measured, for Prometheus."""

from __future__ import annotations

from typing import Any

from engine.plugin import hookimpl


@hookimpl
def http_routes(router: Any) -> None:
    """Add the family's route."""
    from fastapi.responses import PlainTextResponse

    from engine_server.metrics import routes

    router.get("/metrics", response_class=PlainTextResponse)(routes.metrics)
