"""From the engine's streams to what OpenAI's answers are made of."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, cast

from fastapi import Request

from engine.embedding import OutputKind, Prompt, RequestStream
from engine.types.outputs import RequestOutput
from engine.types.params import SamplingParams
from engine_server.errors import APIError
from engine_server.plugins import origin
from engine_server.state import ServerState

MAX_COMPLETIONS = 4096
"""The most sequences that one HTTP request may ask for."""


async def submit(
    state: ServerState,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    identity: str,
    *,
    stream: bool,
    priority: int = 0,
    timeout: float | None = None,
    request: Request | None = None,
) -> list[RequestStream]:
    """Queue every prompt, or none: one that is refused takes the others back. Hooks are told of the HTTP `request`.

    With `stream` the outputs hold only what is new; without, one comes at the end. Raises a 429 APIError where the
    queue is full, 400 where the completions are too many, and what `AsyncLLM.process` and `enqueue` raise.
    """
    if len(prompts) * params.num_sequences > MAX_COMPLETIONS:
        raise APIError(
            400,
            f"{len(prompts)} prompts of {params.num_sequences} completions each are "
            f"{len(prompts) * params.num_sequences} completions; "
            f"ask for up to {MAX_COMPLETIONS} in one request",
            param="n",
        )
    state.check_queue()
    if request is not None:
        prompts = salted(prompts, request, state)
    engine = state.engine
    told = origin(request) if request is not None and engine.told_of_requests else None
    processed = []
    for i, prompt in enumerate(prompts):
        name = identity if len(prompts) == 1 else f"{identity}-{i}"
        processed.append(await engine.process(prompt, params, name, priority, timeout, told))
    state.check_queue()  # again: meanwhile others came
    kind = OutputKind.DELTA if stream else OutputKind.FINAL
    streams: list[RequestStream] = []
    try:
        for one in processed:
            streams.append(engine.enqueue(one, kind))
    except BaseException:
        for stream_ in streams:
            stream_.close()
        raise
    return streams


def salted(prompts: Sequence[Prompt], request: Request, state: ServerState) -> Sequence[Prompt]:
    """The prompts so that they share no cached pages with those of other API keys, unless they may, and none with those
    of another `cache_salt`."""
    noted = request.scope["state"]
    salts = (None if state.share_prefix_cache else noted.get("cache_salt"), noted.get("own_salt"))
    for salt in filter(None, reversed(salts)):
        prompts = [_salted(prompt, salt) for prompt in prompts]
    return prompts


def truncated(prompts: Sequence[Prompt], most: int | None) -> Sequence[Prompt]:
    """The prompts, to be cut to so many tokens."""
    return prompts if most is None else [cast(Prompt, {**_fields(p), "truncate_prompt_tokens": most}) for p in prompts]


def _fields(prompt: Prompt) -> dict[str, Any]:
    if isinstance(prompt, str):
        return {"prompt": prompt}
    return dict(prompt) if isinstance(prompt, Mapping) else {"prompt_token_ids": prompt}


def _salted(prompt: Prompt, salt: str) -> Prompt:
    """The prompt with this salt, before its own where it has one."""
    fields = _fields(prompt)
    own = fields.get("cache_salt")
    return cast(Prompt, {**fields, "cache_salt": salt if own is None else f"{salt} {own}"})


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


class Usage:
    """Counts tokens over all prompts and completions of an answer, whole outputs or deltas alike."""

    def __init__(self) -> None:
        self._prompts: dict[str, tuple[int, int]] = {}
        self._completion = 0

    def add(self, output: RequestOutput) -> None:
        """Count one output of a stream."""
        self._prompts[output.request_id] = len(output.prompt_token_ids), output.num_cached_tokens
        for completion in output.outputs:
            self._completion += len(completion.token_ids)
        self._completion += output.num_discarded_tokens

    def json(self) -> dict[str, Any]:
        """As OpenAI's `usage`."""
        prompt = sum(length for length, _ in self._prompts.values())
        cached = sum(found for _, found in self._prompts.values())
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self._completion,
            "total_tokens": prompt + self._completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }


class UsageSoFar:
    """Counts tokens of each choice while they come: vLLM's `continuous_usage_stats`."""

    def __init__(self) -> None:
        self._completions: dict[int, int] = {}

    def json(self, index: int, num_prompt_tokens: int, new_tokens: int = 0) -> dict[str, int]:
        """As OpenAI's `usage`, of a choice that has so many tokens more."""
        told = self._completions[index] = self._completions.get(index, 0) + new_tokens
        return {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": told,
            "total_tokens": num_prompt_tokens + told,
        }
