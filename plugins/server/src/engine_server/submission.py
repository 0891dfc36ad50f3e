"""Requests on their way to the engine, of whatever protocol, and the way back: what all routes that generate share; and
how many tokens an answer took, as OpenAI's `usage` tells it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from typing import Any, cast

from fastapi import Request

from engine.embedding import OutputKind, Prompt, RequestStream
from engine.types.hooks import HTTPOrigin
from engine.types.outputs import RequestOutput
from engine.types.params import SamplingParams
from engine.types.pooling import PoolingParams
from engine_server.bodies import Answer, GeneratingBody, QueuedBody
from engine_server.errors import APIError
from engine_server.keys import is_secret
from engine_server.state import ServerState

MAX_COMPLETIONS = 4096
"""The most sequences that one HTTP request may ask for."""


def origin(request: Request) -> HTTPOrigin:
    """What hooks are told of a request that came over HTTP."""
    headers: dict[str, str] = {}
    for name, value in request.headers.items():
        if not is_secret(name):
            headers[name] = f"{headers[name]}, {value}" if name in headers else value
    client = "" if request.client is None else request.client.host
    return HTTPOrigin(method=request.method, path=request.url.path, headers=headers, client=client)


async def generate(
    state: ServerState,
    request: Request,
    body: GeneratingBody,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    identity: str,
) -> list[RequestStream]:
    """As `submit`, to generate from each prompt alike. Where the body says `stream`, the outputs hold only what is new;
    else one comes at the end. Raises a 400 APIError, too, where the completions are too many."""
    if (completions := len(prompts) * params.num_sequences) > MAX_COMPLETIONS:
        params.verify()  # what it refuses, it refuses in better words
        raise APIError(
            400,
            f"{len(prompts)} prompts of {params.num_sequences} completions each are {completions} completions; "
            f"ask for up to {MAX_COMPLETIONS} in one request",
            param="n",
        )
    kind = OutputKind.DELTA if body.stream else OutputKind.FINAL
    return await submit(state, request, body, prompts, [params] * len(prompts), identity, kind)


async def submit(
    state: ServerState,
    request: Request,
    body: QueuedBody,
    prompts: Sequence[Prompt],
    params: Sequence[SamplingParams | PoolingParams],
    identity: str,
    kind: OutputKind = OutputKind.FINAL,
) -> list[RequestStream]:
    """Queue every prompt, or none: one that is refused takes the others back. Hooks are told of the HTTP `request`.

    Raises what `AsyncLLM.process` and `enqueue` raise.
    """
    engine = state.engine
    told = origin(request) if engine.told_of_requests else None
    processed = []
    for i, (prompt, one) in enumerate(zip(salted(prompts, request, state), params, strict=True)):
        name = identity if len(prompts) == 1 else f"{identity}-{i}"
        processed.append(await engine.process(prompt, one, name, body.priority, body.timeout, told))
    streams: list[RequestStream] = []
    try:
        for ready in processed:
            streams.append(engine.enqueue(ready, kind))
    except BaseException:
        for stream in streams:
            stream.close()
        raise
    return streams


def salted(prompts: Sequence[Prompt], request: Request, state: ServerState) -> Sequence[Prompt]:
    """The prompts so that they share no cached pages with those of other API keys, unless they may, and none with those
    of another `cache_salt`."""
    noted = request.scope["state"]
    of_key = None if state.settings.share_prefix_cache else noted.get("cache_salt")
    salts = [*filter(None, (of_key, noted.get("own_salt")))]
    if not salts:
        return prompts
    several = [_fields(prompt) for prompt in prompts]
    for fields in several:
        own = fields.get("cache_salt")
        fields["cache_salt"] = " ".join(salts if own is None else [*salts, own])
    return [cast(Prompt, fields) for fields in several]


def truncated(prompts: Sequence[Prompt], most: int | None) -> Sequence[Prompt]:
    """The prompts, to be cut to so many tokens."""
    return prompts if most is None else [cast(Prompt, {**_fields(p), "truncate_prompt_tokens": most}) for p in prompts]


def _fields(prompt: Prompt) -> dict[str, Any]:
    """The prompt as a dict, which is new."""
    if isinstance(prompt, str):
        return {"prompt": prompt}
    return dict(prompt) if isinstance(prompt, Mapping) else {"prompt_token_ids": prompt}


async def collect(streams: list[RequestStream]) -> list[RequestOutput]:
    """Wait for all of them. An error in one, or cancellation, aborts the others."""
    try:
        return [await stream.final() for stream in streams]
    finally:
        for stream in streams:
            stream.close()


async def merged(streams: list[RequestStream]) -> AsyncGenerator[tuple[int, RequestOutput]]:
    """(stream's index, its next output) from all streams, as they come."""
    if len(streams) == 1:
        async for only in streams[0]:
            yield 0, only
        return
    pending = {asyncio.ensure_future(anext(stream, None)): i for i, stream in enumerate(streams)}
    try:
        while pending:
            done, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                i = pending.pop(task)
                if (output := task.result()) is not None:
                    pending[asyncio.ensure_future(anext(streams[i], None))] = i
                    yield i, output
    finally:
        for task in pending:
            task.cancel()


class CachedTokens(Answer):
    """Of the prompt's tokens."""

    cached_tokens: int


class Usage(Answer):
    """Tokens over all prompts and completions of an answer."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


def usage_of_prompts(outputs: Iterable[RequestOutput]) -> Usage:
    """Of prompts that were pooled."""
    told = list(outputs)
    tokens = sum(len(output.prompt_token_ids) for output in told)
    cached = CachedTokens(cached_tokens=sum(output.num_cached_tokens for output in told))
    return Usage(prompt_tokens=tokens, completion_tokens=0, total_tokens=tokens, prompt_tokens_details=cached)
