"""LangChain's ChatOpenAI, unmodified. (Its OpenAIEmbeddings: `test_pooling_routes`, beside the official client.)"""

from __future__ import annotations

import asyncio
import json
from typing import Any, Literal

import openai
import pytest
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, SystemMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, Field

from .conftest import Server

QUESTION = "What is the capital of France?"
ASKED = "What is the weather in Rome?"
TOLD = json.dumps({"temperature": 21, "condition": "sunny"})


class Place(BaseModel):
    """Some place."""

    city: Literal["Paris", "Rome"] = Field(description="which it is")
    large: bool


class About(BaseModel):
    """What the bundled model says where it is only asked for JSON."""

    about: str


@tool
def get_weather(city: str) -> str:
    """Get the weather"""
    assert city == "Rome"
    return TOLD


def chat(server: Server, **more: Any) -> ChatOpenAI:
    options: dict[str, Any] = {"model": "tiny", "api_key": "none", "temperature": 0, "max_retries": 0}
    return ChatOpenAI(base_url=server.address + "/v1", **{**options, "max_completion_tokens": 64, **more})


def whole(chunks: Any) -> AIMessageChunk:
    first, *rest = chunks
    return sum(rest, first)


@pytest.fixture
def expected(client: openai.OpenAI) -> Any:
    """The same by the official client."""
    return client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": QUESTION}], temperature=0, max_tokens=64
    )


def test_invoke_and_stream(server: Server, expected: Any) -> None:
    text = expected.choices[0].message.content
    answer = chat(server).invoke(QUESTION)
    assert answer.content == text and answer.response_metadata["finish_reason"] == "stop"
    assert answer.response_metadata["model_name"] == "tiny" and answer.id
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["input_tokens"] == expected.usage.prompt_tokens
    assert answer.usage_metadata["output_tokens"] == expected.usage.completion_tokens
    chunks = list(chat(server).stream(QUESTION, stream_usage=True))
    together = whole(chunks)
    assert together.content == text
    assert together.response_metadata["finish_reason"] == "stop"
    assert together.usage_metadata is not None
    for count in ("input_tokens", "output_tokens", "total_tokens"):
        assert together.usage_metadata[count] == answer.usage_metadata[count]


def test_asynchronously(server: Server, expected: Any) -> None:
    text = expected.choices[0].message.content

    async def ask() -> list[Any]:
        model = chat(server)
        streamed = [chunk.content async for chunk in model.astream(QUESTION)]
        one, several = await asyncio.gather(model.ainvoke(QUESTION), model.abatch([QUESTION] * 4))
        return [one.content, "".join(streamed), *(message.content for message in several)]

    assert asyncio.run(ask()) == [text] * 6


def test_what_it_sends(server: Server, client: openai.OpenAI) -> None:
    """Its own parameters and those of the server beside them, each as the official client has it."""
    words: list[Any] = [
        SystemMessage("Answer briefly."),
        HumanMessage([{"type": "text", "text": "Hi"}]),
        AIMessage("Yes?"),
    ]
    words.append(HumanMessage(QUESTION, name="somebody"))
    sampled: dict[str, Any] = {
        "temperature": 1.0, "top_p": 0.9, "frequency_penalty": 0.1, "presence_penalty": 0.1, "seed": 3,
        "logit_bias": {"5": 1}, "stop": ["France"], "extra_body": {"top_k": 20},
    }  # fmt: skip
    kept = {"service_tier": "auto", "store": False, "logprobs": True, "top_logprobs": 2, "model_kwargs": {"user": "me"}}
    answer = chat(server, **sampled, **kept).invoke(words)
    said: list[Any] = [
        {"role": "system", "content": "Answer briefly."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
        {"role": "assistant", "content": "Yes?"},
        {"role": "user", "content": QUESTION, "name": "somebody"},
    ]
    same = client.chat.completions.create(model="tiny", messages=said, max_tokens=64, **sampled)
    assert answer.content == same.choices[0].message.content
    tops = [token["top_logprobs"] for token in answer.response_metadata["logprobs"]["content"]]
    assert len(tops) == same.usage.completion_tokens and {len(top) for top in tops} == {2}


def test_tools_in_two_turns(server: Server) -> None:
    model = chat(server).bind_tools([get_weather])
    messages: list[Any] = [HumanMessage(ASKED)]
    for answer in (model.invoke(messages), whole(model.stream(messages))):
        (call,) = answer.tool_calls
        assert (call["name"], call["args"]) == ("get_weather", {"city": "Rome"}) and call["id"].startswith("call_")
        assert answer.response_metadata["finish_reason"] == "tool_calls" and not answer.invalid_tool_calls
        turn = [*messages, answer, get_weather.invoke(call)]
        assert model.invoke(turn).content == "It is sunny and 21 degrees in Rome."
        assert whole(model.stream(turn)).content == "It is sunny and 21 degrees in Rome."


def test_tool_choice(server: Server) -> None:
    assert not chat(server).bind_tools([get_weather], tool_choice="none").invoke(ASKED).tool_calls
    pytest.importorskip("engine_xgrammar", reason="no grammar driver that enforces schemas is installed")
    for choice in ("any", "required", "get_weather", True):
        forced = chat(server).bind_tools([get_weather], tool_choice=choice, strict=True, parallel_tool_calls=False)
        assert [call["name"] for call in forced.invoke(QUESTION).tool_calls] == ["get_weather"]


@pytest.mark.parametrize(
    ("method", "strict"),
    [("json_schema", None), ("json_schema", True), ("function_calling", None), ("function_calling", True)],
)
def test_with_structured_output(server: Server, method: Any, strict: bool | None) -> None:
    pytest.importorskip("engine_xgrammar", reason="no grammar driver that enforces schemas is installed")
    model = chat(server, max_completion_tokens=200)
    options = {} if strict is None else {"strict": strict}
    shaped = model.with_structured_output(Place, method=method, include_raw=True, **options)
    answer = shaped.invoke("Tell me about Rome.")
    assert answer["parsing_error"] is None and answer["raw"].usage_metadata["output_tokens"] > 4
    assert isinstance(answer["parsed"], Place) and answer["parsed"].city == "Rome"
    by_schema = model.with_structured_output(Place.model_json_schema(), method=method, **options)
    assert list(by_schema.stream("Tell me about Rome."))[-1] == answer["parsed"].model_dump()


def test_json_mode(server: Server) -> None:
    pytest.importorskip("engine_xgrammar", reason="no grammar driver that enforces JSON is installed")
    shaped = chat(server).with_structured_output(About, method="json_mode")
    assert shaped.invoke("Tell me about Rome in JSON") == About(about="Rome")
    assert list(shaped.stream("Tell me about Rome in JSON"))[-1] == About(about="Rome")


def test_by_responses(server: Server, expected: Any) -> None:
    """The same model through `/v1/responses`."""
    model = chat(server, use_responses_api=True)
    text = expected.choices[0].message.content
    assert model.invoke(QUESTION).text == text == whole(model.stream(QUESTION)).text
    tooled = model.bind_tools([get_weather])
    first = tooled.invoke(ASKED)
    (call,) = first.tool_calls
    answer = tooled.invoke([HumanMessage(ASKED), first, get_weather.invoke(call)])
    assert answer.text == "It is sunny and 21 degrees in Rome."
    goes_on = chat(server, use_previous_response_id=True)
    second = goes_on.invoke([HumanMessage(QUESTION), model.invoke(QUESTION), HumanMessage("Thanks")])
    assert second.usage_metadata["input_tokens"] > expected.usage.total_tokens
    pytest.importorskip("engine_xgrammar", reason="no grammar driver that enforces schemas is installed")
    assert isinstance(model.with_structured_output(Place).invoke(QUESTION), Place)


def test_completions(server: Server, client: openai.OpenAI) -> None:
    model = OpenAI(
        model="tiny", base_url=server.address + "/v1", api_key="none", temperature=0, max_retries=0, max_tokens=8
    )
    text = client.completions.create(model="tiny", prompt="Once upon", temperature=0, max_tokens=8).choices[0].text
    assert model.invoke("Once upon") == text == "".join(model.stream("Once upon"))


def test_errors(server: Server) -> None:
    with pytest.raises(openai.NotFoundError, match="no-such-model"):
        chat(server, model="no-such-model").invoke(QUESTION)
    with pytest.raises(openai.BadRequestError, match="reasoning_effort"):
        chat(server, reasoning_effort="low").invoke(QUESTION)
    with pytest.raises(openai.BadRequestError, match="store"):
        chat(server, store=True).invoke(QUESTION)
    with pytest.raises(openai.BadRequestError) as caught:
        chat(server).invoke("word " * 5000)
    assert caught.value.code == "context_length_exceeded"
