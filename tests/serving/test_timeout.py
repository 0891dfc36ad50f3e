"""Over HTTP: a request that does not end in time gets a 504, a stream an error event."""

from __future__ import annotations

import time
from typing import Any

import openai
import pytest

LONG: dict[str, Any] = {"model": "tiny", "prompt": "Once upon a time", "max_tokens": 450, "temperature": 0}


def test_a_late_answer_is_a_504_that_nobody_sends_again(client: openai.OpenAI) -> None:
    began = time.monotonic()
    with pytest.raises(openai.InternalServerError) as caught:
        client.with_options(max_retries=5).completions.create(**LONG, extra_body={"timeout": 0.05, "ignore_eos": True})
    assert caught.value.status_code == 504
    assert isinstance(caught.value.body, dict) and caught.value.body["code"] == "request_timeout"
    assert caught.value.response.headers["x-should-retry"] == "false"
    assert time.monotonic() - began < 30


def test_a_late_stream_ends_with_an_error_event(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "Tell me a story."}],
        max_tokens=400,
        stream=True,
        extra_body={"timeout": 0.05, "ignore_eos": True},
    )
    with pytest.raises(openai.APIError, match="finish request"):
        for _ in stream:
            pass


def test_enough_time_and_nonsense(client: openai.OpenAI) -> None:
    answer = client.completions.create(**{**LONG, "max_tokens": 4}, extra_body={"timeout": 600})
    assert answer.choices[0].finish_reason == "length"
    for timeout in (0, -1, "soon"):
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(**LONG, extra_body={"timeout": timeout})
        assert caught.value.param == "timeout"
