"""A machine is lost at a moment that a seed draws, while an engine starts on it or computes: clients are told in time,
other engine cores go on, what ran there ends, and the machine that comes back is one of the engine's again."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

import agents_of_a_test as agents
import psutil
import pytest

from engine import LLM, SamplingParams
from engine.types.errors import EngineError

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0 or not os.path.exists("/usr/sbin/ip"), reason="root makes networks, with ip"),
]

SETTINGS: dict[str, Any] = {
    "model": "tiny", "dtype": "float64", "max_num_seqs": 8, "kv_cache_memory": "16MiB", "step_timeout": 6.0,
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "tp": {"tensor_parallel_size": 2},
    "pp": {"pipeline_parallel_size": 2},
    "dp": {"data_parallel_size": 2, "data_parallel_restarts": 3},
}
KINDS = ("agent killed", "agent hangs", "machine hangs", "process killed", "process hangs", "cut off")
TOLD_SECONDS = 2.0
PROMPTS = [{"prompt_token_ids": [(7 * i + j) % 250 + 3 for j in range(5 + 60 * (i % 2))]} for i in range(6)]
SHORT = SamplingParams(max_tokens=16, ignore_eos=True, temperature=0)
SOME = SamplingParams(max_tokens=300, ignore_eos=True, temperature=0)
LONG = SamplingParams(max_tokens=1500, ignore_eos=True, temperature=0)
EXAMPLES = int(os.environ.get("EXAMPLES", "1"))


class Loss(NamedTuple):
    """What becomes of the second machine, and how long after the start began, or the requests were sent."""

    kind: str
    starting: bool
    after: float
    victim: float

    @classmethod
    def drawn(cls, seed: int) -> Loss:
        draw = random.Random(seed)
        starting = draw.random() < 0.3
        return cls(KINDS[seed % len(KINDS)], starting, draw.uniform(0, 3.0 if starting else 1.5), draw.random())


class Network:
    """The second machine has a network of its own, whose cable can be pulled."""

    def __init__(self, at_end: ExitStack) -> None:
        number = os.getpid() % 250
        self.name = f"engine-m{os.getpid()}"
        self.here = f"10.78.{number}.1"
        self.there = f"10.78.{number}.2"
        self._cable = f"e{os.getpid()}h"
        _ip("netns", "add", self.name)
        at_end.callback(_ip, "netns", "del", self.name)
        _ip("link", "add", self._cable, "type", "veth", "peer", "name", "peer", "netns", self.name)
        at_end.callback(_ip, "link", "del", self._cable)  # with its namespace it would go later
        _ip("addr", "add", f"{self.here}/24", "dev", self._cable)
        self.plug(True)
        for words in (f"addr add {self.there}/24 dev peer", "link set peer up", "link set lo up"):
            _ip("-n", self.name, *words.split())

    def plug(self, up: bool) -> None:
        _ip("link", "set", self._cable, "up" if up else "down")


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


class Pair:
    """Two machines, and what a loss does to the second."""

    def __init__(self, folder: Path, at_end: ExitStack) -> None:
        self.network = Network(at_end)
        self.machines = agents.Machines(folder, self.network.here)
        at_end.callback(self.machines.end)
        self.machines.start("a", self.network.here)
        self._join()

    def _join(self) -> None:
        self.machines.start("b", self.network.there, ["ip", "netns", "exec", self.network.name])

    def lose(self, loss: Loss) -> list[psutil.Process]:
        """What ran on the second machine."""
        running = self.machines.processes("b")
        if loss.kind == "cut off":
            self.network.plug(False)
        elif loss.kind.startswith("process"):
            if started := running[1:]:
                victim = started[int(loss.victim * len(started))]
                with suppress(psutil.Error):
                    victim.send_signal(signal.SIGKILL if loss.kind == "process killed" else signal.SIGSTOP)
        else:
            self.machines.hurt("b", loss.kind)
        return running

    def bring_back(self, loss: Loss, running: list[psutil.Process]) -> None:
        """The machine as it was. What hung goes on."""
        if loss.kind == "cut off":
            self.network.plug(True)
        elif loss.kind == "agent killed":
            self.machines.agents["b"].wait()
            self._join()
        for process in running:
            with suppress(psutil.Error):
                process.send_signal(signal.SIGCONT)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    with ExitStack() as at_end:
        yield Pair(tmp_path, at_end)


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    with LLM(**SETTINGS) as llm:
        return tokens(llm, SHORT)


def tokens(llm: LLM, params: SamplingParams) -> list[list[int]]:
    prompts: Any = PROMPTS
    return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params, use_tqdm=False)]


def seconds(pair: Pair, loss: Loss) -> float:
    """Until clients have to be told."""
    silence = {"agent killed": 0.0, "process killed": 0.0, "process hangs": SETTINGS["step_timeout"]}
    return TOLD_SECONDS + silence.get(loss.kind, pair.machines.timeout)


@pytest.mark.parametrize("seed", range(18 * EXAMPLES))
def test_it_is_told_and_the_machine_is_used_again(seed: int, pair: Pair, expected: list[list[int]]) -> None:
    loss, shape = Loss.drawn(seed), list(SHAPES)[seed // len(KINDS) % len(SHAPES)]
    settings = {**SETTINGS, **SHAPES[shape], **pair.machines.settings(2)}
    lost: list[tuple[float, list[psutil.Process]]] = []

    def lose() -> None:
        time.sleep(loss.after)
        lost.append((time.monotonic(), pair.lose(loss)))

    def told() -> None:
        late.join(20)
        assert time.monotonic() - lost[0][0] < seconds(pair, loss)

    late = threading.Thread(target=lose)
    if loss.starting:
        agents.until(lambda: "looking for the head" in pair.machines.log.read_text())
        late.start()
        try:
            with LLM(**settings):
                late.join(20)  # it came up before
        except EngineError:
            told()
    else:
        with LLM(**settings) as llm:
            late.start()
            if shape == "dp":
                tokens(llm, SOME)  # what the lost core had is computed by the other
                late.join(20)
            else:
                with pytest.raises(EngineError, match="rank|node|engine core"):
                    tokens(llm, LONG)
                told()
            if shape == "dp":
                client: Any = llm.llm_engine.client
                if loss.kind.startswith("process"):  # its machine is there, and starts another
                    agents.until(lambda: agents.gone(lost[0][1][1:]), "it is seen")
                else:
                    agents.until(lambda: not client.states()[1].alive, "it is seen")
                    pair.bring_back(loss, lost[0][1])
                agents.until(lambda: tokens(llm, SHORT) == expected and all(state.alive for state in client.states()))
    running = lost[0][1]
    if not (shape == "dp" and not loss.starting):
        pair.bring_back(loss, running)
    agents.until(lambda: agents.gone(running[1:]), "what ran there ends")
    with LLM(**settings) as llm:
        assert tokens(llm, SHORT) == expected
