"""From a conversation to a request of the engine: what chat, messages and responses have in common.

Each of these routes reads its own body into a `Conversation`. The model's chat template makes a prompt of it, tools and
constraints become parameters, and a `CompletionReader` for each completion tells thoughts, text and calls apart."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from reprlib import repr as short
from typing import Any, Protocol

import msgspec

from engine.embedding import TextPrompt
from engine.plugin.hints import did_you_mean
from engine.types.errors import TokenizerError
from engine.types.params import SamplingParams, ThinkingBudget
from engine_kit.long_prompts import LONG
from engine_server.bodies import Effort
from engine_server.conversation.completion import CompletionReader
from engine_server.conversation.tool_constraint import Plan, plan_calls
from engine_server.conversation.tools import ToolRequest
from engine_server.errors import APIError, invalid
from engine_server.state import ServerState

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
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
        model: that is to answer; an adapter may have a template and a tokenizer of its own.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: ToolRequest = field(default_factory=ToolRequest)
    add_generation_prompt: bool = True
    variables: Mapping[str, Any] | None = None
    thinking_budget: int | None = None
    prefill: str = ""
    model: str | None = None


class SaysConversation(Protocol):
    """A body in OpenAI's chat form: the model; messages; whether the last one, the assistant's, is the beginning of the
    answer; further variables for the template."""

    @property
    def model(self) -> str | None: ...
    @property
    def messages(self) -> Sequence[Mapping[str, Any]] | None: ...
    @property
    def continue_final_message(self) -> bool | None: ...
    @property
    def chat_template_kwargs(self) -> Mapping[str, Any] | None: ...


def said(body: SaysConversation, *, add_generation_prompt: bool, tools: ToolRequest | None = None) -> Conversation:
    """What a body says, with tools that the template shows; the prompt ends where the assistant begins, or else not.

    Raises a 400 APIError for no messages, for a role that is none (many templates write any role into the prompt as it
    is, and a slip would only make the answer worse), and for a last message that is no beginning of an answer.
    """
    messages = body.messages
    if not messages:
        raise APIError(400, "messages is empty; send at least one", param="messages")
    for i, message in enumerate(messages):
        role = message.get("role")
        if role not in ROLES:
            hint = did_you_mean(role[:64], ROLES) if isinstance(role, str) else ""
            found = f"messages.{i}: the role is {short(role)}; {hint or 'send one of ' + ', '.join(ROLES)}"
            raise APIError(400, found, param="messages")
    prefill = _prefill(messages) if body.continue_final_message else ""
    return Conversation(
        messages=messages[:-1] if prefill else messages,
        tools=tools or ToolRequest(),
        add_generation_prompt=add_generation_prompt or bool(prefill),
        variables=body.chat_template_kwargs,
        prefill=prefill,
        model=body.model,
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
    return invalid("continue_final_message", f"{found}; end messages with the assistant's own words, as a string")


@dataclass(frozen=True)
class Turn:
    """A conversation, ready for the engine: its rendered prompt; parameters, with the constraint that makes sure of
    calls; what makes a completion's reader. Where it is plain, a completion's text is the answer as it is."""

    prompt: TextPrompt
    params: SamplingParams
    reader: Callable[[], CompletionReader]
    plain: bool


async def prepare(
    state: ServerState, conversation: Conversation, params: SamplingParams, *, special_tokens_set: bool = False
) -> Turn:
    """Render the conversation and plan how its answer is read. With `special_tokens_set` the request itself says
    whether special tokens are shown.

    Raises:
        APIError: tools that the model cannot see, or that nobody can make sure of.
        InvalidRequestError, TokenizerError: the messages are none, or the template refuses them.
    """
    tools = conversation.tools
    check_tools(state, tools)
    grammars, answer = state.engine.plan.constraints, params.structured_outputs
    plan = Plan() if tools.choice == "none" else plan_calls(tools, state.engine.tool_parser, grammars, answer)
    prompt = await render(state, conversation)
    end = prompt["prompt"][-PROMPT_END:]
    _check_prefill(state, conversation, prompt["prompt"])
    params = constrained(
        params, plan, state, end, conversation.thinking_budget, special_tokens_set, model=conversation.model
    )
    reasoning = state.engine.reasoning_parser

    def reader() -> CompletionReader:
        thoughts = None if reasoning is None else reasoning.stream(end)
        return CompletionReader(thoughts, None if plan.stream is None else plan.stream(), tools.parallel)

    return Turn(prompt, params, reader, plain=reasoning is None and plan.stream is None)


async def render(state: ServerState, conversation: Conversation) -> TextPrompt:
    """The prompt, with the beginning of the answer at its end. Raises as `check_tools` and `Tokenizer.render_chat`."""
    tools = conversation.tools
    check_tools(state, tools)
    given = tools.given if tools.choice != "none" else None
    rendered = partial(
        state.engine.inputs.render_chat,
        conversation.messages,
        tools=given,
        add_generation_prompt=conversation.add_generation_prompt,
        variables=conversation.variables,
        adapter=state.adapters.get(conversation.model),
    )
    plain = not given and not conversation.variables
    prompt = await state.engine.long.run(rendered, sum(map(_length, conversation.messages)) if plain else LONG)
    if not conversation.prefill:
        return prompt
    return TextPrompt(prompt=prompt["prompt"] + conversation.prefill, add_special_tokens=False)


def _length(message: Any) -> int:
    """Roughly, how much there is to render."""
    if not isinstance(message, Mapping):
        return 0
    return 256 + sum(len(part) if isinstance(part, str) else LONG if part else 0 for part in message.values())


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
    text, adapter = prompt["prompt"], state.adapters.get(conversation.model)
    count = len(await state.engine.long.run(partial(state.engine.inputs.tokenize, text, False, adapter), len(text)))
    return count + num_given(state, conversation)


def num_given(state: ServerState, conversation: Conversation) -> int:
    """Tokens that a prompt adapter puts before the conversation's prompt."""
    embeds = state.adapters.embeds(conversation.model)
    return 0 if embeds is None else len(embeds.data)


def check_tools(state: ServerState, tools: ToolRequest) -> None:
    """Raises a 400 APIError where the model would not see the tools."""
    if tools.choice != "none" and not state.engine.renders_tools:
        raise invalid(
            "tools",
            "the model's chat template has no place for them, so that the model would not see them; leave them out, or "
            "serve a model that was made for tools",
        )


def constrained(
    params: SamplingParams,
    plan: Plan,
    state: ServerState,
    prompt: str,
    budget: int | None = None,
    special_tokens_set: bool = False,
    *,
    model: str | None = None,
) -> SamplingParams:
    """The parameters with the plan's constraint, and special tokens where calls begin with some. Where the answer to a
    prompt with this end begins with thoughts, the constraint begins when these have ended, which they do after `budget`
    tokens at most, as the tokenizer of `model` writes their marks."""
    more: dict[str, Any] = {}
    constraint = params.structured_outputs
    if plan.stream is not None:
        constraint = plan.constraint
        if state.engine.calls_hold_special_tokens and not special_tokens_set:
            more["skip_special_tokens"] = False
    if (marks := state.engine.thought_marks) is not None and (constraint is not None or budget is not None):
        tokenizer = state.engine.inputs.tokenizer_of(state.adapters.get(model))
        begin, end = (tokenizer.encode(mark, add_special_tokens=False) for mark in marks)
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


# -- what a body asks of the template: each raises a 400 APIError, which names the parameter, where it is not had ------
_NO_THOUGHTS = {"enable_thinking": False, "thinking": False}
"""The switches that chat templates have: Qwen's, and DeepSeek's."""
_THOUGHTS = {"enable_thinking": True, "thinking": True}
_EFFORT = "reasoning_effort"
"""The variable that chat templates have, as gpt-oss' do."""
_DOCUMENTS = "documents"
"""The variable that chat templates have, as Cohere's do."""
_PROBE = ({"role": "user", "content": "?"},)


def _tells_apart(state: ServerState, one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether the prompt depends on these variables, which a template that knows them writes differently, and which are
    not a user's: a fact of the template, tried once with a short conversation. False where it renders none."""
    key = msgspec.json.encode((one, other))
    if key not in state.told_apart:
        try:
            first, second = (state.engine.inputs.render_chat(_PROBE, variables=variables) for variables in (one, other))
            state.told_apart[key] = first != second
        except TokenizerError:
            state.told_apart[key] = False
    return state.told_apart[key]


def without_thoughts(state: ServerState, said: Conversation, parameter: str) -> Conversation:
    """The conversation with its template's switch against thoughts; as it is where the model has none anyway."""
    if state.engine.reasoning_parser is None:
        return said
    if not _tells_apart(state, _NO_THOUGHTS, _THOUGHTS):
        raise _unsupported("thinking cannot be disabled: this model's chat template has no switch for it", parameter)
    return _with_variables(said, _NO_THOUGHTS)


def with_budget(
    state: ServerState, said: Conversation, tokens: int | None, parameter: str, *, switch: bool = False
) -> Conversation:
    """The conversation with thoughts of at most so many tokens; with `switch` its template is told to think."""
    if tokens is None:
        return said
    if state.engine.reasoning_parser is None:
        found = "no reasoning parser is at work, so that nobody knows how this model marks its thoughts"
        raise _unsupported(f"{found} (--reasoning-parser NAME)", parameter)
    return replace(_with_variables(said, _THOUGHTS) if switch else said, thinking_budget=tokens)


def with_effort(state: ServerState, said: Conversation, effort: Effort | None, parameter: str) -> Conversation:
    """The conversation with so much thinking: the template's variable `reasoning_effort`, for "none" its switch."""
    if effort is None:
        return said
    if effort == "none":
        return without_thoughts(state, said, parameter)
    if not _tells_apart(state, {_EFFORT: "low"}, {_EFFORT: "high"}):
        raise _unsupported(f"this model's chat template does not take {_EFFORT}", parameter)
    return _with_variables(said, {_EFFORT: effort})


def with_documents(
    state: ServerState, said: Conversation, documents: Sequence[Mapping[str, Any]] | None
) -> Conversation:
    """The conversation with documents beside it: vLLM's `documents`."""
    if not documents:
        return said
    if not _tells_apart(state, {}, {_DOCUMENTS: [{"title": "?", "text": "?"}]}):
        message = f"{_DOCUMENTS}: this model's chat template does not show them; put them into a message"
        raise APIError(400, message, param=_DOCUMENTS, code="unsupported_parameter")
    return _with_variables(said, {_DOCUMENTS: list(documents)})


def _with_variables(said: Conversation, more: Mapping[str, object]) -> Conversation:
    return replace(said, variables={**(said.variables or {}), **more})


def _unsupported(found: str, parameter: str) -> APIError:
    message, top = f"{parameter} is not supported: {found}; leave it out", parameter.partition(".")[0]
    return APIError(400, message, param=top, code="unsupported_parameter")
