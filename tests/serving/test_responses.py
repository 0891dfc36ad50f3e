"""`/v1/responses` by OpenAI's official client, unmodified."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from typing import Any, Literal

import httpx
import openai
import pytest
from pydantic import BaseModel

from .conftest import Server

QUESTION = "What is the capital of France?"
ASKED = "What is the weather in Rome?"
OPTIONS: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_output_tokens": 64}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "Get the weather",
    "parameters": SCHEMA,
    "strict": False,
}
TIME: Any = {**WEATHER, "name": "get_time", "description": "Get the time"}
TOLD = json.dumps({"temperature": 21, "condition": "sunny"})


class Place(BaseModel):
    city: Literal["Paris", "Rome"]
    large: bool


def events_of(server: Server, **body: Any) -> list[dict[str, Any]]:
    """The data of each event, as they come over the wire."""
    answer = httpx.post(server.address + "/v1/responses", json={**OPTIONS, **body, "stream": True}, timeout=60)
    assert answer.status_code == 200, answer.text
    events = []
    for i, part in enumerate(answer.text.removesuffix("\n\n").split("\n\n")):
        name, data = part.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}" and event["sequence_number"] == i
        events.append(event)
    return events


def test_a_response(client: openai.OpenAI) -> None:
    """As chat answers."""
    messages: list[Any] = [{"role": "system", "content": "Answer briefly."}, {"role": "user", "content": QUESTION}]
    expected = client.chat.completions.create(model="tiny", messages=messages, temperature=0, max_tokens=64)
    made = client.responses.create(input=QUESTION, instructions="Answer briefly.", metadata={"a": "b"}, **OPTIONS)
    assert made.output_text == expected.choices[0].message.content and "Paris" in made.output_text
    assert (made.status, made.error, made.incomplete_details, made.metadata) == ("completed", None, None, {"a": "b"})
    assert made.usage is not None and expected.usage is not None
    assert made.usage.input_tokens == expected.usage.prompt_tokens
    assert made.usage.output_tokens == expected.usage.completion_tokens
    items: Any = [{"role": "user", "content": [{"type": "input_text", "text": QUESTION}]}]
    again = client.responses.create(input=items, instructions="Answer briefly.", **OPTIONS)
    assert again.output_text == made.output_text and again.usage.input_tokens_details.cached_tokens > 0


def test_cut_off(client: openai.OpenAI, server: Server) -> None:
    made = client.responses.create(input=QUESTION, **{**OPTIONS, "max_output_tokens": 2})
    assert made.status == "incomplete" and made.incomplete_details.reason == "max_output_tokens"
    assert made.output[0].status == "incomplete" and made.usage.output_tokens == 2
    events = events_of(server, input=QUESTION, max_output_tokens=2)
    assert events[-1]["type"] == "response.incomplete" and events[-1]["response"]["output"][0]["status"] == "incomplete"
    assert events[-2]["item"]["status"] == "incomplete"


def test_going_on(client: openai.OpenAI) -> None:
    """The model sees what was said before; instructions are not carried over."""
    first = client.responses.create(input=QUESTION, instructions="Answer briefly.", **OPTIONS)
    second = client.responses.create(input="And of Italy?", previous_response_id=first.id, **OPTIONS)
    said: list[Any] = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "And of Italy?"},
    ]
    expected = client.chat.completions.create(model="tiny", messages=said, temperature=0, max_tokens=64)
    assert second.output_text == expected.choices[0].message.content
    assert second.usage.input_tokens == expected.usage.prompt_tokens and second.previous_response_id == first.id
    third = client.responses.create(input=QUESTION, previous_response_id=second.id, **OPTIONS)
    assert third.usage.input_tokens > second.usage.total_tokens
    items = [item.model_dump(exclude_none=True) for item in first.output]
    by_hand = client.responses.create(input=[said[0], *items, said[2]], store=False, **OPTIONS)
    assert by_hand.output_text == second.output_text and by_hand.usage.input_tokens == second.usage.input_tokens


def test_stored_and_forgotten(client: openai.OpenAI) -> None:
    made = client.responses.create(input=QUESTION, **OPTIONS)
    assert made.store and client.responses.retrieve(made.id).to_dict() == made.to_dict()
    again = client.responses.create(input="Thanks", previous_response_id=made.id, **OPTIONS)
    pages = client.responses.input_items.list(again.id, limit=2, order="asc")
    items = list(pages)
    assert [item.role for item in items] == ["user", "assistant", "user"] and len(pages.data) == 2
    assert items[0].content[0].text == QUESTION
    with pytest.raises(openai.BadRequestError, match="background"):
        client.responses.cancel(made.id)
    client.responses.delete(made.id)
    for call in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError):
            call(made.id)
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(input="Thanks", previous_response_id=made.id, **OPTIONS)
    assert caught.value.code == "previous_response_not_found" and caught.value.param == "previous_response_id"
    assert client.responses.create(input="Bye", previous_response_id=again.id, **OPTIONS).output, (
        "it holds its own copy"
    )
    unstored = client.responses.create(input=QUESTION, store=False, **OPTIONS)
    assert not unstored.store
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(unstored.id)


def test_events_that_a_client_comes_back_to(client: openai.OpenAI, server: Server) -> None:
    """It leaves, and reads on where it was; afterwards all can be read again."""
    asked: dict[str, Any] = {**OPTIONS, "input": "Tell me a story.", "max_output_tokens": 40}
    whole = client.responses.create(**asked)
    identity, seen = "", []
    for event in client.responses.create(**asked, background=True, stream=True):
        seen.append(event)
        identity = identity or event.response.id  # type: ignore[union-attr]
        if len(seen) == 5:
            break
    assert [event.sequence_number for event in seen] == [0, 1, 2, 3, 4] and seen[0].type == "response.created"
    seen += client.responses.retrieve(identity, stream=True, starting_after=4)
    assert [event.sequence_number for event in seen] == list(range(len(seen)))
    assert seen[-1].type == f"response.{whole.status}"
    assert "".join(event.delta for event in seen if event.type == "response.output_text.delta") == whole.output_text
    again = list(client.responses.retrieve(identity, stream=True))
    assert [event.to_dict() for event in again] == [event.to_dict() for event in seen]
    stored = client.responses.retrieve(identity)
    assert stored.output_text == whole.output_text and stored.background
    assert list(client.responses.retrieve(identity, stream=True, starting_after=len(seen))) == []
    for name, refused in (
        ("stream", lambda: list(client.responses.retrieve(whole.id, stream=True))),
        ("starting_after", lambda: client.responses.retrieve(identity, extra_query={"starting_after": 1})),
        ("include", lambda: client.responses.retrieve(identity, include=["message.output_text.logprobs"])),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            refused()
        assert (caught.value.param or "").removesuffix("[]") == name


def test_a_cancelled_stream_in_the_background_ends(client: openai.OpenAI, server: Server) -> None:
    asked: dict[str, Any] = {"model": "tiny", "input": "Tell me a story.", "temperature": 1.9, "background": True}
    story = {"story": {"type": "string", "minLength": 2500}}  # a short one has ended before it is cancelled
    schema = {"type": "object", "properties": story, "required": ["story"], "additionalProperties": False}
    asked["text"] = {"format": {"type": "json_schema", "name": "told", "schema": schema, "strict": True}}
    events = client.responses.create(**asked, stream=True, extra_body={"seed": 3})
    first = next(iter(events))
    assert first.type == "response.created"
    assert client.responses.cancel(first.response.id).status == "cancelled"
    assert all(event.type != "response.completed" for event in events)
    server.until_idle()
    assert client.responses.retrieve(first.response.id).status == "cancelled"


def test_in_the_background(client: openai.OpenAI, server: Server) -> None:
    whole = client.responses.create(input=QUESTION, **OPTIONS)
    made = client.responses.create(input=QUESTION, background=True, **OPTIONS)
    assert made.status == "in_progress" and made.background and made.output == []
    deadline = time.monotonic() + 30
    while (found := client.responses.retrieve(made.id)).status == "in_progress":
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert (found.status, found.output_text) == ("completed", whole.output_text)
    assert client.responses.cancel(made.id).status == "completed", "it has ended"
    goes_on = client.responses.create(input="Thanks", previous_response_id=made.id, **OPTIONS)
    assert goes_on.usage.input_tokens > found.usage.total_tokens


def test_cancelled(client: openai.OpenAI, server: Server) -> None:
    """Nothing runs on, and nothing goes on from it; the same where it is deleted."""
    long: dict[str, Any] = {"model": "tiny", "input": "Tell me a story.", "temperature": 1.9, "background": True}
    seeded = {"extra_body": {"seed": 7, "min_p": 0.0}}
    made = client.responses.create(**long, **seeded)
    assert client.responses.cancel(made.id).status == "cancelled" == client.responses.retrieve(made.id).status
    assert client.responses.cancel(made.id).status == "cancelled"
    server.until_idle()
    with pytest.raises(openai.BadRequestError, match="is cancelled"):
        client.responses.create(input="Thanks", previous_response_id=made.id, **OPTIONS)
    deleted = client.responses.create(**long, **seeded)
    client.responses.delete(deleted.id)
    server.until_idle()
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(deleted.id)
    late = client.responses.create(**long, extra_body={"timeout": 1e-4})
    server.until_idle()
    deadline = time.monotonic() + 30
    while (found := client.responses.retrieve(late.id)).status == "in_progress":
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert found.status == "failed" and found.error.code == "request_timeout"


def test_streamed(client: openai.OpenAI) -> None:
    whole = client.responses.create(input=QUESTION, **OPTIONS)
    with client.responses.stream(input=QUESTION, **OPTIONS) as stream:
        pieces = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert "".join(pieces) == whole.output_text == final.output_text
    assert final.usage.output_tokens == whole.usage.output_tokens
    assert client.responses.retrieve(final.id).output_text == whole.output_text
    goes_on = client.responses.create(input="Thanks", previous_response_id=final.id, **OPTIONS)
    assert goes_on.usage.input_tokens > final.usage.total_tokens


def test_the_events(server: Server) -> None:
    """Their order and content, as OpenAI documents them."""
    events = events_of(server, input=QUESTION)
    names = [event["type"].removeprefix("response.") for event in events]
    assert names[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert set(names[4:-4]) == {"output_text.delta"}
    assert names[-4:] == ["output_text.done", "content_part.done", "output_item.done", "completed"]
    assert events[0]["response"]["status"] == "in_progress" and events[0]["response"]["output"] == []
    added, done, completed = events[2]["item"], events[-2]["item"], events[-1]["response"]
    assert added["content"] == [] and added["status"] == "in_progress" and done["status"] == "completed"
    assert completed["output"] == [done] and added["id"] == done["id"] == events[4]["item_id"]
    text = "".join(event["delta"] for event in events[4:-4])
    assert text == events[-4]["text"] == done["content"][0]["text"] and completed["id"] == events[0]["response"]["id"]


def check_call(item: Any) -> None:
    assert (item.type, item.name, json.loads(item.arguments)) == ("function_call", "get_weather", {"city": "Rome"})
    assert item.call_id.startswith("call_") and item.id.startswith("fc_") and item.status == "completed"


def test_tools_in_two_turns(client: openai.OpenAI) -> None:
    first = client.responses.create(input=ASKED, tools=[WEATHER, TIME], **OPTIONS)
    (call,) = first.output
    check_call(call)
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": TOLD}
    stored = client.responses.create(input=[result], previous_response_id=first.id, tools=[WEATHER, TIME], **OPTIONS)
    by_hand: list[Any] = [{"role": "user", "content": ASKED}, *first.output, result]
    sent = client.responses.create(input=by_hand, tools=[WEATHER, TIME], **OPTIONS)
    assert stored.output_text == sent.output_text == "It is sunny and 21 degrees in Rome."


def test_tools_streamed(client: openai.OpenAI, server: Server) -> None:
    with client.responses.stream(input=ASKED, tools=[WEATHER], **OPTIONS) as stream:
        deltas = [event.delta for event in stream if event.type == "response.function_call_arguments.delta"]
        final = stream.get_final_response()
    assert json.loads("".join(deltas)) == {"city": "Rome"}
    check_call(final.output[0])
    events = events_of(server, input=ASKED, tools=[WEATHER])
    names = [event["type"] for event in events]
    assert events[2]["item"]["arguments"] == "" and events[2]["item"]["name"] == "get_weather"
    assert names[-3:-1] == ["response.function_call_arguments.done", "response.output_item.done"]


def test_tool_choice(client: openai.OpenAI) -> None:
    hidden = client.responses.create(input=ASKED, tools=[WEATHER], tool_choice="none", **OPTIONS)
    assert [item.type for item in hidden.output] == ["message"]
    pytest.importorskip("engine_xgrammar", reason="no grammar driver that enforces schemas is installed")
    forced: dict[str, Any] = {"input": QUESTION, "tools": [WEATHER, TIME], **OPTIONS}
    (one,) = client.responses.create(tool_choice="required", parallel_tool_calls=False, **forced).output
    assert one.type == "function_call"
    (named,) = client.responses.create(tool_choice={"type": "function", "name": "get_time"}, **forced).output
    assert named.name == "get_time" and "city" in json.loads(named.arguments)


def test_parsed(client: openai.OpenAI) -> None:
    pytest.importorskip("engine_xgrammar", reason="no grammar driver that enforces schemas is installed")
    parsed = client.responses.parse(input=QUESTION, text_format=Place, **OPTIONS)
    assert isinstance(parsed.output_parsed, Place) and parsed.text.format.type == "json_schema"
    with client.responses.stream(input=QUESTION, text_format=Place, **OPTIONS) as stream:
        assert stream.get_final_response().output_parsed == parsed.output_parsed
    any_object = client.responses.create(input=QUESTION, text={"format": {"type": "json_object"}}, **OPTIONS)
    assert any_object.output_text.startswith("{")


def test_asynchronously(server: Server, client: openai.OpenAI) -> None:
    expected = client.responses.create(input=QUESTION, **OPTIONS).output_text

    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=server.address + "/v1", api_key="none", max_retries=0) as asking:

            async def streamed() -> str:
                async with asking.responses.stream(input=QUESTION, **OPTIONS) as stream:
                    return (await stream.get_final_response()).output_text

            made = await asking.responses.create(input=QUESTION, **OPTIONS)
            return [made.output_text, *await asyncio.gather(*(streamed() for _ in range(4)))]

    assert asyncio.run(ask()) == [expected] * 5


@pytest.mark.parametrize(
    ("body", "param", "told"),
    [
        ({"conversation": "c"}, "conversation", "not supported"),
        ({"reasoning": {"effort": "low"}}, "reasoning", "not supported"),
        ({"background": True, "store": False}, "store", "background"),
        ({"truncation": "auto"}, "truncation", "disabled"),
        ({"include": ["message.output_text.logprobs"]}, "include", "at most 0"),
        ({"text": {"verbosity": "low"}}, "verbosity", "not supported"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text", "a name and a schema"),
        ({"tools": [{"type": "web_search"}]}, "tools", "tools.0.type"),
        ({"tools": [{**WEATHER, "defer_loading": True}]}, "tools", "tools.0.defer_loading"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "get_wether"}}, "tool_choice", "get_weather"),
        ({"tool_choice": "required"}, "tool_choice", "no tools"),
        ({"input": []}, "input", "is empty"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input", "input.0.role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input", "input.0.content.0.type"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input", "input.0.type"),
        ({"input": [{"type": "reasoning", "summary": [], "encrypted_content": "x"}]}, "input", "encrypted_content"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata", "16"),
        ({"max_output_tokens": -1}, "max_output_tokens", "greater than or equal to 0"),
        ({"stream_options": {"include_obfuscation": False}}, None, "stream_options"),
    ],
)
def test_what_is_refused(client: openai.OpenAI, body: dict[str, Any], param: str | None, told: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(**{"input": QUESTION, **OPTIONS}, extra_body=body)
    assert caught.value.param == param and told in str(caught.value)


def test_what_is_nested_too_deep(server: Server) -> None:
    """It can be read, and could not be written into the response."""
    deep: Any = 1
    for _ in range(500):
        deep = [deep]
    tool = {**WEATHER, "parameters": {**SCHEMA, "default": deep}}
    call = {"type": "tool_use", "id": "t", "name": "f", "input": {"a": deep}}
    said = [{"role": "user", "content": "x"}, {"role": "assistant", "content": [call]}]
    for path, body in (
        ("responses", {"input": QUESTION, "tools": [tool]}),
        ("responses", {"input": [{"role": "user", "content": "x", "id": deep}]}),
        ("messages", {"messages": said, "max_tokens": 1}),
    ):
        assert httpx.post(f"{server.address}/v1/{path}", json=body).status_code == 400


def test_what_cannot_be_asked_of_stored_ones(server: Server, client: openai.OpenAI) -> None:
    made = client.responses.create(input=QUESTION, **OPTIONS)
    for query in ("?stream=true", "/input_items?include=x", "/input_items?limit=1000", "/input_items?after=x"):
        assert httpx.get(f"{server.address}/v1/responses/{made.id}{query}").status_code == 400


def test_an_error_on_the_way(server: Server) -> None:
    events = events_of(server, input=QUESTION, timeout=1e-4)
    assert events[-1]["type"] == "response.failed" and events[-1]["response"]["status"] == "failed"
    assert events[-1]["response"]["error"]["code"] == "request_timeout"


@pytest.fixture(scope="module")
def guarded() -> Iterator[Server]:
    """Two keys, thoughts, and room for little."""
    running = Server(
        *("tiny", "--api-key", "of-a", "--api-key", "of-b", "--reasoning-parser", "deepseek_r1"),
        *("--response-store-size", "20000", "--max-model-len", "512"),
    )
    yield running
    assert running.stop() == 0, "".join(running.lines)


def test_keys_thoughts_and_little_room(guarded: Server) -> None:
    a, b = guarded.client(api_key="of-a"), guarded.client(api_key="of-b")
    made = a.responses.create(input=QUESTION, **OPTIONS)
    (item,) = made.output
    assert item.type == "reasoning" and "Paris" in item.content[0].text and made.output_text == ""
    assert made.usage.output_tokens_details.reasoning_tokens > 2
    for call in (b.responses.retrieve, b.responses.delete, b.responses.cancel, b.responses.input_items.list):
        with pytest.raises(openai.NotFoundError):
            call(made.id)
    with pytest.raises(openai.BadRequestError):
        b.responses.create(input="Thanks", previous_response_id=made.id, **OPTIONS)
    assert a.responses.retrieve(made.id).id == made.id
    goes_on = a.responses.create(input="Thanks", previous_response_id=made.id, **OPTIONS)
    assert goes_on.output
    with a.responses.stream(input=QUESTION, **OPTIONS) as stream:
        thoughts = [event.delta for event in stream if event.type == "response.reasoning_text.delta"]
        final = stream.get_final_response()
    assert "".join(thoughts) == item.content[0].text == final.output[0].content[0].text
    for _ in range(20):
        last = b.responses.create(input=QUESTION, **OPTIONS)
    assert b.responses.retrieve(last.id).id == last.id and a.responses.retrieve(final.id).id == final.id
    with pytest.raises(openai.NotFoundError):
        for _ in range(20):
            a.responses.create(input=QUESTION, **OPTIONS)
        a.responses.retrieve(made.id)
