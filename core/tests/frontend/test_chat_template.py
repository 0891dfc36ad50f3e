"""What chat templates get of calls of earlier turns, and what they are found to know."""

from __future__ import annotations

from typing import Any

import pytest

from engine.frontend.chat_template import ChatTemplate, read_calls
from engine.types.errors import InvalidRequestError, TokenizerError


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


class Renders:
    """A tokenizer whose template knows one variable, or is missing."""

    def __init__(self, knows: str = "", missing: bool = False) -> None:
        self.knows, self.missing, self.count = knows, missing, 0

    def render_chat(self, messages: Any, **options: Any) -> str:
        self.count += 1
        if self.missing:
            raise TokenizerError("render", "there is no template")
        return f"{messages} {options.get(self.knows)}"


def test_what_a_template_tells_apart_is_found_once() -> None:
    tokenizer: Any = Renders("effort")
    template = ChatTemplate(tokenizer, variables={"effort": "low"})
    for _ in range(3):
        assert template.tells_apart({"effort": "low"}, {"effort": "high"})
        assert not template.tells_apart({"thinking": True}, {"thinking": False})
    assert tokenizer.count == 4
    assert not ChatTemplate(tokenizer).tells_apart({}, {"documents": [{"text": "a"}]})
    none: Any = Renders("effort", missing=True)
    assert not ChatTemplate(none).tells_apart({"effort": "low"}, {"effort": "high"})
