"""`POST /v1/chat/completions`."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response

from engine.embedding import RequestState
from engine.types.outputs import CompletionOutput, RequestOutput
from engine_server import logprobs, sse
from engine_server.begun_answer import cut_last
from engine_server.chat_choice import ChatChoice
from engine_server.choices import Usage, UsageSoFar, collect, submit, truncated
from engine_server.disconnect import until_disconnect
from engine_server.documents import with_documents
from engine_server.errors import APIError
from engine_server.json import JSON, JSONRoute
from engine_server.labels import note
from engine_server.protocol import ChatBody, StreamOptions
from engine_server.rendering import check_roles
from engine_server.request_id import engine_id, request_id
from engine_server.state import ServerState, state_of
from engine_server.thinking import with_budget, with_effort
from engine_server.token_stream import TokenStream
from engine_server.tool_request import tool_request
from engine_server.turn import Conversation, prepare

NewChoice = Callable[[], ChatChoice]
router = APIRouter(route_class=JSONRoute)


@router.post("/v1/chat/completions")
async def chat_completions(
    body: ChatBody, request: Request, state: Annotated[ServerState, Depends(state_of)]
) -> Response:
    """Answer a conversation, rendered by the model's chat template."""
    model = state.check_model(body.model)
    if not body.messages:
        raise APIError(400, "messages is empty; send at least one", param="messages")
    check_roles(body.messages)
    if None not in (body.max_tokens, body.max_completion_tokens) and body.max_tokens != body.max_completion_tokens:
        raise APIError(400, "max_tokens and max_completion_tokens differ; send one of them", param="max_tokens")
    max_tokens = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    logprobs_asked = (body.top_logprobs or 0) if body.logprobs else None
    params = body.sampling_params(state.engine.sampling_defaults, max_tokens=max_tokens, logprobs=logprobs_asked)
    note(request, body.user, body.safety_identifier, cache_salt=body.cache_salt)
    tools = tool_request(body.tools, body.tool_choice, body.parallel_tool_calls)
    messages, prefill = cut_last(body.messages) if body.continue_final_message else (body.messages, "")
    conversation = Conversation(
        messages=messages,
        tools=tools,
        add_generation_prompt=body.add_generation_prompt or body.continue_final_message,
        variables=body.chat_template_kwargs,
        prefill=prefill,
    )
    conversation = await with_documents(state, conversation, body.documents)
    conversation = with_budget(state, conversation, body.thinking_token_budget, "thinking_token_budget")
    conversation = await with_effort(state, conversation, body.reasoning_effort, "reasoning_effort")
    turn = await prepare(state, conversation, params, special_tokens_set=body.skip_special_tokens is not None)
    params = turn.params
    reader = None if turn.plain else lambda: ChatChoice(turn.reader(), body.include_reasoning)
    identity = engine_id(request, "chatcmpl")
    streams = await submit(
        state,
        truncated([{**turn.prompt, "add_special_tokens": body.add_special_tokens}], body.truncate_prompt_tokens),
        params,
        identity,
        stream=body.stream,
        priority=body.priority,
        timeout=body.timeout,
        request=request,
    )
    head = {"id": identity, "created": int(time.time()), "model": model}
    if body.service_tier is not None:
        head["service_tier"] = "default"
    if body.stream:
        head = {**head, "object": "chat.completion.chunk"}
        events = _Events(body, params.n, head, reader, streams[0].request, state.force_include_usage)
        return TokenStream(events, streams[0], request_id(request))
    (output,) = await until_disconnect(request, collect(streams))
    return JSON(_answer(body, output, {**head, "object": "chat.completion"}, reader))


def _answer(body: ChatBody, output: RequestOutput, head: dict[str, Any], reader: NewChoice | None) -> dict[str, Any]:
    usage = Usage()
    usage.add(output)
    choices = []
    for completion in output.outputs:
        message: dict[str, Any] = {"role": "assistant", "content": completion.text}
        reason = completion.finish_reason
        if reader is not None:
            choice = reader()
            message, reason = choice.message(completion.text), choice.finish_reason(reason)
        told = {
            "index": completion.index,
            "message": message,
            "logprobs": _logprobs(body, completion),
            "finish_reason": reason,
            "stop_reason": completion.stop_reason,
        }
        if body.return_token_ids:
            told["token_ids"] = completion.token_ids
        choices.append(told)
    answer = {**head, "choices": choices, "usage": usage.json()}
    answer |= _prompt(body, output)
    if body.metadata is not None:
        answer["metadata"] = body.metadata
    if output.prompt_logprobs is not None:
        answer["prompt_logprobs"] = logprobs.prompt(output)
    return answer


def _prompt(body: ChatBody, prompt: RequestOutput | RequestState) -> dict[str, Any]:
    """What is told of the prompt, once."""
    told: dict[str, Any] = {"prompt_token_ids": prompt.prompt_token_ids} if body.return_token_ids else {}
    return {**told, "prompt_text": prompt.prompt} if body.return_prompt_text else told


def _logprobs(body: ChatBody, completion: CompletionOutput) -> dict[str, Any] | None:
    return logprobs.chat(completion, body.top_logprobs or 0, body.return_tokens_as_token_ids)


class _Events:
    """See `engine_server.token_stream.Events`. What is asked of the prompt goes into the first event."""

    def __init__(
        self,
        body: ChatBody,
        n: int,
        head: dict[str, Any],
        reader: NewChoice | None,
        prompt: RequestState,
        include_usage: bool,
    ) -> None:
        self._body, self._n, self._head, self._prompt = body, n, head, prompt
        options = body.stream_options or StreamOptions()
        self._include_usage = include_usage or options.include_usage
        self._so_far = UsageSoFar() if options.continuous_usage_stats else None
        self._blank = {**head, "usage": None} if self._include_usage else head
        self._usage = Usage()
        self._readers = None if reader is None else [reader() for _ in range(n)]
        self._plain: dict[int, sse.PreparedEvent] = {}

    def opening(self) -> bytes:
        events = []
        for index in range(self._n):
            delta = {"role": "assistant", "content": ""}
            first = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
            begun = {**self._blank, "choices": [first], **self._counted(index, 0)}
            events.append(sse.event(begun if index else begun | _prompt(self._body, self._prompt)))
        return b"".join(events)

    def told(self, output: RequestOutput) -> bytes:
        self._usage.add(output)
        if len(output.outputs) == 1:
            return self._of_one(output.outputs[0])
        return b"".join([self._of_one(completion) for completion in output.outputs])

    def closing(self) -> bytes:
        if not self._include_usage:
            return b""
        return sse.event({**self._head, "choices": [], "usage": self._usage.json()})

    def _of_one(self, completion: CompletionOutput) -> bytes:
        if self._readers is not None:
            choice = _read(self._body, completion, self._readers[completion.index])
        elif self._is_plain(completion):
            index = completion.index
            if (plain := self._plain.get(index)) is None:
                plain = self._plain[index] = sse.PreparedEvent(_plain(self._blank, index))
            return plain(completion.text)
        else:
            choice = _delta(self._body, completion)
        counted = self._counted(completion.index, len(completion.token_ids))
        return b"" if choice is None else sse.event({**self._blank, "choices": [choice], **counted})

    def _counted(self, index: int, new_tokens: int) -> dict[str, Any]:
        """The usage of an event, where each has one."""
        if self._so_far is None:
            return {}
        return {"usage": self._so_far.json(index, len(self._prompt.prompt_token_ids), new_tokens)}

    def _is_plain(self, completion: CompletionOutput) -> bool:
        with_more = completion.logprobs is not None or self._body.return_token_ids or self._so_far is not None
        return completion.finish_reason is None and not with_more and bool(completion.token_ids)


def _plain(head: dict[str, Any], index: int) -> Callable[[str], dict[str, Any]]:
    """Makes the chunk of a delta that brings text, and nothing else."""

    def make(text: str) -> dict[str, Any]:
        choice = {"index": index, "delta": {"content": text}, "logprobs": None, "finish_reason": None}
        return {**head, "choices": [choice]}

    return make


def _read(body: ChatBody, completion: CompletionOutput, reader: ChatChoice) -> dict[str, Any] | None:
    """As `_delta`, thoughts, content and calls told apart; None where there is nothing to tell."""
    delta = reader.delta(completion.text, completion.finished)
    with_more = completion.logprobs is not None or body.return_token_ids
    if not delta and not completion.finished and not with_more:
        return None
    choice = _delta(body, completion)
    choice["delta"], choice["finish_reason"] = delta, reader.finish_reason(completion.finish_reason)
    return choice


def _delta(body: ChatBody, completion: CompletionOutput) -> dict[str, Any]:
    choice = {
        "index": completion.index,
        "delta": {"content": completion.text} if completion.text or completion.token_ids else {},
        "logprobs": _logprobs(body, completion),
        "finish_reason": completion.finish_reason,
    }
    if body.return_token_ids:
        choice["token_ids"] = completion.token_ids
    if completion.finish_reason is not None:
        choice["stop_reason"] = completion.stop_reason
    return choice
