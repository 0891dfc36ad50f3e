"""`POST /v1/chat/completions`."""

from __future__ import annotations

import reprlib
import time
from collections.abc import AsyncGenerator, Callable
from typing import TYPE_CHECKING, Annotated, Any, cast

import msgspec
from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response

from engine.frontend.request_stream import RequestStream
from engine.plugin.near import did_you_mean
from engine.server import logprobs, sse
from engine.server.chat_choice import ChatChoice
from engine.server.choices import Usage, collect, merged, submit
from engine.server.disconnect import until_disconnect
from engine.server.errors import APIError
from engine.server.json import JSON, JSONRoute
from engine.server.protocol import ROLES, ChatBody
from engine.server.request_id import engine_id, request_id
from engine.server.state import ServerState, state_of
from engine.server.tool_constraint import Plan, plan_calls
from engine.server.tool_request import ToolRequest, tool_request
from engine.types.outputs import CompletionOutput, RequestOutput
from engine.types.params import SamplingParams

if TYPE_CHECKING:
    from engine.interfaces.reasoning_parser import ReasoningParser, ReasoningParserCard
    from engine.interfaces.tool_parser import ToolParserCard

NewChoice = Callable[[], ChatChoice]
PROMPT_END = 4096
"""Characters of the prompt's end that a reasoning parser looks at."""
router = APIRouter(route_class=JSONRoute)


@router.post("/v1/chat/completions")
async def chat_completions(
    body: ChatBody, request: Request, state: Annotated[ServerState, Depends(state_of)]
) -> Response:
    """Answer a conversation, rendered by the model's chat template."""
    model = state.check_model(body.model)
    if not body.messages:
        raise APIError(400, "messages is empty; send at least one", param="messages")
    _check_roles(body)
    if None not in (body.max_tokens, body.max_completion_tokens) and body.max_tokens != body.max_completion_tokens:
        raise APIError(400, "max_tokens and max_completion_tokens differ; send one of them", param="max_tokens")
    max_tokens = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    params = body.sampling_params(max_tokens=max_tokens, logprobs=(body.top_logprobs or 0) if body.logprobs else None)
    tools = tool_request(body.tools, body.tool_choice, body.parallel_tool_calls)
    if tools.choice != "none" and not state.engine.renders_tools:
        raise APIError(
            400,
            "tools: the model's chat template has no place for them, so that the model would not see them; leave them "
            "out, or serve a model that was made for tools",
            param="tools",
        )
    plan = plan_calls(tools, state.engine.tool_parser, state.engine.plan.grammar)
    params = _with_tools(body, params, plan, state)
    state.check_queue()
    prompt = await state.engine.render_chat(
        body.messages,
        tools=tools.given if tools.choice != "none" else None,
        add_generation_prompt=body.add_generation_prompt,
        variables=body.chat_template_kwargs,
    )
    end = prompt["prompt"][-PROMPT_END:]
    params = _after_thoughts(params, state, end)
    reader = _reader(state.engine.reasoning_parser, plan, tools, end)
    identity = engine_id(request, "chatcmpl")
    streams = await submit(
        state,
        [prompt],
        params,
        identity,
        stream=body.stream,
        priority=body.priority,
        timeout=body.timeout,
        request=request,
    )
    head = {"id": identity, "created": int(time.time()), "model": model}
    if body.stream:
        events = _events(body, streams, params.n, {**head, "object": "chat.completion.chunk"}, reader)
        return sse.EventStream(events, streams, request_id(request))
    (output,) = await until_disconnect(request, collect(streams))
    return JSON(_answer(body, output, {**head, "object": "chat.completion"}, reader))


def _with_tools(body: ChatBody, params: SamplingParams, plan: Plan, state: ServerState) -> SamplingParams:
    """The parameters with the constraint that makes sure of calls, and special tokens where calls begin with some."""
    if plan.stream is None:
        return params
    if params.structured_outputs is not None:
        name = params.structured_outputs.asked_as or "structured_outputs"
        raise APIError(
            400,
            f"{name}: it constrains the whole text, so that the model could not call its tools; leave it out, "
            'or send tool_choice "none"',
            param=name,
        )
    params = msgspec.structs.replace(params, structured_outputs=plan.constraint)
    parser = state.engine.plan.tool_parser
    marked = parser is not None and cast("type[ToolParserCard]", parser.card).reads_special_tokens
    if body.skip_special_tokens is None and marked:
        params = msgspec.structs.replace(params, skip_special_tokens=False)
    return params


def _after_thoughts(params: SamplingParams, state: ServerState, prompt: str) -> SamplingParams:
    """The parameters; where the answer begins with thoughts, with a constraint that begins when these have ended."""
    parser, selection = state.engine.reasoning_parser, state.engine.plan.reasoning_parser
    if params.structured_outputs is None or parser is None or selection is None or not parser.stream(prompt).thinking:
        return params
    end = state.engine.tokenizer.encode(cast("type[ReasoningParserCard]", selection.card).end, add_special_tokens=False)
    constraint = msgspec.structs.replace(params.structured_outputs, start_after=end)
    return msgspec.structs.replace(params, structured_outputs=constraint)


def _reader(reasoning: ReasoningParser | None, plan: Plan, tools: ToolRequest, prompt: str) -> NewChoice | None:
    """What makes a reader for each completion; None where a completion's text is the message's content as it is."""
    if reasoning is None and plan.stream is None:
        return None
    return lambda: ChatChoice(
        reasoning.stream(prompt) if reasoning is not None else None,
        plan.stream() if plan.stream is not None else None,
        tools.parallel,
    )


def _check_roles(body: ChatBody) -> None:
    """Many templates write any role into the prompt as it is, and a slip would only make the answer worse."""
    for i, message in enumerate(body.messages):
        role = message.get("role")
        if role not in ROLES:
            hint = did_you_mean(role[:64], ROLES) if isinstance(role, str) else ""
            raise APIError(
                400,
                f"messages.{i}: the role is {reprlib.repr(role)}; {hint or 'send one of ' + ', '.join(ROLES)}",
                param="messages",
            )


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
        choices.append(
            {
                "index": completion.index,
                "message": message,
                "logprobs": logprobs.chat(completion, body.top_logprobs or 0),
                "finish_reason": reason,
                "stop_reason": completion.stop_reason,
            }
        )
    answer = {**head, "choices": choices, "usage": usage.json()}
    if output.prompt_logprobs is not None:
        answer["prompt_logprobs"] = logprobs.prompt(output)
    return answer


async def _events(
    body: ChatBody, streams: list[RequestStream], n: int, head: dict[str, Any], reader: NewChoice | None
) -> AsyncGenerator[bytes]:
    include_usage = body.stream_options is not None and body.stream_options.include_usage
    blank = {**head, "usage": None} if include_usage else head
    usage = Usage()
    readers = None if reader is None else [reader() for _ in range(n)]
    for index in range(n):
        first = {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        yield sse.event({**blank, "choices": [first]})
    async for _, output in merged(streams):
        usage.add(output)
        for completion in output.outputs:
            choice = _delta(body, completion) if readers is None else _read(body, completion, readers[completion.index])
            if choice is not None:
                yield sse.event({**blank, "choices": [choice]})
    if include_usage:
        yield sse.event({**head, "choices": [], "usage": usage.json()})


def _read(body: ChatBody, completion: CompletionOutput, reader: ChatChoice) -> dict[str, Any] | None:
    """As `_delta`, thoughts, content and calls told apart; None where there is nothing to tell."""
    delta = reader.delta(completion.text, completion.finished)
    if not delta and not completion.finished and completion.logprobs is None:
        return None
    choice = _delta(body, completion)
    choice["delta"], choice["finish_reason"] = delta, reader.finish_reason(completion.finish_reason)
    return choice


def _delta(body: ChatBody, completion: CompletionOutput) -> dict[str, Any]:
    choice = {
        "index": completion.index,
        "delta": {"content": completion.text} if completion.text or completion.token_ids else {},
        "logprobs": logprobs.chat(completion, body.top_logprobs or 0),
        "finish_reason": completion.finish_reason,
    }
    if completion.finish_reason is not None:
        choice["stop_reason"] = completion.stop_reason
    return choice
