"""Completions told as chat messages, whole and as they come."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest

from engine_parsers.reasoning_parsers.think import Qwen3Parser
from engine_parsers.tool_parsers.hermes import HermesText
from engine_server.bodies import dumps
from engine_server.conversation.completion import CompletionReader
from engine_server.openai.chat import ChatReader

CALL = '<tool_call>{"name": "f", "arguments": {"a": [1, "x"]}}</tool_call>'
OTHER = '<tool_call>{"name": "g", "arguments": {}}</tool_call>'
TEXT = f"<think>\nHm.\n</think>\n\nLet me see.\n{CALL}\n{OTHER}"


def choice(*, thoughts: bool = True, tools: bool = True, parallel: bool = True, told: bool = True) -> ChatReader:
    thinking = Qwen3Parser(None).stream("") if thoughts else None
    return ChatReader(CompletionReader(thinking, HermesText() if tools else None, parallel), told)


def message_of(made: ChatReader, text: str) -> dict[str, Any]:
    """The whole message, as clients get it."""
    return orjson.loads(dumps(made.message(text)))  # type: ignore[no-any-return]


def gathered(made: ChatReader, pieces: list[str]) -> dict[str, Any]:
    """The message that a client puts together from deltas."""
    message: dict[str, Any] = {"role": "assistant", "content": "", "reasoning_content": "", "tool_calls": []}
    for i, piece in enumerate(pieces):
        delta = made.delta(piece, i == len(pieces) - 1)
        for key in ("content", "reasoning_content"):
            message[key] += delta.get(key, "")
        for entry in delta.get("tool_calls", []):
            if entry["index"] == len(message["tool_calls"]):
                assert entry["type"] == "function" and entry["id"] and entry["function"]["name"]
                message["tool_calls"].append({**entry, "function": dict(entry["function"])})
            else:
                assert entry["index"] == len(message["tool_calls"]) - 1 and "id" not in entry
                message["tool_calls"][-1]["function"]["arguments"] += entry["function"]["arguments"]
    return message


def calls_of(message: dict[str, Any]) -> list[tuple[str, Any]]:
    functions = [call["function"] for call in message.get("tool_calls", [])]
    return [(f["name"], json.loads(f["arguments"])) for f in functions]


def test_a_whole_message() -> None:
    made = choice()
    message = message_of(made, TEXT)
    assert message["reasoning_content"] == "Hm." and message["content"] == "Let me see."
    assert calls_of(message) == [("f", {"a": [1, "x"]}), ("g", {})]
    assert len({call["id"] for call in message["tool_calls"]}) == 2
    assert made.finish_reason("stop") == "tool_calls" and made.finish_reason("length") == "length"


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_thoughts_that_nobody_wants_to_hear(size: int) -> None:
    whole = message_of(choice(told=False), TEXT)
    assert "reasoning_content" not in whole and whole["content"] == "Let me see." and len(calls_of(whole)) == 2
    message = gathered(choice(told=False), [TEXT[i : i + size] for i in range(0, len(TEXT), size)])
    assert message["reasoning_content"] == "" and calls_of(message) == calls_of(whole)
    assert message["content"].strip() == whole["content"]


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_deltas_are_the_message(size: int) -> None:
    made = choice()
    message = gathered(made, [TEXT[i : i + size] for i in range(0, len(TEXT), size)])
    expected = message_of(choice(), TEXT)
    assert (message["content"], message["reasoning_content"]) == (expected["content"], expected["reasoning_content"])
    assert calls_of(message) == calls_of(expected)
    assert made.finish_reason("stop") == "tool_calls"


def test_calls_alone_have_no_content() -> None:
    message = message_of(choice(thoughts=False), CALL)
    assert message["content"] is None and "reasoning_content" not in message
    assert message_of(choice(thoughts=False), "")["content"] == ""
    assert message_of(choice(tools=False), "<think>x</think>y") == {
        "role": "assistant", "content": "y", "reasoning_content": "x",
    }  # fmt: skip


def test_tags_among_thoughts_are_no_calls() -> None:
    message = message_of(choice(), f"<think>I could {CALL}</think>No.")
    assert "tool_calls" not in message and CALL in message["reasoning_content"] and message["content"] == "No."


@pytest.mark.parametrize("pieces", [[CALL + OTHER], list(CALL + OTHER)])
def test_one_call_where_only_one_is_wanted(pieces: list[str]) -> None:
    assert calls_of(message_of(choice(thoughts=False, parallel=False), "".join(pieces))) == [("f", {"a": [1, "x"]})]
    assert calls_of(gathered(choice(thoughts=False, parallel=False), pieces)) == [("f", {"a": [1, "x"]})]


def test_an_unfinished_call() -> None:
    """Whole it is content; in a stream it had been told of, and is not the reason of the end."""
    whole = choice(thoughts=False)
    assert message_of(whole, CALL[:50]) == {"role": "assistant", "content": CALL[:50]}
    assert whole.finish_reason("stop") == "stop"
    streamed = choice(thoughts=False)
    message = gathered(streamed, list(CALL[:50]))
    assert message["content"] == "" and message["tool_calls"][0]["function"]["arguments"] == CALL[38:50]
    assert streamed.finish_reason("stop") == "stop" and streamed.finish_reason("length") == "length"
