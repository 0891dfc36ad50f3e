"""What a request asks of the model's chat template, refused where it has nothing of the kind: switches for how much the
model thinks before it answers, and a place for documents."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from engine_server.bodies import Effort
from engine_server.conversation.turn import Conversation
from engine_server.errors import APIError

if TYPE_CHECKING:
    from engine_server.state import ServerState

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
