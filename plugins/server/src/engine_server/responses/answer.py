"""What `/v1/responses` answers: completions as responses, whole and as events."""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from engine.types.outputs import CompletionOutput, RequestOutput
from engine_server import errors, stream
from engine_server.bodies import Answer
from engine_server.conversation.completion import Block, BlockNews, Blocks, new_id

Event = tuple[str, dict[str, Any]]
_PREFIXES = {"thoughts": "rs_", "text": "msg_", "call": "fc_"}
_CUT = {"reason": "max_output_tokens"}


Status = Literal["completed", "incomplete", "in_progress", "failed", "cancelled"]


class OutputText(Answer):
    """A text of a message."""

    type: Literal["output_text"]
    text: str
    annotations: list[dict[str, Any]]
    logprobs: list[dict[str, Any]]


class ReasoningText(Answer):
    """A text of thoughts."""

    type: Literal["reasoning_text"]
    text: str


class MessageItem(Answer):
    """What the model says."""

    id: str
    status: Status
    type: Literal["message"]
    role: Literal["assistant"]
    content: list[OutputText]


class ReasoningItem(Answer):
    """What it thinks."""

    id: str
    status: Status
    type: Literal["reasoning"]
    summary: list[dict[str, Any]]
    content: list[ReasoningText]
    encrypted_content: None


class CallItem(Answer):
    """A function that it calls."""

    id: str
    status: Status
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class InputDetails(Answer):
    """Of the prompt's tokens."""

    cached_tokens: int
    cache_write_tokens: int


class OutputDetails(Answer):
    """Of the answer's tokens."""

    reasoning_tokens: int


class ResponseUsage(Answer):
    """Tokens."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class ResponseError(Answer):
    """Why it failed."""

    code: str
    message: str


class ResponseAnswer(Answer):
    """A response, at whatever stage; much of it is the request's own."""

    id: str
    object: Literal["response"]
    created_at: int
    model: str
    background: bool
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: dict[str, str | None]
    safety_identifier: str | None
    service_tier: Literal["default"]
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"]
    user: str | None
    completed_at: int | None
    error: ResponseError | None
    incomplete_details: dict[str, str] | None
    output: list[Annotated[MessageItem | ReasoningItem | CallItem, Field(discriminator="type")]]
    usage: ResponseUsage | None
    status: Status


class Deleted(Answer):
    """A response that is forgotten."""

    id: str
    object: Literal["response"]
    deleted: bool


class InputItems(Answer):
    """A page of what a response answers."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    has_more: bool
    first_id: str | None
    last_id: str | None


def _error(error: Exception, request_id: str) -> tuple[int, bytes]:
    status, told = errors.describe(error, request_id)
    fields = {"code": told.code, "message": told.message, "param": told.param}
    return status, stream.named_event("error", {"type": "error", **fields, "sequence_number": 0})


DIALECT = stream.Dialect(_error, b"")


class ResponseMaker:
    """Makes one response.

    Args:
        head: the fields that are known from the request.
        blocks: reads the completion.
        count: how many tokens a text has.
        finish: is told of the finished response, before the client is.
    """

    def __init__(
        self,
        head: dict[str, Any],
        blocks: Blocks,
        count: Callable[[str], int],
        finish: Callable[[dict[str, Any]], Awaitable[None]],
    ) -> None:
        self._head = head
        self._blocks = blocks
        self._count = count
        self._finish = finish
        self._numbers = itertools.count()
        self._num_tokens = 0
        self._cut = False
        self._ids: list[str] = []
        self._call_ids: list[str] = []

    def begun(self) -> dict[str, Any]:
        """The response before it is computed."""
        return self._response("in_progress")

    def cancelled(self) -> dict[str, Any]:
        """The response that nobody wants any more."""
        return self._response("cancelled")

    def failed(self, error: Exception, request_id: str) -> tuple[int, dict[str, Any]]:
        """The response that could not be computed, and the status that says so."""
        status, told = errors.describe(error, request_id)
        fields = {"code": told.code or "server_error", "message": told.message}
        return status, self._response("failed", error=fields)

    def failure(self, response: dict[str, Any]) -> bytes:
        """The last event of a failed response."""
        return self._event("response.failed", response=response)

    @property
    def dialect(self) -> stream.Dialect:
        """How its events tell of an error."""

        def error(found: Exception, request_id: str) -> tuple[int, bytes]:
            status, response = self.failed(found, request_id)
            return status, self.failure(response)

        return stream.Dialect(error, b"")

    async def whole(self, output: RequestOutput) -> dict[str, Any]:
        """The response to a finished request."""
        (completion,) = output.outputs
        self._blocks.whole(completion.text)
        return await self._end(output, completion)

    async def events(self, outputs: AsyncIterator[RequestOutput]) -> AsyncGenerator[bytes]:
        """The response as it comes. Raises what goes wrong on the way."""
        yield self._event("response.created", response=self.begun())
        yield self._event("response.in_progress", response=self.begun())
        async for output in outputs:
            for completion in output.outputs:
                for name, fields in self._told(completion):
                    yield self._event(name, **fields)
                if completion.finished:
                    made = await self._end(output, completion)
                    yield self._event(f"response.{made['status']}", response=made)

    def _told(self, completion: CompletionOutput) -> Iterator[Event]:
        self._num_tokens += len(completion.token_ids)
        self._cut = completion.finish_reason == "length"
        for news in self._blocks.push(completion.text, completion.finished):
            yield from self._call_events(news) if news.block.kind == "call" else self._text_events(news)

    def _text_events(self, news: BlockNews) -> Iterator[Event]:
        block = news.block
        place = {"item_id": self._id(block), "output_index": block.index, "content_index": 0}
        name = "response.reasoning_text" if block.kind == "thoughts" else "response.output_text"
        more: dict[str, Any] = {} if block.kind == "thoughts" else {"logprobs": []}
        match news.step:
            case "start":
                item = {**self._item(block), "content": [], "status": "in_progress"}
                yield "response.output_item.added", {"output_index": block.index, "item": item}
                yield "response.content_part.added", {**place, "part": _part(block, "")}
            case "more":
                yield f"{name}.delta", {**place, "delta": news.text, **more}
            case "stop":
                yield f"{name}.done", {**place, "text": block.text, **more}
                yield "response.content_part.done", {**place, "part": _part(block, block.text)}
                yield "response.output_item.done", {"output_index": block.index, "item": self._item(block)}

    def _call_events(self, news: BlockNews) -> Iterator[Event]:
        block = news.block
        place = {"item_id": self._id(block), "output_index": block.index}
        match news.step:
            case "start":
                item = {**self._item(block), "arguments": "", "status": "in_progress"}
                yield "response.output_item.added", {"output_index": block.index, "item": item}
            case "more":
                yield "response.function_call_arguments.delta", {**place, "delta": news.text}
            case "stop":
                done = {**place, "name": block.name, "arguments": block.text}
                yield "response.function_call_arguments.done", done
                yield "response.output_item.done", {"output_index": block.index, "item": self._item(block)}

    def _event(self, name: str, /, **fields: Any) -> bytes:
        return stream.named_event(name, {"type": name, "sequence_number": next(self._numbers), **fields})

    async def _end(self, output: RequestOutput, completion: CompletionOutput) -> dict[str, Any]:
        self._cut = completion.finish_reason == "length"
        num_tokens = self._num_tokens or len(completion.token_ids)
        thoughts = "".join(block.text for block in self._blocks.row if block.kind == "thoughts")
        prompt = len(output.prompt_token_ids)
        made = self._response(
            "incomplete" if self._cut else "completed",
            completed_at=None if self._cut else int(time.time()),
            incomplete_details=_CUT if self._cut else None,
            output=[self._item(block) for block in self._blocks.row],
            usage={
                "input_tokens": prompt,
                "input_tokens_details": {"cached_tokens": output.num_cached_tokens, "cache_write_tokens": 0},
                "output_tokens": num_tokens,
                "output_tokens_details": {
                    "reasoning_tokens": min(num_tokens, self._count(thoughts)) if thoughts else 0
                },
                "total_tokens": prompt + num_tokens,
            },
        )
        await self._finish(made)
        return made

    def _response(self, status: str, **fields: Any) -> dict[str, Any]:
        blank: dict[str, Any] = {
            "completed_at": None,
            "error": None,
            "incomplete_details": None,
            "output": [],
            "usage": None,
        }
        return {**self._head, **blank, "status": status, **fields}

    def _item(self, block: Block) -> dict[str, Any]:
        """The block as it stands; where the answer was cut off, its last one is incomplete."""
        cut = not block.complete or (self._cut and block is self._blocks.row[-1])
        item: dict[str, Any] = {"id": self._id(block), "status": "incomplete" if cut else "completed"}
        match block.kind:
            case "thoughts":
                parts = [_part(block, block.text)]
                return {**item, "type": "reasoning", "summary": [], "content": parts, "encrypted_content": None}
            case "text":
                return {**item, "type": "message", "role": "assistant", "content": [_part(block, block.text)]}
        call = {"call_id": self._call_ids[block.index], "name": block.name, "arguments": block.text}
        return {**item, "type": "function_call", **call}

    def _id(self, block: Block) -> str:
        """One for each block, and for each call one more, by which its result is known."""
        for one in self._blocks.row[len(self._ids) : block.index + 1]:
            self._ids.append(new_id(_PREFIXES[one.kind]))
            self._call_ids.append(one.call_id or new_id())
        return self._ids[block.index]


def _part(block: Block, text: str) -> dict[str, Any]:
    if block.kind == "thoughts":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
