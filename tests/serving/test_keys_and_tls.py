"""A guarded server: keys of a file that changes, their limits, no neighbour's cached prompt, TLS, and browsers."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from .conftest import START_SECONDS, Certificate, Server

PROMPT = "Once upon a time there was a small village by the sea, and every morning its people went down to the boats."


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("guarded")
    (made / "keys.yaml").write_text(
        "- key: of-team-a\n  name: team-a\n- of-team-b\n- key: slow\n  requests_per_minute: 2\n"
    )
    return made


@pytest.fixture(scope="module")
def guarded(folder: Path) -> Iterator[Server]:
    running = Server(
        *("tiny", "--api-key-file", str(folder / "keys.yaml"), "--allowed-origins", "https://chat.example"),
        *("--max-model-len", "512", "--kv-cache-memory", "64MiB", "--access-log"),
    )
    yield running
    assert running.stop() == 0, "".join(running.lines)


def cached(server: Server, key: str) -> int:
    answer = server.client(api_key=key).completions.create(model="tiny", prompt=PROMPT, max_tokens=1, temperature=0)
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    return answer.usage.prompt_tokens_details.cached_tokens or 0


def test_no_key_finds_what_another_has_sent(guarded: Server) -> None:
    assert cached(guarded, "of-team-a") == 0 and cached(guarded, "of-team-a") > 0
    assert cached(guarded, "of-team-b") == 0 and cached(guarded, "of-team-b") > 0


def test_a_key_may_send_so_many_requests_a_minute(guarded: Server) -> None:
    client = guarded.client(api_key="slow")
    for _ in range(2):
        client.models.list()
    with pytest.raises(openai.RateLimitError) as caught:
        client.models.list()
    assert 1 <= int(caught.value.response.headers["retry-after"]) <= 30
    assert caught.value.code == "rate_limit_exceeded" and "2 requests a minute" in str(caught.value)
    assert guarded.client(api_key="of-team-a").models.list().data


def test_keys_come_and_go_while_the_server_runs(guarded: Server, folder: Path) -> None:
    path, before = folder / "keys.yaml", (folder / "keys.yaml").read_text()
    path.write_text(before + "- newcomer\n")
    deadline = time.monotonic() + 30
    while httpx.get(guarded.address + "/v1/models", headers={"x-api-key": "newcomer"}).status_code != 200:
        assert time.monotonic() < deadline, "".join(guarded.lines)
        time.sleep(0.2)
    path.write_text(before)
    while httpx.get(guarded.address + "/v1/models", headers={"x-api-key": "newcomer"}).status_code != 401:
        assert time.monotonic() < deadline, "".join(guarded.lines)
        time.sleep(0.2)
    told = "".join(guarded.lines)
    assert "4 in all, 1 new, 0 gone" in told and not re.search("newcomer|of-team", told)


def test_scripts_of_an_allowed_origin(guarded: Server) -> None:
    asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    url = guarded.address + "/v1/completions"
    allowed = httpx.options(url, headers={"Origin": "https://chat.example", **asks})
    assert allowed.status_code == 200 and allowed.headers["access-control-allow-origin"] == "https://chat.example"
    denied = httpx.options(url, headers={"Origin": "https://evil.example", **asks})
    assert denied.status_code == 400 and "access-control-allow-origin" not in denied.headers
    refused = httpx.post(url, headers={"Origin": "https://chat.example"})
    assert refused.status_code == 401 and refused.headers["access-control-allow-origin"] == "https://chat.example"


def test_no_script_of_another_origin_by_itself(server: Server) -> None:
    answer = httpx.get(server.address + "/v1/models", headers={"Origin": "https://chat.example"})
    assert "access-control-allow-origin" not in answer.headers


def test_https_with_client_certificates(tmp_path: Path) -> None:
    certificate = Certificate(tmp_path)
    running = Server("tiny", "--max-model-len", "256", *certificate.flags, f"--ssl-ca-certs={tmp_path / 'ca.pem'}")
    try:
        context = certificate.trust()
        with pytest.raises(httpx.TransportError), httpx.Client(verify=context) as stranger:
            stranger.get(running.address + "/health")
        issued_to_client = certificate.authority.issue_cert("someone@example.org")
        issued_to_client.configure_cert(context)
        with httpx.Client(verify=context) as known:
            assert known.get(running.address + "/health").status_code == 200
            client = running.client(http_client=known)
            assert client.completions.create(model="tiny", prompt="Hi", max_tokens=2).choices[0].text
        with pytest.raises(httpx.TransportError):
            httpx.get(running.address.replace("https", "http") + "/health")
    finally:
        assert running.stop() == 0, "".join(running.lines)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--ssl-keyfile", "k.pem"], "there is no certificate"),
        (["--ssl-certfile", "none.pem"], "No such file"),
        (["--ssl-certfile", __file__], "check that the files exist, are PEM"),
        (["--api-key-file", "none.yaml"], "--api-key-file"),
        (["--requests-per-minute", "3"], "pass --api-key or --api-key-file"),
        (["--max-concurrent-requests", "0", "--api-key", "x"], "greater than or equal to 1"),
    ],
)
def test_what_cannot_be_is_refused_at_once(args: list[str], says: str) -> None:
    asked = [sys.executable, "-m", "engine", "serve", "tiny", "--port", "0", *args]
    ended = subprocess.run(asked, capture_output=True, text=True, timeout=START_SECONDS)
    assert ended.returncode != 0 and says in ended.stderr and "Traceback" not in ended.stderr
