"""`/tokenize` and `/detokenize`: the ids are those that the engine computes with."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

from tests.serving.conftest import Server

MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]


def post(server: Server, path: str, **body: Any) -> Any:
    return httpx.post(server.address + path, json=body, timeout=60)


def test_a_prompt_there_and_back(server: Server, client: openai.OpenAI) -> None:
    text = "One day, Émile saw a 🦊 by the sea.\n"
    answer = post(server, "/tokenize", model="tiny", prompt=text, return_token_strs=True).json()
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["max_model_len"] == client.models.list().data[0].max_model_len  # type: ignore[attr-defined]
    used = client.completions.create(model="tiny", prompt=text, max_tokens=1).usage
    assert used is not None and used.prompt_tokens == answer["count"]
    bare = post(server, "/tokenize", prompt=text, add_special_tokens=False).json()
    assert bare["token_strs"] is None
    assert post(server, "/detokenize", model="tiny", tokens=bare["tokens"]).json() == {"prompt": text}
    assert post(server, "/detokenize", tokens=[]).json() == {"prompt": ""}
    assert post(server, "/tokenize", prompt="", add_special_tokens=False).json()["tokens"] == []


def test_a_long_prompt_is_the_same(server: Server) -> None:
    text = "There was a small village by the sea. " * 600
    tokens = post(server, "/tokenize", prompt=text, add_special_tokens=False).json()["tokens"]
    assert post(server, "/detokenize", tokens=tokens).json()["prompt"] == text


def test_a_conversation(server: Server, client: openai.OpenAI) -> None:
    answer = post(server, "/tokenize", messages=MESSAGES).json()
    used = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=1).usage  # type: ignore[arg-type]
    assert used is not None and used.prompt_tokens == answer["count"]
    text = post(server, "/detokenize", tokens=answer["tokens"]).json()["prompt"]
    assert MESSAGES[0]["content"] in text
    without = post(server, "/tokenize", messages=MESSAGES, add_generation_prompt=False).json()
    assert without["tokens"] == answer["tokens"][: without["count"]] and without["count"] < answer["count"]
    begun = [*MESSAGES, {"role": "assistant", "content": " Paris"}]
    further = post(server, "/tokenize", messages=begun, continue_final_message=True).json()["tokens"]
    assert post(server, "/detokenize", tokens=further).json()["prompt"] == text + " Paris"


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("/tokenize", {}, "send prompt or messages"),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, "send prompt or messages"),
        ("/tokenize", {"prompt": "a", "add_generation_prompt": True}, "add_generation_prompt is for messages"),
        ("/tokenize", {"messages": MESSAGES, "chat_template": "x"}, "'chat_template' is not supported"),
        ("/tokenize", {"messages": []}, "messages is empty"),
        ("/tokenize", {"prompt": 5}, "valid string"),
        ("/detokenize", {"tokens": [-1]}, "the id -1 is none"),
        ("/detokenize", {"tokens": [10**12]}, "the id 1000000000000 is none"),
        ("/detokenize", {"tokens": ["a"]}, "valid integer"),
        ("/detokenize", {"tokens": [1], "skip_special_tokens": True}, "'skip_special_tokens' is not supported"),
    ],
)
def test_what_is_refused(server: Server, path: str, body: dict[str, Any], says: str) -> None:
    answer = post(server, path, **body)
    assert answer.status_code == 400 and says in answer.json()["error"]["message"]
