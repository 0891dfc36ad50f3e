"""`/v1/messages` by Anthropic's official client, unmodified."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any, Literal

import anthropic
import httpx
import openai
import pytest
from pydantic import BaseModel

from .conftest import Server

USER: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
ASKED: list[Any] = [{"role": "user", "content": "What is the weather in Rome?"}]
BODY: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 64}
OPTIONS: dict[str, Any] = {"model": "tiny", "max_tokens": 64, "extra_body": {"temperature": 0}}
"""The same: this client has no temperature of its own any more."""
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: Any = {"name": "get_weather", "description": "Get the weather", "input_schema": SCHEMA}
TIME: Any = {"name": "get_time", "description": "Get the time", "input_schema": SCHEMA}


def text(said: str, ttl: str = "5m") -> Any:
    """A block with a mark; "" for none."""
    mark: dict[str, Any] = {"cache_control": {"type": "ephemeral", "ttl": ttl}} if ttl else {}
    return {"type": "text", "text": said, **mark}


def marked(*said: str, ttl: str = "5m") -> Any:
    """A message of the user whose last block has a mark."""
    return {"role": "user", "content": [*(text(one, "") for one in said[:-1]), text(said[-1], ttl)]}


@pytest.fixture
def claude(server: Server) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.address, api_key="none", max_retries=0, timeout=60)


def chat(server: Server, messages: list[Any], **options: Any) -> Any:
    return server.client().chat.completions.create(messages=messages, **(BODY | options))


def events_of(server: Server, **body: Any) -> list[tuple[str, Any]]:
    """(name, data) of each event, as they come over the wire."""
    answer = httpx.post(server.address + "/v1/messages", json={**BODY, **body, "stream": True}, timeout=60)
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = []
    for part in answer.text.removesuffix("\n\n").split("\n\n"):
        name, data = part.split("\n")
        events.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    assert all(name == data["type"] for name, data in events)
    return events


def test_a_message(server: Server, claude: anthropic.Anthropic) -> None:
    """As chat answers; also where blocks and messages in a row say the same."""
    system = "Answer briefly."
    expected = chat(server, [{"role": "system", "content": system}, *USER])
    message = claude.messages.create(messages=USER, system=system, metadata={"user_id": "u"}, **OPTIONS)
    assert (message.type, message.role, message.model) == ("message", "assistant", "tiny")
    assert message.stop_reason == "end_turn" and message._request_id
    (block,) = message.content
    assert block.type == "text" and block.text == expected.choices[0].message.content and "Paris" in block.text
    usage = message.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == expected.usage.prompt_tokens
    assert usage.output_tokens == expected.usage.completion_tokens
    marked = {"type": "text", "text": system, "cache_control": {"type": "ephemeral"}}
    blocks: list[Any] = [{"role": "user", "content": [{"type": "text", "text": USER[0]["content"]}]}]
    again = claude.messages.create(messages=blocks, system=[marked], **OPTIONS)
    assert again.content[0].text == block.text and again.usage.cache_read_input_tokens > 0


def test_what_is_marked_is_kept_and_told(server: Server, claude: anthropic.Anthropic) -> None:
    """Up to the end of each marked block, in whole blocks of 16 tokens; the second turn finds all of it."""
    told, asked = "You are a helpful engine. " * 8, "Tell me about the sea and the ships on it. " * 6
    system, tools = [text(told, ""), text("Answer briefly.", "1h")], [WEATHER, TIME]
    options: Any = {**OPTIONS, "max_tokens": 4, "extra_body": {"temperature": 0, "cache_salt": "marks"}}
    before = server.metrics().get("kv_retained_pages{priority=0}", 0)
    messages = [marked(asked, "Now.")]
    first = claude.messages.create(messages=messages, system=system, tools=tools, **options).usage
    whole = claude.messages.count_tokens(model="tiny", messages=messages, system=system, tools=tools).input_tokens
    assert first.cache_read_input_tokens == 0 and first.cache_creation is not None
    created, hourly = first.cache_creation_input_tokens or 0, first.cache_creation.ephemeral_1h_input_tokens
    assert first.input_tokens + created == whole and created % 16 == hourly % 16 == 0
    assert whole - 32 < created and 16 * 4 < hourly < created == hourly + first.cache_creation.ephemeral_5m_input_tokens
    pages = server.until_idle().get("kv_retained_pages{priority=0}", 0) - before
    assert pages == created // 16
    more = [*messages, {"role": "assistant", "content": "Yes."}, marked("And?", ttl="1h")]
    with claude.messages.stream(messages=more, system=system, tools=tools, **options) as stream:
        second = stream.get_final_message().usage
    assert second.cache_read_input_tokens is not None and second.cache_read_input_tokens >= created
    all_of_it = claude.messages.count_tokens(model="tiny", messages=more, system=system, tools=tools).input_tokens
    parts = (second.input_tokens, second.cache_creation_input_tokens, second.cache_read_input_tokens)
    assert sum(part or 0 for part in parts) == all_of_it
    unmarked = claude.messages.create(messages=USER, **options).usage
    assert unmarked.cache_creation_input_tokens == 0


@pytest.mark.parametrize("place", ["tool", "system", "message", "result", "top"])
def test_each_place_of_a_mark(server: Server, claude: anthropic.Anthropic, place: str) -> None:
    """It keeps what stands up to it, and not the rest."""
    long = "Once upon a time there was a little engine. " * 8
    mark: Any = {"cache_control": {"type": "ephemeral"}}
    call: Any = {"type": "tool_use", "id": "c", "name": "get_time", "input": {"city": "Rome"}}
    result: Any = {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": long}]}
    body: dict[str, Any] = {
        "system": [{"type": "text", "text": "Be brief. " * 10}, {"type": "text", "text": long}],
        "tools": [dict(WEATHER), dict(TIME)],
        "messages": [*USER, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}],
    }
    whole = claude.messages.count_tokens(model="tiny", **body).input_tokens
    del body["messages"][1:]
    upto = claude.messages.count_tokens(model="tiny", **body).input_tokens
    if place in ("result", "top"):
        body["messages"] += [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    if place == "tool":
        body["tools"][1] |= mark
    elif place == "system":
        body["system"][0] |= mark
    elif place == "message":
        body["messages"] = [marked(USER[0]["content"]), marked(long, ttl="")]
    elif place == "result":
        result["content"][0] |= mark
    else:
        body |= mark
    more: Any = {"extra_body": {"temperature": 0, "cache_salt": place}}
    usage = claude.messages.create(model="tiny", max_tokens=2, **body, **more).usage
    created = usage.cache_creation_input_tokens or 0
    most = {"tool": upto, "system": upto - 60, "message": upto, "result": whole, "top": whole}[place]
    least = {"tool": 100, "system": 20, "message": upto - 40, "result": whole - 40, "top": whole - 16}[place]
    assert least < created <= most, (usage, upto, whole)


@pytest.fixture(scope="module")
def small() -> Iterator[Server]:
    """A server whose cache holds little more than one request."""
    running = Server("tiny", "--num-kv-pages", "80", "--max-model-len", "512", "--max-kv-retention-per-key", "0.5")
    yield running
    assert running.stop() == 0, "".join(running.lines)


@pytest.mark.parametrize("ttl", ["", "5m", "1h"])
def test_what_is_marked_outlives_what_is_not(small: Server, ttl: str) -> None:
    client = anthropic.Anthropic(base_url=small.address, api_key="none", max_retries=0)
    system = [text(f"Marked for {ttl or 'nothing'}. " + "You know all the stories of the sea. " * 12, ttl)]
    options: Any = {"model": "tiny", "max_tokens": 4}
    first = client.messages.create(messages=USER, system=system, **options).usage
    for i in range(6):
        client.messages.create(messages=[{"role": "user", "content": f"{i} " + "Tell me more of it. " * 60}], **options)
    again = client.messages.create(messages=ASKED, system=system, **options).usage
    kept = first.cache_creation_input_tokens or 0
    assert (kept > 64) == bool(ttl)
    assert again.cache_read_input_tokens is not None
    assert again.cache_read_input_tokens >= kept if ttl else again.cache_read_input_tokens < 64


def test_stop_sequence_and_length(claude: anthropic.Anthropic) -> None:
    whole = claude.messages.create(messages=USER, **OPTIONS).content[0].text
    word = whole.split()[2]
    stopped = claude.messages.create(messages=USER, stop_sequences=[word], **OPTIONS)
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", word)
    assert stopped.content[0].text == whole[: whole.index(word)]
    cut = claude.messages.create(messages=USER, **{**OPTIONS, "max_tokens": 2})
    assert (cut.stop_reason, cut.stop_sequence, cut.usage.output_tokens) == ("max_tokens", None, 2)


def test_the_beginning_of_an_answer(claude: anthropic.Anthropic) -> None:
    whole = claude.messages.create(messages=USER, **OPTIONS).content[0].text
    for cut in (whole.index(" "), whole.rindex(" ")):
        begun = [*USER, {"role": "assistant", "content": whole[:cut]}]
        goes_on = claude.messages.create(messages=begun, **OPTIONS).content[0].text
        assert whole[:cut] + goes_on == whole


def test_streamed(claude: anthropic.Anthropic) -> None:
    whole = claude.messages.create(messages=USER, **OPTIONS)
    with claude.messages.stream(messages=USER, **OPTIONS) as stream:
        pieces = list(stream.text_stream)
        final = stream.get_final_message()
    assert "".join(pieces) == whole.content[0].text == final.content[0].text
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)


def test_the_events(server: Server) -> None:
    """Their order and content, as Anthropic documents them."""
    events = events_of(server, messages=USER)
    names = [name for name, _ in events]
    assert names[:3] == ["message_start", "content_block_start", "ping"]
    assert set(names[3:-3]) == {"content_block_delta"}
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    start = events[0][1]["message"]
    assert (start["content"], start["stop_reason"], start["usage"]["output_tokens"]) == ([], None, 0)
    assert events[1][1]["index"] == 0
    assert events[1][1]["content_block"] == {"type": "text", "text": "", "citations": None}
    assert {data["delta"]["type"] for name, data in events if name == "content_block_delta"} == {"text_delta"}
    assert events[-2][1]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert events[-2][1]["usage"]["output_tokens"] > 2


def test_tools_in_two_turns(server: Server, claude: anthropic.Anthropic) -> None:
    first = claude.messages.create(messages=ASKED, tools=[WEATHER, TIME], **OPTIONS)
    assert first.stop_reason == "tool_use"
    (call,) = first.content
    assert call.type == "tool_use" and call.id.startswith("toolu_")
    assert (call.name, call.input) == ("get_weather", {"city": "Rome"})
    told = json.dumps({"temperature": 21, "condition": "sunny"})
    result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": told}]}
    messages = [*ASKED, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    second = claude.messages.create(messages=messages, tools=[WEATHER, TIME], **OPTIONS)
    assert second.content[0].text == "It is sunny and 21 degrees in Rome." and second.stop_reason == "end_turn"
    counted = claude.messages.count_tokens(model="tiny", messages=messages, tools=[WEATHER, TIME])
    assert counted.input_tokens == second.usage.input_tokens + second.usage.cache_read_input_tokens


def test_tools_streamed(server: Server, claude: anthropic.Anthropic) -> None:
    with claude.messages.stream(messages=ASKED, tools=[WEATHER], **OPTIONS) as stream:
        deltas = [event.partial_json for event in stream if event.type == "input_json"]
        final = stream.get_final_message()
    assert json.loads("".join(deltas)) == {"city": "Rome"}
    assert final.content[0].input == {"city": "Rome"} and final.stop_reason == "tool_use"
    names = [(name, data.get("index")) for name, data in events_of(server, messages=ASKED, tools=[WEATHER])]
    assert names[:4] == [
        ("message_start", None),
        ("content_block_start", 0),
        ("ping", None),
        ("content_block_delta", 0),
    ]


def test_tool_choice(claude: anthropic.Anthropic) -> None:
    hidden = claude.messages.create(messages=ASKED, tools=[WEATHER], tool_choice={"type": "none"}, **OPTIONS)
    assert hidden.stop_reason == "end_turn" and hidden.content[0].type == "text"
    pytest.importorskip("engine_xgrammar", reason="no grammar driver that enforces schemas is installed")
    forced = {"messages": USER, "tools": [WEATHER, TIME], **OPTIONS}
    one = claude.messages.create(tool_choice={"type": "any", "disable_parallel_tool_use": True}, **forced)
    assert (
        one.stop_reason == "tool_use" and len(one.content) == 1 and one.content[0].name in ("get_weather", "get_time")
    )
    named = claude.messages.create(tool_choice={"type": "tool", "name": "get_time"}, **forced)
    assert [block.name for block in named.content] == ["get_time"] and named.stop_reason == "tool_use"
    with claude.messages.stream(tool_choice={"type": "tool", "name": "get_time"}, **forced) as stream:
        assert stream.get_final_message().content[0].input == named.content[0].input


def test_an_answer_of_a_schema(claude: anthropic.Anthropic) -> None:
    pytest.importorskip("engine_xgrammar", reason="no grammar driver that enforces schemas is installed")

    class Place(BaseModel):
        city: Literal["Paris", "Rome"]
        large: bool

    parsed = claude.messages.parse(messages=USER, output_format=Place, **OPTIONS).parsed_output
    assert isinstance(parsed, Place)


def test_asynchronously(server: Server, claude: anthropic.Anthropic) -> None:
    expected = claude.messages.create(messages=USER, **OPTIONS).content[0].text

    async def ask() -> list[str]:
        async with anthropic.AsyncAnthropic(base_url=server.address, api_key="none", max_retries=0) as client:

            async def streamed() -> str:
                async with client.messages.stream(messages=USER, **OPTIONS) as stream:
                    return await stream.get_final_text()

            message = client.messages.create(messages=USER, **OPTIONS)
            return [(await message).content[0].text, *await asyncio.gather(*(streamed() for _ in range(4)))]

    assert asyncio.run(ask()) == [expected] * 5


def test_a_client_that_leaves(server: Server, claude: anthropic.Anthropic) -> None:
    story: list[Any] = [{"role": "user", "content": "Tell me a long story."}]
    with claude.messages.stream(messages=story, model="tiny", max_tokens=2000) as stream:
        next(iter(stream.text_stream))
    server.until_idle()


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({"container": "c"}, "container"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "budget_tokens"),
        ({"cache_control": {"type": "ephemeral", "ttl": "2h"}}, "'5m' or '1h'"),
        ({"tools": [{**WEATHER, "cache_control": {"type": "ephemeral", "ttl": 300}}]}, "tools.0.cache_control.ttl"),
        ({"messages": [marked("x"), *[marked("y"), marked("z")] * 2]}, "more than 4 are in this request"),
        ({"messages": [marked("x")], "kv_retention": {"release": True}}, "release and cache_control"),
        ({"output_config": {"effort": "low"}}, "effort"),
        ({"tools": [{**WEATHER, "input_examples": []}]}, "tools.0.input_examples"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0.type"),
        ({"tools": [{**WEATHER, "input_schema": {"type": "array"}}]}, "tools.0.input_schema.type"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "tool", "name": "get_wether"}, "tools": [WEATHER]}, "get_weather"),
        ({"tool_choice": {"type": "auto", "name": "get_weather"}, "tools": [WEATHER]}, "name"),
        ({"messages": []}, "messages is empty"),
        ({"messages": [{"role": "system", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": "x", "name": "n"}]}, "messages.0.name"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages.0.content.0.type"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t"}]}]}, "tool_use_id"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "no message of the user"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"temperature": -1.0}, "temperature"),
    ],
)  # fmt: skip
def test_what_is_refused(claude: anthropic.Anthropic, body: dict[str, Any], told: str) -> None:
    with pytest.raises(anthropic.BadRequestError) as caught:
        claude.messages.create(model="tiny", max_tokens=64, messages=USER, extra_body=body)
    error = caught.value.body
    assert error["type"] == "error" and error["error"]["type"] == "invalid_request_error" and error["request_id"]
    assert told in error["error"]["message"]


def test_errors_are_anthropics(server: Server, claude: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        claude.messages.create(messages=USER, **{**OPTIONS, "model": "other"})
    assert missing.value.body["error"]["type"] == "not_found_error"
    answer = httpx.post(server.address + "/v1/messages/batches", json={})
    assert answer.status_code == 404 and answer.json()["error"]["type"] == "not_found_error"
    answer = httpx.post(server.address + "/v1/messages", json={"messages": USER, "max_token": 1})
    assert (answer.json()["error"]["code"], answer.json()["error"]["param"]) == ("unsupported_parameter", "max_token")
    timed = httpx.post(server.address + "/v1/messages", json={**BODY, "messages": USER, "timeout": 1e-4}, timeout=60)
    assert timed.status_code == 504 and timed.json()["error"]["type"] == "timeout_error"
    name, data = events_of(server, messages=USER, timeout=1e-4)[-1]
    assert name == "error" and data["error"]["type"] == "timeout_error"


@pytest.fixture(scope="module")
def thinker() -> Iterator[Server]:
    """A server that takes what comes before `</think>` for thoughts, and asks for a key."""
    running = Server("tiny", "--reasoning-parser", "deepseek_r1", "--api-key", "secret", "--max-model-len", "256")
    yield running
    assert running.stop() == 0, "".join(running.lines)


def test_thoughts_keys_and_a_full_context(thinker: Server) -> None:
    stranger = anthropic.Anthropic(base_url=thinker.address, api_key="none", max_retries=0)
    with pytest.raises(anthropic.AuthenticationError) as caught:
        stranger.messages.create(messages=USER, **OPTIONS)
    assert caught.value.body["error"]["type"] == "authentication_error"
    client = anthropic.Anthropic(base_url=thinker.address, api_key="secret", max_retries=0)
    message = client.messages.create(messages=USER, **OPTIONS)
    (block,) = message.content
    assert block.type == "thinking" and "Paris" in block.thinking and block.signature
    with client.messages.stream(messages=USER, **OPTIONS) as stream:
        thoughts = [event.thinking for event in stream if event.type == "thinking"]
        final = stream.get_final_message()
    assert "".join(thoughts) == block.thinking and final.content[0] == block
    back = [*USER, {"role": "assistant", "content": message.content}, {"role": "user", "content": "Thank you!"}]
    assert client.messages.create(messages=back, **OPTIONS).content
    for other, told in (({"thinking": {"type": "disabled"}}, "no switch"), ({}, "thoughts")):
        begun = [*USER, {"role": "assistant", "content": "The"}]
        with pytest.raises(anthropic.BadRequestError, match=told):
            client.messages.create(messages=begun if not other else USER, **OPTIONS, **other)
    budget: Any = {"type": "enabled", "budget_tokens": 2}
    thought, answer = client.messages.create(messages=USER, **OPTIONS, thinking=budget).content
    assert thought.type == "thinking" and answer.type == "text" and block.thinking.startswith(thought.thinking)
    assert len(thought.thinking) < len(block.thinking)
    with pytest.raises(anthropic.BadRequestError, match="less than max_tokens"):
        client.messages.create(model="tiny", max_tokens=2, messages=USER, thinking=budget)
    completions = openai.OpenAI(base_url=thinker.address + "/v1", api_key="secret").chat.completions
    asked: Any = {"model": "tiny", "messages": USER, "temperature": 0, "max_tokens": 40}
    more: Any = {"thinking_token_budget": 2, "structured_outputs": {"choice": ["yes", "no"]}}
    chat = completions.create(**asked, extra_body=more)
    said = chat.choices[0].message
    assert said.content in ("yes", "no") and said.to_dict()["reasoning_content"] == thought.thinking
    silent = completions.create(**asked, extra_body=more | {"include_reasoning": False})
    assert silent.choices[0].message.content == said.content and silent.usage == chat.usage
    assert "reasoning_content" not in silent.choices[0].message.to_dict()
    long = [{"role": "user", "content": "Tell me a long story. " * 30}]
    full = client.messages.create(model="tiny", max_tokens=8192, messages=long, extra_body={"seed": 1})
    assert full.stop_reason in ("model_context_window_exceeded", "end_turn")
