"""What is asked of a server under load: requests whose answers are known, and ones that nothing can answer."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

PROMPTS = (
    "Once upon a time",
    "The cat",
    "One day a fox",
    "Numbers: 1, 2,",
    "It",
)
QUESTIONS = ("What is the capital of France?", "What is the weather in Rome?", "Hello")
SHAPE = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "large": {"type": "boolean"}, "count": {"type": "integer"}},
    "required": ["city", "large"],
    "additionalProperties": False,
}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "get_weather", "description": "Get the weather", "parameters": PARAMETERS}


@dataclass(frozen=True)
class Good:
    """A request with one right answer.

    Args:
        path, body: of the request.
        whole: what counts of an answer.
        pieces: the same, of the events of a stream; None where there are no streams.
    """

    path: str
    body: dict[str, Any]
    whole: Callable[[dict[str, Any]], Any]
    pieces: Callable[[Iterable[dict[str, Any]]], Any] | None = None

    @property
    def name(self) -> str:
        """What it is called in the table of answers."""
        return self.path + json.dumps(self.body, sort_keys=True)


@dataclass(frozen=True)
class Bad:
    """A request that is refused: with a 4xx, an error in the protocol's form, and nothing left behind."""

    path: str
    content: bytes
    method: str = "POST"


def good_requests() -> list[Good]:
    """All of them; greedy, or drawn with a seed, which is as certain."""
    made: list[Good] = []
    for i, prompt in enumerate(PROMPTS):
        sampled = {"temperature": 1.0, "seed": i} if i % 2 else {"temperature": 0}
        body = {"prompt": prompt, "max_tokens": 8 + 9 * i, "ignore_eos": True, **sampled}
        made.append(Good("/v1/completions", body, _texts, _text_pieces))
    made.append(Good("/v1/completions", {**made[1].body, "n": 3}, _texts, _text_pieces))
    made.append(Good("/v1/completions", {"prompt": list(PROMPTS), "max_tokens": 6, "temperature": 0}, _texts))
    made.append(Good("/v1/completions", {"prompt": "story " * 300, "max_tokens": 4, "temperature": 0}, _texts))
    for question in QUESTIONS:
        said = [{"role": "user", "content": question}]
        chat = {"messages": said, "temperature": 0, "max_tokens": 40}
        tools = {"tools": [{"type": "function", "function": WEATHER}]}
        shape = {"response_format": {"type": "json_schema", "json_schema": {"name": "it", "schema": SHAPE}}}
        for more in ({}, tools, {**tools, "tool_choice": "required"}, shape, {**shape, **tools}):
            made.append(Good("/v1/chat/completions", {**chat, **more}, _chat, _chat_pieces))
        for store in (False, True):
            made.append(
                Good("/v1/responses", {"input": question, "temperature": 0, "store": store}, _output, _last_output)
            )
        made.append(Good("/v1/messages", chat, _blocks, _block_pieces))
        made.append(Good("/v1/messages/count_tokens", {"messages": said}, lambda answer: answer))
        made.append(Good("/tokenize", {"messages": said}, lambda answer: answer))
    for constraint in (
        {"regex": "[a-z]{3}-[0-9]{2,4}"},
        {"choice": ["yes", "no"]},
        {"grammar": 'root ::= ("ab" | "c")+ "."'},
    ):
        body = {"prompt": "It is", "max_tokens": 20, "temperature": 0, "structured_outputs": constraint}
        made.append(Good("/v1/completions", body, _texts, _text_pieces))
    return made


def bad_requests() -> list[Bad]:
    """Requests that are wrong in one way each."""
    hello = {"messages": [{"role": "user", "content": "Hello"}]}
    wrong: list[tuple[str, Any]] = [
        ("/v1/completions", {"prompt": "word " * 5000}),
        ("/v1/completions", {"prompt": "x", "max_tokens": -1}),
        ("/v1/completions", {"prompt": "x", "no_such_thing": 1}),
        ("/v1/completions", {"prompt": [10**9]}),
        ("/v1/completions", {"prompt": "x", "structured_outputs": {"regex": "(?=a)"}}),
        ("/v1/completions", {"prompt": "x", "structured_outputs": {"grammar": "root ::= ("}}),
        ("/v1/chat/completions", {"messages": []}),
        ("/v1/chat/completions", {"messages": [{"role": "nobody", "content": "x"}]}),
        ("/v1/chat/completions", {**hello, "tools": [{"type": "function"}]}),
        ("/v1/chat/completions", {**hello, "model": "another"}),
        ("/v1/chat/completions", {**hello, "response_format": {"type": "json_schema", "json_schema": {"name": "a b"}}}),
        ("/v1/responses", {"input": "x", "previous_response_id": "resp_none"}),
        ("/v1/messages", {**hello, "max_tokens": -1}),
        ("/tokenize", {}),
        ("/detokenize", {"tokens": [-1]}),
    ]
    made = [Bad(path, json.dumps(body).encode()) for path, body in wrong]
    made += [Bad("/v1/chat/completions", content) for content in (b"", b"{not json", b"\xff\xfe", b"[1]", b"[" * 5000)]
    return [
        *made,
        Bad("/v1/completions", b"", "DELETE"),
        Bad("/no/such/route", b"{}"),
        Bad("/v1/responses/none", b"", "GET"),
    ]


def long_request(draw: random.Random, longest: int) -> tuple[str, dict[str, Any]]:
    """(path, body) of one that takes a while, `longest` tokens at most, for clients who leave it, or read it slowly."""
    many = {"max_tokens": draw.randint(longest // 4, longest), "temperature": 1.0, "seed": draw.randrange(2**31)}
    messages = [{"role": "user", "content": "Tell me a long story."}]
    return draw.choice(
        [
            ("/v1/completions", {"prompt": f"Story {draw.randrange(100)}", "ignore_eos": True, "logprobs": 5, **many}),
            ("/v1/chat/completions", {"messages": messages, "ignore_eos": True, "n": draw.randint(1, 3), **many}),
            ("/v1/messages", {"messages": messages, **many}),
            (
                "/v1/chat/completions",
                {
                    "messages": messages,
                    **many,
                    "response_format": {"type": "json_schema", "json_schema": _new_shape(draw)},
                },
            ),
        ]
    )


def _new_shape(draw: random.Random) -> dict[str, Any]:
    """A schema that was never compiled before."""
    names = [f"k{draw.randrange(10**6)}" for _ in range(4)]
    properties = {name: {"type": "array", "items": {"type": "integer"}} for name in names}
    return {"name": "new", "schema": {"type": "object", "properties": properties, "required": names}}


def _texts(answer: dict[str, Any]) -> Any:
    return [(choice["text"], choice["finish_reason"]) for choice in answer["choices"]]


def _text_pieces(events: Iterable[dict[str, Any]]) -> Any:
    found: dict[int, list[Any]] = {}
    for event in events:
        for choice in event["choices"]:
            entry = found.setdefault(choice["index"], ["", None])
            entry[0] += choice["text"]
            entry[1] = choice["finish_reason"] or entry[1]
    return [tuple(found[i]) for i in sorted(found)]


def _chat(answer: dict[str, Any]) -> Any:
    (choice,) = answer["choices"]
    calls = [(c["function"]["name"], c["function"]["arguments"]) for c in choice["message"].get("tool_calls") or []]
    return choice["message"]["content"] or "", calls, choice["finish_reason"]


def _chat_pieces(events: Iterable[dict[str, Any]]) -> Any:
    text, reason = "", None
    calls: dict[int, list[str]] = {}
    for event in events:
        (choice,) = event["choices"]
        text += choice["delta"].get("content") or ""
        for delta in choice["delta"].get("tool_calls") or []:
            call = calls.setdefault(delta["index"], ["", ""])
            call[0] += delta["function"].get("name") or ""
            call[1] += delta["function"].get("arguments") or ""
        reason = choice["finish_reason"] or reason
    return text, [tuple(calls[i]) for i in sorted(calls)], reason


def _output(answer: dict[str, Any]) -> Any:
    (item,) = answer["output"]
    return answer["status"], item["content"][0]["text"]


def _last_output(events: Iterable[dict[str, Any]]) -> Any:
    told = list(events)
    answer = _output(told[-1]["response"])
    assert "".join(e["delta"] for e in told if e["type"] == "response.output_text.delta") == answer[1]
    return answer


def _blocks(answer: dict[str, Any]) -> Any:
    return [block["text"] for block in answer["content"]], answer["stop_reason"]


def _block_pieces(events: Iterable[dict[str, Any]]) -> Any:
    texts: dict[int, str] = {}
    reason = None
    for event in events:
        if event["type"] == "content_block_start":
            texts[event["index"]] = event["content_block"]["text"]
        elif event["type"] == "content_block_delta":
            texts[event["index"]] += event["delta"]["text"]
        elif event["type"] == "message_delta":
            reason = event["delta"]["stop_reason"]
    return [texts[i] for i in sorted(texts)], reason
