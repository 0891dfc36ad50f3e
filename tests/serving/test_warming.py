"""`max_tokens` 0 brings a prompt's KV cache to the device, by every API's own client, and answers nothing."""

from __future__ import annotations

from typing import Any

import anthropic
import openai

from .conftest import Server

STORY = "Once upon a time there was a small engine that went out to sea. " * 6
MESSAGES: Any = [{"role": "user", "content": STORY}]


def warmed(server: Server) -> tuple[float, float, float]:
    """(sequences, tokens found, tokens computed) so far."""
    counts = server.metrics()
    tokens = [counts[f"kv_warming_tokens_total{{source={source}}}"] for source in ("found", "computed")]
    return counts["kv_warming_requests_total"], tokens[0], tokens[1]


def test_completions_find_what_was_warmed(server: Server, client: openai.OpenAI) -> None:
    before, generated = warmed(server), server.metrics()["request_generation_tokens_sum"]
    options: Any = {"model": "tiny", "prompt": STORY, "temperature": 0, "extra_body": {"cache_salt": "completions"}}
    for stream in (False, True):
        if stream:
            chunks = list(client.completions.create(max_tokens=0, stream=True, **options))
            assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == ""
            assert chunks[-1].choices[0].finish_reason == "length"
        else:
            one = client.completions.create(max_tokens=0, **options)
            assert one.usage is not None and one.usage.completion_tokens == 0
            assert (one.choices[0].text, one.choices[0].finish_reason) == ("", "length")
    after = client.completions.create(max_tokens=8, **options)
    plain = client.completions.create(max_tokens=8, **{**options, "extra_body": {"cache_salt": "other"}})
    assert after.choices[0].text == plain.choices[0].text and after.usage and after.usage.prompt_tokens_details
    tokens = after.usage.prompt_tokens
    assert (after.usage.prompt_tokens_details.cached_tokens or 0) >= tokens - 16
    requests, found, computed = (b - a for a, b in zip(before, warmed(server), strict=True))
    assert requests == 2 and found >= tokens - 16 and found + computed == 2 * tokens
    assert server.metrics()["request_generation_tokens_sum"] == generated + 16


def test_conversations_of_every_api(server: Server, client: openai.OpenAI) -> None:
    before = warmed(server)[0]
    salt: Any = {"cache_salt": "conversations", "kv_retention": {"ttl": 60}}
    tool: Any = {"name": "f", "parameters": {"type": "object", "properties": {}}}
    chat = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=0, tools=[{"type": "function", "function": tool}], extra_body=salt
    )
    assert chat.usage is not None and chat.usage.completion_tokens == 0
    assert not chat.choices[0].message.content and chat.choices[0].finish_reason == "length"
    response = client.responses.create(model="tiny", input=MESSAGES, max_output_tokens=0, extra_body=salt)
    assert response.output_text == "" and response.usage is not None and response.usage.output_tokens == 0
    claude = anthropic.Anthropic(base_url=server.address, api_key="none", max_retries=0)
    message = claude.messages.create(model="tiny", messages=MESSAGES, max_tokens=0, extra_body=salt)
    assert (message.stop_reason, message.usage.output_tokens, message.content) == ("max_tokens", 0, [])
    with claude.messages.stream(model="tiny", messages=MESSAGES, max_tokens=0, extra_body=salt) as stream:
        final = stream.get_final_message()
    assert (final.stop_reason, final.usage.output_tokens) == ("max_tokens", 0)
    assert final.usage.cache_read_input_tokens and final.usage.cache_read_input_tokens > 64
    assert warmed(server)[0] == before + 4
    assert server.until_idle()["kv_retained_pages{priority=0}"] > 4
