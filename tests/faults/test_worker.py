"""A worker that dies, hangs or returns garbage, through every drive: a typed error in bounded time, nothing left, and
never a wrong token. What was streamed before the fault is what a quiet engine gives."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from fault_worker import BEFORE, GARBAGE

from engine import LLM, EngineArgs, SamplingParams
from engine.frontend.request_state import OutputKind
from engine.types.errors import EngineDeadError, ShuttingDownError
from engine_kit.async_llm import AsyncLLM
from engine_server.metrics.measures import Measures

from .conftest import Faulty

SETTINGS: dict[str, Any] = {"model": "tiny", "dtype": "float64", "num_kv_pages": 200, "max_num_seqs": 8}
PARAMS = SamplingParams(temperature=0.8, seed=5, max_tokens=24, ignore_eos=True)
PROMPTS = ["Once upon a time", "The cat", "One day"]
HANGS = ("stopped", "loops", "sleeps")
RAISES = ("has no memory", "has no device memory", "raises")
REPEATED = ("has no memory", "has no device memory", "crashes", "sleeps", "another step", "negative")
"""Fates of a core process that go the way of another: a signal, an exception, a hang, garbage."""


def or_slow(slow: bool, *values: object) -> Any:
    """The parameters of a test; of a slow one where a faster one goes the same way."""
    return pytest.param(*values, marks=pytest.mark.slow if slow else ())


@pytest.fixture(scope="module")
def quiet() -> list[list[int]]:
    """Without any fault."""
    with LLM(**SETTINGS) as llm:
        return [list(o.outputs[0].token_ids) for o in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]


def assert_llm_dies(llm: LLM, words: str, seconds: float = 20) -> None:
    began = time.monotonic()
    with pytest.raises(EngineDeadError, match=words):
        llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    assert time.monotonic() - began < seconds
    with pytest.raises(EngineDeadError):
        llm.generate(PROMPTS, PARAMS, use_tqdm=False)


@pytest.mark.parametrize("fate", [*GARBAGE, *RAISES])
def test_in_process(faulty: Faulty, nothing_left: Path, fate: str) -> None:
    """A worker on the caller's own thread can fail and lie, but die or hang only together with its caller."""
    faulty(fate)
    with LLM(**SETTINGS) as llm:
        assert_llm_dies(llm, "compute a step with executor inline, platform ")


@pytest.mark.parametrize(
    ("size", "fate"),
    [
        or_slow(fate == "loops" or (size == 1 and fate != "killed"), size, fate)
        for size in (1, 2)
        for fate in ("killed", "crashes", "loops", "out of the vocabulary", "has no memory", "a list")
    ],
)
def test_in_ranks(faulty: Faulty, nothing_left: Path, size: int, fate: str) -> None:
    if fate in GARBAGE and size == 2:
        faulty(fate, rank=0)  # the one whose result counts
    else:
        faulty(fate)
    options = {"executor": "process", "executor.step_timeout": 3, "tensor_parallel_size": size}
    with LLM(**SETTINGS, **options) as llm:
        assert_llm_dies(llm, "executor process" if fate in GARBAGE else "rank|MemoryError")


def test_a_communicator_that_raises(faulty: Faulty, nothing_left: Path) -> None:
    """The group is everybody's."""
    faulty("cannot talk", rank=1)
    options = {"executor": "process", "executor.step_timeout": 3, "communicator": "gloo", "tensor_parallel_size": 2}
    with LLM(**SETTINGS, **options) as llm:
        assert_llm_dies(llm, "the cable is out")


@pytest.mark.parametrize(
    "fate", [or_slow(fate in REPEATED, fate) for fate in (*BEFORE, "another step", "negative", "an object")]
)
def test_core_process(faulty: Faulty, nothing_left: Path, quiet: list[list[int]], fate: str) -> None:
    faulty(fate, step=6)

    async def run() -> None:
        llm = AsyncLLM(EngineArgs(**SETTINGS, step_timeout=2))
        deaths: list[Exception] = []
        await llm.start(deaths.append)
        try:
            seen: list[list[int]] = [[] for _ in PROMPTS]

            async def follow(i: int) -> EngineDeadError:
                try:
                    async for output in llm.generate(PROMPTS[i], PARAMS):
                        seen[i] = list(output.outputs[0].token_ids)
                except EngineDeadError as error:
                    return error
                raise AssertionError("it ended as if nothing had happened")

            errors = await asyncio.wait_for(asyncio.gather(*map(follow, range(len(PROMPTS)))), 15)
            for tokens, expected in zip(seen, quiet, strict=True):
                assert tokens == expected[: len(tokens)] and 0 < len(tokens) < len(expected)
            if fate in HANGS:
                assert all("no sign of life for 2 s" in str(error) for error in errors)
            while not deaths:
                await asyncio.sleep(0.01)
            assert len(deaths) == 1 and not llm.alive()
            with pytest.raises(EngineDeadError):
                await llm.submit("late", PARAMS)
            with pytest.raises(EngineDeadError):
                await llm.call("stats")
        finally:
            llm.shutdown()

    asyncio.run(run())


@pytest.mark.parametrize("fate", ["killed", or_slow(True, "raises"), "stopped"])
def test_ranks_of_a_core_process(faulty: Faulty, nothing_left: Path, quiet: list[list[int]], fate: str) -> None:
    faulty(fate, step=6)

    async def run() -> None:
        options = {"executor.step_timeout": 2, "tensor_parallel_size": 2}
        llm = AsyncLLM(EngineArgs(**SETTINGS, **options))
        await llm.start()
        try:
            seen: list[int] = []
            with pytest.raises(EngineDeadError, match="rank"):
                async with asyncio.timeout(20):
                    async for output in llm.generate(PROMPTS[0], PARAMS):
                        seen = list(output.outputs[0].token_ids)
            assert seen == quiet[0][: len(seen)] and seen
        finally:
            llm.shutdown()

    asyncio.run(run())


@pytest.mark.slow
def test_a_hung_core_with_ranks_takes_them_along(faulty: Faulty, nothing_left: Path) -> None:
    """Core and rank are stopped: neither could see that the other, or their parent, has ended."""
    faulty("stopped", step=6)

    async def run() -> None:
        llm = AsyncLLM(EngineArgs(**SETTINGS, step_timeout=2, tensor_parallel_size=2))
        await llm.start()
        try:
            with pytest.raises(EngineDeadError, match="no sign of life for 2 s .*stopped"):
                async with asyncio.timeout(20):
                    count = 0
                    async for _ in llm.generate(PROMPTS[0], PARAMS):
                        count += 1
                        if count == 2:
                            os.kill(llm.cores[0].pid, signal.SIGSTOP)
        finally:
            llm.shutdown()

    asyncio.run(run())


def test_a_hung_data_parallel_rank_is_ended_and_its_requests_go_elsewhere(
    nothing_left: Path, quiet: list[list[int]]
) -> None:
    async def run() -> None:
        llm = AsyncLLM(EngineArgs(**SETTINGS, step_timeout=2, data_parallel_size=2))
        llm.observe(measures := Measures(llm.max_model_len))
        await llm.start()
        try:
            os.kill(llm.cores[1].pid, signal.SIGSTOP)
            streams = [await llm.submit(prompt, PARAMS, kind=OutputKind.FINAL) for prompt in PROMPTS for _ in range(2)]
            outputs = await asyncio.wait_for(asyncio.gather(*(stream.final() for stream in streams)), 20)
            assert [list(o.outputs[0].token_ids) for o in outputs] == [ids for ids in quiet for _ in range(2)]
            assert [core.alive for core in llm.cores] == [True, False] and measures.retries == 3
        finally:
            llm.shutdown()
        with pytest.raises(ShuttingDownError):
            await llm.submit("late", PARAMS)
        with pytest.raises(ShuttingDownError):
            await llm.call("stats")

    asyncio.run(run())


@pytest.mark.slow
def test_an_idle_core_that_hangs_is_noticed(nothing_left: Path) -> None:
    async def run() -> None:
        llm = AsyncLLM(EngineArgs(**SETTINGS, step_timeout=2))
        died = asyncio.Event()
        await llm.start(lambda error: died.set())
        try:
            await asyncio.sleep(3)
            assert llm.alive(), "idleness is no death"
            os.kill(llm.cores[0].pid, signal.SIGSTOP)
            await asyncio.wait_for(died.wait(), 10)
            with pytest.raises(EngineDeadError, match="step-timeout"):
                await llm.submit("late", PARAMS)
        finally:
            llm.shutdown()

    asyncio.run(run())
