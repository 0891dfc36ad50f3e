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
from engine_server.conversation.completion import Block, Blocks, new_id

Event = tuple[str, dict[str, Any]]
_PREFIXES = {"thoughts": "rs_", "text": "msg_", "call": "fc_"}
_EVENTS = {
    "thoughts": "response.reasoning_text",
    "text": "response.output_text",
    "call": "response.function_call_arguments",
}
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
    kv_transfer_params: dict[str, Any] | None = None


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


def tell_error(error: Exception, request_id: str) -> tuple[int, bytes]:
    status, told = errors.describe(error, request_id)
    fields = {"code": told.code, "message": told.message, "param": told.param}
    return status, stream.named_event("error", {"type": "error", **fields, "sequence_number": 0})


class ResponseMaker:
    """Makes one response.

    Args:
        head: the fields that are known from the request, and those that are not yet, as None.
        blocks: reads the completion.
        count: how many tokens a text has.
        keep: is given the response when it is finished, before the client is told.
    """

    def __init__(
        self,
        head: dict[str, Any],
        blocks: Blocks,
        count: Callable[[str], int],
        keep: Callable[[dict[str, Any]], Awaitable[None]],
    ) -> None:
        self._head = head
        self._blocks = blocks
        self._count = count
        self.keep = keep
        self._numbers = itertools.count()
        self._num_tokens = 0
        self._cut = False
        self._ids: list[str] = []
        self._call_ids: list[str] = []

    def response(self, status: Status, **fields: Any) -> dict[str, Any]:
        """The response as it stands: one without fields is under way, or cancelled."""
        return {**self._head, "status": status, **fields}

    def failed(self, error: Exception, request_id: str) -> tuple[int, dict[str, Any]]:
        """The response that could not be computed, and the status that says so."""
        status, told = errors.describe(error, request_id)
        fields = {"code": told.code or "server_error", "message": told.message}
        return status, self.response("failed", error=fields)

    def failure(self, response: dict[str, Any]) -> bytes:
        """The last event of a failed response."""
        return self._event("response.failed", response=response)

    def tell_error(self, error: Exception, request_id: str) -> tuple[int, bytes]:
        """See `engine_server.stream.TellError`."""
        status, response = self.failed(error, request_id)
        return status, self.failure(response)

    async def whole(self, output: RequestOutput) -> dict[str, Any]:
        """The response to a finished request."""
        (completion,) = output.outputs
        self._blocks.whole(completion.text)
        return await self._end(output, completion)

    async def events(self, outputs: AsyncIterator[RequestOutput]) -> AsyncGenerator[bytes]:
        """The response as it comes. Raises what goes wrong on the way."""
        yield self._event("response.created", response=self.response("in_progress"))
        yield self._event("response.in_progress", response=self.response("in_progress"))
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
            yield from self._of_block(news.step, news.block, news.text)

    def _of_block(self, step: Literal["start", "more", "stop"], block: Block, text: str) -> Iterator[Event]:
        name, call = _EVENTS[block.kind], block.kind == "call"
        more: dict[str, Any] = {"logprobs": []} if block.kind == "text" else {}
        place = {"item_id": self._id(block), "output_index": block.index} | ({} if call else {"content_index": 0})
        if step == "more":
            yield f"{name}.delta", {**place, "delta": text, **more}
            return
        item = self._item(block)
        if step == "start":
            empty: dict[str, Any] = {"arguments": ""} if call else {"content": []}
            begun = {**item, **empty, "status": "in_progress"}
            yield "response.output_item.added", {"output_index": block.index, "item": begun}
            if not call:
                yield "response.content_part.added", {**place, "part": _part(block, "")}
            return
        whole = {"name": block.name, "arguments": block.text} if call else {"text": block.text, **more}
        yield f"{name}.done", {**place, **whole}
        if not call:
            yield "response.content_part.done", {**place, "part": _part(block, block.text)}
        yield "response.output_item.done", {"output_index": block.index, "item": item}

    def _event(self, name: str, /, **fields: Any) -> bytes:
        return stream.named_event(name, {"type": name, "sequence_number": next(self._numbers), **fields})

    async def _end(self, output: RequestOutput, completion: CompletionOutput) -> dict[str, Any]:
        self._cut = completion.finish_reason == "length"
        num_tokens = self._num_tokens or len(completion.token_ids)
        thoughts = "".join(block.text for block in self._blocks.row if block.kind == "thoughts")
        prompt = len(output.prompt_token_ids)
        usage = {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": output.num_cached_tokens, "cache_write_tokens": 0},
            "output_tokens": num_tokens,
            "output_tokens_details": {"reasoning_tokens": min(num_tokens, self._count(thoughts)) if thoughts else 0},
            "total_tokens": prompt + num_tokens,
        }
        made = self.response(
            "incomplete" if self._cut else "completed",
            completed_at=None if self._cut else int(time.time()),
            incomplete_details={"reason": "max_output_tokens"} if self._cut else None,
            output=[self._item(block) for block in self._blocks.row],
            usage=usage,
        )
        await self.keep(made)
        return made if output.kv_transfer is None else {**made, "kv_transfer_params": output.kv_transfer}

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
