"""Engines over two machines: the tokens of one process, whatever is divided, and what becomes of the rest when one is
lost. Machines are agents of this one at addresses of its loopback device."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import agents_of_a_test as agents
import psutil
import pytest

from engine import LLM, SamplingParams
from engine.types.errors import EngineDeadError, EngineError
from engine.types.outputs import RequestOutput

SETTINGS: dict[str, Any] = {"model": "tiny", "dtype": "float64", "max_num_seqs": 8, "kv_cache_memory": "16MiB"}
PROMPTS = [f"Once upon a time there were {i} bears. " * (1 + i % 4) for i in range(6)]
PARAMS = [SamplingParams(temperature=(i % 3) / 2, seed=i, max_tokens=16) for i in range(6)]
LONG = SamplingParams(max_tokens=1900, ignore_eos=True, temperature=0)
DIVIDED = {
    "tp": {"tensor_parallel_size": 2},
    "pp": {"pipeline_parallel_size": 2},
    "tp x pp": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
    "dp": {"data_parallel_size": 2},
}


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    with LLM(**SETTINGS) as llm:
        return tokens(llm)


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[agents.Machines]:
    made = agents.Machines(tmp_path)
    made.start("a", "127.0.0.2")
    made.start("b", "127.0.0.3")
    yield made
    left = [process for name, agent in made.agents.items() if agent.poll() is None for process in made.processes(name)]
    made.end()
    assert not psutil.wait_procs(left, 20)[1], made.log.read_text()


def tokens(llm: LLM) -> list[list[int]]:
    outputs: list[RequestOutput] = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def test_a_machine_is_lost_and_comes_back(machines: agents.Machines, expected: list[list[int]]) -> None:
    """Two cores, one on each: what was sent to the lost one is computed by the other, and it stands again when its
    machine does. Nothing that ran there stays."""
    machines.timeout = 4.0  # longer than the pause before a try: that one finds an agent that is not missed yet
    with LLM(**SETTINGS, data_parallel_size=2, data_parallel_restarts=1, **machines.settings(2)) as llm:
        assert tokens(llm) == expected
        client: Any = llm.llm_engine.client
        running = machines.hurt("b", "agent killed")
        assert len(running) == 2
        agents.until(lambda: agents.gone(running[1:]))
        assert tokens(llm) == expected
        assert [state.alive for state in client.states()] == [True, False]
        machines.agents["b"].wait()
        time.sleep(machines.timeout + 2.0)  # more tries than it has restarts: none counts while the machine is away
        machines.start("b", "127.0.0.3")
        agents.until(lambda: tokens(llm) == expected and all(state.alive for state in client.states()))
    assert len(machines.processes("a")) == len(machines.processes("b")) == 1, "agents live on, and wait"


@pytest.mark.slow
@pytest.mark.parametrize("how", DIVIDED)
def test_the_tokens_are_those_of_one_process(how: str, machines: agents.Machines, expected: list[list[int]]) -> None:
    with LLM(**SETTINGS, **DIVIDED[how], **machines.settings(2)) as llm:
        assert tokens(llm) == expected
        there = [len(machines.processes(name)) - 1 for name in "ab"]
        assert there == {"tp": [2, 1], "pp": [2, 1], "tp x pp": [3, 2], "dp": [1, 1]}[how]


@pytest.mark.slow
@pytest.mark.parametrize("where", ["a", "b"])
@pytest.mark.parametrize("how", ["agent killed", "agent hangs", "machine hangs", "rank killed"])
@pytest.mark.parametrize("divided", ["tp", "pp"])
def test_who_loses_a_part_says_so(divided: str, how: str, where: str, machines: agents.Machines) -> None:
    """Clients are told within 2 s after it is seen, which takes `timeout` at most; all that ran elsewhere ends."""
    with LLM(**SETTINGS, **DIVIDED[divided], **machines.settings(2)) as llm:
        running = machines.processes("a")[1:] + machines.processes("b")[1:]
        told: list[float] = []

        def generate() -> None:
            with pytest.raises(EngineError):
                llm.generate(PROMPTS, LONG, use_tqdm=False)
            told.append(time.monotonic())

        client = threading.Thread(target=generate)
        client.start()
        time.sleep(1.0)
        began = time.monotonic()
        if how == "rank killed":
            os.kill(machines.processes(where)[-1].pid, signal.SIGKILL)
        else:
            machines.hurt(where, how)
        client.join(machines.timeout + 20)
        assert told and told[0] - began < machines.timeout + 2.0
        with pytest.raises(EngineDeadError):
            llm.generate(PROMPTS, LONG, use_tqdm=False)
    agents.until(lambda: agents.gone([one for one in running if not stopped(one)]))
    for process in (one for one in machines.processes(where) if stopped(one)):
        process.send_signal(signal.SIGCONT)
    agents.until(lambda: agents.gone(running), "what hung sees that it was left, and leaves")


def stopped(process: psutil.Process) -> bool:
    try:
        return bool(process.status() == psutil.STATUS_STOPPED)
    except psutil.Error:
        return False


@pytest.mark.slow
def test_a_head_that_is_killed_leaves_nothing(machines: agents.Machines) -> None:
    """Agents end what they started, and wait for another head."""
    script = machines.token.parent / "head.py"
    settings = {**SETTINGS, **DIVIDED["tp"], **machines.settings(2)}
    script.write_text(f"from engine import LLM\nllm = LLM(**{settings!r})\nprint('up', flush=True)\ninput()\n")
    with subprocess.Popen([sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as head:
        assert head.stdout is not None and head.stdout.readline() == b"up\n"
        running = machines.processes("a")[1:] + machines.processes("b")[1:]
        assert len(running) == 3
        head.kill()
    agents.until(lambda: agents.gone(running))
    with LLM(**settings) as llm:
        assert llm.generate("Once", SamplingParams(max_tokens=2), use_tqdm=False)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0 or not os.path.exists("/usr/sbin/ip"), reason="root makes networks, with ip")
def test_a_machine_that_is_cut_off(tmp_path: Path, expected: list[list[int]]) -> None:
    """A network of its own, whose cable is pulled: nothing tells of it. The other core goes on; both ends see it; when
    the cable is back, so is the core."""
    with ExitStack() as at_end:
        _ip("netns", "add", "engine-b")
        at_end.callback(_ip, "netns", "del", "engine-b")
        _ip("link", "add", "engine-h", "type", "veth", "peer", "name", "engine-p", "netns", "engine-b")
        _ip("addr", "add", "10.77.9.1/24", "dev", "engine-h")
        _ip("link", "set", "engine-h", "up")
        for words in ("addr add 10.77.9.2/24 dev engine-p", "link set engine-p up", "link set lo up"):
            _ip("-n", "engine-b", *words.split())
        made = agents.Machines(tmp_path, "10.77.9.1")
        at_end.callback(made.end)
        made.start("a", "10.77.9.1")
        made.start("b", "10.77.9.2", ["ip", "netns", "exec", "engine-b"])
        with LLM(**SETTINGS, data_parallel_size=2, data_parallel_restarts=1, **made.settings(2)) as llm:
            assert tokens(llm) == expected
            client: Any = llm.llm_engine.client
            running = made.processes("b")[1:]
            _ip("link", "set", "engine-h", "down")
            began = time.monotonic()
            agents.until(lambda: not client.states()[1].alive or (tokens(llm) and False))
            assert time.monotonic() - began < made.timeout + 3.0
            assert tokens(llm) == expected
            agents.until(lambda: agents.gone(running), "what is cut off ends, too")
            _ip("link", "set", "engine-h", "up")
            agents.until(lambda: tokens(llm) == expected and all(state.alive for state in client.states()))
