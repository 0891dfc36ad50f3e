"""What an operator asks a running server, and what only an administrator may have it do."""

from __future__ import annotations

import gzip
import json
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from .conftest import Server

ADMIN, CLIENT, SECRET = "key-of-admin", "key-of-client", "secret-of-driver"
PROMPT = "Once upon a time there was a small village by the sea, and every morning its people went down to the boats."


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("profiles") / "made" / "on-demand"


@pytest.fixture(scope="module")
def managed(folder: Path) -> Iterator[Server]:
    running = Server(
        *(
            "tiny",
            "--admin-key",
            ADMIN,
            "--api-key",
            CLIENT,
            "--profile-dir",
            str(folder),
            "--platform",
            "host",
            "--ops",
            "torch",
        ),
        *("--max-model-len", "512", "--kv-cache-memory", "32MiB", "--max-num-seqs", "4"),
    )
    yield running
    assert running.stop() == 0, "".join(running.lines)
    assert ADMIN not in "".join(running.lines) and CLIENT not in "".join(running.lines)


def ask(server: Server, method: str, path: str, key: str = ADMIN, **more: Any) -> httpx.Response:
    return httpx.request(method, server.address + path, headers={"Authorization": f"Bearer {key}"}, timeout=60, **more)


def cached(server: Server, prompt: str = PROMPT) -> int:
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0}
    answer = ask(server, "POST", "/v1/completions", CLIENT, json=body).json()
    found: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found


def test_admin_routes_need_the_administrators_key(managed: Server, server: Server) -> None:
    routes = [("GET", "/admin/plugins"), ("POST", "/admin/kv/reset")]
    routes += [("POST", "/admin/profile/start"), ("POST", "/admin/profile/stop")]
    for method, path in routes:
        assert ask(managed, method, path, CLIENT).status_code == 403
        assert ask(managed, method, path, "wrong").status_code == 401
        assert ask(managed, method, path + "/", CLIENT).status_code == 403
        assert httpx.request(method, managed.address + path).status_code == 401
        assert httpx.request(method, server.address + path).json()["error"]["code"] == "admin_disabled"
    assert ask(managed, "GET", "/v1/models", ADMIN).status_code == 401
    assert ask(managed, "GET", "/admin/nothing").status_code == 404


def test_the_prefix_cache_is_forgotten(managed: Server) -> None:
    cached(managed)
    assert cached(managed) > 0
    assert ask(managed, "POST", "/admin/kv/reset").json() == {"reset": "prefix_cache", "ranks": [0]}
    assert cached(managed) == 0 and cached(managed) > 0


def test_the_plugins(managed: Server) -> None:
    rows = ask(managed, "GET", "/admin/plugins").json()["plugins"]
    by_name = {(row["point"], row["name"]): row for row in rows}
    lru = by_name["evictor", "lru"]
    assert (lru["state"], lru["distribution"]) == ("active", "engine-reference")
    assert by_name["executor", "process"]["state"] == "installed"
    assert {row["state"] for row in rows} <= {"active", "installed", "broken", "outdated", "denied"}


def test_a_profile_is_taken_while_requests_run(managed: Server, folder: Path) -> None:
    refused = ask(managed, "POST", "/admin/profile/stop")
    assert refused.status_code == 409 and "none is being taken" in refused.json()["error"]["message"]
    started = ask(managed, "POST", "/admin/profile/start")
    assert started.json() == {"profiling": True, "ranks": [0]}
    twice = ask(managed, "POST", "/admin/profile/start")
    assert twice.status_code == 409 and "stop it first" in twice.json()["error"]["message"]
    cached(managed)
    (path,) = ask(managed, "POST", "/admin/profile/stop").json()["files"]
    assert Path(path).parent == folder
    events = json.loads(gzip.decompress(Path(path).read_bytes()))["traceEvents"]
    names = {event.get("name") for event in events}
    assert {"aten::mm", "aten::addmm", "aten::linear"} & names, sorted(map(str, names))[:50]
    ask(managed, "POST", "/admin/profile/start")
    (other,) = ask(managed, "POST", "/admin/profile/stop").json()["files"]
    assert other != path
    assert managed.process.poll() is None and cached(managed) > 0


def test_without_a_folder_no_profile_is_taken() -> None:
    running = Server("tiny", "--admin-key", ADMIN, "--max-model-len", "128", "--kv-cache-memory", "16MiB")
    try:
        refused = ask(running, "POST", "/admin/profile/start")
        assert refused.status_code == 409 and "--profile-dir" in refused.json()["error"]["message"]
        assert httpx.get(running.address + "/v1/models").status_code == 200
        assert httpx.get(running.address + "/admin/plugins").status_code == 401
    finally:
        assert running.stop() == 0, "".join(running.lines)


def test_the_server_says_what_it_is(managed: Server, folder: Path) -> None:
    import engine

    assert httpx.get(managed.address + "/server_info").status_code == 401
    answer = ask(managed, "GET", "/server_info", CLIENT)
    found = answer.json()
    assert found["version"] == engine.__version__ and found["model"]["name"] == "tiny"
    assert found["settings"]["max_num_seqs"] == 4 and found["settings"]["max_model_len"] == 512
    assert found["settings"]["profile_dir"] == str(folder) and found["kv_cache"]["bytes"] <= 32 * 2**20
    assert found["server"]["admin_key"] == found["server"]["api_key"] == "(hidden)"
    assert found["server"]["max_queue"] == 8192 and found["server"]["api_key_file"] is None
    assert not any(key in answer.text for key in (ADMIN, CLIENT))
    drivers = {one["point"]: one for one in found["drivers"]}
    assert drivers["platform"]["driver"] == "host" and drivers["platform"]["why"] == "asked for"
    assert drivers["evictor"]["why"].startswith("auto") and drivers["evictor"]["distribution"].startswith("engine")
    assert isinstance(found["quarantined"], list)


def test_the_load(managed: Server) -> None:
    managed.until_idle()
    idle = httpx.get(managed.address + "/load").json()
    assert (idle["server_load"], idle["running"], idle["waiting"], idle["kv_cache_usage"]) == (0, 0, 0, 0.0)
    body = {"prompt": "Long", "max_tokens": 300, "ignore_eos": True, "n": 6}
    asking = threading.Thread(target=ask, args=(managed, "POST", "/v1/completions", CLIENT), kwargs={"json": body})
    asking.start()
    load = idle
    while asking.is_alive() and load["running"] < 4:
        load = httpx.get(managed.address + "/load").json()
        time.sleep(0.005)
    asking.join()
    assert load["server_load"] == 1 and load["running"] == 4 and load["waiting"] == 2
    assert 0 < load["kv_cache_usage"] <= 1 and load["ranks"][0]["rank"] == 0


def test_ready_while_it_serves_and_only_then() -> None:
    running = Server("tiny", "--max-model-len", "1900", "--shutdown-timeout", "20")
    try:
        assert httpx.get(running.address + "/ready").json() == {"status": "serving"}
        body = {"prompt": "Long", "max_tokens": 1500, "ignore_eos": True}
        asking = threading.Thread(target=httpx.post, args=(running.address + "/v1/completions",), kwargs={"json": body})
        asking.start()
        running.until(lambda m: m["num_requests_running"] == 1, "it runs")
        running.process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + 10
        while (answer := httpx.get(running.address + "/ready")).status_code == 200:
            assert time.monotonic() < deadline
        assert answer.status_code == 503 and answer.json() == {"status": "draining"}
        running.process.send_signal(signal.SIGTERM)
        asking.join()
    finally:
        running.process.wait(30)
        running.stop()
