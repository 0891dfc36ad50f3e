"""Whatever JSON stands for messages, items and tools: it is read, or refused as the client's fault."""

from __future__ import annotations

import contextlib
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from engine_server.anthropic import input as messages_input
from engine_server.anthropic.input import CountTokensBody
from engine_server.errors import APIError
from engine_server.responses import input as responses_input
from engine_server.responses.input import ResponsesBody

NAMES = (
    *("type", "role", "content", "text", "id", "call_id", "tool_use_id", "name", "input", "arguments", "output"),
    *("summary", "thinking", "signature", "status", "tool_choice", "tools", "input_schema", "parameters", "strict"),
    *("cache_control", "is_error", "citations", "annotations", "function"),
)
WORDS = (
    *("user", "assistant", "system", "message", "text", "input_text", "output_text", "reasoning_text", "tool_use"),
    *("tool_result", "thinking", "reasoning", "function_call", "function_call_output", "function", "custom"),
    *("ephemeral", "auto", "any", "required", "tool", "none", "c1"),
)
LEAVES = st.none() | st.booleans() | st.integers(-2, 2) | st.sampled_from(WORDS) | st.text(max_size=3)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=4),
    max_leaves=20,
)
TYPED = st.builds(
    lambda kind, fields: {**fields, "type": kind},
    st.sampled_from(WORDS),
    st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=5),
)
SAID = st.builds(
    lambda role, content: {"role": role, "content": content},
    st.sampled_from(("user", "assistant")),
    VALUES | st.lists(TYPED, max_size=3),
)
LISTS = st.lists(TYPED | SAID | VALUES, max_size=4)


@given(LISTS, LISTS, VALUES)
def test_messages(messages: list[Any], tools: list[Any], choice: Any) -> None:
    with contextlib.suppress(APIError, ValidationError):
        body = CountTokensBody(messages=messages, tools=tools, tool_choice=choice)
        assert messages_input.conversation(body).messages


@given(LISTS, LISTS, VALUES)
def test_items(items: list[Any], tools: list[Any], choice: Any) -> None:
    with contextlib.suppress(APIError, ValidationError):
        body = ResponsesBody(input=items, tools=tools, tool_choice=choice)
        responses_input.conversation(body, (), responses_input.items_of(body))


@given(LISTS)
def test_without_tools(said: list[Any]) -> None:
    """More of them get as far as the items."""
    said = [one for one in said if isinstance(one, dict)]
    with contextlib.suppress(APIError, ValidationError):
        messages_input.conversation(CountTokensBody(messages=said))
    with contextlib.suppress(APIError, ValidationError):
        body = ResponsesBody(input=said)
        responses_input.conversation(body, (), responses_input.items_of(body))
