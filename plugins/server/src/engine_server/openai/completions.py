"""`POST /v1/completions`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from engine.embedding import Prompt, RequestStream
from engine.types.errors import InvalidRequestError
from engine.types.outputs import CompletionOutput, RequestOutput
from engine_kit.prompt_embeds import read_text
from engine_server import stream
from engine_server.bodies import JSON, LARGE
from engine_server.errors import APIError
from engine_server.middleware import engine_id, note, request_id
from engine_server.openai.answers import Chunks, UsageCount, completion_logprobs, prompt_logprobs
from engine_server.openai.bodies import Completion, CompletionBody, CompletionChoice
from engine_server.state import ServerState, State, collect, sampling_params

DEFAULT_MAX_TOKENS = 16
MAX_PROMPTS = 1024


async def completions(body: CompletionBody, request: Request, state: State) -> Response:
    """Complete one or several prompts; choice `i * n + j` is completion j of prompt i."""
    model = state.admit(body.model)
    if body.echo and body.logprobs is not None:
        raise APIError(400, "logprobs with echo=true is not supported: prompt tokens are not scored", param="echo")
    note(request, body.user, cache_salt=body.cache_salt)
    prompts, texts = body.prompts(), body.embeds()
    if not texts and "prompt" not in body.model_fields_set:
        raise APIError(400, "prompt is missing; send it, or prompt_embeds", param="prompt")
    if not 1 <= (count := len(texts) + len(prompts)) <= MAX_PROMPTS:
        raise APIError(400, f"prompt holds {count} prompts; send 1 to {MAX_PROMPTS}", param="prompt")
    if texts:
        prompts = [*await _embeds(state, texts), *prompts]
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    defaults = state.engine.sampling_defaults
    constraint = body.constraint()
    params = sampling_params(body, defaults, max_tokens, logprobs=body.logprobs, structured_outputs=constraint)
    identity = engine_id(request, "cmpl")
    streams = await state.generate(request, body, prompts, params, identity)
    head: dict[str, Any] = {"id": identity, "object": "text_completion", "created": int(time.time()), "model": model}
    if body.stream:
        events = _TextEvents(state, body, params.n, head)
        if len(streams) == 1:
            return stream.TokenStream(events, streams[0], request_id(request))
        return stream.EventStream(_of_several(events, streams), streams, request_id(request))
    outputs = await stream.until_disconnect(request.receive, collect(streams))
    return JSON(_answer(state, body, outputs, params.n, head))


async def _embeds(state: ServerState, texts: list[str]) -> list[Prompt]:
    """The prompts of `prompt_embeds`; large ones are read in a thread. Raises a 400 APIError for what is none."""
    inputs = state.engine.inputs

    def read() -> list[Prompt]:
        return [{"prompt_embeds": read_text(text, inputs.model, inputs.max_model_len)} for text in texts]

    try:
        return read() if sum(map(len, texts)) < LARGE else await asyncio.to_thread(read)
    except InvalidRequestError as error:
        raise APIError(400, str(error), param="prompt_embeds", code=error.code) from error


def _answer(
    state: ServerState, body: CompletionBody, outputs: list[RequestOutput], n: int, head: dict[str, Any]
) -> Completion:
    choices = []
    count = UsageCount()
    for i, output in enumerate(outputs):
        count.add(output)
        echo = _echo(state, body, output)
        for completion in output.outputs:
            choice = _choice(body, i * n + completion.index, echo, completion, 0)
            if body.return_token_ids:
                choice["prompt_token_ids"] = output.prompt_token_ids
            if output.prompt_logprobs is not None:
                choice["prompt_logprobs"] = prompt_logprobs(output)
            choices.append(CompletionChoice(**choice))
    if outputs[0].kv_transfer is not None:
        head["kv_transfer_params"] = outputs[0].kv_transfer
    return Completion(**head, choices=choices, usage=count.usage())


class _TextEvents(Chunks):
    """Of several requests, too."""

    def __init__(self, state: ServerState, body: CompletionBody, n: int, head: dict[str, Any]) -> None:
        super().__init__(body, head, state.settings.enable_force_include_usage)
        self._state = state
        self._body = body
        self._n = n
        self._characters: dict[int, int] = {}

    def told(self, output: RequestOutput, prompt: int = 0) -> bytes:
        self._usage.add(output)
        events = [self._of_one(output, completion, prompt) for completion in output.outputs]
        return events[0] if len(events) == 1 else b"".join(events)

    def _of_one(self, output: RequestOutput, completion: CompletionOutput, prompt: int) -> bytes:
        index = prompt * self._n + completion.index
        begins = index not in self._characters
        echo = _echo(self._state, self._body, output) if begins else ""
        offset = self._characters.get(index, 0)
        self._characters[index] = offset + len(completion.text)
        if self._is_plain(completion):
            plain = self._plain.get(index) or self._prepared(index)
            return plain(echo + completion.text)
        choice = _choice(self._body, index, echo, completion, offset)
        if self._with_ids and begins:
            choice["prompt_token_ids"] = output.prompt_token_ids
        return self._event(index, choice, len(output.prompt_token_ids), len(completion.token_ids))

    def _text_choice(self, index: int, text: str) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": None, "finish_reason": None, "stop_reason": None}


async def _of_several(events: _TextEvents, streams: list[RequestStream]) -> AsyncGenerator[bytes]:
    async for i, output in _merged(streams):
        yield events.told(output, i)
    yield events.closing() + stream.DONE


async def _merged(streams: list[RequestStream]) -> AsyncGenerator[tuple[int, RequestOutput]]:
    """(stream's index, its next output) from all streams, as they come."""
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


def _choice(body: CompletionBody, index: int, echo: str, completion: CompletionOutput, offset: int) -> dict[str, Any]:
    choice: dict[str, Any] = {
        "index": index,
        "text": echo + completion.text,
        "logprobs": completion_logprobs(completion, body.logprobs or 0, offset, body.return_tokens_as_token_ids),
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
    }
    if body.return_token_ids:
        choice["token_ids"] = completion.token_ids
    return choice


def _echo(state: ServerState, body: CompletionBody, output: RequestOutput) -> str:
    if not body.echo:
        return ""
    if output.prompt is not None:
        return output.prompt
    embeds = state.adapters.embeds(body.model)
    ids = output.prompt_token_ids
    tokenizer = state.engine.inputs.tokenizer_of(state.adapters.get(body.model))
    return tokenizer.decode(ids if embeds is None else ids[len(embeds.data) :])
