"""The fields that vLLM's server documents beside OpenAI's: each is honoured, or refused by name and listed in the docs.

The names are those of its protocol modules and of its page "OpenAI-Compatible Server"; the older ones, which it has
given up since, are sent by clients to this day.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel, ValidationError

from engine_server.openai.bodies import ChatBody, CompletionBody, StreamOptions, StructuredOutputsBody
from engine_server.pooling.bodies import (
    ClassifyBody,
    EmbeddingsBody,
    PoolBody,
    RerankBody,
    ScoreBody,
)
from engine_server.tokenization import DetokenizeBody, TokenizeBody

from .conftest import Server

PAGE = Path(__file__).parents[2] / "docs" / "users" / "server.md"
TEMPLATE = "add_generation_prompt continue_final_message add_special_tokens chat_template chat_template_kwargs"
MEDIA = "media_io_kwargs mm_processor_kwargs"
GUIDED = (
    "guided_json guided_regex guided_choice guided_grammar guided_decoding_backend guided_whitespace_pattern "
    "structural_tag"
)
BOTH = (
    "use_beam_search top_k min_p repetition_penalty length_penalty stop_token_ids include_stop_str_in_output "
    "ignore_eos min_tokens skip_special_tokens spaces_between_special_tokens truncate_prompt_tokens truncation_side "
    "prompt_logprobs logprob_token_ids allowed_token_ids bad_words add_special_tokens structured_outputs priority "
    "request_id session_id return_tokens_as_token_ids return_token_ids return_token_offsets return_mm_kwargs "
    "cache_salt kv_transfer_params ec_transfer_params vllm_xargs repetition_detection thinking_token_budget "
    "stream_interval routed_experts_prompt_start watermarking logits_processors response_format user " + GUIDED
)
POOLING = "user truncate_prompt_tokens truncation_side padding request_id priority mm_processor_kwargs cache_salt"
VECTORS = (
    f"{POOLING} {TEMPLATE} messages media_io_kwargs encoding_format embed_dtype endianness dimensions use_activation "
    "normalize"
)
ACTIVATION = "use_activation softmax activation"
DOCUMENTED: dict[str, tuple[type[BaseModel], str]] = {
    "chat": (ChatBody, f"{BOTH} {TEMPLATE} {MEDIA} echo documents include_reasoning return_prompt_text"),
    "completions": (CompletionBody, f"{BOTH} prompt_embeds best_of suffix"),
    "embeddings": (EmbeddingsBody, VECTORS),
    "pooling": (PoolBody, f"{VECTORS} task data softmax activation"),
    "classify": (ClassifyBody, f"{POOLING} {TEMPLATE} {ACTIVATION} messages media_io_kwargs"),
    "score": (ScoreBody, f"{POOLING} {ACTIVATION} data_1 data_2 queries documents items text_1 text_2"),
    "rerank": (RerankBody, f"{POOLING} {ACTIVATION} query documents top_n"),
    "tokenize": (TokenizeBody, f"{TEMPLATE} {MEDIA} prompt messages return_token_strs tools"),
    "detokenize": (DetokenizeBody, "tokens"),
    "stream_options": (StreamOptions, "include_usage continuous_usage_stats"),
    "structured_outputs": (
        StructuredOutputsBody,
        "json regex choice grammar json_object structural_tag whitespace_pattern disable_fallback "
        "disable_any_whitespace disable_additional_properties",
    ),
}


def split(where: str) -> tuple[set[str], set[str]]:
    """Names that are fields of our body, and the others."""
    model, names = DOCUMENTED[where]
    ours = {field.alias or name for name, field in model.model_fields.items()}
    return ours & set(names.split()), set(names.split()) - ours


@pytest.mark.parametrize("where", DOCUMENTED)
def test_each_is_honoured_or_refused_by_name(where: str) -> None:
    model, (honoured, strangers) = DOCUMENTED[where][0], split(where)
    assert honoured, "the body is another one"
    for name in strangers:
        with pytest.raises(ValidationError) as caught:
            model.model_validate({name: 1})
        (fault,) = caught.value.errors()
        assert fault["type"] == "unsupported_parameter" and fault["ctx"]["name"] == name


def test_those_refused_are_the_ones_that_the_page_lists() -> None:
    section = PAGE.read_text().partition("## Beside vLLM")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \|", section, re.MULTILINE)
    listed: dict[str, set[str]] = {}
    for places, names in rows[1:]:
        for place in re.findall(r"`(\w+)`", places):
            listed.setdefault(place, set()).update(re.findall(r"`(\w+)`", names))
    assert listed == {where: strangers for where in DOCUMENTED if (strangers := split(where)[1])}


def test_an_answer_that_goes_on_with_the_last_message(client: openai.OpenAI) -> None:
    asked: Any = {"model": "tiny", "temperature": 0, "max_tokens": 12}
    question = {"role": "user", "content": "What is the capital of France?"}
    whole = client.chat.completions.create(**asked, messages=[question]).choices[0].message.content
    assert whole is not None
    begun, end = whole[:-6], whole[-6:]
    messages = [question, {"role": "assistant", "content": begun}]
    rest = client.chat.completions.create(**asked, messages=messages, extra_body={"continue_final_message": True})
    assert (rest.choices[0].message.content or "").startswith(end)
    for more, says in (
        ({"messages": [question]}, "not the assistant's"),
        ({"messages": messages[1:]}, "no message stands before it"),
        ({"messages": [question, {"role": "assistant", "content": None, "tool_calls": [{}]}]}, "has tool_calls"),
        ({"messages": messages, "add_generation_prompt": True}, "contradict each other"),
    ):
        body = {**asked, "continue_final_message": True, **more}
        answer = httpx.post(str(client.base_url) + "chat/completions", json=body, timeout=30)
        assert answer.status_code == 400 and says in answer.json()["error"]["message"]


def test_special_tokens_are_added_or_not(server: Server, client: openai.OpenAI) -> None:
    text = "Once upon a time"
    for special in (True, False):
        asked = {"prompt": text, "add_special_tokens": special}
        count = httpx.post(server.address + "/tokenize", json=asked, timeout=30).json()["count"]
        answer = client.completions.create(
            model="tiny", prompt=text, max_tokens=1, extra_body={"add_special_tokens": special}
        )
        assert answer.usage is not None and answer.usage.prompt_tokens == count
    with pytest.raises(openai.BadRequestError, match="token ids are taken as they are"):
        client.completions.create(model="tiny", prompt=[5, 6], extra_body={"add_special_tokens": True})


def test_documents_that_the_template_does_not_show(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "Hi"}],
            extra_body={"documents": [{"title": "a", "text": "b"}]},
        )  # fmt: skip
    assert (caught.value.param, caught.value.code) == ("documents", "unsupported_parameter")


def test_the_prompt_as_the_template_has_written_it(server: Server, client: openai.OpenAI) -> None:
    asked: Any = {
        "model": "tiny", "max_tokens": 4, "n": 2,
        "messages": [{"role": "user", "content": "Hi"}],
        "extra_body": {"return_prompt_text": True},
    }  # fmt: skip
    whole: Any = client.chat.completions.create(**asked)
    body = {"messages": asked["messages"]}
    tokens = httpx.post(server.address + "/tokenize", json=body, timeout=30).json()["tokens"]
    spelt = httpx.post(server.address + "/detokenize", json={"tokens": tokens}, timeout=30).json()["prompt"]
    assert whole.prompt_text == spelt and "Hi" in spelt
    chunks: list[Any] = list(client.chat.completions.create(stream=True, **asked))
    assert [getattr(chunk, "prompt_text", None) for chunk in chunks] == [spelt] + [None] * (len(chunks) - 1)
    assert "prompt_token_ids" not in whole.model_dump()


@pytest.mark.parametrize("last", [False, True])
def test_usage_in_every_event(client: openai.OpenAI, last: bool) -> None:
    options: Any = {"continuous_usage_stats": True, "include_usage": last}
    asked: Any = {"model": "tiny", "max_tokens": 6, "n": 2, "stream": True, "stream_options": options, "seed": 3}
    ignore: Any = {"extra_body": {"ignore_eos": True}}
    messages: Any = [{"role": "user", "content": "Hi"}]
    for stream in (
        client.completions.create(prompt="Once upon a time", **asked, **ignore),
        client.chat.completions.create(messages=messages, **asked, **ignore),
    ):
        chunks: list[Any] = list(stream)
        told: dict[int, list[int]] = {0: [], 1: []}
        for chunk in chunks:
            assert chunk.usage.total_tokens == chunk.usage.prompt_tokens + chunk.usage.completion_tokens
            for choice in chunk.choices:
                told[choice.index].append(chunk.usage.completion_tokens)
        for counts in told.values():
            assert counts == sorted(counts) and counts[-1] == 6 and len(set(counts)) > 2
        assert (chunks[-1].choices == []) == last
        if last:
            assert chunks[-1].usage.completion_tokens == 12
