"""Structured outputs over HTTP, by the official client, with the grammar drivers that `auto` asks in turn: `xgrammar`,
then `llguidance`, then others."""

from __future__ import annotations

import asyncio
import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import openai
import psutil
import pytest
from pydantic import BaseModel, Field

from .conftest import Server

MESSAGES: Any = [{"role": "user", "content": "Tell me about a pet."}]
COMMON: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "temperature": 1.0}


class Toy(BaseModel):
    """A part of a pet's life."""

    colour: Literal["red", "blue"]
    count: int = Field(ge=1, le=9)


class Pet(BaseModel):
    """What the answer must be."""

    name: str = Field(min_length=2, max_length=12)
    kind: Literal["cat", "dog"]
    good: bool
    toys: list[Toy] = Field(max_length=2)
    friend: str | None = Field(max_length=8)


def test_parse_with_pydantic(client: openai.OpenAI) -> None:
    for seed in range(3):
        answer = client.chat.completions.parse(**COMMON, response_format=Pet, seed=seed, max_tokens=400)
        pet = answer.choices[0].message.parsed
        assert isinstance(pet, Pet) and answer.choices[0].finish_reason == "stop"


def test_streamed(client: openai.OpenAI) -> None:
    """The client's helper, which parses while the answer comes, and the same answer as at once."""
    options = {**COMMON, "seed": 5, "max_tokens": 400}
    with client.chat.completions.stream(**options, response_format=Pet) as stream:
        events = [event.type for event in stream]
        final = stream.get_final_completion()
    assert "content.delta" in events and "content.done" in events
    whole = client.chat.completions.parse(**options, response_format=Pet)
    assert final.choices[0].message.parsed == whole.choices[0].message.parsed


def test_asynchronously(server: Server, client: openai.OpenAI) -> None:
    options = {**COMMON, "seed": 5, "max_tokens": 400, "response_format": Pet}
    expected = client.chat.completions.parse(**options).choices[0].message.parsed

    async def ask() -> list[Pet | None]:
        async with openai.AsyncOpenAI(base_url=server.address + "/v1", api_key="none", max_retries=0) as asking:
            answer = await asking.chat.completions.parse(**options)
            async with asking.chat.completions.stream(**options) as stream:
                final = await stream.get_final_completion()
            return [answer.choices[0].message.parsed, final.choices[0].message.parsed]

    assert asyncio.run(ask()) == [expected] * 2


class Colour(BaseModel):
    """No call, and what the model would say to "Hello" is none."""

    colour: Literal["red", "blue"]


class GetWeather(BaseModel):
    """Get the weather"""

    city: str


def test_parse_with_tools(client: openai.OpenAI) -> None:
    """Calls, or an answer in the form that is asked for: with each the other is offered, too."""
    tool = openai.pydantic_function_tool(GetWeather, name="get_weather")
    options: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 200, "tools": [tool]}
    weather: Any = [{"role": "user", "content": "What is the weather in Rome?"}]
    called = client.chat.completions.parse(**options, messages=weather, response_format=Toy).choices[0]
    with client.chat.completions.stream(**options, messages=weather, response_format=Toy) as stream:
        streamed = stream.get_final_completion().choices[0]
    for choice in (called, streamed):
        (call,) = choice.message.tool_calls
        assert call.function.parsed_arguments == GetWeather(city="Rome") and choice.message.parsed is None
        assert choice.finish_reason == "tool_calls"
    hello: Any = [{"role": "user", "content": "Hello"}]
    answered = client.chat.completions.parse(**options, messages=hello, response_format=Colour).choices[0]
    with client.chat.completions.stream(**options, messages=hello, response_format=Colour) as stream:
        streamed = stream.get_final_completion().choices[0]
    for choice in (answered, streamed):
        assert isinstance(choice.message.parsed, Colour) and not choice.message.tool_calls
        assert choice.finish_reason == "stop"
    forced = client.chat.completions.parse(
        **options, messages=MESSAGES, response_format=Toy, tool_choice="required", parallel_tool_calls=False
    )
    assert len(forced.choices[0].message.tool_calls) == 1


@pytest.mark.parametrize("body", [{"choice": ["x y", "z"]}, {"regex": "[0-9]{3}"}, {"grammar": 'root ::= "ab" | "cd"'}])
def test_other_constraints_beside_tools(client: openai.OpenAI, body: dict[str, Any]) -> None:
    tool = openai.pydantic_function_tool(GetWeather, name="get_weather")
    answer = client.chat.completions.create(
        **{**COMMON, "messages": [{"role": "user", "content": "Hello"}]},
        tools=[tool], seed=1, max_tokens=100, extra_body={"structured_outputs": body},
    )  # fmt: skip
    message = answer.choices[0].message
    assert message.tool_calls or re.fullmatch("x y|z|[0-9]{3}|ab|cd", message.content)


def test_several_choices_beside_free_ones(client: openai.OpenAI) -> None:
    with ThreadPoolExecutor(4) as threads:
        free = threads.submit(client.chat.completions.create, **COMMON, max_tokens=60, seed=1)
        held = threads.submit(client.chat.completions.parse, **COMMON, response_format=Pet, n=4, seed=1)
        assert len({choice.message.content for choice in held.result().choices}) > 1
        assert all(choice.message.parsed for choice in held.result().choices)
        alone = client.chat.completions.create(**COMMON, max_tokens=60, seed=1)
        assert free.result().choices[0].message.content == alone.choices[0].message.content


def test_any_json_object(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        **COMMON, response_format={"type": "json_object"}, seed=2, max_tokens=300, stop=["}"],
        extra_body={"include_stop_str_in_output": True},
    )  # fmt: skip
    text = answer.choices[0].message.content
    assert text is not None and text.startswith("{")


@pytest.mark.parametrize(
    ("constraint", "pattern"),
    [
        ({"regex": "[A-Z][a-z]{2,5} [0-9]{3}"}, "[A-Z][a-z]{2,5} [0-9]{3}"),
        ({"choice": ["yes", "no"]}, "yes|no"),
        ({"grammar": 'root ::= "SELECT " name " FROM " name\nname ::= [a-z]{1,4}'}, "SELECT [a-z]+ FROM [a-z]+"),
        ({"json": {"enum": ["a", 1, None]}}, '"a"|1|null'),
        ({"json": '{"type": "integer", "minimum": 10, "maximum": 12}'}, "1[012]"),
        (
            {"structural_tag": json.dumps({"type": "structural_tag", "format": {"type": "tag", "begin": "<n>",
             "content": {"type": "json_schema", "json_schema": {"type": "boolean"}}, "end": "</n>"}})},
            "<n>\\s*(true|false)\\s*</n>",
        ),
    ],
)  # fmt: skip
def test_vllms_field(client: openai.OpenAI, constraint: dict[str, Any], pattern: str) -> None:
    body = {"structured_outputs": constraint}
    chat = client.chat.completions.create(**COMMON, max_tokens=60, extra_body=body)
    plain = client.completions.create(model="tiny", prompt="A pet is", max_tokens=60, extra_body=body)
    for text in (chat.choices[0].message.content, plain.choices[0].text):
        assert text is not None and re.fullmatch(pattern, text), text


def test_completions_take_a_response_format_too(client: openai.OpenAI) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "boolean"}}}
    answer = client.completions.create(model="tiny", prompt="A pet is", extra_body={"response_format": schema})
    assert json.loads(answer.choices[0].text) in (True, False)


def schema_format(schema: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "it", "schema": schema, **more}}


UNIQUE = {"type": "array", "uniqueItems": True}


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"response_format": schema_format(UNIQUE)}, "response_format", "'uniqueItems'"),
        ({"response_format": schema_format(UNIQUE, strict=True)}, "response_format", "cannot"),
        ({"response_format": schema_format({"$ref": "#/$defs/a"})}, "response_format", "is not there"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "go together"),
        ({"response_format": {"type": "json_object", "json_schema": {"name": "a"}}}, "response_format", "go together"),
        ({"response_format": schema_format({}, nmae=1)}, "nmae", "did you mean 'name'"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a b"}}}, "response_format", "characters"),
        ({"response_format": {"type": "structural_tag"}}, "response_format", "format, or structures"),
        ({"response_format": {"type": "text", "triggers": []}}, "response_format", "structural_tag"),
        (
            {"response_format": {"type": "json_object"}, "extra_body": {"structured_outputs": {"regex": "a"}}},
            None, "two constraints",
        ),
        ({"extra_body": {"structured_outputs": {"regex": "(?=a)"}}}, "structured_outputs.regex", "lookarounds"),
        ({"extra_body": {"structured_outputs": {"grammar": "root ::= ("}}}, "structured_outputs.grammar", "EBNF"),
        ({"extra_body": {"structured_outputs": {"grammar": "root ::= root"}}}, "structured_outputs.grammar", "nothing"),
        ({"response_format": schema_format({"not": {}})}, "response_format", "nothing fits"),
        ({"extra_body": {"structured_outputs": {"regex": "a", "choice": ["a"]}}}, None, "choice and regex"),
        ({"extra_body": {"structured_outputs": {"regex": "a" * 1_000_000}}}, "structured_outputs.regex", "at most"),
    ],
)  # fmt: skip
def test_what_is_refused(client: openai.OpenAI, fields: dict[str, Any], param: str | None, words: str) -> None:
    with pytest.raises(openai.BadRequestError, match=words) as found:
        client.chat.completions.create(**COMMON, **fields)
    assert found.value.param == param and len(found.value.message) < 1000


def test_what_the_first_driver_refuses_the_next_enforces(server: Server, client: openai.OpenAI) -> None:
    """Multiples in an open range and Lark are nothing for the first; a structural tag is for it alone."""
    schema = {"allOf": [{"type": "integer", "multipleOf": 5, "minimum": 0}, {"maximum": 5000}]}
    for _ in range(2):
        answer = client.chat.completions.create(**COMMON, response_format=schema_format(schema), max_tokens=20)
        assert json.loads(answer.choices[0].message.content or "") in range(0, 5001, 5)
    constraints = [
        ({"grammar": 'start: "a" B\nB: /[x-z]{2}/'}, "a[x-z][x-z]"),
        ({"json": schema}, "[1-9]?[0-9]{0,2}[05]"),
        ({"regex": "[0-9]{4}"}, "[0-9]{4}"),
        ({"structural_tag": json.dumps({"type": "structural_tag", "format": {"type": "const_string", "value": "ab"}})},
         "ab"),
    ]  # fmt: skip
    with ThreadPoolExecutor(8) as threads:  # of several drivers in one step
        answers = [
            threads.submit(
                client.completions.create,
                model="tiny", prompt="A pet", max_tokens=30, extra_body={"structured_outputs": constraint},
            )
            for constraint, _ in constraints * 3
        ]  # fmt: skip
        for answer_, (_, pattern) in zip(answers, constraints * 3, strict=True):
            assert re.fullmatch(pattern, answer_.result().choices[0].text.strip())


def test_what_none_enforces_is_named_once(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as found:
        client.chat.completions.create(**COMMON, response_format=schema_format(UNIQUE))
    assert "'uniqueItems' in the schema; the grammar driver cannot enforce 'uniqueItems'" in found.value.message


@pytest.mark.parametrize("warm", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_named_driver_stands_for_itself_and_warms_up_where_it_is_to(warm: bool) -> None:
    """Its process is there once a request asks for one, or before; what it refuses nobody else is asked for."""
    server = Server("tiny", "--grammar", "outlines", *(["--grammar-warm-up"] if warm else []))
    try:
        core = psutil.Process(server.core_pid())
        assert bool(core.children()) == warm, "it is started while the model is loaded, or not at all"
        with pytest.raises(openai.BadRequestError, match="'grammar'|enforces choice, json, regex"):
            server.client().completions.create(
                model="tiny", prompt="A pet", extra_body={"structured_outputs": {"grammar": 'root ::= "a"'}}
            )
        answer = server.client().completions.create(
            model="tiny", prompt="A pet", extra_body={"structured_outputs": {"regex": "[0-9]{3}"}}
        )
        assert re.fullmatch("[0-9]{3}", answer.choices[0].text) and len(core.children()) == 1
    finally:
        assert server.stop() == 0, "".join(server.lines)


@pytest.mark.slow
def test_one_that_runs_away_costs_only_itself(client: openai.OpenAI) -> None:
    """Its memory or its time; others begin and end meanwhile. Always run: the tests of `engine_kit.compiling`, which
    ends it, and one of xgrammar's own."""
    wide = {"type": "object", "properties": {f"k{i}": {"type": "string"} for i in range(499)}}
    with ThreadPoolExecutor(2) as threads:
        runaway = threads.submit(client.chat.completions.create, **COMMON, response_format=schema_format(wide))
        answers = 0
        while not runaway.done() and answers < 5:
            began = time.monotonic()
            answer = client.chat.completions.create(
                **COMMON, max_tokens=4, extra_body={"structured_outputs": {"choice": ["yes", f"no {answers}"]}}
            )
            assert answer.choices[0].message.content in ("yes", f"no {answers}")
            answers += time.monotonic() - began < 60
        with pytest.raises(
            openai.BadRequestError, match="more than the 1024 MiB|longer than the 10 s|LLGuidance gave up"
        ):
            runaway.result()
    assert answers
