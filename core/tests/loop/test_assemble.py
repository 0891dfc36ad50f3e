"""The one place where the core's drivers are built: by the names in the manifest, whatever they are."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

import msgspec
import pytest
from cores import LAYOUTS, worker_start
from paged_worker import PagedWorker, alone
from schedules import Settings

from engine.interfaces.context import GrammarContext
from engine.interfaces.grammar import GrammarCard
from engine.loop.assemble import assemble_core
from engine.plugin import Candidate, Registry
from engine.plugin.points import POINTS
from engine.types.errors import ConfigError, KVCacheTooSmallError, ManifestError
from engine.types.params import SamplingParams
from engine.types.request import EngineRequest
from engine.types.start import Choice, CoreStart

CARDS = {
    "executor": "engine_reference.executor_inline:InlineExecutor",
    "evictor": "engine_reference.evictor_lru:LRUEvictor",
    "scheduling_policy": "engine_reference.policy_fcfs:FCFSPolicy",
}
SETTINGS = Settings(
    num_pages=100, max_num_seqs=4, max_num_batched_tokens=16, max_model_len=64, in_flight=2, enable_prefix_caching=True
)
REGISTRY = [
    Candidate(point, f"my-{point}", POINTS[point].majors[-1], "stranger", "1.0", value)
    for point, value in CARDS.items()
]


def core_start(**changes: Any) -> CoreStart:
    choices = tuple(
        Choice(point=c.point, driver=c.name, distribution=c.distribution, version=c.version, value=c.value)
        for c in REGISTRY
    )
    worker = msgspec.structs.replace(worker_start(LAYOUTS["full and sliding"], SETTINGS), choices=choices)
    worker = msgspec.structs.replace(worker, **changes)
    return CoreStart(worker=worker, worker_class="paged_worker:PagedWorker")


def test_a_core_of_renamed_drivers_generates() -> None:
    core = assemble_core(core_start(), Registry(REGISTRY))
    assert core.in_flight == 2 and core.worker_ready.num_pages == 100
    params = SamplingParams(temperature=0, max_tokens=12, seed=0)
    core.add_request(EngineRequest(request_id="a", prompt_token_ids=[1, 2, 3], params=params))
    tokens: list[int] = []
    while core.has_work():
        for output in core.step().outputs:
            tokens += output.new_token_ids
    assert tokens == alone(core.scheduler.kv.layout, [1, 2, 3], params, [], SETTINGS.max_model_len)[0]
    core.shutdown()


def test_other_drivers_than_the_launchers_are_refused() -> None:
    other = [dataclasses.replace(candidate, version="2.0") for candidate in REGISTRY]
    with pytest.raises(ManifestError, match=r"stranger 1\.0"):
        assemble_core(core_start(), Registry(other))
    with pytest.raises(ManifestError, match="evictor"):
        assemble_core(core_start(choices=core_start().worker.choices[:1]), Registry(REGISTRY))


def test_a_pool_without_a_usable_page_is_refused_and_the_worker_shut_down(monkeypatch: pytest.MonkeyPatch) -> None:
    stopped: list[PagedWorker] = []
    monkeypatch.setattr(PagedWorker, "shutdown", lambda worker: stopped.append(worker))
    with pytest.raises(KVCacheTooSmallError, match="1 pages"):
        assemble_core(core_start(num_kv_pages=1), Registry(REGISTRY))
    assert len(stopped) == 1


class Slow(GrammarCard):
    """Its library takes seconds to import."""

    constraints = frozenset({"regex"})
    body = "test_assemble:SlowBody"


told: list[str] = []


class SlowBody:
    def __init__(self, context: GrammarContext) -> None:
        told.append(f"prepare={context.prepare}")

    def close(self) -> None:
        told.append("close")


@pytest.mark.parametrize("prepare", [False, True])
def test_grammars_are_prepared_before_the_model_is_loaded(prepare: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """And given up where it cannot be."""
    told: list[str] = importlib.import_module("test_assemble").told  # where the body is loaded from
    told.clear()
    load = PagedWorker.__init__

    def loaded(worker: PagedWorker, *args: Any, **kwargs: Any) -> None:
        told.append("load")
        load(worker, *args, **kwargs)

    monkeypatch.setattr(PagedWorker, "__init__", loaded)
    slow = Candidate("grammar", "slow", 0, "stranger", "1.0", "test_assemble:Slow")
    choices = (
        *core_start().worker.choices,
        Choice(point="grammar", driver="slow", distribution="stranger", version="1.0", value=slow.value, kind="regex"),
    )
    with pytest.raises(KVCacheTooSmallError):
        assemble_core(core_start(num_kv_pages=1, choices=choices), Registry([*REGISTRY, slow]), prepare=prepare)
    assert told == [f"prepare={prepare}", "load", "close"]


def test_no_step_in_flight_is_refused() -> None:
    with pytest.raises(ConfigError, match="in_flight=0"):
        assemble_core(msgspec.structs.replace(core_start(), in_flight=0), Registry(REGISTRY))
