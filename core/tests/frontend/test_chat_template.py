"""Calls of earlier turns, as chat templates get them."""

from __future__ import annotations

from typing import Any

import pytest

from engine.frontend.chat_template import read_calls
from engine.types.errors import InvalidRequestError


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
