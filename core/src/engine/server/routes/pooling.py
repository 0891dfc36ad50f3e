"""`/v1/embeddings`, `/classify`, `/score`, `/rerank`: vectors, labels and scores in place of text."""

from __future__ import annotations

import base64
import time
from typing import Annotated, Any

import msgspec
import numpy as np
from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response

from engine.frontend.score_plan import data_of
from engine.server.errors import APIError
from engine.server.json import JSON, JSONRoute
from engine.server.pooled import check_count, pool, usage
from engine.server.pooling_protocol import ClassifyBody, EmbeddingsBody, RerankBody, ScoreBody
from engine.server.request_id import engine_id
from engine.server.state import ServerState, state_of
from engine.types.outputs import RequestOutput
from engine.types.pooling import PoolingParams

router = APIRouter(route_class=JSONRoute)
State = Annotated[ServerState, Depends(state_of)]


@router.post("/v1/embeddings")
async def embeddings(body: EmbeddingsBody, request: Request, state: State) -> Response:
    """A vector for each input."""
    model = state.check_model(body.model)
    check_count(len(body.inputs()), "input")
    params = PoolingParams(task="embed", dimensions=body.dimensions, normalize=body.normalize)
    outputs = await _pool_inputs(state, request, body, "embd", params)
    as_base64 = body.encoding_format == "base64"
    data = [
        {"object": "embedding", "index": i, "embedding": _base64(vector) if as_base64 else vector.tolist()}
        for i, vector in enumerate(map(data_of, outputs))
    ]
    return JSON({**_head(request, "embd", model), "data": data, "usage": usage(outputs)})


@router.post("/classify")
async def classify(body: ClassifyBody, request: Request, state: State) -> Response:
    """For each input a number for each label, and the label of the largest."""
    model = state.check_model(body.model)
    check_count(len(body.inputs()), "input")
    params = PoolingParams(task="classify", use_activation=body.use_activation)
    outputs = await _pool_inputs(state, request, body, "classify", params)
    labels = state.engine.plan.model.config.get("id2label") or {}
    data = []
    for i, probs in enumerate(map(data_of, outputs)):
        best = int(probs.argmax())
        label = labels.get(str(best), f"LABEL_{best}")
        data.append({"index": i, "label": label, "probs": probs.tolist(), "num_classes": len(probs)})
    return JSON({**_head(request, "classify", model), "data": data, "usage": usage(outputs)})


@router.post("/score")
@router.post("/v1/score")
async def score(body: ScoreBody, request: Request, state: State) -> Response:
    """How well each pair of texts fits: one against one, one against several, or equally many."""
    model = state.check_model(body.model)
    first, second = body.texts()
    check_count(max(len(first), len(second)), "text_2")
    params = PoolingParams(use_activation=body.use_activation)
    scores, outputs = await _scores(state, request, body, "score", first, second, params)
    data = [{"index": i, "object": "score", "score": score} for i, score in enumerate(scores)]
    return JSON({**_head(request, "score", model), "data": data, "usage": usage(outputs)})


@router.post("/rerank")
@router.post("/v1/rerank")
@router.post("/v2/rerank")
async def rerank(body: RerankBody, request: Request, state: State) -> Response:
    """The documents that fit the query best, best first; of equal ones the first."""
    model = state.check_model(body.model)
    texts = body.texts()
    check_count(len(texts), "documents")
    params = PoolingParams(use_activation=body.use_activation)
    scores, outputs = await _scores(state, request, body, "rerank", [body.query], texts, params)
    with_texts = body.return_documents
    if with_texts is None:
        with_texts = request.url.path != "/v2/rerank"
    order = sorted(range(len(texts)), key=lambda i: -scores[i])[: body.top_n or None]
    results: list[dict[str, Any]] = []
    for i in order:
        document = {"document": {"text": texts[i]}} if with_texts else {}
        results.append({"index": i, **document, "relevance_score": scores[i]})
    return JSON({"id": engine_id(request, "rerank"), "model": model, "usage": usage(outputs), "results": results})


async def _pool_inputs(
    state: ServerState, request: Request, body: EmbeddingsBody | ClassifyBody, prefix: str, params: PoolingParams
) -> list[RequestOutput]:
    prompts = body.prompts()
    return await pool(state, request, body, prefix, prompts, [params] * len(prompts))


async def _scores(
    state: ServerState,
    request: Request,
    body: ScoreBody | RerankBody,
    prefix: str,
    first: list[str],
    second: list[str],
    params: PoolingParams,
) -> tuple[list[float], list[RequestOutput]]:
    if params.use_activation is not None and not state.engine.plan.model.pooler.num_labels:
        raise APIError(
            400, "use_activation is for cross-encoders, this model's scores are cosines", param="use_activation"
        )
    plan = await state.engine.plan_scores(first, second, params, body.truncate_prompt_tokens)
    complete = [msgspec.structs.replace(one, task=plan.task) for one in plan.params]
    outputs = await pool(state, request, body, prefix, plan.prompts, complete)
    return [one.outputs.score for one in plan.scores(outputs)], outputs


def _head(request: Request, prefix: str, model: str) -> dict[str, Any]:
    return {"id": engine_id(request, prefix), "object": "list", "created": int(time.time()), "model": model}


def _base64(vector: np.ndarray) -> str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()
