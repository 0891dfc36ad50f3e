"""With `--log-format json` every process of a server writes JSON, one object a line, and no key."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from .conftest import START_SECONDS, Server

FAULTS = Path(__file__).parents[1] / "faults"
KEY, ADMIN = "key-of-client", "key-of-admin"


def records(server: Server) -> list[dict[str, Any]]:
    return [json.loads(line) for line in server.lines]


def test_a_life_in_json(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the greeting to the death of its engine, whose worker fails at its third step."""
    for name, value in (("FATE", "raises"), ("STEP", "3"), ("RANK", "0")):
        monkeypatch.setenv(f"FAULT_{name}", value)
    monkeypatch.setenv("PYTHONPATH", str(FAULTS))
    server = Server(
        *("tiny", "--log-format", "json", "--access-log", "--api-key", KEY, "--admin-key", ADMIN),
        *("--max-model-len", "256", "--kv-cache-memory", "16MiB"),
        program=["-m", "faulty_server"],
    )

    def ask(path: str, key: str, name: str, **more: Any) -> int:
        headers = {"Authorization": f"Bearer {key}", "X-Request-Id": name}
        return httpx.post(f"{server.address}{path}?key={key}", headers=headers, timeout=60, **more).status_code

    assert ask("/v1/completions", KEY, "refused", json={"prompt": "x", "best": 1}) == 400
    assert ask("/v1/completions", "wrong", "unknown", json={"prompt": "x"}) == 401
    assert ask("/admin/kv/reset", ADMIN, "reset") == 200
    assert (
        ask("/v1/completions", KEY, "fatal", json={"prompt": "x", "max_tokens": 50, "ignore_eos": True, "user": "u-7"})
        == 503
    )
    assert server.process.wait(30) == 1
    server.stop()
    found = records(server)
    assert {"time", "level", "logger", "message", "pid"} <= set.intersection(*(set(one) for one in found))
    assert found[0]["address"] == server.address + "/v1" and "serves tiny" in found[0]["message"]
    access = {one["request_id"]: one for one in found if one["logger"] == "engine.access"}
    statuses = {"refused": 400, "unknown": 401, "reset": 200, "fatal": 503}
    assert {name: one["status"] for name, one in access.items()} == statuses
    assert access["fatal"]["user"] == "u-7" and "user" not in access["refused"]
    assert access["refused"]["method"] == "POST" and access["refused"]["path"] == "/v1/completions"
    assert [one["request_id"] for one in found if "an administrator asks" in one["message"]] == ["reset"]
    died = [one for one in found if "the device fell off the bus" in one.get("exception", "")]
    assert died and died[0]["pid"] != server.process.pid, "the core's own process tells"
    text = "".join(server.lines)
    assert KEY not in text and ADMIN not in text and "Bearer" not in text


def test_a_start_that_fails_says_so_in_json() -> None:
    asked = [sys.executable, "-m", "engine", "serve", "nothing-like-that", "--log-format", "json", "--port", "0"]
    ended = subprocess.run(asked, capture_output=True, text=True, timeout=START_SECONDS)
    (line,) = ended.stderr.splitlines()
    found = json.loads(line)
    assert ended.returncode == 2 and ended.stdout == ""
    assert found["level"] == "ERROR" and found["code"] == "model_not_found" and "--load-format" in found["remedy"]
