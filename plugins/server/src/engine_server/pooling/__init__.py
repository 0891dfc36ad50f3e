"""The API of models that pool: vectors, labels and scores in place of text."""

from __future__ import annotations

from typing import Any

from engine.plugin import hookimpl


@hookimpl
def http_routes(router: Any) -> None:
    """Add the family's routes."""
    from engine_server.errors import WITH_BODY, faults
    from engine_server.pooling import answers, routes

    wrong: dict[int | str, Any] = faults(*WITH_BODY)
    octets: dict[int | str, Any] = {**wrong, 200: {"content": {routes.OCTETS: {}}}}
    router.post("/v1/embeddings", response_model=answers.Embeddings, responses=octets)(routes.embeddings)
    router.post("/pooling", response_model=answers.Pooled, responses=octets)(routes.pooling)
    router.post("/classify", response_model=answers.Classified, responses=wrong)(routes.classify)
    for path in ("/score", "/v1/score"):
        router.post(path, response_model=answers.Scores, responses=wrong)(routes.score)
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        router.post(path, response_model=answers.Ranking, responses=wrong)(routes.rerank)
