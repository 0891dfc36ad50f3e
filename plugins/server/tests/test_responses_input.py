"""The items of responses as chat templates take them."""

from __future__ import annotations

from typing import Any

import pytest

from engine_server.errors import APIError
from engine_server.responses.input import ResponsesBody, conversation, items_of

USER = {"role": "user", "content": "Hello"}
CALL = {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "f", "arguments": "{}", "status": "completed"}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "21"}]}
THOUGHTS = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}


def said(*items: dict[str, Any], before: tuple[dict[str, Any], ...] = (), **more: Any) -> Any:
    body = ResponsesBody(input=list(items), **more)
    return conversation(body, before, items_of(body))


def test_a_text() -> None:
    body = ResponsesBody(input="Hello", instructions="Be brief.")
    assert conversation(body, (), items_of(body)).messages == [{"role": "system", "content": "Be brief."}, USER]


def test_one_turn_of_the_assistant_is_one_message() -> None:
    part = {"type": "output_text", "text": "Let me see.", "annotations": [], "logprobs": []}
    text = {"type": "message", "role": "assistant", "content": [part]}
    messages = said(USER, THOUGHTS, text, CALL, RESULT, THOUGHTS, CALL | {"call_id": "c2"}).messages
    function = {"name": "f", "arguments": "{}"}
    calls = [{"id": "c1", "type": "function", "function": function}]
    assert messages[1] == {
        "role": "assistant",
        "content": "Let me see.",
        "reasoning_content": "Hm.",
        "tool_calls": calls,
    }
    assert messages[2] == {"role": "tool", "tool_call_id": "c1", "name": "f", "content": "21"}
    assert messages[3]["reasoning_content"] == "Hm." and messages[3]["tool_calls"][0]["id"] == "c2"


def test_what_comes_before() -> None:
    assert said(RESULT, before=(USER, CALL)).messages[-1]["name"] == "f"
    with pytest.raises(APIError, match=r"input\.0\.call_id .* no earlier function_call"):
        said(RESULT)


def test_tools_as_templates_take_them() -> None:
    tool = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}
    read = said(USER, tools=[tool], tool_choice={"type": "function", "name": "f"}, parallel_tool_calls=False).tools
    assert read.given == ({"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}},)
    assert (read.choice, read.name, read.parallel, read.tools[0].strict) == ("named", "f", False, True)
    assert said(USER, tools=[tool]).tools.choice == "auto" and said(USER, tool_choice="none").tools.choice == "none"
