"""What the routes answer, as JSON schemas for the OpenAPI document. Answers may hold more than is named here."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
WHOLE: Schema = {"type": "integer"}
NUMBER: Schema = {"type": "number"}
TRUTH: Schema = {"type": "boolean"}
ANY: Schema = {"type": "object"}


def fields(optional: dict[str, Schema] | None = None, /, **required: Schema) -> Schema:
    """An object with these fields."""
    return {"type": "object", "properties": {**required, **(optional or {})}, "required": list(required)}


def many(items: Schema) -> Schema:
    """A list of such."""
    return {"type": "array", "items": items}


def only(*values: str) -> Schema:
    """One of these texts."""
    return {"type": "string", "enum": list(values)}


def maybe(schema: Schema) -> Schema:
    """The same, or null."""
    return {"anyOf": [schema, {"type": "null"}]}


_ERROR = fields(message=TEXT, type=TEXT, param=maybe(TEXT), code=maybe(TEXT))
_ANTHROPIC_ERROR = fields({"param": TEXT, "code": TEXT}, message=TEXT, type=TEXT)
ERROR = fields(error=_ERROR)
"""Of all routes but Anthropic's."""
ANTHROPIC_ERROR = fields(type=only("error"), error=_ANTHROPIC_ERROR, request_id=maybe(TEXT))

_RANK = fields(rank=WHOLE, alive=TRUTH, running=WHOLE, waiting=WHOLE, kv_cache_usage=NUMBER)
_CACHED = fields(cached_tokens=WHOLE)
_USAGE = fields(prompt_tokens=WHOLE, completion_tokens=WHOLE, total_tokens=WHOLE, prompt_tokens_details=_CACHED)
_MODEL = fields(id=TEXT, object=only("model"), created=WHOLE, owned_by=TEXT, root=TEXT, max_model_len=WHOLE)
_CALL = fields(id=TEXT, type=only("function"), function=fields(name=TEXT, arguments=TEXT))
_MESSAGE = fields(
    {"reasoning_content": maybe(TEXT), "tool_calls": many(_CALL)}, role=only("assistant"), content=maybe(TEXT)
)
_REASON = only("stop", "length", "tool_calls", "abort")
_STOPPED: dict[str, Schema] = {
    "logprobs": maybe(ANY),
    "finish_reason": _REASON,
    "stop_reason": {"anyOf": [TEXT, WHOLE, {"type": "null"}]},
}
_IDS = many(WHOLE)
"""With `return_token_ids`."""
_POOLED: dict[str, Schema] = {"id": TEXT, "object": only("list"), "created": WHOLE, "model": TEXT, "usage": _USAGE}
_SCORES = fields(**_POOLED, data=many(fields(index=WHOLE, object=only("score"), score=NUMBER)))
_RANKED = fields({"document": fields(text=TEXT)}, index=WHOLE, relevance_score=NUMBER)
_RANKING = fields(id=TEXT, model=TEXT, usage=_USAGE, results=many(_RANKED))
_RESPONSE = fields(
    {"usage": maybe(fields(input_tokens=WHOLE, output_tokens=WHOLE, total_tokens=WHOLE))},
    id=TEXT,
    object=only("response"),
    created_at=WHOLE,
    model=TEXT,
    status=only("completed", "incomplete", "in_progress", "failed", "cancelled"),
    output=many(fields(type=only("message", "function_call", "reasoning"), id=TEXT)),
    error=maybe(fields(code=TEXT, message=TEXT)),
    incomplete_details=maybe(fields(reason=TEXT)),
    metadata=ANY,
)
_RANKS_DONE = many(WHOLE)
_HEALTH = fields(status=only("ok", "degraded", "unavailable"), ranks=many(_RANK))

ANSWERS: dict[str, Schema] = {
    "GET /health": _HEALTH,
    "GET /ping": _HEALTH,
    "POST /ping": _HEALTH,
    "GET /ready": fields(status=TEXT),
    "GET /load": fields(server_load=WHOLE, running=WHOLE, waiting=WHOLE, kv_cache_usage=NUMBER, ranks=many(_RANK)),
    "GET /version": fields(version=TEXT),
    "GET /server_info": ANY,
    "GET /admin/plugins": fields(plugins=many(ANY)),
    "POST /admin/kv/reset": fields(reset=only("prefix_cache"), ranks=_RANKS_DONE),
    "POST /admin/profile/start": fields(profiling=TRUTH, ranks=_RANKS_DONE),
    "POST /admin/profile/stop": fields(profiling=TRUTH, files={}),
    "GET /v1/models": fields(object=only("list"), data=many(_MODEL)),
    "GET /v1/models/{name}": _MODEL,
    "POST /v1/completions": fields(
        id=TEXT,
        object=only("text_completion"),
        created=WHOLE,
        model=TEXT,
        choices=many(
            fields(
                {"prompt_logprobs": maybe(many(maybe(ANY))), "prompt_token_ids": _IDS, "token_ids": _IDS},
                index=WHOLE,
                text=TEXT,
                **_STOPPED,
            )
        ),
        usage=_USAGE,
    ),
    "POST /v1/chat/completions": fields(
        {
            "prompt_logprobs": maybe(many(maybe(ANY))),
            "metadata": ANY,
            "prompt_token_ids": _IDS,
            "prompt_text": maybe(TEXT),
        },
        id=TEXT,
        object=only("chat.completion"),
        created=WHOLE,
        model=TEXT,
        choices=many(fields({"token_ids": _IDS}, index=WHOLE, message=_MESSAGE, **_STOPPED)),
        usage=_USAGE,
    ),
    "POST /v1/messages": fields(
        id=TEXT,
        type=only("message"),
        role=only("assistant"),
        model=TEXT,
        content=many(fields(type=only("text", "tool_use", "thinking"))),
        stop_reason=only("end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"),
        stop_sequence=maybe(TEXT),
        usage=fields(input_tokens=WHOLE, output_tokens=WHOLE, cache_read_input_tokens=WHOLE),
    ),
    "POST /v1/messages/count_tokens": fields(input_tokens=WHOLE),
    "POST /v1/responses": _RESPONSE,
    "GET /v1/responses/{identity}": _RESPONSE,
    "DELETE /v1/responses/{identity}": fields(id=TEXT, deleted=TRUTH),
    "POST /v1/responses/{identity}/cancel": _RESPONSE,
    "GET /v1/responses/{identity}/input_items": fields(
        object=only("list"),
        data=many(fields(id=TEXT, type=TEXT)),
        has_more=TRUTH,
        first_id=maybe(TEXT),
        last_id=maybe(TEXT),
    ),
    "POST /v1/embeddings": fields(
        **_POOLED,
        data=many(fields(object=only("embedding"), index=WHOLE, embedding={"anyOf": [TEXT, many(NUMBER)]})),
    ),
    "POST /pooling": fields(
        **_POOLED, data=many(fields(object=only("pooling"), index=WHOLE, data={"anyOf": [TEXT, many({})]}))
    ),
    "POST /classify": fields(
        **_POOLED, data=many(fields(index=WHOLE, label=TEXT, probs=many(NUMBER), num_classes=WHOLE))
    ),
    "POST /score": _SCORES,
    "POST /v1/score": _SCORES,
    "POST /rerank": _RANKING,
    "POST /v1/rerank": _RANKING,
    "POST /v2/rerank": _RANKING,
    "POST /tokenize": fields(count=WHOLE, max_model_len=WHOLE, tokens=many(WHOLE), token_strs=maybe(many(TEXT))),
    "POST /detokenize": fields(prompt=TEXT),
}
"""By method and path: the body of a 200."""
