"""From a conversation to a request of the engine: what chat, messages and responses have in common.

Each of these routes reads its own body into a `Conversation`. The model's chat template makes a prompt of it, tools and
constraints become parameters, and a `CompletionReader` for each completion tells thoughts, text and calls apart."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from reprlib import repr as short
from typing import Any

import msgspec

from engine.embedding import TextPrompt
from engine.plugin.hints import did_you_mean
from engine.types.params import SamplingParams, ThinkingBudget
from engine_server.bodies import Effort
from engine_server.conversation.completion import CompletionReader
from engine_server.conversation.tool_constraint import Plan, plan_calls
from engine_server.conversation.tools import ToolRequest
from engine_server.errors import APIError
from engine_server.state import ServerState

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_CONTINUE = "continue_final_message"


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


def said(
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    variables: Mapping[str, Any] | None = None,
    tools: ToolRequest | None = None,
) -> Conversation:
    """A conversation in OpenAI's chat form.

    Args:
        messages: as a body has them.
        add_generation_prompt: end the prompt where the assistant begins.
        continue_final_message: the last message, the assistant's, is the beginning of the answer.
        variables: further ones for the template.
        tools: that it shows.

    Raises a 400 APIError for no messages, for a role that is none (many templates write any role into the prompt as it
    is, and a slip would only make the answer worse), and for a last message that is no beginning of an answer.
    """
    if not messages:
        raise APIError(400, "messages is empty; send at least one", param="messages")
    for i, message in enumerate(messages):
        role = message.get("role")
        if role not in ROLES:
            hint = did_you_mean(role[:64], ROLES) if isinstance(role, str) else ""
            found = f"messages.{i}: the role is {short(role)}; {hint or 'send one of ' + ', '.join(ROLES)}"
            raise APIError(400, found, param="messages")
    prefill = ""
    if continue_final_message:
        prefill = _prefill(messages)
        messages = messages[:-1]
    return Conversation(
        messages=messages,
        tools=tools or ToolRequest(),
        add_generation_prompt=add_generation_prompt or continue_final_message,
        variables=variables,
        prefill=prefill,
    )


def _prefill(messages: Sequence[Mapping[str, Any]]) -> str:
    """The text of the last message: the beginning of the answer, vLLM's `continue_final_message`."""
    last = messages[-1]
    if last.get("role") != "assistant":
        raise _refused("the last message is not the assistant's")
    if strange := [name for name in ("tool_calls", "reasoning_content", "reasoning") if last.get(name)]:
        raise _refused(f"the last message has {strange[0]}")
    content = last.get("content")
    if not isinstance(content, str) or not content:
        raise _refused("the last message's content is no text")
    if len(messages) == 1:
        raise _refused("no message stands before it")
    return content


def _refused(found: str) -> APIError:
    return APIError(
        400, f"{_CONTINUE}: {found}; end messages with the assistant's own words, as a string", param=_CONTINUE
    )


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
        params: of the request.
        special_tokens_set: the request itself says whether special tokens are shown.

    Raises:
        APIError: tools that the model cannot see, or that nobody can make sure of.
        InvalidRequestError, TokenizerError: the messages are none, or the template refuses them.
    """
    tools = conversation.tools
    check_tools(state, tools)
    grammars, answer = state.engine.plan.constraints, params.structured_outputs
    plan = plan_calls(tools, state.engine.tool_parser, grammars, answer)
    prompt = await render(state, conversation)
    end = prompt["prompt"][-PROMPT_END:]
    _check_prefill(state, conversation, prompt["prompt"])
    params = constrained(params, plan, state, end, conversation.thinking_budget, special_tokens_set)
    reasoning = state.engine.reasoning_parser

    def reader() -> CompletionReader:
        return CompletionReader(
            reasoning.stream(end) if reasoning is not None else None,
            plan.stream() if plan.stream is not None else None,
            tools.parallel,
        )

    return Turn(prompt, params, reader, plain=reasoning is None and plan.stream is None)


async def render(state: ServerState, conversation: Conversation) -> TextPrompt:
    """The prompt, with the beginning of the answer at its end. Raises a 400 APIError for tools that the template has no
    place for, and as `AsyncLLM.render_chat`."""
    tools = conversation.tools
    check_tools(state, tools)
    prompt = await state.engine.render_chat(
        conversation.messages,
        tools=tools.given if tools.choice != "none" else None,
        add_generation_prompt=conversation.add_generation_prompt,
        variables=conversation.variables,
    )
    if not conversation.prefill:
        return prompt
    return TextPrompt(prompt=prompt["prompt"] + conversation.prefill, add_special_tokens=False)


def _check_prefill(state: ServerState, conversation: Conversation, prompt: str) -> None:
    """Raise a 400 APIError for the beginning of an answer that would stand within thoughts."""
    if conversation.prefill and _thinks(state, prompt.removesuffix(conversation.prefill)[-PROMPT_END:]):
        raise APIError(
            400,
            "messages ends with the beginning of an answer, and this model begins its answers with thoughts; end with "
            "a message of the user",
            param="messages",
        )


async def count_tokens(state: ServerState, conversation: Conversation) -> int:
    """How many tokens the conversation's prompt has. Raises as `prepare`."""
    prompt = await render(state, conversation)
    _check_prefill(state, conversation, prompt["prompt"])
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


def constrained(
    params: SamplingParams,
    plan: Plan,
    state: ServerState,
    prompt: str,
    budget: int | None = None,
    special_tokens_set: bool = False,
) -> SamplingParams:
    """The parameters with the plan's constraint, and special tokens where calls begin with some. Where the answer to a
    prompt with this end begins with thoughts, the constraint begins when these have ended, which they do after `budget`
    tokens at most."""
    more: dict[str, Any] = {}
    constraint = params.structured_outputs
    if plan.stream is not None:
        constraint = plan.constraint
        if state.engine.calls_hold_special_tokens and not special_tokens_set:
            more["skip_special_tokens"] = False
    if (marks := state.engine.thought_marks) is not None and (constraint is not None or budget is not None):
        begin, end = (state.engine.tokenizer.encode(mark, add_special_tokens=False) for mark in marks)
        thinks = _thinks(state, prompt)
        if thinks and constraint is not None:
            constraint = msgspec.structs.replace(constraint, start_after=end)
        if budget is not None and (thinks or begin):  # else the prompt has ended the thoughts
            more["thinking_budget"] = ThinkingBudget(tokens=budget, end=end, begin=[] if thinks else begin)
    if constraint is not params.structured_outputs:
        more["structured_outputs"] = constraint
    return msgspec.structs.replace(params, **more) if more else params


def _thinks(state: ServerState, prompt: str) -> bool:
    """Whether the answer to a prompt with this end begins with thoughts."""
    parser = state.engine.reasoning_parser
    return parser is not None and parser.stream(prompt).thinking


_NO_THOUGHTS = {"enable_thinking": False, "thinking": False}
"""The switches that chat templates have: Qwen's, and DeepSeek's."""
_THOUGHTS = {"enable_thinking": True, "thinking": True}
_EFFORT = "reasoning_effort"
"""The variable that chat templates have, as gpt-oss' do."""
_DOCUMENTS = "documents"
"""The variable that chat templates have, as Cohere's do."""


def without_thoughts(state: ServerState, said: Conversation, parameter: str) -> Conversation:
    """The conversation with its template's switch against thoughts; as it is where the model has none anyway.

    Raises a 400 APIError, which names the parameter, where the template has no switch.
    """
    if state.engine.reasoning_parser is None:
        return said
    if not state.engine.chat_template.tells_apart(_NO_THOUGHTS, _THOUGHTS):
        raise _unsupported("thinking cannot be disabled: this model's chat template has no switch for it", parameter)
    return with_variables(said, **_NO_THOUGHTS)


def with_budget(
    state: ServerState, said: Conversation, tokens: int | None, parameter: str, *, switch: bool = False
) -> Conversation:
    """The conversation with thoughts of at most so many tokens; with `switch` a template that can be told to think is.

    Raises a 400 APIError, which names the parameter, where nobody knows how the model marks its thoughts.
    """
    if tokens is None:
        return said
    if state.engine.reasoning_parser is None:
        found = "no reasoning parser is at work, so that nobody knows how this model marks its thoughts"
        raise _unsupported(f"{found} (--reasoning-parser NAME)", parameter)
    return dataclasses.replace(with_variables(said, **_THOUGHTS) if switch else said, thinking_budget=tokens)


def with_effort(state: ServerState, said: Conversation, effort: Effort | None, parameter: str) -> Conversation:
    """The conversation with so much thinking: the template's variable `reasoning_effort`, for "none" its switch.

    Raises a 400 APIError, which names the parameter, where the template has nothing of the kind.
    """
    if effort is None:
        return said
    if effort == "none":
        return without_thoughts(state, said, parameter)
    if not state.engine.chat_template.tells_apart({_EFFORT: "low"}, {_EFFORT: "high"}):
        raise _unsupported(f"this model's chat template does not take {_EFFORT}", parameter)
    return with_variables(said, **{_EFFORT: effort})


def with_documents(
    state: ServerState, said: Conversation, documents: Sequence[Mapping[str, Any]] | None
) -> Conversation:
    """The conversation with documents beside it: vLLM's `documents`. Raises a 400 APIError where the template does not
    show them."""
    if not documents:
        return said
    if not state.engine.chat_template.tells_apart({}, {_DOCUMENTS: [{"title": "?", "text": "?"}]}):
        message = f"{_DOCUMENTS}: this model's chat template does not show them; put them into a message"
        raise APIError(400, message, param=_DOCUMENTS, code="unsupported_parameter")
    return with_variables(said, **{_DOCUMENTS: list(documents)})


def with_variables(said: Conversation, **variables: object) -> Conversation:
    """The conversation with these variables for the template too."""
    return dataclasses.replace(said, variables={**(said.variables or {}), **variables})


def _unsupported(found: str, parameter: str) -> APIError:
    message, top = f"{parameter} is not supported: {found}; leave it out", parameter.partition(".")[0]
    return APIError(400, message, param=top, code="unsupported_parameter")
