"""`/openapi.json` is complete and true: schemathesis makes requests of it, right ones and wrong ones, and looks at what
comes back. No request whatever makes a 500.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from .conftest import Server

ROOT = Path(__file__).parents[2]
ADMIN = "for-administrators"
CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,response_headers_conformance,"
    "response_schema_conformance,negative_data_rejection,unsupported_method"
)
CONFIG = '[checks.not_a_server_error]\nexpected-statuses = ["2xx", "3xx", "4xx", 503, 504]\n'
ALL = 10_000


@pytest.fixture(scope="module", params=["generate", pytest.param("pooling", marks=pytest.mark.slow)])
def runner(request: pytest.FixtureRequest) -> Iterator[Server]:
    """A server whose contexts are short, so that everything ends soon."""
    flags = ("--dtype", "float64", "--max-model-len", "128", "--max-num-seqs", "32", "--admin-key", ADMIN)
    running = Server("tiny", "--runner", request.param, *flags)
    yield running
    assert running.stop() == 0, "".join(running.lines)
    assert not [line for line in running.lines if "Traceback" in line or "unforeseen" in line], "".join(running.lines)


def cases(server: Server, folder: Path, *flags: str) -> int:
    """Let schemathesis make cases of the server's document; how many they were."""
    (config := folder / "schemathesis.toml").write_text(CONFIG)
    program = [sys.executable, "-m", "schemathesis.cli", "--config-file", str(config), "run"]
    asked = ["--header", f"Authorization: Bearer {ADMIN}", "--checks", CHECKS, "--no-shrink", "--continue-on-failure"]
    asked += ["--request-timeout", "120", "--suppress-health-check", "all", "--warnings", "off"]
    done = subprocess.run(
        [*program, server.address + "/openapi.json", *asked, *flags],
        cwd=folder,
        env={**os.environ, "SCHEMATHESIS_HOOKS": "tests.serving.schemathesis_hooks", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr
    counted = re.search(r"(\d+) generated", done.stdout)
    assert counted is not None and "Tested: 37" in done.stdout, done.stdout
    server.until_idle()
    return int(counted.group(1))


def test_some_cases(runner: Server, tmp_path: Path) -> None:
    assert cases(runner, tmp_path, "--phases", "fuzzing", "--max-examples", "6", "--seed", "5") >= 100


@pytest.mark.slow
def test_ten_thousand_cases(runner: Server, tmp_path: Path) -> None:
    phases = "examples,coverage,fuzzing"
    assert cases(runner, tmp_path, "--phases", phases, "--max-examples", "500", "--seed", "1") >= ALL


def test_every_operation_says_what_may_go_wrong(runner: Server) -> None:
    document = httpx.get(runner.address + "/openapi.json").json()
    for path, operations in document["paths"].items():
        for name, operation in operations.items():
            answers: dict[str, Any] = operation["responses"]
            assert {"200", "500"} <= set(answers) and "422" not in answers, (name, path)
            assert all(answer["description"] and answer["content"] for answer in answers.values()), (name, path)
            assert ("requestBody" not in operation) or {"400", "401", "404", "413", "429", "503", "504"} <= set(answers)
            assert bool(operation["security"]) == path.startswith("/admin/")
    streamed = {path for path, of in document["paths"].items() if "text/event-stream" in str(of)}
    made = {"/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses"}
    sound = {"/v1/audio/transcriptions", "/v1/audio/translations"}
    assert streamed == {*made, *sound, "/v1/responses/{identity}"}


@pytest.mark.parametrize("prompt", [[False], [[True]], [0.0], [[1.0]]])
def test_no_number_that_is_not_whole_is_a_token(runner: Server, prompt: Any) -> None:
    for path, name in (("/v1/completions", "prompt"), ("/v1/embeddings", "input")):
        answer = httpx.post(runner.address + path, json={name: prompt})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == name
