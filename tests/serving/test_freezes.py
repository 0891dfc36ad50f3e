"""No body within the limits keeps `/health` waiting: each of them once stopped the event loop for seconds."""

from __future__ import annotations

import http.client
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from engine_server.bodies import MOST
from engine_server.config import ServerConfig

from .conftest import Server

MAX_BODY = ServerConfig().max_body
BAR_SECONDS = 0.25
"""On two cores with nothing else to do it is 0.1 s. The tests' machine may have more to do: then the best of a few."""
TRIES = 6

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SAID = '"messages":[{"role":"user","content":"Hi"}],"max_tokens":1'


PART, MESSAGE = '{"type":"text","text":"a"}', '{"role":"user","content":"a"}'


def text(unit: str, size: int = MAX_BODY - 500) -> str:
    """A text of so many bytes."""
    return f'"{unit * (size // len(unit))}"'


def several(unit: str) -> str:
    """As many of these as a body may hold."""
    objects, values = unit.count('"') // 2 + unit.count("[") + unit.count("{"), unit.count(",") + unit.count("{") + 1
    count = min((MOST.objects - 50) // objects if objects else MOST.values, (MOST.values - 50) // values)
    return f"[{','.join([unit] * count)}]"


def fields(value: str) -> str:
    """An object with as many fields as a body may hold."""
    count = (MOST.objects - 50) // (1 + value.count('"') // 2 + value.count("{"))
    return "{" + ",".join(f'"{i}":{value}' for i in range(count)) + "}"


BODIES = {
    "one text": (COMPLETIONS, f'{{"prompt":{text("lazy dog ")}}}'),
    "one text that is cut": (
        COMPLETIONS,
        f'{{"max_tokens":1,"truncate_prompt_tokens":5,"prompt":{text("lazy dog ", 2**20)}}}',
    ),
    "prompts": (COMPLETIONS, f'{{"prompt":{several("[1]")}}}'),
    "ids": (COMPLETIONS, f'{{"prompt":{several("17")}}}'),
    "allowed ids": (COMPLETIONS, f'{{"prompt":"a","max_tokens":1,"allowed_token_ids":{several("300")}}}'),
    "stop": (COMPLETIONS, f'{{"prompt":"a","stop":{several(text("b", 1))}}}'),
    "logit_bias": (COMPLETIONS, f'{{"prompt":"a","logit_bias":{fields("1")}}}'),
    "extra_args": (COMPLETIONS, f'{{"prompt":"a","extra_args":{fields("1")}}}'),
    "a schema": (COMPLETIONS, f'{{"prompt":"a","structured_outputs":{{"json":{{"enum":{several("1")}}}}}}}'),
    "names that nobody knows": (COMPLETIONS, fields("1")),
    "content parts": (
        CHAT,
        f'{{"max_tokens":1,"messages":[{{"role":"user","content":{several(PART)}}}]}}',
    ),
    "messages": (CHAT, f'{{"max_tokens":1,"messages":{several(MESSAGE)}}}'),
    "metadata": (CHAT, f'{{{SAID},"metadata":{fields(text("a", 1))}}}'),
    "a tool": (
        CHAT,
        f'{{{SAID},"tools":[{{"type":"function","function":{{"name":"f","parameters":{{"properties":{fields("{}")}}}}}}}]}}',
    ),
    "messages for Anthropic's API": (
        "/v1/messages",
        f'{{"model":"tiny","max_tokens":1,"messages":{several(MESSAGE)}}}',
    ),
    "items": ("/v1/responses", f'{{"input":{several(MESSAGE)}}}'),
    "a text to tokenise": ("/tokenize", f'{{"prompt":{text("lazy dog ")}}}'),
    "ids to detokenise": ("/detokenize", f'{{"tokens":{several("300")}}}'),
    "more than may be": (COMPLETIONS, f'{{"prompt":[{",".join(["[]"] * (MAX_BODY // 3 - 500))}]}}'),
}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    running = Server("tiny")
    yield running
    assert running.stop() == 0, "".join(running.lines)
    assert "Traceback" not in "".join(running.lines)


class Watch:
    """Asks for `/health` again and again, in a thread."""

    def __init__(self, server: Server) -> None:
        self.longest = 0.0
        self._server = server
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._ask)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._ended.set()
        self._thread.join()

    def _ask(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._server.port, timeout=60)
        while not self._ended.wait(0.005):
            began = time.perf_counter()
            connection.request("GET", "/health")
            assert connection.getresponse().read()
            self.longest = max(self.longest, time.perf_counter() - began)
        connection.close()


@pytest.mark.parametrize("name", BODIES)
def test_health_is_not_kept_waiting(server: Server, name: str) -> None:
    path, body = BODIES[name]
    content = body.encode()
    assert len(content) <= MAX_BODY
    longest: list[float] = []
    while len(longest) < TRIES and min(longest, default=1.0) > BAR_SECONDS:
        with Watch(server) as watch:
            connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
            connection.request("POST", path, content, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            told = answer.read()
            connection.close()
        assert answer.status in (200, 400, 413) and b"not valid JSON" not in told, told[:500]
        assert (answer.status == 413) == (name == "more than may be"), told[:500]
        longest.append(watch.longest)
    assert min(longest) <= BAR_SECONDS, longest
