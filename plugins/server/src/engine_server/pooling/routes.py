"""`/v1/embeddings`, `/pooling`, `/classify`, `/score`, `/rerank`: vectors, labels and scores in place of text."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from engine.types.outputs import RequestOutput
from engine.types.pooling import PoolingParams
from engine_kit.request_checks import check_task
from engine_kit.scoring import plan_scores
from engine_server.bodies import JSON, Answer, CachedTokens, Usage, prompts_of, several
from engine_server.conversation.turn import render, said
from engine_server.errors import APIError
from engine_server.middleware import engine_id, note
from engine_server.pooling import bodies
from engine_server.pooling.vector_bytes import vector_bytes
from engine_server.state import ServerState, State, collect
from engine_server.stream import until_disconnect

OCTETS = "application/octet-stream"
MAX_METADATA_HEADER = 60_000
"""Bytes; Python's own client takes lines of 65,536."""
MAX_INPUTS = 2048
"""The most prompts of one request, as at OpenAI."""


async def embeddings(body: bodies.EmbeddingsBody, request: Request, state: State) -> Response:
    """A vector for each input."""
    model = state.admit(body.model)
    outputs = await _pool_inputs(state, request, body, "embd", body.params("embed"))
    return _vectors(body, _head(request, "embd", model), outputs, _embeddings)


async def pooling(body: bodies.PoolBody, request: Request, state: State) -> Response:
    """What the model makes of each input: a vector, one for each of its tokens, or a number for each label."""
    model = state.admit(body.model)
    task = state.engine.plan.model.pooler.tasks[0] if body.task is None else body.task
    outputs = await _pool_inputs(state, request, body, "pooling", body.params(task))
    return _vectors(body, _head(request, "pooling", model), outputs, _pooled)


async def classify(body: bodies.ClassifyBody, request: Request, state: State) -> Response:
    """For each input a number for each label, and the label of the largest."""
    model = state.admit(body.model)
    params = PoolingParams(task="classify", use_activation=body.use_activation)
    outputs = await _pool_inputs(state, request, body, "classify", params)
    labels = state.engine.plan.model.config.get("id2label") or {}
    data = []
    for i, probs in enumerate(output.data for output in outputs):
        best = int(probs.argmax())
        label = str(labels.get(str(best), f"LABEL_{best}"))  # some config.json have numbers there
        data.append(bodies.Labelled(index=i, label=label, probs=probs.tolist(), num_classes=len(probs)))
    return JSON(bodies.Classified(**_head(request, "classify", model), data=data, usage=_usage(outputs)))


async def score(body: bodies.ScoreBody, request: Request, state: State) -> Response:
    """How well each pair of texts fits: one against one, one against several, or equally many."""
    model = state.admit(body.model)
    first, second = body.texts()
    _check_count(max(len(first), len(second)), "text_2")
    params = PoolingParams(use_activation=body.use_activation)
    scores, outputs = await _scores(state, request, body, "score", first, second, params)
    data = [bodies.Score(index=i, object="score", score=score) for i, score in enumerate(scores)]
    return JSON(bodies.Scores(**_head(request, "score", model), data=data, usage=_usage(outputs)))


async def rerank(body: bodies.RerankBody, request: Request, state: State) -> Response:
    """The documents that fit the query best, best first; of equal ones the first."""
    model = state.admit(body.model)
    texts = body.texts()
    _check_count(len(texts), "documents")
    params = PoolingParams(use_activation=body.use_activation)
    scores, outputs = await _scores(state, request, body, "rerank", [body.query], texts, params)
    with_texts = body.return_documents
    if with_texts is None:
        with_texts = request.url.path != "/v2/rerank"
    order = sorted(range(len(texts)), key=lambda i: -scores[i])[: body.top_n or None]
    results = []
    for i in order:
        document = {"document": bodies.RankedText(text=texts[i])} if with_texts else {}
        results.append(bodies.Ranked(index=i, relevance_score=scores[i], **document))
    identity, usage = engine_id(request, "rerank"), _usage(outputs)
    return JSON(bodies.Ranking(id=identity, model=model, usage=usage, results=results))


def _check_count(count: int, name: str) -> None:
    """Raise a 400 APIError for no prompts and for too many; `name` is the field that holds them."""
    if not 1 <= count <= MAX_INPUTS:
        raise APIError(400, f"{name} holds {count} prompts; send 1 to {MAX_INPUTS}", param=name)


async def _pool(
    state: ServerState,
    request: Request,
    body: bodies.PoolingBody,
    prefix: str,
    prompts: Sequence[Any],
    params: Sequence[PoolingParams],
) -> list[RequestOutput]:
    """Pool every prompt (with params of its own), or none: one that is refused takes the others back. A client that
    leaves ends them. Ids begin with the prefix. Raises what `AsyncLLM.submit_all` raises."""
    note(request, body.user, cache_salt=body.cache_salt)
    for task in dict.fromkeys(one.task for one in params):
        check_task(task, state.engine.plan.model)  # before anything is tokenised
    streams = await state.submit(request, body, prompts, params, engine_id(request, prefix))
    return await until_disconnect(request.receive, collect(streams))


async def _pool_inputs(
    state: ServerState, request: Request, body: bodies.InputBody, prefix: str, params: PoolingParams
) -> list[RequestOutput]:
    params.verify()  # before anything is rendered
    check_task(params.task, state.engine.plan.model)
    special = body.add_special_tokens
    if body.input is not None:
        inputs = several(body.input)
        _check_count(len(inputs), "input")
    else:
        prompt = await render(state, said(body, add_generation_prompt=bool(body.add_generation_prompt)))
        inputs, special = [prompt["prompt"]], bool(special)
    prompts = prompts_of(inputs, special, body.truncate_prompt_tokens)
    return await _pool(state, request, body, prefix, prompts, [params] * len(prompts))


async def _scores(
    state: ServerState,
    request: Request,
    body: bodies.ScoreBody | bodies.RerankBody,
    prefix: str,
    first: list[str],
    second: list[str],
    params: PoolingParams,
) -> tuple[list[float], list[RequestOutput]]:
    if params.use_activation is not None and not state.engine.plan.model.pooler.num_labels:
        raise APIError(
            400, "use_activation is for cross-encoders, this model's scores are cosines", param="use_activation"
        )
    planned = partial(plan_scores, state.engine.inputs, first, second, params, body.truncate_prompt_tokens)
    length = sum(map(len, first)) * (len(second) if len(first) == 1 else 1) + sum(map(len, second))
    plan = await state.engine.long.run(planned, length)
    outputs = await _pool(state, request, body, prefix, plan.prompts, plan.params)
    return [one.outputs.score for one in plan.scores(outputs)], outputs


def _head(request: Request, prefix: str, model: str) -> dict[str, Any]:
    return {"id": engine_id(request, prefix), "object": "list", "created": int(time.time()), "model": model}


def _embeddings(vectors: list[Any], **head: Any) -> bodies.Embeddings:
    data = [bodies.Embedding(object="embedding", index=i, embedding=one) for i, one in enumerate(vectors)]
    return bodies.Embeddings(data=data, **head)


def _pooled(vectors: list[Any], **head: Any) -> bodies.Pooled:
    return bodies.Pooled(
        data=[bodies.PooledInput(object="pooling", index=i, data=one) for i, one in enumerate(vectors)], **head
    )


def _vectors(
    body: bodies.VectorsBody, head: dict[str, Any], outputs: list[RequestOutput], answer: Callable[..., Answer]
) -> Response:
    """The outputs in the encoding that the body asks for; `answer` makes JSON of them."""
    dtype, endianness = body.embed_dtype or "float32", body.endianness or "little"
    vectors = [output.data for output in outputs]
    if body.encoding_format == "float":
        shown: list[Any] = [vector.tolist() for vector in vectors]
    else:
        contents = [vector_bytes(vector, dtype, endianness) for vector in vectors]
        if body.encoding_format == "bytes_only":
            return Response(b"".join(contents), media_type=OCTETS)
        if body.encoding_format == "bytes":
            usage, ends = _usage(outputs).model_dump(), list(accumulate(map(len, contents), initial=0))
            form = {"embed_dtype": dtype, "endianness": endianness}
            table = [  # where in the bytes each array is, in vLLM's words
                {"index": i, **form, "start": ends[i], "end": ends[i + 1], "shape": list(vector.shape)}
                for i, vector in enumerate(vectors)
            ]
            return _bytes({**head, "data": table, "usage": usage}, contents)
        shown = [base64.b64encode(content).decode() for content in contents]
    return JSON(answer(shown, **head, usage=_usage(outputs)))


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


def _usage(outputs: Sequence[RequestOutput]) -> Usage:
    tokens = sum(len(output.prompt_token_ids) for output in outputs)
    cached = CachedTokens(cached_tokens=sum(output.num_cached_tokens for output in outputs))
    return Usage(prompt_tokens=tokens, completion_tokens=0, total_tokens=tokens, prompt_tokens_details=cached)
