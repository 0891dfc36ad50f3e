"""Whatever a client sends: a typed error that helps, no page that stays in use, and a server that goes on."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from .conftest import Server

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "Hello"}]
DEEP = b"[" * 900 + b"]" * 900
DEEPER = b"[" * 30_000 + b"]" * 30_000


@pytest.fixture(scope="module")
def limited() -> Iterator[Server]:
    """A server with tight limits: those of size are the defaults."""
    running = Server("tiny", "--dtype", "float64", "--body-timeout", "1", "--header-timeout", "1")
    yield running
    assert running.stop() == 0, "".join(running.lines)
    assert "Traceback" not in "".join(running.lines)


def chat(**more: Any) -> bytes:
    return json.dumps({"messages": HELLO, "max_tokens": 4} | more).encode()


def completion(**more: Any) -> bytes:
    return json.dumps({"prompt": "Hello", "max_tokens": 4} | more).encode()


def raw(start: str, value: bytes) -> bytes:
    """A chat body whose last value is written as it stands."""
    return chat()[:-1] + f', "{start}": '.encode() + value + b"}"


# (path, body, param of the error, words in its message)
REFUSED: dict[str, tuple[str, bytes, str | None, list[str]]] = {
    "prompt beyond the context": (COMPLETIONS, completion(prompt="word " * 5000), None, ["2048", "shorten"]),
    "chat beyond the context": (CHAT, chat(messages=[HELLO[0] | {"content": "word " * 5000}]), None, ["2048"]),
    "a megabyte of prompt": (COMPLETIONS, completion(prompt="x" * 2**20), None, ["2048", "shorten"]),
    "max_tokens=-2": (CHAT, chat(max_tokens=-2), "max_tokens", ["-2"]),
    "max_tokens below 0": (COMPLETIONS, completion(max_tokens=-1), "max_tokens", ["-1"]),
    "NaN as JSON": (CHAT, raw("temperature", b"NaN"), None, ["NaN", "finite"]),
    "Infinity as JSON": (CHAT, raw("temperature", b"-Infinity"), None, ["Infinity", "finite"]),
    "NaN as text": (CHAT, chat(temperature="NaN"), "temperature", ["NaN", "number"]),
    "a number beyond double": (CHAT, raw("temperature", b"1e999"), None, ["valid JSON"]),
    "an integer of 5000 digits": (CHAT, raw("seed", b"1" * 5000), None, ["valid JSON"]),
    "an integer of 30 digits": (CHAT, raw("seed", b"1" * 30), "seed", ["integer"]),
    "max_tokens=10**18": (CHAT, chat(max_tokens=10**18), "max_tokens", ["outside"]),
    "temperature below 0": (CHAT, chat(temperature=-0.5), "temperature", ["-0.5"]),
    "top_p=0": (CHAT, chat(top_p=0), "top_p", ["0"]),
    "n=0": (CHAT, chat(n=0), "n", ["0"]),
    "n=10**6": (CHAT, chat(n=10**6), "n", ["128"]),
    "too many completions": (COMPLETIONS, completion(prompt=["a"] * 1000, n=128), "n", ["128000"]),
    "too many prompts": (COMPLETIONS, completion(prompt=["a"] * 2000), "prompt", ["2000"]),
    "text as a number": (CHAT, chat(temperature="warm"), "temperature", ["warm", "number"]),
    "number as text": (COMPLETIONS, completion(prompt=5), "prompt", ["prompt", "5"]),
    "boolean as integer": (CHAT, chat(max_tokens=True), "max_tokens", ["integer"]),
    "prompt of mixed types": (COMPLETIONS, completion(prompt=["a", 1]), "prompt", ["prompt"]),
    "prompt of 100,000 wrong entries": (COMPLETIONS, completion(prompt=[None] * 100_000), "prompt", ["prompt"]),
    "no prompts": (COMPLETIONS, completion(prompt=[]), "prompt", ["0 prompts"]),
    "empty ids": (COMPLETIONS, completion(prompt=[[]]), None, ["empty prompt"]),
    "ids outside the vocabulary": (COMPLETIONS, completion(prompt=[1, 10**9]), None, ["vocabulary"]),
    "ids below 0": (COMPLETIONS, completion(prompt=[-1]), None, ["-1"]),
    "no prompt": (COMPLETIONS, b"{}", "prompt", ["prompt is missing"]),
    "not JSON": (CHAT, b"{not json", None, ["valid JSON"]),
    "half of JSON": (CHAT, chat()[:-5], None, ["valid JSON"]),
    "JSON and more": (CHAT, chat() + b"x", None, ["valid JSON"]),
    "not UTF-8": (CHAT, chat().replace(b"Hello", b"\xff\xfe"), None, ["valid JSON"]),
    "an array": (CHAT, b"[1, 2]", None, ["dictionary"]),
    "a string": (CHAT, b'"hello"', None, ["dictionary"]),
    "null": (CHAT, b"null", None, ["body"]),
    "nothing": (CHAT, b"", None, ["no body"]),
    "a lone surrogate": (COMPLETIONS, b'{"prompt": "\\ud800 x"}', None, ["surrogate"]),
    "10,000 stop strings": (CHAT, chat(stop=[f"s{i}" for i in range(10_000)]), "stop", ["10000", "64"]),
    "an endless stop string": (CHAT, chat(stop="s" * 100_000), "stop", ["100000", "1024"]),
    "an empty stop string": (CHAT, chat(stop=[""]), "stop", ["empty"]),
    "10,000 stop ids": (CHAT, chat(stop_token_ids=[1] * 10_000), "stop_token_ids", ["10000", "1024"]),
    "stop ids outside the vocabulary": (CHAT, chat(stop_token_ids=[10**6]), "stop_token_ids", ["vocabulary"]),
    "deep messages": (CHAT, b'{"messages": [{"role": "user", "content": "a", "x": ' + DEEP + b"}]}", None, ["nested"]),
    "deep variables": (CHAT, raw("chat_template_kwargs", b'{"x": ' + DEEP + b"}"), None, ["nested"]),
    "deep temperature": (CHAT, raw("temperature", DEEP), "temperature", ["number"]),
    "deeper": (CHAT, DEEPER, None, ["depth"]),
    "a template of one's own": (CHAT, chat(chat_template="{{ 1 }}"), "chat_template", ["chat_template"]),
    "embeddings in place of a prompt": (
        COMPLETIONS,
        completion(prompt_embeds="gAR9"),
        "prompt_embeds",
        ["prompt_embeds"],
    ),
    "a negative number of tokens": (COMPLETIONS, completion(max_tokens=-1), "max_tokens", ["-1"]),
    "no messages": (CHAT, chat(messages=[]), "messages", ["at least one"]),
    "messages of text": (CHAT, chat(messages="Hello"), "messages", ["list"]),
    "messages of numbers": (CHAT, chat(messages=[1] * 100_000), "messages", ["messages.0"]),
    "a message without role": (CHAT, chat(messages=[{"content": "a"}]), "messages", ["messages.0", "role"]),
    "an unknown role": (CHAT, chat(messages=[{"role": "asistant", "content": "a"}]), "messages", ["'assistant'"]),
    "a role that is a list": (CHAT, chat(messages=[{"role": ["user"], "content": "a"}]), "messages", ["role"]),
    "an image": (CHAT, chat(messages=[{"role": "user", "content": [{"type": "image_url"}]}]), None, ["text only"]),
    "variables that override messages": (CHAT, chat(chat_template_kwargs={"messages": []}), None, ["'messages'"]),
    "variables that override self": (CHAT, chat(chat_template_kwargs={"self": 1}), None, ["'self'"]),
    "variables that override the template": (CHAT, chat(chat_template_kwargs={"template": "x"}), None, ["'template'"]),
    "what the template cannot read": (CHAT, chat(messages=[{"role": "user", "content": 7}]), None, ["template"]),
    "what is no tool call": (CHAT, chat(messages=[{"role": "assistant", "tool_calls": [{}]}]), None, ["no function"]),
    "an unknown parameter": (CHAT, chat(max_token=4), "max_token", ["max_token", "did you mean 'max_tokens'"]),
    "30,000 unknown parameters": (CHAT, chat(**{f"p{i}": i for i in range(30_000)}), "p0", ["p0"]),
    "max_tokens twice": (CHAT, chat(max_completion_tokens=5), "max_tokens", ["differ"]),
    "stream options without stream": (CHAT, chat(stream_options={"include_usage": True}), None, ["stream=true"]),
    "top_logprobs alone": (CHAT, chat(top_logprobs=2), None, ["logprobs=true"]),
    "logprobs beyond the limit": (COMPLETIONS, completion(logprobs=1000), "logprobs", ["64"]),
    "another response format": (CHAT, chat(response_format={"type": "xml"}), "response_format", ["text"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_request_that_is_refused(limited: Server, name: str) -> None:
    path, content, param, words = REFUSED[name]
    headers = {"Content-Type": "application/json"}
    for body in (content, content.replace(b'"max_tokens"', b'"stream": true, "max_tokens"', 1)):
        answer = httpx.post(limited.address + path, content=body, headers=headers, timeout=30)
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert error["type"] == "invalid_request_error" and error["code"], error
        for word in words:
            assert word in error["message"], error
        if b'"stream": true' not in body or name != "stream options without stream":
            assert error["param"] == param, error
        assert len(error["message"]) < 1000, "the message repeats the request"
        if name == "stream options without stream":
            break
    limited.until_idle()


@pytest.mark.parametrize(
    "body",
    [
        completion(prompt=""),  # begins with the model's own first token
        completion(prompt="null \x00 byte"),
        completion(prompt="\U0001f600 \ufffe \u202e"),
        completion(seed=-(2**63)),
        completion(user="me", model=None, stop=None),
        completion(stop=["\x00"]),
        chat(messages=[{"role": "user", "content": None}]),
        chat(messages=[{"role": "user", "content": "x", "name": "\x00"}]),
        chat(messages=[{"role": "assistant", "content": ""}] * 100),
        chat(chat_template_kwargs={"not a name": 1, "enable_thinking": False}),
    ],
)
def test_a_request_that_is_strange_and_good(limited: Server, body: bytes) -> None:
    path = CHAT if b"messages" in body else COMPLETIONS
    answer = httpx.post(limited.address + path, content=body, headers={"Content-Type": "application/json"}, timeout=30)
    assert answer.status_code == 200, answer.text
    limited.until_idle()


def test_unknown_models_and_routes(limited: Server) -> None:
    for name in ("x" * 10_000, "\x00", "../../etc/passwd", ""):
        answer = httpx.post(limited.address + CHAT, content=chat(model=name), headers={"Content-Type": "text/json"})
        assert answer.status_code == 400 and "application/json" in answer.json()["error"]["message"]
        answer = httpx.post(limited.address + CHAT, json=json.loads(chat(model=name)))
        assert answer.status_code == 404 and answer.json()["error"]["code"] == "model_not_found"
        assert len(answer.text) < 1000
    answer = httpx.post(limited.address + "/nowhere", content=b"x")
    assert answer.status_code == 404 and "/nowhere" in answer.json()["error"]["message"]
    answer = httpx.get(limited.address + CHAT)
    assert answer.status_code == 405 and answer.json()["error"]["message"]


# -- below JSON: raw connections ---------------------------------------------------------------------------------------
def exchange(server: Server, *parts: bytes, seconds: float = 20) -> bytes:
    """Send, and read until the server closes the connection."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=seconds) as connection:
        for part in parts:
            connection.sendall(part)
        answer = b""
        while chunk := connection.recv(65536):
            answer += chunk
        return answer


def head(length: int | str, *more: str) -> bytes:
    lines = [f"POST {CHAT} HTTP/1.1", "Host: x", "Content-Type: application/json", f"Content-Length: {length}", *more]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def test_a_body_of_50_megabytes_is_refused_unread(limited: Server) -> None:
    answer = exchange(limited, head(50_000_000), b'{"messages": "')  # the rest is never sent, and not waited for
    assert answer.startswith(b"HTTP/1.1 413"), answer
    assert b"body_too_large" in answer and b"8388608" in answer and b"connection: close" in answer


def test_a_body_of_50_megabytes_that_is_sent(limited: Server) -> None:
    big = json.dumps({"messages": [{"role": "user", "content": "x" * 50_000_000}]}).encode()
    answer = httpx.post(limited.address + CHAT, content=big, timeout=30)
    assert answer.status_code == 413 and answer.json()["error"]["code"] == "body_too_large"
    chunks = (big[i : i + 2**20] for i in range(0, len(big), 2**20))  # no declared length
    answer = httpx.post(limited.address + CHAT, content=chunks, timeout=30)
    assert answer.status_code == 413 and answer.json()["error"]["code"] == "body_too_large"


def test_a_slow_body(limited: Server) -> None:
    answer = exchange(limited, head(100), b'{"mess')
    assert answer.startswith(b"HTTP/1.1 408") and b"body_timeout" in answer


def test_no_answer_tells_what_serves(limited: Server) -> None:
    answers = [httpx.get(limited.address + path) for path in ("/health", "/v1/models", "/nothing")]
    assert not any("server" in answer.headers for answer in answers)


def test_slow_and_endless_headers(limited: Server) -> None:
    assert exchange(limited, b"POST /v1/chat").startswith(b"HTTP/1.1 408")
    assert exchange(limited) == exchange(limited, b"GET")
    assert exchange(limited, b"GET /health HTTP/1.1\r\nA: ", b"b" * 100_000).startswith(b"HTTP/1.1 431")


@pytest.mark.parametrize(
    "bytes_",
    [b"\x16\x03\x01\x02\x00\x01\x00", b"GET\r\n\r\n", head("-5"), head("five"), head("5", "Content-Length: 6")],
)
def test_not_http(limited: Server, bytes_: bytes) -> None:
    assert exchange(limited, bytes_).startswith(b"HTTP/1.1 400")


@pytest.mark.parametrize("stream", [False, True])
def test_closed_connections(limited: Server, stream: bool) -> None:
    """In the headers, in the body, while it waits, and while it is answered: nothing goes on for nobody."""
    body = chat(max_tokens=1900, ignore_eos=True, stream=stream)
    whole = head(len(body)) + body
    for cut in (10, len(whole) - 10, len(whole)):
        with socket.create_connection(("127.0.0.1", limited.port), timeout=20) as connection:
            connection.sendall(whole[:cut])
            if cut == len(whole):
                limited.until(lambda m: m["num_requests_running"] == 1, "the request runs")
    before = limited.until_idle()["generation_tokens_total"]
    time.sleep(0.1)
    assert limited.metrics()["generation_tokens_total"] == before


@pytest.mark.slow
def test_a_reader_that_does_not_read(limited: Server) -> None:
    """Its request ends all the same, and gives its pages back; what it did not read is there when it does."""
    body = chat(max_tokens=1500, ignore_eos=True, stream=True, logprobs=True, top_logprobs=20, temperature=0)
    with socket.socket() as connection:
        connection.settimeout(60)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        connection.connect(("127.0.0.1", limited.port))
        connection.sendall(head(len(body), "Connection: close") + body)
        limited.until(lambda m: m["num_requests_running"] == 1, "the request runs")
        limited.until_idle(90)
        answer = b""
        while chunk := connection.recv(65536):
            answer += chunk
    assert b'"finish_reason":"length"' in answer and b"data: [DONE]" in answer
    assert answer.count(b'"top_logprobs"') == 1500


def test_the_server_still_serves(limited: Server) -> None:
    """After all of the above."""
    answer = httpx.post(limited.address + CHAT, json=json.loads(chat()), timeout=30)
    assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] >= 1
    metrics = limited.until_idle()
    assert metrics["request_success_total{finished_reason=error}"] == 0
    assert not [name for name in metrics if name.startswith("http_responses_total{code=5")]
