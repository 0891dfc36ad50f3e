"""`engine serve --data-parallel-size 2`: the same answers, a death that loses only its own, and an orderly end."""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import os
import random
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from engine import LLM, AsyncLLM, EngineConfig, SamplingParams
from engine.errors import RankDeadError
from engine.frontend.request_state import OutputKind
from engine_server.metrics.measures import Measures

from .conftest import Server

ARGS = (
    *("tiny", "--dtype", "float64", "--data-parallel-size", "2"),
    *("--max-num-seqs", "8", "--kv-cache-memory", "32MiB"),
)


def body(**fields: object) -> dict[str, Any]:
    return {"model": "tiny", "prompt": "Once upon a time", "max_tokens": 24, "ignore_eos": True, "seed": 7, **fields}


def post(server: Server, **fields: object) -> httpx.Response:
    return httpx.post(server.address + "/v1/completions", json=body(**fields), timeout=120)


def text(server: Server, **fields: object) -> str:
    answer: str = post(server, **fields).raise_for_status().json()["choices"][0]["text"]
    return answer


def health(server: Server) -> tuple[int, dict[str, Any]]:
    answer = httpx.get(server.address + "/health", timeout=30)
    return answer.status_code, answer.json()


def family(server: Server) -> tuple[list[psutil.Process], list[Path]]:
    """The ranks, in order of their start, and the directories of their sockets."""
    frontend = psutil.Process(server.process.pid)
    ranks = sorted(frontend.children(), key=lambda process: process.create_time())
    bound = [str(c.laddr) for c in frontend.net_connections("unix")]
    return ranks, sorted(
        {Path(address).parent for address in bound if address.startswith(f"{tempfile.gettempdir()}/engine-")}
    )


def assert_gone(processes: list[psutil.Process], directories: list[Path], seconds: float) -> None:
    _, alive = psutil.wait_procs(processes, timeout=seconds)
    assert not alive and not [directory for directory in directories if directory.exists()]


@pytest.fixture(scope="module")
def pair() -> Iterator[Server]:
    running = Server(*ARGS)
    yield running
    assert running.stop() == 0, "".join(running.lines)


def test_answers_are_those_of_one_core(server: Server, pair: Server) -> None:
    asked = [{"prompt": f"Story {i}", "temperature": (i % 3) / 2, "seed": i, "n": 1 + i % 2} for i in range(16)]
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        one, two = (
            [answer.json()["choices"] for answer in pool.map(lambda ask, s=s: post(s, **ask), asked)]  # type: ignore[misc]
            for s in (server, pair)
        )
    assert one == two
    metrics = pair.until_idle()
    assert metrics["generation_tokens_total"] > 0 and metrics["generation_tokens_total{engine=1}"] > 0
    assert metrics["engine_up"] == metrics["engine_up{engine=1}"] == 1


def test_health_tells_of_each_rank(pair: Server) -> None:
    post(pair)
    status, said = health(pair)
    assert status == 200 and said["status"] == "ok"
    assert [(rank["rank"], rank["alive"]) for rank in said["ranks"]] == [(0, True), (1, True)]
    assert "on each of 2 ranks" in "".join(pair.lines)


def running(metrics: dict[str, float]) -> tuple[float, float]:
    return metrics["num_requests_running"], metrics["num_requests_running{engine=1}"]


def test_a_burst_runs_on_both(pair: Server) -> None:
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(post, pair, prompt=f"Tale {i}", max_tokens=250) for i in range(8)]
        # As they are told of, not always four: what waits on a rank that is slow to tell counts more than what runs.
        pair.until(lambda m: min(running(m)) >= 2 and sum(running(m)) == 8, "some run on each")
        _, said = health(pair)
        assert sum(rank["running"] for rank in said["ranks"]) == 8 and min(r["running"] for r in said["ranks"]) >= 2
        assert all(future.result().status_code == 200 for future in answers)


class Stream:
    """A streamed completion, read in a thread of its own."""

    def __init__(self, server: Server, **fields: object) -> None:
        self.events: list[dict[str, Any]] = []
        self._request = body(stream=True, **fields)
        self._url = server.address + "/v1/completions"
        self.thread = threading.Thread(target=self._read)
        self.thread.start()

    def _read(self) -> None:
        with httpx.stream("POST", self._url, json=self._request, timeout=120) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    self.events.append(json.loads(line.removeprefix("data: ")))

    def begun(self) -> Stream:
        """Itself, once some text has come."""
        deadline = time.monotonic() + 60
        while len(self.events) <= 3:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return self

    @property
    def text(self) -> str:
        return "".join(choice["text"] for event in self.events for choice in event.get("choices", ()))


def test_a_killed_rank_loses_its_streams_alone(server: Server) -> None:
    """Streams of the rank end with an error, whole answers come all the same and right, the other rank notices
    nothing; the server goes on, and ends in order."""
    long = {"max_tokens": 200, "temperature": 0.8}
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        answers = {
            name: [pool.submit(text, server, prompt=f"{name} {i}", seed=i, **long) for i in range(3)]
            for name in ("Stream", "Whole")
        }
        expected = {name: [answer.result() for answer in several] for name, several in answers.items()}
    divided = Server(*ARGS)
    try:
        ranks, directories = family(divided)
        # The streams first, one after the other: spread evenly, each rank has at least one of them.
        streams = [Stream(divided, prompt=f"Stream {i}", seed=i, **long).begun() for i in range(3)]
        with concurrent.futures.ThreadPoolExecutor(3) as pool:
            wholes = [pool.submit(text, divided, prompt=f"Whole {i}", seed=i, **long) for i in range(3)]
            found = divided.until(lambda m: sum(running(m)) == 6 and running(m)[1] > 0, "all run")
            lost = running(found)[1]
            os.kill(ranks[1].pid, signal.SIGKILL)
            assert [future.result() for future in wholes] == expected["Whole"]
        for stream in streams:
            stream.thread.join(60)
        failed = [stream for stream in streams if "error" in stream.events[-1]]
        for i, stream in enumerate(streams):
            if stream in failed:
                error = stream.events[-1]["error"]
                assert error["code"] == "rank_dead" and "rank 1" in error["message"] and "signal 9" in error["message"]
                assert expected["Stream"][i].startswith(stream.text)
            else:
                assert stream.text == expected["Stream"][i]

        status, said = health(divided)
        assert status == 200 and said["status"] == "degraded"
        assert [rank["alive"] for rank in said["ranks"]] == [True, False]
        metrics = divided.until_idle()
        assert (metrics["engine_up"], metrics["engine_up{engine=1}"]) == (1, 0)
        assert metrics["num_requests_running{engine=1}"] == 0 < metrics["generation_tokens_total{engine=1}"]
        # Of those that the dead rank had, the ones that streamed could not be sent again.
        assert 1 <= len(failed) <= 2 and metrics["num_requests_retried_total"] == lost - len(failed)
        assert metrics["request_success_total{finished_reason=error}"] == len(failed)
        assert_gone([ranks[1]], [], 5)
        assert text(divided, prompt="Whole 0", seed=0, **long) == expected["Whole"][0]
        assert "data-parallel rank 1 of 2 has died" in "".join(divided.lines)
    finally:
        code = divided.stop()
    assert code == 0, "".join(divided.lines)
    assert_gone(ranks, directories, 5)


@pytest.mark.parametrize("victims", ["ranks", pytest.param("server", marks=pytest.mark.slow)])
def test_nothing_is_left_behind(victims: str) -> None:
    """Of a server with one core, `test_faults.py` always asks it."""
    divided = Server(*ARGS)
    try:
        ranks, directories = family(divided)
        assert len(ranks) == len(directories) == 2
        text(divided)
        if victims == "server":
            divided.process.kill()
            assert divided.process.wait(10) == -9
        else:
            for rank in ranks:
                rank.kill()
            assert divided.process.wait(15) == 1, "all ranks dead is the engine dead"
    finally:
        divided.stop()
    assert_gone(ranks, directories, 5)


@pytest.mark.slow
def test_each_rank_divided_over_two_processes(server: Server) -> None:
    """Two data-parallel ranks of two tensor-parallel ranks each; a worker takes its data-parallel rank along."""
    divided = Server(*ARGS, "--tensor-parallel-size", "2")
    try:
        cores, directories = family(divided)
        workers = [core.children() for core in cores]
        assert [len(each) for each in workers] == [2, 2]
        asked = [{"prompt": f"Story {i}", "seed": i, "temperature": 0.7} for i in range(6)]
        with concurrent.futures.ThreadPoolExecutor(6) as pool:
            assert list(pool.map(lambda ask: text(divided, **ask), asked)) == [text(server, **ask) for ask in asked]
            running = [pool.submit(text, divided, max_tokens=200, **ask) for ask in asked]
            divided.until(lambda m: m["num_requests_running{engine=1}"] > 0, "the second core works")
            workers[1][0].kill()
            assert [future.result() for future in running] == [text(server, max_tokens=200, **ask) for ask in asked]
        assert health(divided)[1]["status"] == "degraded"
        assert_gone([cores[1], *workers[1]], [], 10)
    finally:
        code = divided.stop()
    assert code == 0
    assert_gone([*cores, *workers[0]], directories, 5)


@pytest.mark.slow
def test_a_churn_of_coroutines_over_a_death() -> None:
    """Streams and whole answers, some of which are given up, while a rank is killed: what ends without an error is what
    a quiet core says, nobody waits for ever, and nothing is left in the core that lives."""
    draw = random.Random(4)
    asked = [
        (f"Tale {i}. ", SamplingParams(temperature=0.8, seed=i, max_tokens=draw.randint(5, 80), ignore_eos=True))
        for i in range(30)
    ]
    settings: dict[str, Any] = {"model": "tiny", "dtype": "float64", "max_num_seqs": 6, "kv_cache_memory": "8MiB"}
    with LLM(**settings) as quiet:
        prompts, params = zip(*asked, strict=True)
        expected = [o.outputs[0].text for o in quiet.generate(prompts, params, use_tqdm=False)]

    async def run() -> None:
        llm = AsyncLLM(EngineConfig(**settings, data_parallel_size=2))
        llm.observe(measures := Measures(llm.max_model_len))
        try:
            await llm.start()
            counts: Counter[str] = Counter()

            async def one(i: int) -> None:
                kind = (OutputKind.DELTA, OutputKind.CUMULATIVE, OutputKind.FINAL)[i % 3]
                await asyncio.sleep(draw.random())
                stream = await llm.submit(*asked[i], f"r{i}", kind)
                said, leave = "", 3 if i % 5 == 4 and kind is not OutputKind.FINAL else None
                try:
                    async for output in stream:
                        said = said + output.outputs[0].text if kind is OutputKind.DELTA else output.outputs[0].text
                        if leave is not None and len(said) > leave:
                            stream.close()
                            counts["left"] += 1
                            return
                except RankDeadError:
                    assert kind is not OutputKind.FINAL and said and expected[i].startswith(said)
                    counts["lost"] += 1
                else:
                    assert said == expected[i]
                    counts["right"] += 1

            async def kill() -> None:
                while (stats := llm.cores[1].stats) is None or stats.generation_tokens < 150:
                    await asyncio.sleep(0.01)
                os.kill(llm.cores[1].pid, signal.SIGKILL)

            await asyncio.wait_for(asyncio.gather(kill(), *(one(i) for i in range(len(asked)))), 120)
            assert counts.total() == len(asked) and counts["right"] > 10
            assert measures.retries > 0 and counts["lost"] == measures.finished["error"]
            assert [core.alive for core in llm.cores] == [True, False] and llm.alive()
            deadline = time.monotonic() + 20
            while (await llm.call("stats"))["num_running"]:
                assert time.monotonic() < deadline
            await llm.call("check_integrity")
            stats = await llm.call("stats")
            assert (stats["pages_used"], stats["num_running"], stats["num_waiting"]) == (0, 0, 0)
            assert llm.num_unfinished == 0
        finally:
            llm.shutdown()

    asyncio.run(run())
