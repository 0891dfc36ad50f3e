"""What the messages of a body must be, in OpenAI's chat form; and from them to a prompt where nothing is answered: to
tokenise them, or to pool them."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from engine.embedding import TextPrompt
from engine.plugin.hints import did_you_mean
from engine_server.conversation.tools import ToolRequest
from engine_server.errors import APIError
from engine_server.state import ServerState

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_CONTINUE = "continue_final_message"


async def rendered(
    state: ServerState,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool,
    continue_final_message: bool = False,
    variables: Mapping[str, Any] | None = None,
    tools: ToolRequest | None = None,
) -> TextPrompt:
    """The conversation as the model's chat template writes it.

    Args:
        state: the server's.
        messages: in OpenAI's chat form.
        add_generation_prompt: end the prompt where the assistant begins.
        continue_final_message: the last message, the assistant's, is the beginning of the answer.
        variables: further ones for the template.
        tools: that it shows.

    Raises:
        APIError: no messages, unknown roles, or tools that the template has no place for.
        InvalidRequestError, TokenizerError: the messages are none, or the template refuses them.
    """
    if not messages:
        raise APIError(400, "messages is empty; send at least one", param="messages")
    check_roles(messages)
    shown = tools is not None and tools.choice != "none"
    if shown and not state.engine.renders_tools:
        raise APIError(400, "tools: the model's chat template has no place for them; leave them out", param="tools")
    rest, begun = cut_prefill(messages) if continue_final_message else (messages, "")
    prompt = await state.engine.render_chat(
        rest,
        tools=tools.given if tools is not None and shown else None,
        add_generation_prompt=add_generation_prompt or bool(begun),
        variables=variables,
    )
    return TextPrompt(prompt=prompt["prompt"] + begun, add_special_tokens=False)


def check_roles(messages: Sequence[Mapping[str, Any]]) -> None:
    """Raise a 400 APIError for a role that is none.

    Many templates write any role into the prompt as it is, and a slip would only make the answer worse.
    """
    for i, message in enumerate(messages):
        role = message.get("role")
        if role not in ROLES:
            hint = did_you_mean(role[:64], ROLES) if isinstance(role, str) else ""
            raise APIError(
                400,
                f"messages.{i}: the role is {reprlib.repr(role)}; {hint or 'send one of ' + ', '.join(ROLES)}",
                param="messages",
            )


def cut_prefill(messages: Sequence[Mapping[str, Any]]) -> tuple[Sequence[Mapping[str, Any]], str]:
    """The messages without the last one, and its text: the beginning of the answer, vLLM's `continue_final_message`.

    Raises a 400 APIError where the last message is no text of the assistant, or stands alone.
    """
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
    return messages[:-1], content


def _refused(found: str) -> APIError:
    return APIError(
        400, f"{_CONTINUE}: {found}; end messages with the assistant's own words, as a string", param=_CONTINUE
    )
