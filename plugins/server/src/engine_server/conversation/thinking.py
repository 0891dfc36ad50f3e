"""What a request asks of the model's chat template, refused where it has nothing of the kind: switches for how much the
model thinks before it answers, and a place for documents."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from engine.types.errors import InvalidRequestError
from engine_server.bodies import Effort
from engine_server.conversation.turn import Conversation, render
from engine_server.errors import APIError
from engine_server.state import ServerState

_NO_THOUGHTS = {"enable_thinking": False, "thinking": False}
"""The switches that chat templates have: Qwen's, and DeepSeek's."""
_THOUGHTS = {"enable_thinking": True, "thinking": True}
_EFFORT = "reasoning_effort"
"""The variable that chat templates have, as gpt-oss' do."""
_DOCUMENTS = "documents"
"""The variable that chat templates have, as Cohere's do."""
_SOME = Conversation(messages=({"role": "user", "content": "Hi"},))


async def without_thoughts(state: ServerState, said: Conversation, parameter: str) -> Conversation:
    """The conversation with its template's switch against thoughts; as it is where the model has none anyway.

    Raises a 400 APIError, which names the parameter, where the template has no switch.
    """
    if state.engine.reasoning_parser is None:
        return said
    if not await _shows(state, "no thoughts", {}, _NO_THOUGHTS):
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


async def with_effort(state: ServerState, said: Conversation, effort: Effort | None, parameter: str) -> Conversation:
    """The conversation with so much thinking: the template's variable `reasoning_effort`, for "none" its switch.

    Raises a 400 APIError, which names the parameter, where the template has nothing of the kind.
    """
    if effort is None:
        return said
    if effort == "none":
        return await without_thoughts(state, said, parameter)
    if not await _shows(state, _EFFORT, {_EFFORT: "low"}, {_EFFORT: "high"}):
        raise _unsupported(f"this model's chat template does not take {_EFFORT}", parameter)
    return with_variables(said, **{_EFFORT: effort})


async def with_documents(
    state: ServerState, said: Conversation, documents: Sequence[Mapping[str, Any]] | None
) -> Conversation:
    """The conversation with documents beside it: vLLM's `documents`. Raises a 400 APIError where the template does not
    show them."""
    if not documents:
        return said
    if not await _shows(state, _DOCUMENTS, {}, {_DOCUMENTS: [{"title": "A", "text": "B"}]}):
        message = f"{_DOCUMENTS}: this model's chat template does not show them; put them into a message"
        raise APIError(400, message, param=_DOCUMENTS, code="unsupported_parameter")
    return with_variables(said, **{_DOCUMENTS: list(documents)})


def with_variables(said: Conversation, **variables: object) -> Conversation:
    """The conversation with these variables for the template too."""
    return dataclasses.replace(said, variables={**(said.variables or {}), **variables})


async def _shows(state: ServerState, what: str, one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether the model's chat template makes two prompts of a conversation with these variables: tried once, with a
    conversation of one message. One that refuses that conversation is taken at its word."""
    if (known := state.shown.get(what)) is None:
        try:
            prompts = [await render(state, with_variables(_SOME, **variables)) for variables in (one, other)]
            known = prompts[0] != prompts[1]
        except InvalidRequestError:
            known = True
        state.shown[what] = known
    return known


def _unsupported(found: str, parameter: str) -> APIError:
    message, top = f"{parameter} is not supported: {found}; leave it out", parameter.partition(".")[0]
    return APIError(400, message, param=top, code="unsupported_parameter")
