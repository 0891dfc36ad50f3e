"""What an operator sees and does: keys, metrics, request ids, a full queue, and a server that leaves in order."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import psutil
import pytest

from engine import LLM, EngineArgs, SamplingParams
from engine.types.errors import EngineDeadError
from engine_kit.async_llm import AsyncLLM

from .conftest import Server

KEYS = ("first-key", "second-key")
FOREIGN = {b"Authorization": "Bearer ключ".encode()}
LONG: dict[str, Any] = {"model": "tiny", "prompt": "Long", "max_tokens": 1900, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def guarded() -> Iterator[Server]:
    """Two keys, two places, a queue of two, small bodies."""
    limits = ["--max-num-seqs", "2", "--max-queue", "2", "--max-body", "64KiB", "--access-log"]
    running = Server("tiny", "--dtype", "float64", *(f"--api-key={key}" for key in KEYS), *limits)
    yield running
    assert running.stop() == 0, "".join(running.lines)


# -- keys --------------------------------------------------------------------------------------------------------------
def test_keys(guarded: Server) -> None:
    for key in KEYS:
        assert [model.id for model in guarded.client(api_key=key).models.list()] == ["tiny"]
    for wrong in ("none", "first-ke", "first-keyy", KEYS[0].upper()):
        with pytest.raises(openai.AuthenticationError) as caught:
            guarded.client(api_key=wrong).completions.create(model="tiny", prompt="Hi")
        assert caught.value.code == "invalid_api_key"
    for header in (
        {},
        {"Authorization": ""},
        {"Authorization": KEYS[0]},
        {"Authorization": f"Basic {KEYS[0]}"},
        FOREIGN,
    ):
        answer = httpx.get(guarded.address + "/v1/models", headers=header)
        assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer"
        assert "Bearer" in answer.json()["error"]["message"]
    for path in ("/nowhere", "/openapi.json", "/docs", "//health", "/health/"):
        assert httpx.get(guarded.address + path).status_code == 401


def test_monitors_need_no_key(guarded: Server) -> None:
    import engine

    assert httpx.get(guarded.address + "/health").status_code == 200
    for ask in (httpx.get, httpx.post):
        assert ask(guarded.address + "/ping").json() == httpx.get(guarded.address + "/health").json()
    assert httpx.get(guarded.address + "/version").json() == {"version": engine.__version__}
    answer = httpx.get(guarded.address + "/metrics")
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/plain; version=")


def test_a_stopped_core_is_seen_at_once(guarded: Server) -> None:
    (core,) = psutil.Process(guarded.process.pid).children()

    def said(path: str) -> tuple[int, Any]:
        answer = httpx.get(guarded.address + path)
        return answer.status_code, answer.json()

    assert said("/ready") == (200, {"status": "serving"})
    core.suspend()
    try:
        deadline = time.monotonic() + 5
        while said("/health")[0] == 200 and time.monotonic() < deadline:
            time.sleep(0.05)
        status, health = said("/health")
        assert status == 503 and health["status"] == "unavailable" and health["ranks"][0]["stopped"]
        assert said("/ready") == (503, {"status": "stopped"})
    finally:
        core.resume()
    deadline = time.monotonic() + 5
    while said("/health")[0] != 200 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert said("/health")[1]["status"] == "ok"
    answer = guarded.client(api_key=KEYS[0]).completions.create(model="tiny", prompt="Hi", max_tokens=2)
    assert answer.usage is not None and answer.usage.completion_tokens == 2


def test_the_key_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENGINE_API_KEY", "from-environment, another")
    server = Server("tiny")
    try:
        for key, fits in (("from-environment", True), ("another", True), ("from-environment, another", False)):
            answer = httpx.get(server.address + "/v1/models", headers={"Authorization": f"Bearer {key}"})
            assert answer.status_code == (200 if fits else 401)
    finally:
        assert server.stop() == 0
    assert "from-environment" not in "".join(server.lines)


# -- request ids -------------------------------------------------------------------------------------------------------
def test_request_ids(guarded: Server) -> None:
    headers = {"Authorization": f"Bearer {KEYS[0]}"}
    body = {"prompt": "Hi", "max_tokens": 2}

    def ask(sent: str | None, **more: Any) -> httpx.Response:
        extra = {} if sent is None else {"X-Request-Id": sent}
        return httpx.post(guarded.address + "/v1/completions", json=body | more, headers=headers | extra, timeout=30)

    answer = ask("job-17/a.b:c")
    assert answer.headers["x-request-id"] == "job-17/a.b:c"
    assert answer.json()["id"].startswith("cmpl-job-17/a.b:c-")
    assert ask("again").json()["id"] != ask("again").json()["id"]
    assert ask("streamed", stream=True).headers["x-request-id"] == "streamed"
    assert ask("refused", max_tokens=-1).headers["x-request-id"] == "refused"
    made = [ask(bad).headers["x-request-id"] for bad in (None, "", "x" * 129, "a b", "a;b", "<script>")]
    assert all(len(identity) == 32 for identity in made) and len(set(made)) == len(made)
    assert httpx.get(guarded.address + "/v1/models", headers={"X-Request-Id": "n"}).headers["x-request-id"] == "n"
    guarded.until_idle()
    lines = [line for line in guarded.lines if "engine.access" in line and "job-17/a.b:c " in line]
    assert len(lines) == 1 and "POST /v1/completions 200" in lines[0]


# -- limits ------------------------------------------------------------------------------------------------------------
def test_a_full_queue(guarded: Server) -> None:
    client = guarded.client(api_key=KEYS[0])
    streams = [client.completions.create(**LONG, stream=True) for _ in range(2)]
    waiting: list[threading.Thread] = []
    try:
        guarded.until(lambda m: m["num_requests_running"] == 2, "two run")
        for i in range(2):
            ask = {"model": "tiny", "prompt": f"Wait {i}", "max_tokens": 2}
            waiting.append(threading.Thread(target=client.completions.create, kwargs=ask))
            waiting[-1].start()
            guarded.until(lambda m, i=i: m["num_requests_waiting"] == i + 1, f"{i + 1} wait")
        for more in ({}, {"stream": True}):
            with pytest.raises(openai.RateLimitError) as caught:
                client.completions.create(model="tiny", prompt="One too many", max_tokens=2, **more)
            assert caught.value.code == "queue_full" and int(caught.value.response.headers["retry-after"]) >= 1
            assert "--max-queue" in caught.value.message
    finally:
        for stream in streams:
            stream.close()
        for thread in waiting:
            thread.join(60)
    guarded.until_idle()
    assert client.completions.create(model="tiny", prompt="Now", max_tokens=2).choices[0].text is not None


def test_a_body_limit_of_ones_own(guarded: Server) -> None:
    client = guarded.client(api_key=KEYS[1])
    with pytest.raises(openai.APIStatusError) as caught:
        client.completions.create(model="tiny", prompt="x" * 70_000)
    assert caught.value.status_code == 413 and "65536" in caught.value.message


# -- metrics -----------------------------------------------------------------------------------------------------------
def test_metrics_count_what_happened(server: Server) -> None:
    """Against what the client saw."""
    client = server.client()
    before = server.until_idle()
    prompts = ["One", "Two two", "Three three three"]
    answers = [client.completions.create(model="tiny", prompt=p, max_tokens=5 + i, n=2) for i, p in enumerate(prompts)]
    events = list(client.completions.create(model="tiny", prompt="Four", max_tokens=9, stream=True))
    stream = client.completions.create(**LONG, stream=True)
    next(iter(stream))
    stream.close()
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model="tiny", prompt="Bad", max_tokens=-1)
    after = server.until_idle()

    def grown(name: str) -> float:
        return after[name] - before.get(name, 0)

    usages = [answer.usage for answer in answers]
    ends = [choice.finish_reason for answer in answers for choice in answer.choices] + [
        event.choices[0].finish_reason for event in events if event.choices[0].finish_reason
    ]
    assert grown("request_success_total{finished_reason=length}") == ends.count("length")
    assert grown("request_success_total{finished_reason=stop}") == ends.count("stop")
    assert grown("request_success_total{finished_reason=abort}") == 1
    assert grown("request_success_total{finished_reason=error}") == 0
    # Of the one that left, some tokens were on their way.
    assert grown("generation_tokens_total") >= grown("request_generation_tokens_sum")
    assert grown("request_generation_tokens_sum") > sum(usage.completion_tokens for usage in usages) + 9
    assert grown("request_generation_tokens_count") == 8
    assert grown("request_params_n_count") == 5 and grown("request_params_n_sum") == 8
    assert grown("request_params_n_bucket{le=1.0}") == 2 and grown("request_params_n_bucket{le=2.0}") == 5
    assert grown("request_params_max_tokens_sum") == 2 * (5 + 6 + 7) + 9 + 1900
    assert grown("request_prompt_tokens_sum") == grown("prompt_tokens_total") == grown("prefix_cache_queries_total")
    assert grown("request_prompt_tokens_sum") > 2 * sum(usage.prompt_tokens for usage in usages)
    assert grown("time_to_first_token_seconds_count") == grown("e2e_request_latency_seconds_count") == 8
    assert grown("request_queue_time_seconds_count") == grown("request_prefill_time_seconds_count") == 8
    between = grown("request_generation_tokens_sum") - 8
    assert grown("inter_token_latency_seconds_count") == grown("time_per_output_token_seconds_count") == between
    assert grown("iteration_tokens_total_sum") >= grown("generation_tokens_total")
    assert grown("http_responses_total{code=400}") == 1
    total = grown("e2e_request_latency_seconds_sum")
    assert 0 < grown("request_decode_time_seconds_sum") < total
    assert 0 < grown("time_to_first_token_seconds_sum") < total
    assert grown("request_queue_time_seconds_sum") + grown("request_inference_time_seconds_sum") < total
    assert after["kv_pages_total"] > 0 and after["kv_cache_usage_perc"] == 0
    assert grown("num_preemptions_total") == 0 and after["quarantined_drivers"] == 0


def test_pages_in_use_are_shown(server: Server) -> None:
    stream = server.client().completions.create(**LONG, stream=True)
    try:
        found = server.until(lambda m: m["kv_pages_used"] > 2, "pages are used")
        assert found["num_requests_running"] == 1 and found["num_requests_waiting"] == 0
        assert found["kv_cache_usage_perc"] == pytest.approx(found["kv_pages_used"] / found["kv_pages_total"])
    finally:
        stream.close()
    server.until_idle()


def test_samples_share_their_prompt(server: Server) -> None:
    """n = 4 over HTTP: the prompt is computed once, and found three times."""
    before = server.until_idle()
    ids = [7 + i % 200 for i in range(645)]
    answer = server.client().completions.create(model="tiny", prompt=ids, max_tokens=4, n=4, seed=3)
    assert len(answer.choices) == 4 and answer.usage.prompt_tokens == len(ids)
    after = server.until_idle()
    assert after["prefix_cache_queries_total"] - before["prefix_cache_queries_total"] == 4 * 645
    assert after["prefix_cache_hits_total"] - before["prefix_cache_hits_total"] == 3 * 640


def test_samples_use_the_prompts_pages_once() -> None:
    with LLM(model="tiny", dtype="float64", num_kv_pages=1000) as llm:
        engine = llm.llm_engine
        ids = [7 + i % 200 for i in range(645)]  # 40 full blocks and 5 tokens
        engine.add_request("four", ids, SamplingParams(n=4, max_tokens=8, seed=3, ignore_eos=True))
        most = 0
        while engine.has_unfinished_requests():
            engine.step()
            stats = engine.stats()
            most = max(most, stats.pages_used)
        assert most == 40 + 4  # each has a page of its own for the prompt's end and the 8 tokens
        while engine.client.has_work():
            engine.step()
        assert engine.stats().pages_used == 0


# -- start and end -----------------------------------------------------------------------------------------------------
def test_a_drain() -> None:
    """After SIGTERM what is in progress ends as it would have, and what comes new is refused."""
    server = Server("tiny", "--dtype", "float64", "--shutdown-timeout", "60")
    body = {"prompt": "Story", "max_tokens": 500, "ignore_eos": True, "stream": True, "temperature": 0}
    with httpx.stream("POST", server.address + "/v1/completions", json=body, timeout=60) as answer:
        lines = answer.iter_lines()
        events = [next(lines)]
        server.process.send_signal(signal.SIGTERM)
        refused = None
        while refused is None:
            health = httpx.get(server.address + "/health")
            if health.status_code == 503:
                refused = httpx.post(server.address + "/v1/completions", json={"prompt": "New"})
        assert refused.status_code == 503 and 1 <= int(refused.headers["retry-after"]) <= 60
        assert refused.json()["error"]["code"] == "shutting_down"
        assert httpx.get(server.address + "/metrics").status_code == 200
        events += [line for line in lines if line]
    assert events[-1] == "data: [DONE]"
    choices = [json.loads(line.removeprefix("data: "))["choices"][0] for line in events[:-1] if line]
    assert choices[-1]["finish_reason"] == "length"
    assert server.process.wait(20) == 0
    assert "finishing 1 requests" in "".join(server.lines)


@pytest.mark.parametrize(("timeout", "signals"), [("0.3", 1), ("600", 2)])
def test_the_end_of_a_drain(timeout: str, signals: int) -> None:
    """At the timeout, or at a second signal, what is still in progress is told so."""
    server = Server("tiny", "--dtype", "float64", "--shutdown-timeout", timeout, "--access-log")
    core = psutil.Process(server.core_pid())
    stream = iter(server.client().completions.create(**(LONG | {"n": 16}), stream=True))
    next(stream)
    for _ in range(signals):
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.1)
    with pytest.raises(openai.APIError, match="stopped") as told:
        for _ in stream:
            pass
    assert told.value.code == "shutting_down"
    assert server.process.wait(20) == 0
    assert re.search(r"POST /v1/completions 503 [\d.]+ s, in mid-stream", "".join(server.lines))
    assert not core.is_running()


def test_a_start_that_is_given_up() -> None:
    """Shutting down while the core loads ends both at once."""

    async def run() -> None:
        llm = AsyncLLM(EngineArgs(model="tiny"))
        core = psutil.Process(llm._client._core.pid)  # type: ignore[attr-defined]  # no state is told yet
        starting = asyncio.ensure_future(llm.start())
        await asyncio.sleep(0.05)
        await asyncio.to_thread(llm.shutdown)
        with pytest.raises(EngineDeadError, match="shut down"):
            await starting
        assert not core.is_running()

    asyncio.run(run())


def command_of(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:  # it has ended meanwhile
        return []


@pytest.mark.usefixtures("plain_processes")
def test_sigterm_while_the_model_loads() -> None:
    command = [sys.executable, "-m", "engine", "serve", "tiny", "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        parent = psutil.Process(process.pid)
        # Other children (the platform module asks `uname`, say) come and go before the core's process.
        while not (children := [c for c in parent.children() if "engine.loop.process" in command_of(c)]):
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=20)
        assert process.returncode == 0 and "Traceback" not in output, output
        assert not psutil.wait_procs(children, 10)[1]
    finally:
        process.kill()
