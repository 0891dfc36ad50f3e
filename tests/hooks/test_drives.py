"""Every hook is heard in every drive, with the values that belong there, and decides alike in all of them."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import contextmanager

import httpx
import pytest

from engine import LLM, AsyncLLM, EngineConfig, SamplingParams
from engine.errors import HookFailedError, RequestRefusedError
from engine.plugin.hookspecs import HOOKSPECS
from engine_kit import lifecycle
from engine_kit.beam_search import BeamSearchParams
from tests.serving.conftest import Server

PROMPT = "Tell me a tale."
HTTP_ONLY = {"http_routes", "http_middleware", "metrics"}
EVERY = {name for spec in HOOKSPECS.values() for name in vars(spec) if not name.startswith("_")}
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, n=2, seed=1)


def check(recorded, prompt_tokens: int) -> None:
    """What is true of one request of two sequences, in any drive."""
    names = recorded.names
    once = ("engine_started", "admit", "rewrite_prompt", "worker_started", "worker_stopping", "engine_stopping")
    assert [names.count(name) for name in once] == [1] * len(once)
    assert names.index("engine_started") < names.index("admit") < names.index("rewrite_prompt")
    assert names.index("rewrite_prompt") < names.index("request_received") < names.index("request_finished")
    assert names.index("request_finished") < names.index("engine_stopping")
    assert [call["index"] for call in recorded.of("output_filter")] == [0, 1]
    assert recorded.of("rewrite_prompt")[0]["prompt"] == PROMPT
    assert recorded.of("engine_started")[0]["info"]["model"] == "tiny"
    assert recorded.of("engine_started")[0]["info"]["max_model_len"] == 256
    drivers = {driver["point"]: driver for driver in recorded.of("engine_started")[0]["info"]["drivers"]}
    assert drivers["evictor"]["driver"] == "lru" and "priority" in drivers["evictor"]["why"]
    assert drivers["evictor"]["distribution"] == "engine-reference" and drivers["evictor"]["version"]
    assert recorded.of("step_done")[-1]["stats"]["generation_tokens"] == 24
    assert len(recorded.of("request_received")) == 2
    summaries = [call["summary"] for call in recorded.of("request_finished")]
    assert sorted(s["index"] for s in summaries) == [0, 1]
    for s in summaries:
        assert s["model"] == "tiny" and s["finish_reason"] == "length" and s["error_code"] == ""
        assert s["prompt_tokens"] == prompt_tokens and s["output_tokens"] == 12
        assert abs(time.time() - s["arrival_time"]) < 120
        parts = (s["queue_seconds"], s["prefill_seconds"], s["decode_seconds"])
        assert all(part >= 0 for part in parts) and s["prefill_seconds"] > 0 and s["decode_seconds"] > 0
        assert sum(parts) <= s["total_seconds"] + 1e-3


def test_llm(recorded, options, monkeypatch):
    monkeypatch.setattr(lifecycle, "INTERVAL", 0.0)
    with LLM(**options()) as llm:
        [output] = llm.generate(PROMPT, PARAMS, use_tqdm=False)
        assert recorded.of("stats")[-1]["stats"]["pages_total"] > 0
    check(recorded, len(output.prompt_token_ids))
    assert set(recorded.names) == EVERY - HTTP_ONLY
    assert recorded.of("request_finished")[0]["summary"]["http"] is None


async def test_async_llm(recorded, options, monkeypatch):
    monkeypatch.setattr(lifecycle, "INTERVAL", 0.05)
    llm = AsyncLLM(EngineConfig(**options()))
    try:
        await llm.start()
        stream = await llm.submit(PROMPT, PARAMS, "mine")
        output = await stream.final()
        await asyncio.sleep(0.2)
    finally:
        llm.shutdown()
    check(recorded, len(output.prompt_token_ids))
    assert set(recorded.names) == EVERY - HTTP_ONLY
    assert recorded.of("request_finished")[0]["summary"]["request_id"] == "mine"
    assert len(recorded.of("stats")) >= 2
    told = [call["stats"] for call in recorded.of("stats")]
    assert sum(s["generation_tokens"] for s in told) in (0, 24)  # 0: all was done before the first interval began


@contextmanager
def serving(settings: dict[str, object]):
    flags = [text for name, value in settings.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    server = Server(*flags)
    try:
        yield server
    finally:
        code = server.stop()
        assert code == 0, "".join(server.lines)


def test_server(recorded, options):
    with serving(options()) as server:
        headers = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "tracestate": "a=b"}
        secrets = {"Authorization": "Bearer secret", "Cookie": "a=secret", "X-Api-Key": "secret", "X-User": "ann"}
        body = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True, "n": 2}
        answer = httpx.post(server.address + "/v1/completions", json=body, headers=headers | secrets, timeout=60)
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-plugin"] == "was-here"
        assert httpx.get(server.address + "/plugin/hello").json() == {"hello": "world"}
        seen = httpx.get(server.address + "/plugin/pages").json()
        assert seen["tokens"] == 24 and seen["pages"] > seen["cached"] >= 0
        refused = httpx.get(server.address + "/plugin/refuses")
        assert refused.status_code == 429 and refused.headers["retry-after"] == "7"
        failed = httpx.get(server.address + "/plugin/raise")
        assert failed.status_code == 503 and failed.json()["error"]["code"] == "hook_failed"
        assert "the middleware has a fault" not in failed.text
        forbidden = httpx.get(server.address + "/plugin/forbidden")
        assert forbidden.status_code == 451 and forbidden.json()["error"]["code"] == "request_refused"
        metrics = server.metrics()
        assert metrics["plugin_things_total"] == 3
        assert metrics["hook_failures_total{hook=http_middleware,plugin=re-corder}"] == 1
        http = recorded.of("admit")[0]["request"]["http"]
        assert http["path"] == "/v1/completions" and http["method"] == "POST" and http["client"] == "127.0.0.1"
        assert http["headers"]["x-user"] == "ann" and http["headers"]["traceparent"] == headers["traceparent"]
        assert "secret" not in recorded.path.read_text()
    check(recorded, answer.json()["usage"]["prompt_tokens"])
    assert set(recorded.names) | {"stats"} == EVERY  # its interval is ten seconds, which may be over or not
    assert recorded.of("request_finished")[0]["summary"]["http"]["headers"]["tracestate"] == "a=b"


def test_server_refuses_filters_and_rewrites(recorded, options):
    with serving(options(refuse="spam", suffix=" And sing", upper="true")) as server:

        def post(path="completions", user="ann", **body):
            body = {"max_tokens": 8, "temperature": 0, **body}
            return httpx.post(f"{server.address}/v1/{path}", json=body, headers={"X-User": user}, timeout=60)

        refused = post(prompt=PROMPT, user="spammer")
        assert refused.status_code == 429 and refused.headers["retry-after"] == "3"
        assert refused.json()["error"] == {
            "message": "a request; too many of yours; wait",
            "type": "rate_limit_error",
            "param": None,
            "code": "request_refused",
        }
        assert post(prompt=PROMPT, user="spammer", stream=True).status_code == 429
        whole = post(prompt=PROMPT, echo=True).json()["choices"][0]["text"]
        assert whole.startswith(f"{PROMPT} And sing") and whole.removeprefix(f"{PROMPT} And sing").isupper()
        streamed = post("chat/completions", messages=[{"role": "user", "content": PROMPT}], stream=True)
        plain = post("chat/completions", messages=[{"role": "user", "content": PROMPT}]).json()
        chunks = [line[6:] for line in streamed.text.splitlines() if line.startswith("data: {")]
        text = "".join(json.loads(c)["choices"][0]["delta"].get("content", "") for c in chunks)
        assert text == plain["choices"][0]["message"]["content"] and text == text.upper() != text.lower()
        rendered = recorded.of("rewrite_prompt")[-1]["prompt"]
        assert PROMPT in rendered and rendered != PROMPT


@pytest.mark.parametrize("fault", ["admit", "rewrite_prompt", "output_filter"])
def test_deciding_hooks_fail_closed(recorded, options, fault):
    with LLM(**options(fail=fault)) as llm:
        for _ in range(12):  # more often than an observing hook is allowed to
            with pytest.raises(HookFailedError, match=f"hook {fault} of plugin 're-corder'") as caught:
                llm.generate(PROMPT, PARAMS, use_tqdm=False)
            assert isinstance(caught.value.__cause__, LookupError)
            assert "has a fault" not in str(caught.value)
        assert llm.llm_engine.num_unfinished == 0
        assert llm.llm_engine.frontend.hooks.failures["re-corder", fault] == 12


def test_a_filter_that_fails_ends_the_request_and_frees_the_core(recorded, options):
    with LLM(**options(fail="shout", upper=True)) as llm:
        with pytest.raises(HookFailedError):
            llm.generate(PROMPT, PARAMS, use_tqdm=False)
        while llm.llm_engine.client.has_work():
            llm.llm_engine.client.receive()
        assert llm.llm_engine.stats().num_running == 0
    assert {c["summary"]["error_code"] for c in recorded.of("request_finished")} == {"hook_failed"}


def test_observing_hooks_never_end_a_request(recorded, options):
    with LLM(**options(fail="request_received,request_finished,engine_started,step_done,worker_started")) as llm:
        for _ in range(6):
            llm.generate(PROMPT, PARAMS, use_tqdm=False)
        assert llm.llm_engine.frontend.hooks.request_finished is None  # disabled after ten
    assert len(recorded.of("request_finished")) == 10


def test_llm_refuses_filters_and_rewrites(recorded, options):
    with LLM(**options(suffix=" And sing.", upper=True, refuse="1")) as llm:
        [output] = llm.generate(PROMPT, PARAMS, use_tqdm=False)  # its id is 0
        assert output.prompt == f"{PROMPT} And sing."
        assert all(completion.text == completion.text.upper() for completion in output.outputs)
        with pytest.raises(RequestRefusedError, match="its id is not liked") as caught:
            llm.generate(PROMPT, PARAMS, use_tqdm=False)
        assert caught.value.status == 403
        before = len(recorded.of("admit"))
        [beams] = llm.beam_search(PROMPT, BeamSearchParams(beam_width=2, max_tokens=4))
        assert len(recorded.of("admit")) == before + 1
        assert all(s.text == s.text.upper() for s in beams.sequences) and beams.sequences[0].text
        ids = output.prompt_token_ids
        before = len(recorded.of("rewrite_prompt"))
        llm.generate({"prompt_token_ids": ids}, PARAMS, use_tqdm=False)
        assert len(recorded.of("rewrite_prompt")) == before


def test_an_abort_and_a_shutdown_are_told(recorded, options):
    from engine.llm import LLMEngine

    engine = LLMEngine.from_engine_args(EngineConfig(**options()))
    for name in ("a", "b"):
        engine.add_request(name, PROMPT, SamplingParams(max_tokens=100, ignore_eos=True))
    engine.step()
    engine.abort_request("a")
    [call] = recorded.of("request_finished")
    assert (call["summary"]["request_id"], call["summary"]["finish_reason"]) == ("a", "abort")
    engine.shutdown()
    assert [c["summary"]["request_id"] for c in recorded.of("request_finished")] == ["a", "b"]
    assert recorded.names[-1] == "engine_stopping"
