"""The API of the tokenizer alone."""

from __future__ import annotations

from typing import Any

from engine.plugin import hookimpl


@hookimpl
def http_routes(router: Any) -> None:
    """Add the family's routes."""
    from engine_server.errors import WITH_BODY, faults
    from engine_server.tokenization import routes

    router.post("/tokenize", response_model=routes.Tokens, responses=faults(*WITH_BODY))(routes.tokenize)
    router.post("/detokenize", response_model=routes.Text, responses=faults(*WITH_BODY))(routes.detokenize)
