"""`LLM(data_parallel_size=2)`: the tokens of one core, in order; deaths, Ctrl-C, and nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from engine import LLM, SamplingParams, StructuredOutputsParams
from engine.types.errors import EngineDeadError, InvalidRequestError
from engine.types.outputs import RequestOutput
from engine_kit.beam_search import BeamSearchParams
from engine_parallel.client import ParallelClient

SETTINGS: dict[str, Any] = {"model": "tiny", "dtype": "float64", "max_num_seqs": 8, "kv_cache_memory": "16MiB"}
ROOT = Path(__file__).parents[4]
PROMPTS = [f"Once upon a time there were {i} bears. " * (1 + i % 4) for i in range(14)]


@pytest.fixture(scope="module")
def one() -> Iterator[LLM]:
    with LLM(**SETTINGS) as llm:
        yield llm


@pytest.fixture
def two() -> Iterator[LLM]:
    with LLM(**SETTINGS, data_parallel_size=2) as llm:
        yield llm
        ranks = family(llm)
    assert not psutil.wait_procs(ranks, timeout=5)[1]


def family(llm: LLM) -> list[psutil.Process]:
    """The ranks that live, and what they started."""
    living = [state.pid for state in client_of(llm).states() if state.alive and psutil.pid_exists(state.pid)]
    return [process for pid in living for process in [psutil.Process(pid), *psutil.Process(pid).children()]]


def params(**fields: Any) -> list[SamplingParams]:
    return [
        SamplingParams(temperature=(i % 3) / 2, seed=i if i % 2 else None, n=1 + i % 3, logprobs=i % 2, **fields)
        for i in range(len(PROMPTS))
    ]


def tokens(outputs: list[RequestOutput]) -> list[list[tuple[str, list[int], str | None]]]:
    return [[(c.text, c.token_ids, c.finish_reason) for c in output.outputs] for output in outputs]


def client_of(llm: LLM) -> ParallelClient:
    client = llm.llm_engine.client
    assert isinstance(client, ParallelClient)
    return client


def test_both_jump_forward_under_constraints() -> None:
    """The tokens of one core that computes forced text token by token; each rank has a grammar of its own."""
    said = [
        "la la la la la la la la la la",
        "the weather in the mountains is cold and fair",
        "one two three four five six",
    ]
    asked = [
        SamplingParams(
            temperature=(i % 3) / 2, seed=i, max_tokens=60, structured_outputs=StructuredOutputsParams(choice=said)
        )
        for i in range(len(PROMPTS))
    ]
    with LLM(**SETTINGS, grammar="choice", enable_jump_forward=False) as plain:
        expected = tokens(plain.generate(PROMPTS, asked, use_tqdm=False))
        assert plain.llm_engine.stats().num_jump_tokens == 0
    with LLM(**SETTINGS, grammar="choice", data_parallel_size=2) as both:
        assert tokens(both.generate(PROMPTS, asked, use_tqdm=False)) == expected
        states = client_of(both).states()
        assert all(state.stats is not None and state.stats.num_accepted_jump_tokens > 3 for state in states), states
    assert {text for ((text, _, _),) in expected} <= set(said)


def test_the_tokens_are_those_of_one_core(one: LLM, two: LLM) -> None:
    asked = params(max_tokens=24, stop=["bear"])
    fresh = LLM(**SETTINGS)  # seeds that nobody gave come from the engine's: the same requests, the same order
    with fresh:
        expected = tokens(fresh.generate(PROMPTS, asked, use_tqdm=False))
    assert tokens(two.generate(PROMPTS, asked, use_tqdm=False)) == expected
    client = client_of(two)
    states = client.states()
    assert all(state.stats is not None and state.stats.generation_tokens > 0 for state in states), "both worked"
    stats = two.llm_engine.stats()
    assert stats.generation_tokens == sum(state.stats.generation_tokens for state in states if state.stats)
    assert (stats.num_running, stats.num_waiting, stats.pages_used) == (0, 0, 0)
    two.llm_engine.call("check_integrity")
    two.llm_engine.call("reset_prefix_cache")
    with pytest.raises(InvalidRequestError):
        two.generate(["a", "b"], [SamplingParams(), SamplingParams(max_tokens=-1)], use_tqdm=False)

    beams = BeamSearchParams(beam_width=3, max_tokens=6)
    ours, theirs = (llm.beam_search(PROMPTS[:3], beams) for llm in (two, one))
    assert [[s.tokens for s in o.sequences] for o in ours] == [[s.tokens for s in o.sequences] for o in theirs]


@pytest.mark.parametrize("router", ["least_loaded", "prefix_aware"])
def test_turns_of_conversations_find_their_prefixes(router: str) -> None:
    """Three conversations, one turn after the other; what the cores found tells where they went."""
    with LLM(**SETTINGS, data_parallel_size=2, router=router) as llm:
        talks = [f"Tenant {name}: " + f"{name} tells a long story. " * 8 for name in ("Ada", "Bob", "Cy")]
        for turn in range(4):
            found = [output.num_cached_tokens for output in _one_by_one(llm, talks)]
            if router == "prefix_aware":
                assert all(count >= 64 if turn else count < 16 for count in found), (turn, found)
            talks = [talk + f" Turn {turn} goes on and on." for talk in talks]
        stats = llm.llm_engine.stats()
        share = stats.prefix_hits / stats.prefix_queries
        # Three conversations take turns on two ranks: by load alone each comes back every other time.
        assert share > 0.6 if router == "prefix_aware" else share < 0.5


def _one_by_one(llm: LLM, prompts: list[str]) -> list[RequestOutput]:
    params = SamplingParams(max_tokens=2, temperature=0)
    return [llm.generate(prompt, params, use_tqdm=False)[0] for prompt in prompts]


def test_a_rank_that_dies_costs_time_alone(one: LLM, two: LLM) -> None:
    """Whole outputs are computed anew elsewhere, n of a prompt too; the next call runs on what is left."""
    asked = [SamplingParams(temperature=0.8, seed=i, n=1 + i % 2, max_tokens=40, ignore_eos=True) for i in range(14)]
    expected = tokens(one.generate(PROMPTS, asked, use_tqdm=False))
    client = client_of(two)
    engine = two.llm_engine
    step, killed = engine.step, []

    def step_and_kill() -> list[RequestOutput]:
        outputs = step()
        victim = client.states()[1]
        if not killed and victim.stats is not None and victim.stats.generation_tokens > 20:
            os.kill(victim.pid, signal.SIGKILL)
            killed.append(victim.num_running + victim.num_waiting)
        return outputs

    engine.step = step_and_kill  # type: ignore[method-assign]
    assert tokens(two.generate(PROMPTS, asked, use_tqdm=False)) == expected
    assert killed and killed[0] > 0, "it had work when it died"
    assert [state.alive for state in client.states()] == [True, False]
    assert tokens(two.generate(PROMPTS[:2], asked[:2], use_tqdm=False)) == expected[:2]


def test_a_rank_comes_back(one: LLM) -> None:
    asked = [SamplingParams(temperature=0.8, seed=i, max_tokens=20) for i in range(14)]
    expected = tokens(one.generate(PROMPTS, asked, use_tqdm=False))
    with LLM(**SETTINGS, data_parallel_size=2, data_parallel_restarts=1) as llm:
        client = client_of(llm)
        old = client.states()[1].pid
        os.kill(old, signal.SIGKILL)
        deadline = time.monotonic() + 60
        while (state := client.states()[1]).pid == old or not state.alive:
            assert tokens(llm.generate(PROMPTS[:2], asked[:2], use_tqdm=False)) == expected[:2], "meanwhile"
            assert time.monotonic() < deadline
        assert tokens(llm.generate(PROMPTS, asked, use_tqdm=False)) == expected
        assert all(state.alive and state.stats and state.stats.generation_tokens for state in client.states())
        left = family(llm)
        assert len(left) == 2
    assert not psutil.wait_procs(left, timeout=5)[1]


def test_all_ranks_dead_is_the_engine_dead(two: LLM) -> None:
    for state in client_of(two).states():
        os.kill(state.pid, signal.SIGKILL)
    with pytest.raises(EngineDeadError, match="signal 9"):
        two.generate(PROMPTS, SamplingParams(max_tokens=50), use_tqdm=False)


def test_ctrl_c_ends_the_prompts_and_the_engine_stays_usable(two: LLM) -> None:
    timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        two.generate(PROMPTS, SamplingParams(max_tokens=1500, ignore_eos=True), use_tqdm=False)
    deadline = time.monotonic() + 20
    while (stats := two.llm_engine.stats()).num_running or stats.num_waiting or stats.pages_used:
        assert time.monotonic() < deadline, stats
    assert len(two.generate(PROMPTS[:2], SamplingParams(max_tokens=2), use_tqdm=False)) == 2


SCRIPT = f"""
import sys
from engine import LLM, SamplingParams
llm = LLM(**{SETTINGS!r}, data_parallel_size=2)
print(*(state.pid for state in llm.llm_engine.client.states()), flush=True)
llm.generate({PROMPTS!r}, SamplingParams(max_tokens=1500 if len(sys.argv) > 1 else 3, ignore_eos=True), use_tqdm=False)
"""


@pytest.mark.parametrize("plainly", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("end", ["by itself", "killed"])
def test_a_script_leaves_nothing_behind(
    request: pytest.FixtureRequest, end: str, plainly: bool, tmp_path: Path
) -> None:
    """It needs no `__main__` guard and no shutdown, and may be killed. Plainly: three processes import torch."""
    if plainly:
        request.getfixturevalue("plain_processes")
    (file := tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "tests.script", str(file), *(["long"] if end == "killed" else [])]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as script:
        assert script.stdout is not None
        ranks = [psutil.Process(int(pid)) for pid in script.stdout.readline().split()]
        assert len(ranks) == 2
        if end == "killed":
            time.sleep(0.5)
            script.kill()
        assert script.wait(60) == (-9 if end == "killed" else 0)
    assert not psutil.wait_procs(ranks, timeout=5)[1]
