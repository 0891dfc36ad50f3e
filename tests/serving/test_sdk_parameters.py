"""Every parameter that the official clients can send is known here, or refused by its name: read from their own types,
so that a field of a newer client shows up here and not at a user's."""

from __future__ import annotations

import typing
from typing import Any, Literal, get_args, get_origin

import httpx
import openai
import pytest
from anthropic.types import (
    message_count_tokens_params,
    message_create_params,
    metadata_param,
    output_config_param,
    thinking_config_adaptive_param,
    tool_choice_any_param,
    tool_choice_auto_param,
    tool_choice_tool_param,
)
from openai.types import completion_create_params, embedding_create_params
from openai.types.chat import chat_completion_stream_options_param
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import response_create_params, response_text_config_param
from openai.types.shared_params import reasoning
from pydantic import BaseModel, ValidationError

from engine_server.anthropic import input as anthropic_bodies
from engine_server.openai import bodies as openai_bodies
from engine_server.pooling import bodies as pooling_bodies
from engine_server.responses import input as responses_bodies

from .conftest import Server

USER = [{"role": "user", "content": "Hello"}]
ROUTES: dict[str, tuple[Any, type[BaseModel], dict[str, Any]]] = {
    "/v1/chat/completions": (chat_params.CompletionCreateParamsStreaming, openai_bodies.ChatBody, {"messages": USER}),
    "/v1/completions": (
        completion_create_params.CompletionCreateParamsStreaming, openai_bodies.CompletionBody, {"prompt": "a"},
    ),
    "/v1/responses": (
        response_create_params.ResponseCreateParamsStreaming, responses_bodies.ResponsesBody, {"input": "a"},
    ),
    "/v1/embeddings": (embedding_create_params.EmbeddingCreateParams, pooling_bodies.EmbeddingsBody, {"input": "a"}),
    "/v1/messages": (
        message_create_params.MessageCreateParamsStreaming, anthropic_bodies.MessagesBody,
        {"messages": USER, "max_tokens": 1},
    ),
    "/v1/messages/count_tokens": (
        message_count_tokens_params.MessageCountTokensParams, anthropic_bodies.CountTokensBody, {"messages": USER},
    ),
}  # fmt: skip
NESTED: list[tuple[Any, type[BaseModel]]] = [
    (chat_completion_stream_options_param.ChatCompletionStreamOptionsParam, openai_bodies.StreamOptions),
    (response_create_params.StreamOptions, responses_bodies.ResponseStreamOptions),
    (response_text_config_param.ResponseTextConfigParam, responses_bodies.TextConfig),
    (reasoning.Reasoning, responses_bodies.Reasoning),
    (metadata_param.MetadataParam, anthropic_bodies.Metadata),
    (output_config_param.OutputConfigParam, anthropic_bodies.OutputConfig),
    (thinking_config_adaptive_param.ThinkingConfigAdaptiveParam, anthropic_bodies.Thinking),
    (tool_choice_auto_param.ToolChoiceAutoParam, anthropic_bodies.ToolChoice),
    (tool_choice_any_param.ToolChoiceAnyParam, anthropic_bodies.ToolChoice),
    (tool_choice_tool_param.ToolChoiceToolParam, anthropic_bodies.ToolChoice),
]
IN_HEADERS = {"betas"}
"""What the client sends as a header."""


def fields(params: Any) -> dict[str, Any]:
    """The fields of a TypedDict, with those that it inherits, and their types."""
    return typing.get_type_hints(params)


def known(model: type[BaseModel]) -> set[str]:
    return {field.alias or name for name, field in model.model_fields.items()}


def literals(annotation: Any) -> list[Any]:
    """The values that a type allows by name."""
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    return [value for inner in get_args(annotation) for value in literals(inner)]


@pytest.mark.parametrize("route", ROUTES)
def test_what_is_not_known_is_refused_by_name(server: Server, route: str) -> None:
    params, model, body = ROUTES[route]
    strangers = [name for name in fields(params) if name not in known(model) | IN_HEADERS]
    assert len(strangers) < len(fields(params)), "the client's fields are read wrongly"
    for name in strangers:
        answer = httpx.post(server.address + route, json={**body, name: "x"}, timeout=30)
        error = answer.json()["error"]
        assert answer.status_code == 400 and f"'{name}'" in error["message"], (name, error)
        if not route.startswith("/v1/messages"):  # whose errors have no code
            assert (error["code"], error["param"]) == ("unsupported_parameter", name)


@pytest.mark.parametrize("route", ROUTES)
def test_each_value_that_has_a_name_is_taken_or_refused(route: str) -> None:
    """The error is about that field. What is taken has an effect: the documentation says which."""
    params, model, body = ROUTES[route]
    for name, annotation in fields(params).items():
        if name not in known(model) or name == "model":
            continue
        for value in literals(annotation):
            try:
                model.model_validate({**body, name: value})
            except ValidationError as error:
                assert {fault["loc"][0] for fault in error.errors()} <= {name}, (name, value, error)


@pytest.mark.parametrize(("params", "model"), NESTED, ids=lambda part: part.__name__)
def test_the_same_holds_within_fields(params: Any, model: type[BaseModel]) -> None:
    assert set(fields(params)) & known(model)
    for name in set(fields(params)) - known(model):
        with pytest.raises(ValidationError) as caught:
            model.model_validate({name: "x"})
        (fault,) = caught.value.errors()
        assert fault["type"] == "unsupported_parameter" and fault["ctx"]["name"] == name


def test_a_salt_of_the_requests_own(client: openai.OpenAI) -> None:
    """What vLLM calls so: prompts with different ones find nothing of each other's."""

    def cached(text: str, **salt: str) -> int:
        answer = client.completions.create(model="tiny", prompt=text, max_tokens=1, extra_body=salt)
        assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
        return answer.usage.prompt_tokens_details.cached_tokens or 0

    text = "A salt of its own has this prompt, which is long enough for a few blocks of the cache. " * 3
    assert cached(text) < 16 and cached(text) > 16
    assert cached(text, cache_salt="a") == 0 and cached(text, cache_salt="b") == 0
    assert cached(text, cache_salt="a") > 16
    with pytest.raises(openai.BadRequestError, match="cache_salt"):
        cached(text, cache_salt="")


def test_a_prompt_that_is_cut(client: openai.OpenAI) -> None:
    """Its end stays, and is what `echo` shows."""
    cut = client.completions.create(
        model="tiny", prompt="Once upon a time", max_tokens=4, echo=True, temperature=0,
        extra_body={"truncate_prompt_tokens": 2},
    )  # fmt: skip
    assert cut.usage is not None and cut.usage.prompt_tokens == 2 and cut.choices[0].text.startswith(" a time")
    asked: dict[str, Any] = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "word " * 3000}],
        "max_tokens": 4,
    }
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(**asked)
    answer = client.chat.completions.create(**asked, extra_body={"truncate_prompt_tokens": -1})
    assert answer.usage is not None and answer.usage.completion_tokens == 4 and answer.usage.prompt_tokens == 2044
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**asked, extra_body={"truncate_prompt_tokens": 0})
    assert caught.value.param == "truncate_prompt_tokens"


def test_the_tier_that_serves_is_told_where_one_is_asked_for(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "tiny", "messages": USER, "max_tokens": 1}
    assert client.chat.completions.create(**asked, service_tier="auto").service_tier == "default"
    assert client.chat.completions.create(**asked).service_tier is None
    chunks = client.chat.completions.create(**asked, service_tier="default", stream=True)
    assert {chunk.service_tier for chunk in chunks} == {"default"}
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**asked, service_tier="flex")
    assert caught.value.param == "service_tier"


def test_a_model_that_cannot_be_told_how_much_to_think(client: openai.OpenAI, server: Server) -> None:
    with pytest.raises(openai.BadRequestError, match="chat template does not take") as caught:
        client.chat.completions.create(model="tiny", messages=USER, reasoning_effort="low")  # type: ignore[arg-type]
    assert (caught.value.param, caught.value.code) == ("reasoning_effort", "unsupported_parameter")
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model="tiny", input="Hello", reasoning={"effort": "high"})
    assert caught.value.param == "reasoning" and "reasoning.effort" in caught.value.message
    body = {"messages": USER, "max_tokens": 1, "output_config": {"effort": "high"}}
    answer = httpx.post(server.address + "/v1/messages", json=body, timeout=30)
    assert answer.status_code == 400 and "output_config.effort" in answer.json()["error"]["message"]
    # It has no thoughts anyway.
    client.chat.completions.create(model="tiny", messages=USER, reasoning_effort="none", max_tokens=1)  # type: ignore[arg-type]
