"""Anthropic's messages as chat templates take them."""

from __future__ import annotations

import time
from typing import Any

import pytest

from engine_server.anthropic.input import CountTokensBody, _MessagesReader, conversation
from engine_server.errors import APIError

USER = {"role": "user", "content": "Hello"}
CALL = {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": "é"}}


def said(*messages: dict[str, Any], **more: Any) -> Any:
    read, _ = conversation(CountTokensBody(messages=list(messages), **more))
    return read


def test_roles_in_a_row_become_one() -> None:
    read = said(USER, {"role": "user", "content": [{"type": "text", "text": "there"}]}, system="Be brief.")
    assert read.messages == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello\nthere"}]
    assert read.prefill == "" and read.tools.choice == "none"


def test_many_in_a_row_are_read_in_time_by_their_number() -> None:
    """They are read in the server's loop: not all that came before is copied with each (5 s)."""
    messages = [{"role": "user", "content": "x" * 100}] * 20_000
    began = time.process_time()
    read = said(*messages)
    assert time.process_time() - began < 2
    assert read.messages == [{"role": "user", "content": "\n".join(["x" * 100] * 20_000)}]


def test_thoughts_calls_and_results() -> None:
    """In one assistant message, however the blocks stand; each result is a message of its own."""
    blocks = [{"type": "thinking", "thinking": "Hm.", "signature": "s"}, {"type": "text", "text": "Let me see."}, CALL]
    results = [
        {"type": "tool_result", "tool_use_id": "t1", "content": "no", "is_error": True},
        {"type": "tool_result", "tool_use_id": "t1"},
        {"type": "text", "text": "Go on."},
    ]
    read = said(USER, {"role": "assistant", "content": blocks}, {"role": "user", "content": results})
    function = {"name": "f", "arguments": '{"a":"é"}'}
    assert read.messages[1] == {
        "role": "assistant",
        "content": "Let me see.",
        "reasoning_content": "Hm.",
        "tool_calls": [{"id": "t1", "type": "function", "function": function}],
    }
    tool = {"role": "tool", "tool_call_id": "t1", "name": "f"}
    assert read.messages[2:] == [
        {**tool, "content": "Error: no"},
        {**tool, "content": ""},
        {"role": "user", "content": "Go on."},
    ]


def test_the_beginning_of_an_answer() -> None:
    read = said(USER, {"role": "assistant", "content": "The"}, {"role": "assistant", "content": "answer"})
    assert read.messages == [USER] and read.prefill == "The\nanswer"
    with pytest.raises(APIError, match=r"messages\.1 ends .* tool_use"):
        said(USER, {"role": "assistant", "content": [CALL]})


def test_tools_as_templates_take_them() -> None:
    schema = {"type": "object", "properties": {}}
    tool = {"type": "custom", "name": "f", "description": "Does f", "input_schema": schema, "strict": True}
    read = said(USER, tools=[tool], tool_choice={"type": "any", "disable_parallel_tool_use": True}).tools
    function = {"name": "f", "description": "Does f", "parameters": schema}
    assert read.given == ({"type": "function", "function": function},)
    assert (read.choice, read.parallel, read.tools[0].strict) == ("required", False, True)
    with pytest.raises(APIError, match=r"tools\.1\.name .* once more"):
        said(USER, tools=[tool, tool])


@pytest.mark.parametrize("within", ["messages", "a result", "the system prompt"])
def test_thousands_of_marks_cost_no_more_than_the_first_too_many(monkeypatch: pytest.MonkeyPatch, within: str) -> None:
    """Each copies all before it."""
    copies, real = [], _MessagesReader._mark

    def counted(self: _MessagesReader, *mark: Any) -> None:
        copies.append(mark)
        real(self, *mark)

    monkeypatch.setattr(_MessagesReader, "_mark", counted)
    blocks = [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}] * 2000
    roles = [{"role": ("user", "assistant")[i % 2], "content": [one]} for i, one in enumerate(blocks)]
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": blocks}]}
    asked, more = {
        "messages": (roles, {}),
        "a result": ([USER, {"role": "assistant", "content": [CALL]}, result], {}),
        "the system prompt": ([USER], {"system": blocks}),
    }[within]
    with pytest.raises(APIError, match="more than 4 are in this request"):
        said(*asked, **more)
    assert len(copies) == 5
