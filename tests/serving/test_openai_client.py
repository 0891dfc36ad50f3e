"""The main job over HTTP, by the official client."""

from __future__ import annotations

import asyncio

import httpx
import openai
import pytest

from engine import LLM, SamplingParams

from .conftest import Server

PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def llm() -> LLM:
    """The offline engine: what the served answers are compared with."""
    return LLM(model="tiny", dtype="float64", num_kv_pages=1000)


def test_models(client: openai.OpenAI) -> None:
    names = [model.id for model in client.models.list()]
    assert names == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"


def test_completion_is_the_offline_one(client: openai.OpenAI, llm: LLM) -> None:
    answer = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=24, temperature=0)
    (expected,) = llm.generate(PROMPT, SamplingParams(max_tokens=24, temperature=0), use_tqdm=False)
    assert answer.choices[0].text == expected.outputs[0].text
    assert answer.choices[0].finish_reason == expected.outputs[0].finish_reason
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(expected.prompt_token_ids)
    assert answer.usage.completion_tokens == len(expected.outputs[0].token_ids)


def test_streamed_completion_is_the_whole_one(client: openai.OpenAI) -> None:
    options = {"model": "tiny", "prompt": PROMPT, "max_tokens": 24, "temperature": 0.9, "seed": 7}
    whole = client.completions.create(**options)
    chunks = list(client.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].text for c in chunks if c.choices) == whole.choices[0].text
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == whole.choices[0].finish_reason


def test_several_prompts_and_token_ids(client: openai.OpenAI, llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    ids = [tokenizer.encode(text) for text in ("The cat", "A dog")]
    answer = client.completions.create(model="tiny", prompt=ids, max_tokens=8, temperature=0, n=2)
    assert [c.index for c in answer.choices] == [0, 1, 2, 3]
    for i, text in enumerate(("The cat", "A dog")):
        alone = client.completions.create(model="tiny", prompt=text, max_tokens=8, temperature=0).choices[0].text
        assert [answer.choices[2 * i].text, answer.choices[2 * i + 1].text] == [alone, alone]


def test_streams_of_several_prompts(client: openai.OpenAI) -> None:
    options = {"model": "tiny", "prompt": ["The cat", "A dog"], "max_tokens": 8, "temperature": 0}
    whole = client.completions.create(**options)
    texts = {0: "", 1: ""}
    for chunk in client.completions.create(**options, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == {c.index: c.text for c in whole.choices}


def test_echo(client: openai.OpenAI) -> None:
    options = {"model": "tiny", "prompt": PROMPT, "max_tokens": 8, "temperature": 0}
    plain = client.completions.create(**options).choices[0].text
    assert client.completions.create(**options, echo=True).choices[0].text == PROMPT + plain
    streamed = client.completions.create(**options, echo=True, stream=True)
    assert "".join(c.choices[0].text for c in streamed) == PROMPT + plain


def test_chat_and_stream(client: openai.OpenAI, llm: LLM) -> None:
    messages = [{"role": "system", "content": "You are helpful."}, {"role": "user", "content": "Hello"}]
    answer = client.chat.completions.create(model="tiny", messages=messages, max_tokens=16, temperature=0)
    expected = llm.chat(messages, SamplingParams(max_tokens=16, temperature=0), use_tqdm=False)[0]
    assert answer.choices[0].message.content == expected.outputs[0].text
    assert answer.choices[0].message.role == "assistant"
    stream = list(
        client.chat.completions.create(
            model="tiny",
            messages=messages,
            max_tokens=16,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert stream[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in stream if c.choices) == expected.outputs[0].text
    assert stream[-1].usage is not None and stream[-1].usage.completion_tokens == len(expected.outputs[0].token_ids)


def test_n_completions_with_a_seed(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "Tell me a story"}]
    options = {"model": "tiny", "messages": messages, "max_tokens": 12, "temperature": 1.0, "n": 3}
    first = client.chat.completions.create(**options, seed=11)
    again = client.chat.completions.create(**options, seed=11)
    other = client.chat.completions.create(**options, seed=12)
    texts = [c.message.content for c in first.choices]
    assert [c.index for c in first.choices] == [0, 1, 2]
    assert len(set(texts)) > 1
    assert texts == [c.message.content for c in again.choices]
    assert texts != [c.message.content for c in other.choices]
    streamed = ["", "", ""]
    for chunk in client.chat.completions.create(**options, seed=11, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert streamed == texts


def test_stop_string(client: openai.OpenAI) -> None:
    options = {"model": "tiny", "prompt": PROMPT, "max_tokens": 32, "temperature": 0}
    text = client.completions.create(**options).choices[0].text
    stop = text[6:9]
    cut = client.completions.create(**options, stop=[stop]).choices[0]
    assert cut.text == text[: text.index(stop)]
    assert cut.finish_reason == "stop"
    kept = client.completions.create(**options, stop=stop, extra_body={"include_stop_str_in_output": True}).choices[0]
    assert kept.text == text[: text.index(stop)] + stop
    streamed = "".join(c.choices[0].text for c in client.completions.create(**options, stop=stop, stream=True))
    assert streamed == cut.text


def test_chat_logprobs(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    options = {"model": "tiny", "messages": messages, "max_tokens": 5, "temperature": 0, "logprobs": True}
    answer = client.chat.completions.create(**options, top_logprobs=3)
    scores = answer.choices[0].logprobs.content
    assert len(scores) == answer.usage.completion_tokens
    for score in scores:
        assert len(score.top_logprobs) == 3
        values = [top.logprob for top in score.top_logprobs]
        assert values == sorted(values, reverse=True)
        assert score.logprob == values[0] <= 0  # greedy draws the best
    streamed = [
        s
        for c in client.chat.completions.create(**options, top_logprobs=3, stream=True)
        if c.choices[0].logprobs
        for s in c.choices[0].logprobs.content
    ]
    assert [s.token for s in streamed] == [s.token for s in scores]


def test_completion_logprobs(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=5, temperature=0, logprobs=2)
    scores = answer.choices[0].logprobs
    assert len(scores.tokens) == len(scores.token_logprobs) == len(scores.top_logprobs) == 5
    assert all(value <= 0 for value in scores.token_logprobs)


def test_error_types(client: openai.OpenAI, server) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    with pytest.raises(openai.NotFoundError, match="no-such-model"):
        client.chat.completions.create(model="no-such-model", messages=messages)
    for bad in (
        {"temperature": -1},
        {"top_p": 0},
        {"n": 0},
        {"max_tokens": -1},
        {"temperature": "warm"},
        {"seed": "x"},
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model="tiny", messages=messages, **bad)
        assert caught.value.param == next(iter(bad)), caught.value.body
    with pytest.raises(openai.BadRequestError, match="does not order by it") as caught:
        client.chat.completions.create(model="tiny", messages=messages, extra_body={"priority": 3})
    assert caught.value.param == "priority"
    with pytest.raises(openai.BadRequestError, match="no_such_thing"):
        client.chat.completions.create(model="tiny", messages=messages, extra_body={"no_such_thing": 1})
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny", prompt="word " * 5000)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model="tiny", prompt=[10**9])
    answer = httpx.post(
        server.address + "/v1/chat/completions", content=b"{not json", headers={"content-type": "application/json"}
    )
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "invalid_json"
    assert httpx.get(server.address + "/nowhere").json()["error"]["message"].startswith("no such route")
    assert httpx.get(server.address + "/health").status_code == 200


def test_what_is_taken_and_given_back(client: openai.OpenAI) -> None:
    """Beside `user`, what other servers keep or sort by, and this one has no use for."""
    options = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, "temperature": 0}
    plain = client.chat.completions.create(**options)
    taken = client.chat.completions.create(
        **options,
        metadata={"a": "b"},
        store=False,
        service_tier="auto",
        safety_identifier="s",
        prompt_cache_key="p",
        user="u",
    )
    assert taken.choices == plain.choices and taken.metadata == {"a": "b"} and plain.metadata is None
    for refused in ({"store": True}, {"service_tier": "priority"}, {"metadata": {str(i): "" for i in range(17)}}):
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(**options, **refused)
        assert caught.value.param == next(iter(refused))


def test_async_streams(server) -> None:
    """Chunk by chunk, and by the client's helper."""
    options = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 16, "temperature": 0}
    expected = server.client().chat.completions.create(**options).choices[0].message.content

    async def run() -> list[str]:
        async with openai.AsyncOpenAI(base_url=server.address + "/v1", api_key="none") as client:
            chunks = await client.chat.completions.create(**options, stream=True)
            text = "".join([c.choices[0].delta.content or "" async for c in chunks])
            async with client.chat.completions.stream(**options) as stream:
                deltas = "".join([event.delta async for event in stream if event.type == "content.delta"])
                final = await stream.get_final_completion()
            completion = await client.completions.create(model="tiny", prompt=PROMPT, max_tokens=8, stream=True)
            assert "".join([c.choices[0].text async for c in completion])
            return [text, deltas, final.choices[0].message.content]

    assert asyncio.run(run()) == [expected] * 3


def test_async_client(server) -> None:
    async def run() -> list[str]:
        async with openai.AsyncOpenAI(base_url=server.address + "/v1", api_key="none") as client:
            calls = [
                client.completions.create(model="tiny", prompt=f"Number {i}", max_tokens=8, temperature=0)
                for i in range(8)
            ]
            return [answer.choices[0].text for answer in await asyncio.gather(*calls)]

    together = asyncio.run(run())
    client = server.client()
    alone = [
        client.completions.create(model="tiny", prompt=f"Number {i}", max_tokens=8, temperature=0).choices[0].text
        for i in range(8)
    ]
    assert together == alone


def test_what_becomes_of_the_cache(server: Server, client: openai.OpenAI) -> None:
    """`kv_retention`: shown in the metrics until it is released; what is none is refused by name."""
    name = "kv_retained_pages{priority=7}"
    options = {"model": "tiny", "prompt": "A prompt that is retained " * 20, "max_tokens": 2}
    before = server.metrics().get(name, 0)
    client.completions.create(**options, extra_body={"kv_retention": {"ttl": 60, "priority": 7, "session": "a"}})
    shown = server.until(lambda found: found.get(name, 0) > before, "pages are retained")
    assert shown["kv_retention_events_total{event=given_up}"] == 0
    again = client.completions.create(**options, extra_body={"kv_retention": {"release": True, "session": "a"}})
    assert again.usage is not None and again.usage.prompt_tokens_details is not None
    assert (again.usage.prompt_tokens_details.cached_tokens or 0) > 0
    server.until(lambda found: found.get(name, 0) == before, "nothing is retained")
    for wish, found in (
        ({"ttl": 1e9}, "ttl"),
        ({"ttl": -1}, "ttl"),
        ({"priority": 101}, "priority"),
        ({"key": "another's"}, "key"),
        ({"ttl": "5m"}, "valid number"),
        ({"keep": 1}, "keep"),
        ({"release": True, "pin": True}, "release goes with"),
    ):
        with pytest.raises(openai.BadRequestError, match=found):
            client.completions.create(**options, extra_body={"kv_retention": wish})
