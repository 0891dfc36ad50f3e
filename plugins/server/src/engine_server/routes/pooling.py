"""`/v1/embeddings`, `/pooling`, `/classify`, `/score`, `/rerank`: vectors, labels and scores in place of text."""

from __future__ import annotations

import base64
import json
import time
from itertools import accumulate
from typing import Annotated, Any

import msgspec
import numpy as np
from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response

from engine.embedding import check_task, data_of
from engine.types.outputs import RequestOutput
from engine.types.pooling import PoolingParams
from engine_server.errors import APIError
from engine_server.json import JSON, JSONRoute
from engine_server.pooled import check_count, pool, prompts_of, usage
from engine_server.pooling_protocol import (
    ClassifyBody,
    EmbeddingsBody,
    InputBody,
    PoolBody,
    RerankBody,
    ScoreBody,
    VectorsBody,
)
from engine_server.request_id import engine_id
from engine_server.state import ServerState, state_of
from engine_server.vector_bytes import vector_bytes

router = APIRouter(route_class=JSONRoute)
OCTETS = "application/octet-stream"
MAX_METADATA_HEADER = 60_000
"""Bytes; Python's own client takes lines of 65,536."""
State = Annotated[ServerState, Depends(state_of)]


@router.post("/v1/embeddings")
async def embeddings(body: EmbeddingsBody, request: Request, state: State) -> Response:
    """A vector for each input."""
    model = state.check_model(body.model)
    outputs = await _pool_inputs(state, request, body, "embd", body.params("embed"))
    return _vectors(body, _head(request, "embd", model), outputs, "embedding", "embedding")


@router.post("/pooling")
async def pooling(body: PoolBody, request: Request, state: State) -> Response:
    """What the model makes of each input: a vector, one for each of its tokens, or a number for each label."""
    model = state.check_model(body.model)
    task = state.engine.plan.model.pooler.tasks[0] if body.task is None else body.task
    outputs = await _pool_inputs(state, request, body, "pooling", body.params(task))
    return _vectors(body, _head(request, "pooling", model), outputs, "pooling", "data")


@router.post("/classify")
async def classify(body: ClassifyBody, request: Request, state: State) -> Response:
    """For each input a number for each label, and the label of the largest."""
    model = state.check_model(body.model)
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
    state: ServerState, request: Request, body: InputBody, prefix: str, params: PoolingParams
) -> list[RequestOutput]:
    params.verify()  # before anything is rendered
    check_task(params.task, state.engine.plan.model)
    prompts = await prompts_of(state, body)
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


def _vectors(body: VectorsBody, head: dict[str, Any], outputs: list[RequestOutput], kind: str, field: str) -> Response:
    """The outputs in the encoding that the body asks for; of JSON, `field` of objects of this kind holds each."""
    dtype, endianness = body.embed_dtype or "float32", body.endianness or "little"
    vectors = [data_of(output) for output in outputs]
    if body.encoding_format == "float":
        shown: list[Any] = [vector.tolist() for vector in vectors]
    else:
        contents = [vector_bytes(vector, dtype, endianness) for vector in vectors]
        if body.encoding_format == "bytes_only":
            return Response(b"".join(contents), media_type=OCTETS)
        if body.encoding_format == "bytes":
            table = _table(vectors, contents, {"embed_dtype": dtype, "endianness": endianness})
            return _bytes({**head, "data": table, "usage": usage(outputs)}, contents)
        shown = [base64.b64encode(content).decode() for content in contents]
    data = [{"object": kind, "index": i, field: one} for i, one in enumerate(shown)]
    return JSON({**head, "data": data, "usage": usage(outputs)})


def _table(vectors: list[np.ndarray], contents: list[bytes], format_: dict[str, str]) -> list[dict[str, Any]]:
    """Where in the bytes each array is, in vLLM's words."""
    ends = list(accumulate(map(len, contents), initial=0))
    return [
        {"index": i, **format_, "start": ends[i], "end": ends[i + 1], "shape": list(vector.shape)}
        for i, vector in enumerate(vectors)
    ]


def _bytes(metadata: dict[str, Any], contents: list[bytes]) -> Response:
    header = json.dumps(metadata, separators=(",", ":"))  # ASCII alone, as a header must be
    if len(header) > MAX_METADATA_HEADER:
        raise APIError(
            400,
            f"encoding_format 'bytes' with {len(contents)} inputs: the header 'metadata' would have {len(header)} "
            f"bytes, at most {MAX_METADATA_HEADER} are sent; send fewer inputs, or encoding_format 'bytes_only'",
            param="encoding_format",
        )
    return Response(b"".join(contents), media_type=OCTETS, headers={"metadata": header})
