"""Calls that must come, enforced by a grammar: valid even where the model draws almost at random."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from tests.serving.conftest import Server

pytest.importorskip("engine_xgrammar", reason="no grammar driver that enforces schemas is installed")
pytest.importorskip("xgrammar")


def tool(name: str, **properties: Any) -> dict[str, Any]:
    schema = {
        "type": "object", "properties": properties, "required": list(properties), "additionalProperties": False,
    }  # fmt: skip
    return {"type": "function", "function": {"name": name, "parameters": schema}}


WEATHER = tool("get_weather", city={"type": "string", "maxLength": 12})
ROUND = tool("round_up", by={"enum": [1, 10, 100]}, exact={"type": "boolean"})
ASKED: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
OPTIONS: dict[str, Any] = {"model": "tiny", "max_tokens": 200, "messages": ASKED, "tools": [WEATHER, ROUND]}
NAMED = {"type": "function", "function": {"name": "round_up"}}


def check(name: str, arguments: str) -> None:
    values = json.loads(arguments)
    if name == "round_up":
        assert values["by"] in (1, 10, 100) and isinstance(values["exact"], bool) and len(values) == 2
    else:
        assert name == "get_weather" and list(values) == ["city"] and len(values["city"]) <= 12


def test_a_question_that_needs_no_tool(client: openai.OpenAI) -> None:
    assert not client.chat.completions.create(**OPTIONS, temperature=0).choices[0].message.tool_calls
    one = {"temperature": 0, "tool_choice": "required", "parallel_tool_calls": False}
    answer = client.chat.completions.create(**OPTIONS, **one).choices[0]
    assert answer.finish_reason == "tool_calls" and answer.message.content is None
    (call,) = answer.message.tool_calls
    check(call.function.name, call.function.arguments)
    (call,) = client.chat.completions.create(**OPTIONS, temperature=0, tool_choice=NAMED).choices[0].message.tool_calls
    assert call.function.name == "round_up"
    check("round_up", call.function.arguments)


@pytest.mark.parametrize(
    ("choice", "parallel"),
    [
        pytest.param("required", True, id="required-several"),
        pytest.param(NAMED, False, id="named-one"),
        pytest.param("required", False, id="required-one", marks=pytest.mark.slow),
        pytest.param(NAMED, True, id="named-several", marks=pytest.mark.slow),
    ],
)
def test_almost_at_random(client: openai.OpenAI, choice: Any, parallel: bool) -> None:
    """Eight hot completions at once: whatever ended by itself holds calls, and valid ones alone."""
    options = OPTIONS | {"temperature": 2.0, "seed": 5, "n": 8, "tool_choice": choice, "parallel_tool_calls": parallel}
    answer = client.chat.completions.create(**options)
    ended = [c for c in answer.choices if c.finish_reason != "length"]
    assert len(ended) > 4
    for completion in answer.choices:
        for call in completion.message.tool_calls or []:
            check(call.function.name, call.function.arguments)
    for completion in ended:
        calls = completion.message.tool_calls
        assert completion.finish_reason == "tool_calls" and completion.message.content is None
        assert len(calls) == 1 if not parallel or choice == NAMED else calls
    texts: dict[int, dict[int, str]] = {}
    for chunk in client.chat.completions.create(**options, stream=True):
        (part,) = chunk.choices
        for call in part.delta.tool_calls or []:
            of_choice = texts.setdefault(part.index, {})
            of_choice[call.index] = of_choice.get(call.index, "") + call.function.arguments
    for completion in ended:
        told = [call.function.arguments for call in completion.message.tool_calls]
        assert list(texts[completion.index].values()) == told


def test_the_typed_helper(client: openai.OpenAI) -> None:
    """`pydantic_function_tool` makes strict tools, and `.parse` gives the arguments as that model."""
    from pydantic import BaseModel

    class GetWeather(BaseModel):
        """Get the weather"""

        city: str

    asked = [{"role": "user", "content": "What is the weather in Rome?"}]
    tools = [openai.pydantic_function_tool(GetWeather, name="get_weather")]
    answer = client.chat.completions.parse(model="tiny", messages=asked, tools=tools, temperature=0, max_tokens=64)
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.parsed_arguments == GetWeather(city="Rome")
    free = client.chat.completions.parse(model="tiny", messages=ASKED, tools=tools, temperature=0, max_tokens=64)
    assert free.choices[0].message.content == "The capital of France is Paris."


def test_what_cannot_be_enforced_is_refused_by_its_name(client: openai.OpenAI) -> None:
    bad = tool("f", a={"type": "string", "format": "no-such-format"})
    with pytest.raises(openai.BadRequestError, match="format") as caught:
        client.chat.completions.create(**OPTIONS | {"tools": [bad], "tool_choice": "required"})
    assert caught.value.param == "tools"
    schema = {"type": "array", "uniqueItems": True, "x-guidance": {}}  # no driver's card takes both
    for choice in ("required", "auto"):  # an answer's form is looked at, even where calls must come
        with pytest.raises(openai.BadRequestError, match="uniqueItems") as caught:
            client.chat.completions.create(
                **OPTIONS, tool_choice=choice, extra_body={"structured_outputs": {"json": schema}}
            )
        assert caught.value.param == "structured_outputs.json"


@pytest.mark.parametrize("choice", ["required", "auto", "none"])
def test_with_a_form_of_the_answer(client: openai.OpenAI, choice: Any) -> None:
    beside = {"structured_outputs": {"choice": ["a", "b"]}}
    message = client.chat.completions.create(**OPTIONS, tool_choice=choice, extra_body=beside).choices[0].message
    assert bool(message.tool_calls) != (message.content in ("a", "b"))
    assert choice == "auto" or bool(message.tool_calls) == (choice == "required")


def test_constraints_begin_when_thoughts_have_ended() -> None:
    """With a parser for which every answer begins with thoughts, and a model that does not end them: nothing is
    constrained, and nothing is an answer."""
    server = Server("tiny", "--reasoning-parser", "deepseek_r1", "--max-num-seqs", "4")
    try:
        client = server.client()
        said = "The capital of France is Paris."
        for beside in ({"tool_choice": "required"}, {"tool_choice": NAMED}, {"tool_choice": "auto"}):
            choice = client.chat.completions.create(**OPTIONS | beside, temperature=0).choices[0]
            assert (choice.message.reasoning_content, choice.message.content) == (said, "")
            assert choice.finish_reason == "stop" and not choice.message.tool_calls
        deltas = [c.choices[0].delta for c in client.chat.completions.create(**OPTIONS, temperature=0, stream=True)]
        assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == said
        assert not any(delta.content for delta in deltas)
    finally:
        server.stop()
