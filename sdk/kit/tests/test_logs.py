"""Every record is one line of JSON, whatever it holds."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from typing import Any

import pytest

from engine_kit.logs import REQUEST_ID, JSONFormatter


def formatted(message: Any, *args: Any, **more: Any) -> dict[str, Any]:
    record = logging.LogRecord("engine.x", logging.WARNING, "file.py", 1, message, args, more.pop("exc_info", None))
    vars(record).update(more)
    line = JSONFormatter().format(record)
    assert "\n" not in line
    found: dict[str, Any] = json.loads(line)
    return found


def test_a_record() -> None:
    found = formatted("%d pages\nof %s", 3, "é \ud800")
    assert found["message"] == "3 pages\nof é \ud800"
    assert (found["level"], found["logger"]) == ("WARNING", "engine.x") and found["pid"] > 0
    assert found["time"].endswith("Z") and len(found["time"]) == len("2026-11-21T12:00:00.000Z")
    assert "request_id" not in found and "exception" not in found


def test_the_request_and_further_fields() -> None:
    token = REQUEST_ID.set("r-1")
    try:
        found = formatted("x", fields={"status": 200, "message": "not this", "what": {1, 2}})
    finally:
        REQUEST_ID.reset(token)
    assert found["request_id"] == "r-1" and found["status"] == 200 and found["message"] == "x"
    assert isinstance(found["what"], str)


def test_exceptions() -> None:
    try:
        raise ValueError("a\nb")
    except ValueError:
        found = formatted("it failed", exc_info=sys.exc_info())
    assert "ValueError: a\nb" in found["exception"] and "Traceback" in found["exception"]


@pytest.mark.parametrize("header", ["Authorization: Bearer sk-abc.1", "{'authorization': 'bearer sk-abc.1'}"])
def test_what_follows_bearer_is_hidden(header: str) -> None:
    found = formatted("sent %s", header, fields={"header": header})
    assert "sk-abc" not in json.dumps(found) and "(hidden)" in found["message"] and "(hidden)" in found["header"]


PROGRAM = """
import logging, threading, warnings
from engine_kit.logs import log_as, tell
log_as("text")
tell("a", "not this", "plain")
log_as("json")
log_as("json")
tell("engine.y", "told", "not this", logging.INFO, address="http://x")
logging.getLogger("z").warning("logged")
logging.getLogger("z").info("not this")
warnings.warn("warned")
thread = threading.Thread(target=lambda: 1 / 0)
thread.start()
thread.join()
raise RuntimeError("uncaught")
"""


def test_a_process_says_everything_in_json() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout == "" and "not this" not in done.stderr
    first, *lines = done.stderr.splitlines()
    assert first == "plain"
    told, logged, warned, thread, uncaught = [json.loads(line) for line in lines]
    assert (told["message"], told["level"], told["address"]) == ("told", "INFO", "http://x")
    assert logged["logger"] == "z" and "warned" in warned["message"]
    assert "ZeroDivisionError" in thread["exception"] and "uncaught" in uncaught["exception"]
