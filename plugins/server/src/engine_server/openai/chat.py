"""`POST /v1/chat/completions`."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from engine.embedding import RequestState, TextPrompt
from engine.interfaces.tool_parser import BrokenCall, ToolCallDelta
from engine.types.outputs import CompletionOutput, RequestOutput
from engine_kit.tool_text import whole
from engine_server import stream
from engine_server.bodies import JSON
from engine_server.conversation.completion import CompletionReader, new_id
from engine_server.conversation.tools import tool_request
from engine_server.conversation.turn import prepare, said, with_budget, with_documents, with_effort
from engine_server.errors import APIError
from engine_server.middleware import engine_id, note, request_id
from engine_server.openai.answers import Chunks, UsageCount, chat_logprobs, prompt_logprobs
from engine_server.openai.bodies import ChatBody, ChatChoice, ChatCompletion, ChatMessage, FunctionCall, ToolCall
from engine_server.state import State, collect, sampling_params


class ChatReader:
    """Makes a chat message of what `reader` tells of one completion; `with_thoughts` False leaves thoughts out."""

    def __init__(self, reader: CompletionReader, with_thoughts: bool = True) -> None:
        self._reader = reader
        self._with_thoughts = with_thoughts
        self._complete = 0
        self._broken = False

    def message(self, text: str) -> ChatMessage:
        """The message of a whole text."""
        thoughts, events = self._reader.push(text, finished=True)
        content, calls = whole(events)
        self._complete = len(calls)
        more: dict[str, Any] = {}
        if self._reader.has_thoughts and self._with_thoughts:
            more["reasoning_content"] = thoughts or None
        if calls:
            more["tool_calls"] = [
                ToolCall(
                    id=call.call_id or new_id(),
                    type="function",
                    function=FunctionCall(name=call.name, arguments=call.arguments),
                )
                for call in calls
            ]
        return ChatMessage(role="assistant", content=content if content or not calls else None, **more)

    def delta(self, text: str, finished: bool) -> dict[str, Any]:
        """What more of the text adds to the message; empty where that is nothing yet. Call it once with `finished`."""
        thoughts, events = self._reader.push(text, finished)
        delta: dict[str, Any] = {"reasoning_content": thoughts} if thoughts and self._with_thoughts else {}
        content: list[str] = []
        calls: dict[int, dict[str, Any]] = {}
        for event in events:
            if isinstance(event, str):
                content.append(event)
            elif isinstance(event, BrokenCall):
                self._broken = True
                content.append(event.untold)
            else:
                self._add(calls, event)
        if any(content):
            delta["content"] = "".join(content)
        if calls:
            delta["tool_calls"] = list(calls.values())
        return delta

    def finish_reason(self, reason: str | None) -> str | None:
        """OpenAI's word for how it ended: calls are the reason where there are some, and all of them are whole."""
        return "tool_calls" if reason == "stop" and self._complete and not self._broken else reason

    def _add(self, calls: dict[int, dict[str, Any]], event: ToolCallDelta) -> None:
        """An event of a call, joined with those of the same call in this delta: clients take one entry for each."""
        self._complete += event.complete
        if event.name:
            calls[event.call] = {
                "index": event.call,
                "id": event.call_id or new_id(),
                "type": "function",
                "function": {"name": event.name, "arguments": event.arguments},
            }
        elif event.arguments:
            entry = calls.setdefault(event.call, {"index": event.call, "function": {"arguments": ""}})
            entry["function"]["arguments"] += event.arguments


NewReader = Callable[[], ChatReader]


async def chat_completions(body: ChatBody, request: Request, state: State) -> Response:
    """Answer a conversation, rendered by the model's chat template."""
    model = state.admit(body.model)
    tools = tool_request(body.tools, body.tool_choice, body.parallel_tool_calls)
    conversation = said(body, add_generation_prompt=body.add_generation_prompt, tools=tools)
    conversation = with_documents(state, conversation, body.documents)
    conversation = with_budget(state, conversation, body.thinking_token_budget, "thinking_token_budget")
    conversation = with_effort(state, conversation, body.reasoning_effort, "reasoning_effort")
    if None not in (body.max_tokens, body.max_completion_tokens) and body.max_tokens != body.max_completion_tokens:
        raise APIError(400, "max_tokens and max_completion_tokens differ; send one of them", param="max_tokens")
    max_tokens = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    logprobs_asked = (body.top_logprobs or 0) if body.logprobs else None
    constraint = body.constraint()
    defaults = state.engine.sampling_defaults
    params = sampling_params(body, defaults, max_tokens, logprobs=logprobs_asked, structured_outputs=constraint)
    note(request, body.user, body.safety_identifier, cache_salt=body.cache_salt)
    turn = await prepare(state, conversation, params, special_tokens_set=body.skip_special_tokens is not None)
    params = turn.params
    reader = None if turn.plain else lambda: ChatReader(turn.reader(), body.include_reasoning)
    identity = engine_id(request, "chatcmpl")
    prompt: TextPrompt = {**turn.prompt, "add_special_tokens": body.add_special_tokens}
    if body.truncate_prompt_tokens is not None:
        prompt["truncate_prompt_tokens"] = body.truncate_prompt_tokens
    streams = await state.generate(request, body, [prompt], params, identity)
    head: dict[str, Any] = {"id": identity, "created": int(time.time()), "model": model}
    if body.service_tier is not None:
        head["service_tier"] = "default"
    if body.stream:
        head = {**head, "object": "chat.completion.chunk"}
        events = _ChatEvents(
            body, params.n, head, reader, streams[0].request, state.settings.enable_force_include_usage
        )
        return stream.TokenStream(events, streams[0], request_id(request))
    (output,) = await stream.until_disconnect(request.receive, collect(streams))
    return JSON(_answer(body, output, {**head, "object": "chat.completion"}, reader))


def _answer(body: ChatBody, output: RequestOutput, head: dict[str, Any], reader: NewReader | None) -> ChatCompletion:
    count = UsageCount()
    count.add(output)
    choices = []
    for completion in output.outputs:
        message = ChatMessage(role="assistant", content=completion.text)
        reason = completion.finish_reason
        if reader is not None:
            read = reader()
            message, reason = read.message(completion.text), read.finish_reason(reason)
        more: dict[str, Any] = {"finish_reason": reason}
        if body.return_token_ids:
            more["token_ids"] = completion.token_ids
        choices.append(
            ChatChoice(
                index=completion.index,
                message=message,
                logprobs=_logprobs(body, completion),
                stop_reason=completion.stop_reason,
                **more,
            )
        )
    told = _prompt(body, output)
    if body.metadata is not None:
        told["metadata"] = body.metadata
    if output.prompt_logprobs is not None:
        told["prompt_logprobs"] = prompt_logprobs(output)
    if output.kv_transfer is not None:
        told["kv_transfer_params"] = output.kv_transfer
    return ChatCompletion(**head, choices=choices, usage=count.usage(), **told)


def _prompt(body: ChatBody, prompt: RequestOutput | RequestState) -> dict[str, Any]:
    """What is told of the prompt, once."""
    told: dict[str, Any] = {"prompt_token_ids": prompt.prompt_token_ids} if body.return_token_ids else {}
    return {**told, "prompt_text": prompt.prompt} if body.return_prompt_text else told


def _logprobs(body: ChatBody, completion: CompletionOutput) -> dict[str, Any] | None:
    return chat_logprobs(completion, body.top_logprobs or 0, body.return_tokens_as_token_ids)


class _ChatEvents(Chunks):
    """What is asked of the prompt goes into the first event."""

    def __init__(
        self,
        body: ChatBody,
        n: int,
        head: dict[str, Any],
        reader: NewReader | None,
        prompt: RequestState,
        include_usage: bool,
    ) -> None:
        super().__init__(body, head, include_usage)
        self._body = body
        self._n = n
        self._prompt = prompt
        self._readers = None if reader is None else [reader() for _ in range(n)]

    def opening(self) -> bytes:
        events = []
        for index in range(self._n):
            delta = {"role": "assistant", "content": ""}
            first = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
            more = {} if index else _prompt(self._body, self._prompt)
            events.append(self._event(index, first, len(self._prompt.prompt_token_ids), 0, **more))
        return b"".join(events)

    def told(self, output: RequestOutput) -> bytes:
        self._usage.add(output)
        if len(output.outputs) == 1:
            return self._of_one(output.outputs[0])
        return b"".join([self._of_one(completion) for completion in output.outputs])

    def _of_one(self, completion: CompletionOutput) -> bytes:
        if self._readers is not None:
            choice = _read(self._body, completion, self._readers[completion.index])
        elif completion.token_ids and self._is_plain(completion):
            plain = self._plain.get(completion.index) or self._prepared(completion.index)
            return plain(completion.text)
        else:
            choice = _delta(self._body, completion)
        prompt_tokens = len(self._prompt.prompt_token_ids)
        return self._event(completion.index, choice, prompt_tokens, len(completion.token_ids))

    def _text_choice(self, index: int, text: str) -> dict[str, Any]:
        return {"index": index, "delta": {"content": text}, "logprobs": None, "finish_reason": None}


def _read(body: ChatBody, completion: CompletionOutput, reader: ChatReader) -> dict[str, Any] | None:
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
