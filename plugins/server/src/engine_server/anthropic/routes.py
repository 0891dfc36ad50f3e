"""`POST /v1/messages` and `POST /v1/messages/count_tokens`, Anthropic's protocol: completions as messages, whole and as
events."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from typing import Annotated, Any, Literal

import orjson
from fastapi import Request
from fastapi.responses import Response
from pydantic import Field

from engine.embedding import TextPrompt
from engine.types.outputs import CompletionOutput, RequestOutput
from engine_server import errors, stream
from engine_server.anthropic.cache_marks import Kept, Mark, find
from engine_server.anthropic.input import CountTokensBody, MessagesBody, conversation
from engine_server.bodies import JSON, Answer
from engine_server.conversation.completion import Block, BlockNews, Blocks, new_id
from engine_server.conversation.turn import (
    Conversation,
    count_tokens,
    prepare,
    with_budget,
    with_effort,
    without_thoughts,
)
from engine_server.errors import invalid
from engine_server.middleware import engine_id, note, request_id
from engine_server.state import ServerState, State, collect

Event = tuple[str, dict[str, Any]]


class TextBlock(Answer):
    """What the model says."""

    type: Literal["text"]
    text: str
    citations: None


class ThinkingBlock(Answer):
    """What it thinks; the signature is a checksum."""

    type: Literal["thinking"]
    thinking: str
    signature: str


class ToolUseBlock(Answer):
    """A tool that it calls."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class CacheCreation(Answer):
    """The tokens that are kept from now on, by how long."""

    ephemeral_5m_input_tokens: int
    ephemeral_1h_input_tokens: int


class MessageUsage(Answer):
    """Tokens. Those of the prompt are told apart: that were found in the prefix cache, that were not and are kept from
    now on (`cache_control`), and all others."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    cache_creation: CacheCreation
    output_tokens: int
    service_tier: Literal["standard"]


class Message(Answer):
    """`POST /v1/messages`."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[Annotated[TextBlock | ThinkingBlock | ToolUseBlock, Field(discriminator="type")]]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]
    stop_sequence: str | None
    usage: MessageUsage
    kv_transfer_params: dict[str, Any] | None = None


class TokenCount(Answer):
    """`POST /v1/messages/count_tokens`."""

    input_tokens: int


def tell_error(error: Exception, request_id: str) -> tuple[int, bytes]:
    status, told = errors.describe(error, request_id)
    return status, stream.named_event("error", errors.anthropic(status, told, request_id))


class MessageMaker:
    """Makes one message of what `blocks` reads. One that is cut off with fewer tokens than `max_tokens` has filled the
    context."""

    def __init__(
        self, state: ServerState, identity: str, model: str, blocks: Blocks, max_tokens: int, kept: Kept
    ) -> None:
        self._state = state
        self._kept = kept
        self._identity = identity
        self._model = model
        self._blocks = blocks
        self._max_tokens = max_tokens
        self._num_tokens = 0
        self._pinged = False

    def whole(self, output: RequestOutput) -> Message:
        """The message of a finished request."""
        (completion,) = output.outputs
        self._num_tokens = len(completion.token_ids)
        content = [_content(block) for block in self._blocks.whole(completion.text)]
        more = {} if output.kv_transfer is None else {"kv_transfer_params": output.kv_transfer}
        return Message(**{**self._message(output, content), **self._end(completion), **more})

    async def events(self, outputs: AsyncIterator[RequestOutput]) -> AsyncGenerator[bytes]:
        """The message as it comes."""
        begun = False
        async for output in outputs:
            (completion,) = output.outputs or (None,)
            if not begun:
                begun = True
                yield self._event("message_start", message=self._message(output, []))
            if completion is None:
                continue
            self._num_tokens += len(completion.token_ids)
            for news in self._blocks.push(completion.text, completion.finished):
                for name, fields in self._told(news):
                    yield self._event(name, **fields)
            if completion.finished:
                usage = self._usage(output)
                yield self._event("message_delta", delta=self._end(completion), usage=usage)
        yield self._event("message_stop")

    def _told(self, news: BlockNews) -> Iterator[Event]:
        block, index = news.block, news.block.index
        match news.step:
            case "start":
                yield "content_block_start", {"index": index, "content_block": _empty(block)}
                if not self._pinged:
                    self._pinged = True
                    yield "ping", {}
                if block.kind == "call":
                    yield "content_block_delta", {"index": index, "delta": _delta(block, "")}
            case "more":
                yield "content_block_delta", {"index": index, "delta": _delta(block, news.text)}
            case "stop":
                if block.kind == "thoughts":
                    delta = {"type": "signature_delta", "signature": _signature(block.text)}
                    yield "content_block_delta", {"index": index, "delta": delta}
                yield "content_block_stop", {"index": index}

    @staticmethod
    def _event(name: str, **fields: Any) -> bytes:
        return stream.named_event(name, {"type": name, **fields})

    def _message(self, output: RequestOutput, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._identity,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {**self._usage(output), "service_tier": "standard"},
        }

    def _usage(self, output: RequestOutput) -> dict[str, Any]:
        prompt = self._kept.usage(self._state, len(output.prompt_token_ids), output.num_cached_tokens)
        return {**prompt, "output_tokens": self._num_tokens}

    def _end(self, completion: CompletionOutput) -> dict[str, Any]:
        sequence: str | None = None
        match completion.finish_reason:
            case "length":
                reason = "max_tokens" if self._num_tokens >= self._max_tokens else "model_context_window_exceeded"
            case "stop" if isinstance(completion.stop_reason, str):
                reason, sequence = "stop_sequence", completion.stop_reason
            case "stop" if self._blocks.called:
                reason = "tool_use"
            case _:
                reason = "end_turn"
        return {"stop_reason": reason, "stop_sequence": sequence}


def _content(block: Block) -> dict[str, Any]:
    """A block that has come to its end."""
    match block.kind:
        case "thoughts":
            return {**_empty(block), "thinking": block.text, "signature": _signature(block.text)}
        case "text":
            return {**_empty(block), "text": block.text}
    return {**_empty(block), "input": _input(block.text)}


def _empty(block: Block) -> dict[str, Any]:
    """A block that begins."""
    match block.kind:
        case "thoughts":
            return {"type": "thinking", "thinking": "", "signature": ""}
        case "text":
            return {"type": "text", "text": "", "citations": None}
    return {"type": "tool_use", "id": block.call_id or new_id("toolu_"), "name": block.name, "input": {}}


def _delta(block: Block, text: str) -> dict[str, Any]:
    match block.kind:
        case "thoughts":
            return {"type": "thinking_delta", "thinking": text}
        case "text":
            return {"type": "text_delta", "text": text}
    return {"type": "input_json_delta", "partial_json": text}


def _signature(thoughts: str) -> str:
    """Clients want some text here to send thoughts back. It is a checksum, which nobody looks at."""
    return base64.b64encode(hashlib.sha256(thoughts.encode()).digest()).decode()


def _input(arguments: str) -> dict[str, Any]:
    """A call's arguments as an object. A model may write an escaped half of a surrogate pair,
    which UTF-8 cannot carry."""
    try:
        return dict(orjson.loads(arguments))
    except orjson.JSONDecodeError:
        read = json.dumps(json.loads(arguments), ensure_ascii=False)
        return dict(orjson.loads(read.encode(errors="replace")))


async def messages(body: MessagesBody, request: Request, state: State) -> Response:
    """Answer a conversation, rendered by the model's chat template."""
    model = state.admit(body.model)
    note(request, None if body.metadata is None else body.metadata.user_id, cache_salt=body.cache_salt)
    params = body.sampling_params(state.engine.sampling_defaults)
    said, marks = _said(body, state)
    if marks and body.kv_retention is not None and body.kv_retention.release:
        raise invalid("kv_retention", "release and cache_control contradict each other; send one of them")
    turn = await prepare(state, said, params)
    kept = await find(state, said, marks, turn.prompt["prompt"])
    prompt: TextPrompt = {**turn.prompt, "kv_retention": kept.wishes} if kept.wishes else turn.prompt
    identity = engine_id(request, "msg")
    streams = await state.generate(request, body, [prompt], turn.params, identity)
    maker = MessageMaker(state, identity, model, Blocks(turn.reader()), params.max_tokens or body.max_tokens, kept)
    if body.stream:
        return stream.EventStream(maker.events(streams[0]), streams, request_id(request), tell_error)
    (output,) = await stream.until_disconnect(request.receive, collect(streams))
    return JSON(maker.whole(output))


async def count(body: CountTokensBody, state: State) -> Response:
    """How many tokens such a request's prompt has."""
    state.check_model(body.model)
    said, _ = _said(body, state)
    return JSON(TokenCount(input_tokens=await count_tokens(state, said)))


def _said(body: CountTokensBody, state: ServerState) -> tuple[Conversation, list[Mark]]:
    """What the body says, with the template's switches for how much the model thinks; and its marks."""
    said, marks = conversation(body)
    if body.thinking is not None and body.thinking.type == "disabled":
        said = without_thoughts(state, said, "thinking")
    elif body.thinking is not None and body.thinking.type == "enabled":
        said = with_budget(state, said, body.thinking.budget_tokens, "thinking.budget_tokens", switch=True)
    effort = None if body.output_config is None else body.output_config.effort
    return with_effort(state, said, effort, "output_config.effort"), marks
