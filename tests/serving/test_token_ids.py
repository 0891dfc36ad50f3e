"""Token ids beside texts: vLLM's `return_token_ids` and `return_tokens_as_token_ids`."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

from .conftest import Server

MESSAGES: Any = [{"role": "user", "content": "What is the capital of France?"}]
ASKED: Any = {"model": "tiny", "seed": 7, "extra_body": {"return_token_ids": True}}
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


def text_of(server: Server, ids: list[int]) -> str:
    """As the tokenizer spells them, special tokens included."""
    text: str = httpx.post(server.address + "/detokenize", json={"tokens": ids}, timeout=30).json()["prompt"]
    return text


def test_chat_tells_the_prompt_and_each_choice(server: Server, client: openai.OpenAI) -> None:
    answer: Any = client.chat.completions.create(messages=MESSAGES, n=2, max_tokens=24, **ASKED)
    rendered = httpx.post(server.address + "/tokenize", json={"messages": MESSAGES}, timeout=30).json()["tokens"]
    assert answer.prompt_token_ids == rendered and len(answer.choices) == 2
    for choice in answer.choices:
        assert text_of(server, choice.token_ids).startswith(choice.message.content)
    assert sum(len(choice.token_ids) for choice in answer.choices) == answer.usage.completion_tokens
    # What is told is what was computed: the ids, sent as they are, are answered alike.
    again: Any = client.completions.create(prompt=rendered, n=2, max_tokens=24, **ASKED)
    assert [choice.token_ids for choice in again.choices] == [choice.token_ids for choice in answer.choices]
    silent = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=2)
    assert "token_ids" not in silent.choices[0].model_dump() and "prompt_token_ids" not in silent.model_dump()


@pytest.mark.parametrize("echo", [False, True])
def test_completions_stream_what_they_answer_whole(server: Server, client: openai.OpenAI, echo: bool) -> None:
    prompts = ["Once upon a time", "The little dog"]
    asked: Any = {**ASKED, "prompt": prompts, "n": 2, "max_tokens": 20, "stop": ["."], "echo": echo}
    whole: Any = client.completions.create(**asked)
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    for choice in whole.choices:
        prompt = prompts[choice.index // 2]
        asked_ids = httpx.post(server.address + "/tokenize", json={"prompt": prompt}, timeout=30).json()["tokens"]
        assert choice.prompt_token_ids == asked_ids
        assert choice.text.startswith(prompt) == echo
        assert text_of(server, choice.token_ids).startswith(choice.text.removeprefix(prompt if echo else ""))
    ids: dict[int, list[int]] = {}
    of_prompts: dict[int, list[int]] = {}
    for chunk in client.completions.create(stream=True, **asked):
        for told in chunk.choices:
            part: Any = told
            assert hasattr(part, "prompt_token_ids") == (part.index not in ids), "once, with the first ids"
            if part.index not in ids:
                of_prompts[part.index] = part.prompt_token_ids
            ids.setdefault(part.index, []).extend(part.token_ids)
    assert ids == {choice.index: choice.token_ids for choice in whole.choices}
    assert of_prompts == {choice.index: choice.prompt_token_ids for choice in whole.choices}


@pytest.mark.parametrize("tools", [False, True])
def test_chat_streams_what_it_answers_whole(client: openai.OpenAI, tools: bool) -> None:
    asked: Any = {**ASKED, "messages": MESSAGES, "n": 2, "max_tokens": 60}
    if tools:
        asked.update(tools=[TOOL], tool_choice="required")
    whole: Any = client.chat.completions.create(**asked)
    if tools:
        assert all(choice.message.tool_calls for choice in whole.choices)
    ids: dict[int, list[int]] = {0: [], 1: []}
    of_prompt, silent = [], 0
    for told in client.chat.completions.create(stream=True, **asked):
        chunk: Any = told
        if hasattr(chunk, "prompt_token_ids"):
            of_prompt.append(chunk.prompt_token_ids)
        for choice in chunk.choices:
            new = getattr(choice, "token_ids", [])
            ids[choice.index] += new
            silent += bool(new) and not choice.delta.content and not choice.delta.tool_calls
    assert of_prompt == [whole.prompt_token_ids]
    assert ids == {choice.index: choice.token_ids for choice in whole.choices}
    if tools:
        assert silent > 2, "ids whose text is not told are told as they come"


def test_log_probabilities_by_id(client: openai.OpenAI) -> None:
    more = {"return_token_ids": True, "return_tokens_as_token_ids": True}
    asked: Any = {"model": "tiny", "temperature": 0, "max_tokens": 6}
    told: Any = client.completions.create(prompt="Once upon", logprobs=2, extra_body=more, **asked).choices[0]
    assert told.logprobs.tokens == [f"token_id:{token}" for token in told.token_ids]
    texts: Any = client.completions.create(prompt="Once upon", logprobs=2, **asked).choices[0]
    assert told.logprobs.text_offset == texts.logprobs.text_offset
    assert told.logprobs.token_logprobs == texts.logprobs.token_logprobs
    for named, tops in zip(told.logprobs.tokens, told.logprobs.top_logprobs, strict=True):
        assert named in tops and len(tops) == 2 and all(name.startswith("token_id:") for name in tops)
    chat: Any = client.chat.completions.create(
        messages=MESSAGES, logprobs=True, top_logprobs=3, extra_body=more, **asked
    ).choices[0]
    entries = chat.logprobs.content
    assert [entry.token for entry in entries] == [f"token_id:{token}" for token in chat.token_ids]
    assert b"".join(bytes(entry.bytes) for entry in entries).decode().startswith(chat.message.content)
    assert all(entry.top_logprobs[0].token == entry.token for entry in entries), "greedy: the best was drawn"
    with pytest.raises(openai.BadRequestError, match="none are asked for"):
        client.completions.create(prompt="Once", extra_body=more, **asked)
