"""Tools over HTTP, by the official clients and the bundled model, which has learnt to call them."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
TIME = {
    "type": "function",
    "function": {
        "name": "get_time",
        "description": "Get the time",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
ASKED: list[Any] = [{"role": "user", "content": "What is the weather in Rome?"}]
OPTIONS: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 64}


def second_turn(message: Any) -> list[Any]:
    """The conversation with the model's own call, as a client sends it back, and the tool's result."""
    result = json.dumps({"temperature": 21, "condition": "sunny"})
    called = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": result}
    return [*ASKED, message.model_dump(exclude_none=True), called]


def check_call(message: Any) -> None:
    (call,) = message.tool_calls
    assert (call.type, call.function.name, json.loads(call.function.arguments)) == (
        "function",
        "get_weather",
        {"city": "Rome"},
    )
    assert call.id.startswith("call_") and not message.content


def test_two_turns(client: openai.OpenAI) -> None:
    first = client.chat.completions.create(messages=ASKED, tools=[WEATHER, TIME], **OPTIONS)
    assert first.choices[0].finish_reason == "tool_calls"
    check_call(first.choices[0].message)
    messages = second_turn(first.choices[0].message)
    answer = client.chat.completions.create(messages=messages, tools=[WEATHER, TIME], **OPTIONS)
    assert answer.choices[0].finish_reason == "stop" and answer.choices[0].message.tool_calls is None
    assert answer.choices[0].message.content == "It is sunny and 21 degrees in Rome."
    assert answer.usage.prompt_tokens_details.cached_tokens > 0, "the second prompt begins with the first"


def test_two_turns_streamed(client: openai.OpenAI) -> None:
    """By the client's own helper, which puts deltas together and reads the arguments."""
    with client.chat.completions.stream(messages=ASKED, tools=[WEATHER], **OPTIONS) as stream:
        events = list(stream)
        final = stream.get_final_completion()
    check_call(final.choices[0].message)
    assert final.choices[0].finish_reason == "tool_calls"
    pieces = [e.arguments_delta for e in events if e.type == "tool_calls.function.arguments.delta"]
    assert json.loads("".join(pieces)) == {"city": "Rome"}
    dumped = final.choices[0].message.model_dump(exclude_none=True, exclude={"parsed"})
    for call in dumped["tool_calls"]:
        call["function"].pop("parsed_arguments", None)
    called = {"role": "tool", "tool_call_id": dumped["tool_calls"][0]["id"], "content": "sunny, 21 degrees"}
    messages = [*ASKED, dumped, called]
    with client.chat.completions.stream(messages=messages, tools=[WEATHER], **OPTIONS) as stream:
        answer = stream.get_final_completion().choices[0]
    assert answer.message.content == "It is sunny and 21 degrees in Rome." and answer.finish_reason == "stop"


def test_deltas(client: openai.OpenAI) -> None:
    """Index, id, type and name first, then arguments; usage as of the whole answer."""
    whole = client.chat.completions.create(messages=ASKED, tools=[WEATHER], **OPTIONS)
    streamed = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(client.chat.completions.create(messages=ASKED, tools=[WEATHER], **OPTIONS, **streamed))
    deltas = [call for c in chunks if c.choices for call in c.choices[0].delta.tool_calls or []]
    first, *rest = deltas
    assert (first.index, first.type, first.function.name) == (0, "function", "get_weather") and first.id
    assert all((d.index, d.id, d.type, d.function.name) == (0, None, None, None) for d in rest)
    assert json.loads("".join(d.function.arguments for d in deltas)) == {"city": "Rome"}
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "tool_calls"
    for count in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert getattr(chunks[-1].usage, count) == getattr(whole.usage, count)
    assert all("<" not in (c.choices[0].delta.content or "") for c in chunks if c.choices)


def test_the_async_client(server: Any) -> None:
    async def run() -> None:
        async with openai.AsyncOpenAI(base_url=server.address + "/v1", api_key="none") as client:
            first = await client.chat.completions.create(messages=ASKED, tools=[WEATHER], **OPTIONS)
            check_call(first.choices[0].message)
            messages = second_turn(first.choices[0].message)
            async with client.chat.completions.stream(messages=messages, tools=[WEATHER], **OPTIONS) as stream:
                final = await stream.get_final_completion()
            assert final.choices[0].message.content == "It is sunny and 21 degrees in Rome."

    asyncio.run(run())


def test_several_completions_with_log_probabilities(client: openai.OpenAI) -> None:
    options = OPTIONS | {"n": 2, "logprobs": True, "messages": ASKED, "tools": [WEATHER]}
    answer = client.chat.completions.create(**options)
    for choice in answer.choices:
        check_call(choice.message)
        assert choice.finish_reason == "tool_calls"
    assert len({choice.message.tool_calls[0].id for choice in answer.choices}) == 2
    tokens = sum(len(choice.logprobs.content) for choice in answer.choices)
    assert tokens == answer.usage.completion_tokens
    streamed = [[], []]
    arguments = ["", ""]
    for chunk in client.chat.completions.create(**options, stream=True):
        (choice,) = chunk.choices
        streamed[choice.index] += choice.logprobs.content if choice.logprobs else []
        arguments[choice.index] += "".join(c.function.arguments for c in choice.delta.tool_calls or [])
    assert [len(s) for s in streamed] == [len(c.logprobs.content) for c in answer.choices]
    assert [json.loads(text) for text in arguments] == [{"city": "Rome"}] * 2


def test_cut_off_calls_are_content(client: openai.OpenAI) -> None:
    """By the length, and by a stop string: whole, they are what the model wrote."""
    cut = client.chat.completions.create(messages=ASKED, tools=[WEATHER], **OPTIONS | {"max_tokens": 6}).choices[0]
    assert cut.finish_reason == "length" and cut.message.tool_calls is None
    assert cut.message.content.startswith("<tool_call>")
    stopped = client.chat.completions.create(messages=ASKED, tools=[WEATHER], stop=["Rome"], **OPTIONS).choices[0]
    assert stopped.finish_reason == "stop" and stopped.message.tool_calls is None
    assert stopped.message.content == '<tool_call>{"name": "get_weather", "arguments": {"city": "'


def test_none_is_without_tools(client: openai.OpenAI) -> None:
    plain = client.chat.completions.create(messages=ASKED, **OPTIONS)
    none = client.chat.completions.create(messages=ASKED, tools=[WEATHER], tool_choice="none", **OPTIONS)
    assert none.choices[0].message == plain.choices[0].message and none.usage.prompt_tokens == plain.usage.prompt_tokens


def test_refused_by_name(client: openai.OpenAI) -> None:
    named = {"type": "function", "function": {"name": "get_wether"}}
    for bad, param, said in (
        ({"tool_choice": named}, "tool_choice", "did you mean 'get_weather'"),
        ({"tools": [WEATHER, WEATHER]}, "tools", "once more"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "x"}}}]}, "tools", "type"),
        ({"tools": "get_weather"}, "tools", "list"),
        ({"tools": []}, "tools", "empty"),
        ({"tools": openai.NOT_GIVEN, "tool_choice": "required"}, "tool_choice", "no tools"),
        ({"tools": openai.NOT_GIVEN, "parallel_tool_calls": False}, "parallel_tool_calls", "only allowed"),
    ):
        with pytest.raises(openai.BadRequestError, match=said) as caught:
            client.chat.completions.create(**{"messages": ASKED, "tools": [WEATHER]} | OPTIONS | bad)
        assert caught.value.param == param
    for calls in ("f", [{}], [{"function": {"name": "f", "arguments": 7}}]):
        with pytest.raises(openai.BadRequestError, match="chat with the tool call"):
            client.chat.completions.create(messages=[{"role": "assistant", "tool_calls": calls}], **OPTIONS)
