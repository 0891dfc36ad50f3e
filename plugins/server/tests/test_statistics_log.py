"""The line of statistics: said while there is work, about the time since the last one."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from engine.types.errors import EngineDeadError
from engine.types.outputs import StepStats
from engine_server.metrics.exposition import Exposition, _EngineCollector
from engine_server.metrics.measures import Measures
from engine_server.program import StatisticsLog


class Engine:
    def __init__(self):
        self.last_stats = None
        self.num_unfinished = 0

    def now(self, **changes):
        old = {} if self.last_stats is None else {f: getattr(self.last_stats, f) for f in StepStats.__struct_fields__}
        blank = dict.fromkeys(StepStats.__struct_fields__, 0) | {"pages_total": 200, "kv_connectors": ()}
        self.last_stats = StepStats(**(blank | old | changes))


@pytest.fixture
def watched():
    engine, clock = Engine(), [100.0]
    return engine, clock, StatisticsLog(engine, clock=lambda: clock[0])


def test_rates_are_of_the_time_since_the_last_line(watched):
    engine, clock, log = watched
    engine.num_unfinished = 5
    engine.now(num_running=3, num_waiting=2, prompt_tokens=30_000, generation_tokens=50, pages_used=50,
               prefix_queries=400, prefix_hits=100)  # fmt: skip
    clock[0] += 10
    assert log.line() == (
        "running 3, waiting 2, prompt 3,000.0 tokens/s, generation 5.0 tokens/s, KV cache 25.0 %, prefix hits 25.0 %"
    )
    engine.now(generation_tokens=60, num_preemptions=4)
    clock[0] += 5
    assert log.line() == (
        "running 3, waiting 2, prompt 0.0 tokens/s, generation 2.0 tokens/s, KV cache 25.0 %, preempted 4"
    )


def test_with_connectors_it_tells_where_prompts_came_from(watched):
    engine, clock, log = watched
    engine.now(prompt_tokens=400, prefix_queries=400, prefix_hits=100, kv_connectors=(("file", "hit_tokens", 40),))
    clock[0] += 10
    assert log.line().endswith(", prompts from device 25.0 %, file 10.0 %, computed 65.0 %")
    engine.now(prompt_tokens=500, prefix_queries=500, prefix_hits=100, kv_connectors=(("file", "hit_tokens", 130),))
    clock[0] += 10
    assert log.line().endswith(", prompts from device 0.0 %, file 90.0 %, computed 10.0 %")


def test_with_reuse_in_any_order_it_tells_what_was_blended(watched):
    engine, clock, log = watched
    engine.now(prompt_tokens=400, prefix_queries=400, prefix_hits=100, reused_tokens=200)
    clock[0] += 10
    assert log.line().endswith(", prompts from device 25.0 %, blended 50.0 %, computed 25.0 %")


def test_what_drafts_were_worth(watched):
    engine, clock, log = watched
    engine.now(generation_tokens=100, num_drafts=60, num_accepted_drafts=45, num_draft_rows=20)
    clock[0] += 10
    assert log.line().endswith(", drafts accepted 75.0 %, 3.25 tokens a step with drafts")


def test_silence_while_there_is_nothing_to_do(watched):
    engine, clock, log = watched
    assert log.line() is None
    engine.num_unfinished = 1
    assert log.line() == "running 0, waiting 1"
    engine.now(generation_tokens=5)
    engine.num_unfinished = 0
    clock[0] += 10
    assert "running 0, waiting 0" in log.line()  # it ended since the last line: this is told once
    assert log.line() is None


def test_requests_that_the_core_has_not_told_of_are_waiting(watched):
    engine, _, log = watched
    engine.now()
    engine.num_unfinished = 7
    assert log.line().startswith("running 0, waiting 7,")


async def test_it_writes_while_it_runs_and_ends_when_cancelled(capsys):
    engine, said = Engine(), ""
    engine.num_unfinished = 1
    task = asyncio.create_task(StatisticsLog(engine).run(interval=0))
    async with asyncio.timeout(30):
        while said.count("\n") < 2:
            await asyncio.sleep(0)
            said += capsys.readouterr().err
    assert {line[len("12:34:56 ") :] for line in said.splitlines()} == {"running 0, waiting 1"}
    engine.num_unfinished = 0
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def samples(stats: StepStats) -> list[tuple[str, dict[str, str], float]]:
    """What /metrics tells of the first of two cores."""
    cores = [SimpleNamespace(dp_rank=0, stats=stats, alive=True), SimpleNamespace(dp_rank=1, stats=None, alive=True)]
    plan = SimpleNamespace(registry=SimpleNamespace(broken=tuple))
    llm = SimpleNamespace(model_name="m", cores=cores, plan=plan, worker=None)
    families = _EngineCollector(cast("Any", llm), {}, Measures(64).plain(), ()).collect()
    found = [(sample.name, dict(sample.labels), sample.value) for family in families for sample in family.samples]
    return [one for one in found if one[1].get("engine") == "0"]


async def test_metrics_tell_what_experts_computed():
    """All ranks' numbers are asked for with each scrape; where nobody answers in time they are those of before."""
    asked, parallel = [], SimpleNamespace(ep=True, world=2)
    start = SimpleNamespace(worker=SimpleNamespace(parallel=parallel, first_dp_rank=2))
    plan = SimpleNamespace(registry=SimpleNamespace(broken=tuple), start=start)
    worker = SimpleNamespace(hook_failures=(), broken=())

    async def call(method):
        asked.append(method)
        if len(asked) > 1:
            raise EngineDeadError("call", "it has died")
        return [[5, 0, 2], [0, 7, 1]]

    llm = SimpleNamespace(model_name="m", cores=[], plan=plan, worker=worker, call=call)
    exposition = Exposition.__new__(Exposition)
    exposition._server = SimpleNamespace(llm=llm)
    exposition._expert_tokens = []
    for _ in range(2):
        told = await exposition._of_experts()
        families = _EngineCollector(cast("Any", llm), {}, Measures(64).plain(), (), told).collect()
        found = {
            (sample.name, sample.labels.get("expert"), sample.labels.get("rank")): sample.value
            for family in families
            for sample in family.samples
            if sample.name.startswith("engine:expert_")
        }
        assert found == {
            ("engine:expert_tokens_total", "0", None): 5,
            ("engine:expert_tokens_total", "1", None): 7,
            ("engine:expert_tokens_total", "2", None): 3,
            ("engine:expert_rank_tokens_total", None, "4"): 7,
            ("engine:expert_rank_tokens_total", None, "5"): 8,
        }
    assert asked == ["worker.expert_tokens"] * 2
    parallel.ep = False
    await exposition._of_experts()
    assert len(asked) == 2


def test_metrics_tell_where_prompts_came_from():
    stats = StepStats(
        prefix_queries=100,
        prefix_hits=32,
        reused_tokens=20,
        kv_connectors=(("host", "hit_tokens", 16), ("host", "loaded_tokens", 48), ("file", "hit_tokens", 0)),
    )
    told = {
        labels["source"]: value
        for name, labels, value in samples(stats)
        if name == "engine:prompt_tokens_by_source_total"
    }
    assert told == {"device": 32, "host": 16, "file": 0, "blended": 20, "computed": 32}
    told = {
        labels["source"]: value
        for name, labels, value in samples(StepStats(prompt_tokens=9))
        if name == "engine:prompt_tokens_by_source_total"
    }
    assert told == {"device": 0, "computed": 9}, "without a prefix cache"


def test_metrics_tell_where_drafts_were_accepted():
    stats = StepStats(num_drafts=9, num_accepted_drafts=6, num_draft_rows=3, accepted_drafts_at=(3, 2, 1))
    found = {
        (name.removeprefix("engine:spec_decode_"), labels.get("position")): value
        for name, labels, value in samples(stats)
        if "spec_decode" in name
    }
    assert found == {
        ("num_drafts_total", None): 3,
        ("num_draft_tokens_total", None): 9,
        ("num_accepted_tokens_total", None): 6,
        **{("num_accepted_tokens_per_pos_total", str(i)): 3 - i for i in range(3)},
    }
