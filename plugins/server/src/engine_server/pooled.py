"""Requests that pool: queue their prompts, wait for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import Request

from engine.embedding import OutputKind, check_task
from engine.types.outputs import RequestOutput
from engine.types.pooling import PoolingParams
from engine_server.choices import collect, salted
from engine_server.disconnect import until_disconnect
from engine_server.errors import APIError
from engine_server.labels import note
from engine_server.plugins import origin
from engine_server.pooling_protocol import InputBody, PoolingBody
from engine_server.rendering import rendered
from engine_server.request_id import engine_id
from engine_server.state import ServerState

MAX_INPUTS = 2048
"""The most prompts of one request, as at OpenAI."""


def check_count(count: int, name: str) -> None:
    """Raise a 400 APIError for no prompts and for too many; `name` is the field that holds them."""
    if not 1 <= count <= MAX_INPUTS:
        raise APIError(400, f"{name} holds {count} prompts; send 1 to {MAX_INPUTS}", param=name)


async def prompts_of(state: ServerState, body: InputBody) -> list[Any]:
    """The body's prompts, as the engine takes them; of a conversation one.

    Raises APIError for no prompts, too many, or messages that are none; and as `AsyncLLM.render_chat`.
    """
    if body.messages is None:
        check_count(len(body.inputs()), "input")
        return body.prompts()
    prompt = await rendered(
        state,
        body.messages,
        add_generation_prompt=bool(body.add_generation_prompt),
        continue_final_message=bool(body.continue_final_message),
        variables=body.chat_template_kwargs,
    )
    return [{**prompt, "add_special_tokens": bool(body.add_special_tokens), **body.cut()}]


async def pool(
    state: ServerState,
    request: Request,
    body: PoolingBody,
    prefix: str,
    prompts: Sequence[Any],
    params: Sequence[PoolingParams],
) -> list[RequestOutput]:
    """Pool every prompt, or none: one that is refused takes the others back. A client that leaves ends them.

    Args:
        state: the server's.
        request: what hooks are told of, and whose client is watched.
        body: its priority and its timeout.
        prefix: of the ids.
        prompts: at least one.
        params: one for each.

    Raises a 429 APIError where the queue is full, and what `AsyncLLM.process` and `enqueue` raise.
    """
    note(request, body.user, cache_salt=body.cache_salt)
    engine, identity = state.engine, engine_id(request, prefix)
    for task in dict.fromkeys(one.task for one in params):
        check_task(task, engine.plan.model)  # before anything is tokenised
    state.check_queue()
    told = origin(request) if engine.told_of_requests else None
    processed = []
    for i, (prompt, one) in enumerate(zip(salted(prompts, request, state), params, strict=True)):
        name = identity if len(prompts) == 1 else f"{identity}-{i}"
        processed.append(await engine.process(prompt, one, name, body.priority, body.timeout, told))
    state.check_queue()  # again: meanwhile others came
    streams = []
    try:
        for ready in processed:
            streams.append(engine.enqueue(ready, OutputKind.FINAL))
    except BaseException:
        for stream in streams:
            stream.close()
        raise
    return await until_disconnect(request, collect(streams))


def usage(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """As OpenAI's `usage`: of all prompts that were computed."""
    tokens = sum(len(output.prompt_token_ids) for output in outputs)
    cached = sum(output.num_cached_tokens for output in outputs)
    return {
        "prompt_tokens": tokens,
        "completion_tokens": 0,
        "total_tokens": tokens,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
