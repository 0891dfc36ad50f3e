"""From a conversation to a request of the engine: what chat, messages and responses have in common.

Each of these routes reads its own body into a `Conversation`. The model's chat template makes a prompt of it, tools and
constraints become parameters, and a `CompletionReader` for each completion tells thoughts, text and calls apart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from engine.embedding import TextPrompt
from engine.types.params import SamplingParams, ThinkingBudget
from engine_server.conversation.completion import CompletionReader
from engine_server.conversation.tool_constraint import Plan, plan_calls
from engine_server.conversation.tools import ToolRequest
from engine_server.errors import APIError
from engine_server.state import ServerState

PROMPT_END = 4096
"""Characters of the prompt's end that a reasoning parser looks at."""


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """What is said, in the form that chat templates take.

    Args:
        messages: in OpenAI's chat form.
        tools: that the model may or must call.
        add_generation_prompt: end the prompt where the assistant begins.
        variables: further variables for the template.
        thinking_budget: tokens after which thoughts are ended.
        prefill: the beginning of the answer, which the model goes on with.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: ToolRequest = field(default_factory=ToolRequest)
    add_generation_prompt: bool = True
    variables: Mapping[str, Any] | None = None
    thinking_budget: int | None = None
    prefill: str = ""


@dataclass(frozen=True)
class Turn:
    """A conversation, ready for the engine.

    Args:
        prompt: rendered.
        params: with the constraint that makes sure of calls.
        reader: makes what reads one completion.
        plain: a completion's text is the answer as it is.
    """

    prompt: TextPrompt
    params: SamplingParams
    reader: Callable[[], CompletionReader]
    plain: bool


async def prepare(
    state: ServerState, conversation: Conversation, params: SamplingParams, *, special_tokens_set: bool = False
) -> Turn:
    """Render the conversation and plan how its answer is read.

    Args:
        state: the server's.
        conversation: see there.
        params: of the request, verified.
        special_tokens_set: the request itself says whether special tokens are shown.

    Raises:
        APIError: tools that the model cannot see, or that nobody can make sure of; a 429 where the queue is full.
        InvalidRequestError, TokenizerError: the messages are none, or the template refuses them.
    """
    tools = conversation.tools
    check_tools(state, tools)
    grammars, answer = state.engine.plan.constraints, params.structured_outputs
    plan = plan_calls(tools, state.engine.tool_parser, grammars, answer)
    params = with_tools(params, plan, state, special_tokens_set)
    state.check_queue()
    prompt = await render(state, conversation)
    end = prompt["prompt"][-PROMPT_END:]
    params = after_thoughts(params, state, end)
    if conversation.thinking_budget is not None:
        params = within_budget(params, state, end, conversation.thinking_budget)
    reasoning = state.engine.reasoning_parser

    def reader() -> CompletionReader:
        return CompletionReader(
            reasoning.stream(end) if reasoning is not None else None,
            plan.stream() if plan.stream is not None else None,
            tools.parallel,
        )

    return Turn(prompt, params, reader, plain=reasoning is None and plan.stream is None)


async def render(state: ServerState, conversation: Conversation) -> TextPrompt:
    """The prompt. Raises APIError for a prefill that would stand within thoughts, and as `AsyncLLM.render_chat`."""
    tools = conversation.tools
    prompt = await state.engine.render_chat(
        conversation.messages,
        tools=tools.given if tools.choice != "none" else None,
        add_generation_prompt=conversation.add_generation_prompt,
        variables=conversation.variables,
    )
    if not conversation.prefill:
        return prompt
    if _thinks(state, prompt["prompt"][-PROMPT_END:]):
        raise APIError(
            400,
            "messages ends with the beginning of an answer, and this model begins its answers with thoughts; end with "
            "a message of the user",
            param="messages",
        )
    return TextPrompt(prompt=prompt["prompt"] + conversation.prefill, add_special_tokens=False)


async def count_tokens(state: ServerState, conversation: Conversation) -> int:
    """How many tokens the conversation's prompt has. Raises as `prepare`."""
    check_tools(state, conversation.tools)
    prompt = await render(state, conversation)
    return len(await state.engine.tokenize(prompt["prompt"], add_special_tokens=False))


def check_tools(state: ServerState, tools: ToolRequest) -> None:
    """Raises a 400 APIError where the model would not see the tools."""
    if tools.choice != "none" and not state.engine.renders_tools:
        raise APIError(
            400,
            "tools: the model's chat template has no place for them, so that the model would not see them; leave them "
            "out, or serve a model that was made for tools",
            param="tools",
        )


def with_tools(
    params: SamplingParams, plan: Plan, state: ServerState, special_tokens_set: bool = False
) -> SamplingParams:
    """The parameters with the plan's constraint, and special tokens where calls begin with some."""
    if plan.stream is None:
        return params
    params = msgspec.structs.replace(params, structured_outputs=plan.constraint)
    if state.engine.calls_hold_special_tokens and not special_tokens_set:
        params = msgspec.structs.replace(params, skip_special_tokens=False)
    return params


def after_thoughts(params: SamplingParams, state: ServerState, prompt: str) -> SamplingParams:
    """The parameters; where the answer begins with thoughts, with a constraint that begins when these have ended."""
    marks = state.engine.thought_marks
    if params.structured_outputs is None or marks is None or not _thinks(state, prompt):
        return params
    end = state.engine.tokenizer.encode(marks[1], add_special_tokens=False)
    constraint = msgspec.structs.replace(params.structured_outputs, start_after=end)
    return msgspec.structs.replace(params, structured_outputs=constraint)


def within_budget(params: SamplingParams, state: ServerState, prompt: str, tokens: int) -> SamplingParams:
    """The parameters, so that thoughts end after so many tokens. There is a reasoning parser."""
    marks = state.engine.thought_marks
    assert marks is not None
    begin, end = (state.engine.tokenizer.encode(mark, add_special_tokens=False) for mark in marks)
    if _thinks(state, prompt):
        begin = []
    elif not begin:
        return params  # the prompt has ended the thoughts
    return msgspec.structs.replace(params, thinking_budget=ThinkingBudget(tokens=tokens, end=end, begin=begin))


def _thinks(state: ServerState, prompt: str) -> bool:
    """Whether the answer to a prompt with this end begins with thoughts."""
    parser = state.engine.reasoning_parser
    return parser is not None and parser.stream(prompt).thinking
