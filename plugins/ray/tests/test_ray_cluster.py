"""On a real cluster: several raylets of this machine, lost one by one."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip("ray", reason="ray is not installed")

from engine import LLM, SamplingParams
from engine.types.errors import EngineError
from engine.types.outputs import RequestOutput
from engine_sdk.conformance import NodesConformance

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray")]

SETTINGS: dict[str, Any] = {"model": "tiny", "dtype": "float64", "max_num_seqs": 8, "kv_cache_memory": "16MiB"}
PROMPTS = [f"Once upon a time there were {i} bears. " * (1 + i % 4) for i in range(6)]
PARAMS = [SamplingParams(temperature=(i % 3) / 2, seed=i, max_tokens=16) for i in range(6)]
STORE = 80 * 2**20


class Raylets:
    """A cluster whose machines have a CPU each, so that each worker has one of its own."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        head = {"num_cpus": 1, "object_store_memory": STORE, "include_dashboard": False}
        self.cluster = Cluster(initialize_head=True, head_node_args=head)
        self.others = [self.add()]

    def add(self) -> Any:
        return self.cluster.add_node(num_cpus=1, object_store_memory=STORE)

    def settings(self) -> dict[str, Any]:
        return {"executor": "ray", "nodes.address": self.cluster.address, "nodes.env": "OMP_NUM_THREADS=1"}


@pytest.fixture(scope="module")
def raylets() -> Iterator[Raylets]:
    import ray

    made = Raylets()
    yield made
    ray.shutdown()
    made.cluster.shutdown()


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    with LLM(**SETTINGS) as llm:
        return tokens(llm)


def tokens(llm: LLM) -> list[list[int]]:
    outputs: list[RequestOutput] = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def engine_processes() -> list[psutil.Process]:
    """Cores and ranks that actors supervise."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            line = " ".join(process.cmdline())
            ours = "engine.loop.process" in line or "executor_process.rank" in line
            if ours and (process.parent().cmdline() or [""])[0].startswith("ray::"):
                found.append(process)
    return found


def test_a_divided_model_has_the_tokens_of_one_process(raylets: Raylets, expected: list[list[int]]) -> None:
    """Actors go by their ranks' names; one that is killed takes its process along, and the engine says so."""
    import ray

    before = {process.pid for process in engine_processes()}
    with LLM(**SETTINGS, pipeline_parallel_size=2, **raylets.settings()) as llm:
        assert tokens(llm) == expected
        named = {"engine:core0", "engine:core0:rank0 stage0 tp0", "engine:core0:rank1 stage1 tp0"}
        assert named <= set(ray.util.list_named_actors())
        running = [process for process in engine_processes() if process.pid not in before]
        assert len(running) == 3
        ranks = [process for process in running if "executor_process.rank" in " ".join(process.cmdline())]
        os.kill(ranks[-1].ppid(), signal.SIGKILL)  # the supervisor
        with pytest.raises(EngineError):
            for _ in range(100):
                tokens(llm)
                time.sleep(0.1)
    assert not psutil.wait_procs(running, 20)[1]


def test_two_cores_of_two_stages_of_two_ranks(raylets: Raylets, expected: list[list[int]]) -> None:
    """The line of the page: eight workers, on machines that have room for four each."""
    import ray

    divided = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "data_parallel_size": 2, "nodes.cpus": 0.2}
    with LLM(**SETTINGS, **divided, **raylets.settings()) as llm:
        assert tokens(llm) == expected
        ranks = {f"rank{2 * stage + tp} stage{stage} tp{tp}" for stage in range(2) for tp in range(2)}
        named = {f"engine:core{core}:{rank}" for core in range(2) for rank in ranks}
        assert named | {"engine:core0", "engine:core1"} <= set(ray.util.list_named_actors())


def test_a_raylet_is_lost_and_another_takes_its_place(raylets: Raylets, expected: list[list[int]]) -> None:
    import ray

    settings = {**SETTINGS, **raylets.settings(), "executor": "inline", "nodes": "ray"}
    with LLM(**settings, data_parallel_size=2, data_parallel_restarts=1) as llm:
        assert tokens(llm) == expected
        client: Any = llm.llm_engine.client
        where = ray.util.placement_group_table()
        (table,) = [one for one in where.values() if one["state"] == "CREATED"]
        lost = raylets.others.pop()
        folders = set(Path(tempfile.gettempdir()).glob("engine-*"))
        (bundle,) = [place for place, node in table["bundles_to_node_id"].items() if node == lost.node_id]
        raylets.cluster.remove_node(lost, allow_graceful=False)
        until(lambda: tokens(llm) == expected and not client.states()[bundle].alive)
        raylets.others.append(raylets.add())
        until(lambda: tokens(llm) == expected and all(state.alive for state in client.states()))
        assert len({state.pid for state in client.states()}) == 2
        for folder in folders:  # Ray kills what a lost raylet's workers started, which then cannot remove it
            with contextlib.suppress(OSError):
                folder.rmdir()


class TestRay(NodesConformance):
    driver, options = "ray", {"place_timeout": 60.0}

    @classmethod
    @contextlib.contextmanager
    def machines(cls) -> Iterator[None]:
        import ray

        if not ray.is_initialized():
            ray.init(address="auto", namespace="conformance", log_to_driver=False)
        yield

    @pytest.fixture(autouse=True)
    def _cluster(self, raylets: Raylets) -> None:
        """Of the other tests."""
