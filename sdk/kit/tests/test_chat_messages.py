"""What chat templates get of messages, and of calls of earlier turns."""

from __future__ import annotations

from typing import Any

import pytest

from engine.types.errors import InvalidRequestError
from engine_kit.chat_messages import read_calls, template_variables, text_messages


def call(arguments: Any, **more: Any) -> dict[str, Any]:
    return {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}, **more}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"a": [1]}', {"a": [1]}),
        ({"a": 1}, {"a": 1}),
        ("", {}),
        (" \n", {}),
        ('{"a": ', '{"a": '),
        ("[1]", "[1]"),
        ("[" * 100_000, "[" * 100_000),
        ("\ud800", "\ud800"),
    ],
    ids=range(8),
)
def test_arguments(arguments: Any, expected: Any) -> None:
    """Text of an object becomes the object; what is none stays text."""
    given = call(arguments)
    assert read_calls([given]) == [call(expected)]
    assert given == call(arguments), "the request's own message is left as it was"


def test_a_call_without_arguments() -> None:
    assert read_calls([{"function": {"name": "f"}}]) == [{"function": {"name": "f", "arguments": {}}}]


@pytest.mark.parametrize("calls", ["f", 7, {"function": {}}, [{}], [7], [{"function": {"name": 1}}], [call(7)]])
def test_what_are_no_calls(calls: Any) -> None:
    with pytest.raises(InvalidRequestError, match="chat with the tool call"):
        read_calls(calls)


@pytest.mark.parametrize("name", ["self", "messages", "tools", "add_generation_prompt", "template"])
def test_template_variables_replace_nothing(name: str) -> None:
    assert template_variables(None) == {} and template_variables({"mood": "glad"}) == {"mood": "glad"}
    with pytest.raises(InvalidRequestError, match=f"'{name}'"):
        template_variables({name: []})


def test_messages() -> None:
    parts = [{"type": "text", "text": "a"}, "b"]
    said = {"role": "user", "content": parts}
    assert text_messages([said, {"role": "tool", "content": "c"}]) == [
        {"role": "user", "content": "a\nb"},
        {"role": "tool", "content": "c"},
    ]
    assert said["content"] is parts, "the request's own message is left as it was"


def test_what_are_no_messages() -> None:
    with pytest.raises(InvalidRequestError, match="type 'image_url'"):
        text_messages([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}])
    for bad in ([], "hi", {"role": "user"}, None):
        with pytest.raises(InvalidRequestError, match="no list of messages"):
            text_messages(bad)
    for message in ("hi", {}, {"role": 3}):
        with pytest.raises(InvalidRequestError, match="no role"):
            text_messages([message])
