"""A system clock that jumps by hours: nothing expires, nothing waits, order and durations stay right."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import httpx
import pytest

from engine import LLM, EngineArgs, SamplingParams
from engine.frontend.input_processor import SteadyClock
from engine_kit.async_llm import AsyncLLM
from engine_server.metrics.measures import Measures

from ..serving.conftest import Server
from .conftest import Faulty
from .jumping_clock import jumping

SETTINGS: dict[str, Any] = {"model": "tiny", "dtype": "float64", "num_kv_pages": 200, "max_num_seqs": 2}
PROMPTS = ["Once upon a time", "The cat", "One day", "A dog"]
PARAMS = [SamplingParams(temperature=0.8, seed=i, max_tokens=20, ignore_eos=True) for i in range(4)]


def test_the_steady_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SteadyClock()
    before = clock.now()
    assert abs(before - time.time()) < 1
    monkeypatch.setattr(time, "time", jumping())
    for _ in range(100):
        after = clock.now()
        assert 0 <= after - before < 1
        before = after


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_in_process(monkeypatch: pytest.MonkeyPatch, policy: str) -> None:
    """Requests of one priority are admitted in the order in which they came."""
    options = {"scheduling_policy": policy, **({"scheduling_policy.aging_seconds": 5} if policy == "priority" else {})}
    with LLM(**SETTINGS, **options) as llm:
        quiet = [list(o.outputs[0].token_ids) for o in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]
        monkeypatch.setattr(time, "time", jumping())
        engine, ended = llm.llm_engine, []
        for i, prompt in enumerate(PROMPTS):
            engine.add_request(str(i), prompt, PARAMS[i])
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    ended.append(output.request_id)
                    assert list(output.outputs[0].token_ids) == quiet[int(output.request_id)]
        assert sorted(ended[:2]) == ["0", "1"] and sorted(ended[2:]) == ["2", "3"]


def test_a_core_process(faulty: Faulty, monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(**SETTINGS) as llm:
        quiet = [list(o.outputs[0].token_ids) for o in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]
    faulty("none", step="never")
    monkeypatch.setenv("FAULT_CLOCK", "1")
    monkeypatch.setattr(time, "time", jumping())

    async def run() -> None:
        began = time.monotonic()
        llm = AsyncLLM(EngineArgs(**SETTINGS, step_timeout=5))
        llm.observe(measures := Measures(llm.max_model_len))
        await llm.start()
        try:
            streams = [await llm.submit(*request, timeout=60) for request in zip(PROMPTS, PARAMS, strict=True)]
            outputs = await asyncio.wait_for(asyncio.gather(*(stream.final() for stream in streams)), 60)
            assert [list(output.outputs[0].token_ids) for output in outputs] == quiet
            took = time.monotonic() - began
            for histogram in (measures.e2e_latency, measures.time_to_first_token, measures.queue_time):
                assert 0 <= histogram.sum <= len(PROMPTS) * took and sum(histogram.counts) == len(PROMPTS)
        finally:
            llm.shutdown()

    asyncio.run(run())


def test_a_server(faulty: Faulty, monkeypatch: pytest.MonkeyPatch) -> None:
    faulty("none", step="never")
    monkeypatch.setenv("FAULT_CLOCK", "1")
    began = time.monotonic()
    server = Server("tiny", "--dtype", "float64", program=["-m", "faulty_server"])
    try:
        body = {"prompt": "Quiet", "max_tokens": 24, "temperature": 0.9, "seed": 3, "ignore_eos": True}
        with httpx.Client(base_url=server.address, timeout=60) as client:
            texts = {client.post("/v1/completions", json=body).json()["choices"][0]["text"] for _ in range(8)}
        assert len(texts) == 1
        found = server.until_idle()
        took = time.monotonic() - began
        seconds = {name: value for name, value in found.items() if name.endswith("seconds_sum")}
        assert seconds and all(0 <= value <= 8 * took * 24 for value in seconds.values()), seconds
        assert 0 < found["e2e_request_latency_seconds_sum"] <= took
    finally:
        assert server.stop() == 0
    assert "Traceback" not in "".join(server.lines)
