"""From the messages of a body to a prompt, where nothing is to be answered: to tokenise them, or to pool them."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from engine.embedding import TextPrompt
from engine.plugin.near import did_you_mean
from engine_server.begun_answer import cut_last
from engine_server.errors import APIError
from engine_server.protocol import ROLES
from engine_server.state import ServerState
from engine_server.tool_request import ToolRequest


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
    rest, begun = cut_last(messages) if continue_final_message else (messages, "")
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
