"""A worker that dies, hangs or lies behind `engine serve`: every client is told, what it got by then is right, and the
server ends by itself with exit code 1 and leaves nothing."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from ..serving.conftest import Server
from .conftest import Faulty
from .test_poison import POISON, PROMPTS, poisoned  # noqa: F401

BODY: dict[str, Any] = {"prompt": "Once", "max_tokens": 40, "temperature": 0.9, "seed": 3, "ignore_eos": True}


def stream(address: str, body: dict[str, Any]) -> tuple[str, list[dict[str, Any]]]:
    """The text that came, and the errors; a connection that is cut off is one."""
    text, errors = "", []
    try:
        with httpx.stream("POST", address + "/v1/completions", json=body | {"stream": True}, timeout=40) as reply:
            if reply.status_code != 200:
                return "", [json.loads(reply.read())["error"]]
            for line in reply.iter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line[6:])
                    errors += [event["error"]] if "error" in event else []
                    text += "".join(choice["text"] for choice in event.get("choices", []))
    except httpx.TransportError as error:
        errors.append({"code": "engine_dead", "message": str(error)})
    return text, errors


@pytest.fixture(scope="module")
def quiet() -> str:
    server = Server("tiny", "--dtype", "float64")
    try:
        text, errors = stream(server.address, BODY)
    finally:
        server.stop()
    assert text and not errors
    return text


@pytest.mark.parametrize(
    ("fate", "size"),
    [
        ("killed", 1), ("stopped", 1), ("out of the vocabulary", 1),
        *(pytest.param(fate, 1, marks=pytest.mark.slow) for fate in ("loops", "has no memory", "nothing")),
        *(pytest.param(fate, 2, marks=pytest.mark.slow) for fate in ("killed", "sleeps")),
    ],
)  # fmt: skip
def test_every_client_is_told(faulty: Faulty, nothing_left: Path, quiet: str, fate: str, size: int) -> None:
    faulty(fate, step=8, rank=0)
    options = ["--executor.step_timeout", "2", "--tensor-parallel-size", "2"] if size == 2 else ["--step-timeout", "2"]
    server = Server("tiny", "--dtype", "float64", *options, program=["-m", "faulty_server"])
    try:
        found: list[tuple[str, list[dict[str, Any]]]] = []
        clients = [threading.Thread(target=lambda: found.append(stream(server.address, BODY))) for _ in range(4)]
        began = time.monotonic()
        for client in clients:
            client.start()
        for client in clients:
            client.join(30)
        assert len(found) == 4 and time.monotonic() - began < 30
        for text, errors in found:
            assert quiet.startswith(text) and text != quiet
            assert [error["code"] for error in errors] == ["engine_dead"], errors
        assert server.process.wait(15) == 1
        log = "".join(server.lines)
        assert "engine: " in log
        if fate in ("loops", "has no memory"):
            assert "fault_worker.py" in log, "the log says where"
    finally:
        if server.process.poll() is None:
            server.process.kill()


def test_poison_over_http(poisoned: Path) -> None:  # noqa: F811
    server = Server(str(poisoned), "--dtype", "float64")
    try:
        good = BODY | {"prompt": PROMPTS[3], "allowed_token_ids": [t for t in range(300) if t != POISON]}
        bad = good | {"prompt": [*PROMPTS[3], POISON]}
        expected = stream(server.address, good)
        assert expected[0] and not expected[1]
        for _ in range(2):
            text, (error,) = stream(server.address, bad)
            assert text == "" and error["code"] == "invalid_logits"
            reply = httpx.post(server.address + "/v1/completions", json=bad, timeout=40)
            assert reply.status_code == 500 and reply.json()["error"]["code"] == "invalid_logits"
            assert stream(server.address, good) == expected
        assert server.until_idle()["request_success_total{finished_reason=error}"] == 4
    finally:
        assert server.stop() == 0
