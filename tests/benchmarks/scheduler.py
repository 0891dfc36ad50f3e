"""`python -m tests.benchmarks scheduler`: the engine's own work in a step, without a model.

Requests are put into slots and decode; others wait. The KV cache is just large enough, and before anything is measured
it is filled with the cached blocks of requests that have ended: so every page that a request takes is one that the
evictor gives up, as in a server that has run for a while.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from engine.process import wire
from engine.types.outputs import CoreOutputs
from engine.types.params import SamplingParams
from engine.types.request import EngineRequest
from engine_bench.report import Report
from engine_bench.statistics import summary
from engine_bench.workload import Ask, Lengths, draw_asks
from tests.benchmarks.null_core import VOCABULARY, NullSizes, null_core
from tests.benchmarks.null_engine import measure_engine_steps, null_frontend

if TYPE_CHECKING:
    from engine.embedding import EngineConfig
    from engine.loop.engine_core import EngineCore
    from engine.scheduling.scheduler import Scheduler
    from engine.types.plan import StepPlan
    from engine_bench.report import Figure

QUANTILES = (0, 50, 90, 99)
SPARE_TOKENS = 64
"""Room in each slot beyond the measured steps."""
SETTLE_STEPS = 16
"""Steps that are not measured, after the last change of the queues."""


@dataclass(frozen=True, kw_only=True)
class SchedulerOptions:
    """What to measure: `steps` steps with `running` requests in slots and `waiting` behind them.

    Args:
        input_len: tokens of a prompt; up to a block more, so that requests fill their blocks in different steps.
        drafts: tokens that each request proposes and computes after its own in each step.
        kv_tables: of the KV cache; see `tests.benchmarks.null_core`.
    """

    running: int
    waiting: int
    steps: int
    input_len: int
    drafts: int = 0
    kv_tables: int = 1


class Parts(NamedTuple):
    """Seconds of one step: the plan, the update with its result, the outputs encoded for another process; and what the
    three together took of the processor."""

    schedule: float
    update: float
    encode: float
    cpu: float


def measure_scheduler(config: EngineConfig, options: SchedulerOptions) -> Report:
    """Run it. Raises PluginError where a driver cannot be had."""
    core = null_core(config, _sizes(config, options))
    try:
        _fill_cache(core, config)
        running = _fill_queues(core, config, options)
        pool, done, preempted = core.scheduler.kv.pool, core.scheduler.states.done_step, core.scheduler.num_preemptions
        evicted = pool.num_evictable
        parts = _measure_parts(core, options.steps)
        evicted -= pool.num_evictable
        whole = _measure_steps(core, options.steps)
        with_text = measure_engine_steps(core, null_frontend(), running, options.steps)
        stats = core.stats()
        assert (stats.num_running, stats.num_waiting) == (options.running, options.waiting)
        assert stats.step_id - done >= 3 * options.steps and stats.num_preemptions == preempted
        core.check_integrity()
    finally:
        core.shutdown()
    return _report(config, options, parts, whole, with_text, evicted)


def _sizes(config: EngineConfig, options: SchedulerOptions) -> NullSizes:
    # Drafts get half of what a budget leaves while others wait.
    tokens = options.running * (1 + 2 * options.drafts)
    return NullSizes(
        max_num_seqs=options.running,
        max_num_batched_tokens=max(config.max_num_batched_tokens or 2048, tokens),
        max_model_len=_longest(config, options),
        kv_tables=options.kv_tables,
        drafts=options.drafts,
    )


def _longest(config: EngineConfig, options: SchedulerOptions) -> int:
    per_step = 1 + options.drafts / 2  # the null worker accepts half of the drafts
    return (
        options.input_len + config.block_size + int(3 * options.steps * per_step) + SPARE_TOKENS * (1 + options.drafts)
    )


def _requests(prefix: str, asks: list[Ask]) -> list[EngineRequest]:
    return [
        EngineRequest(
            request_id=f"{prefix}-{index}",
            prompt_token_ids=ask.prompt,
            params=SamplingParams(max_tokens=ask.output_len, ignore_eos=True, seed=index),
        )
        for index, ask in enumerate(asks)
    ]


def _fill_cache(core: EngineCore, config: EngineConfig) -> None:
    """Run requests of one token each until every page holds a cached block, but for some last ones of requests."""
    pool, block = core.scheduler.kv.pool, config.block_size
    length = core.scheduler.max_model_len // block * block - block
    lengths, one = Lengths(length, length), Lengths(1, 1)
    asks = draw_asks(2 + pool.num_usable * block // length, lengths, one, (0, VOCABULARY), config.seed + 1)
    for request in _requests("ended", asks):
        core.add_request(request)
        while core.has_work():
            core.step()
        if pool.num_free < block:
            return
    raise AssertionError("the cache is not full of cached blocks")


def _fill_queues(core: EngineCore, config: EngineConfig, options: SchedulerOptions) -> list[EngineRequest]:
    """Put requests into all slots, and others behind them, and let the slots decode for a while; those in slots."""
    inputs = Lengths(options.input_len, options.input_len + config.block_size - 1)
    outputs = Lengths(_longest(config, options), _longest(config, options))  # cut by max_model_len
    asks = draw_asks(options.running + options.waiting, inputs, outputs, (0, VOCABULARY), config.seed)
    requests = _requests("request", asks)
    for request in requests[: options.running]:
        core.add_request(request)
    while len(core.scheduler.running) < options.running or core.scheduler.prefilling:
        core.step()
    for request in requests[options.running :]:
        core.add_request(request)
    for _ in range(SETTLE_STEPS):
        core.step()
    return requests[: options.running]


def _measure_parts(core: EngineCore, steps: int) -> list[Parts]:
    """The parts of each step, driven by hand. One step is under way while the next is planned, but with drafts: how far
    a request has come is then known when its step is back."""
    scheduler, executor = core.scheduler, core.executor
    while scheduler.outstanding:
        core.step()
    measured: list[Parts] = []
    now, cpu = time.perf_counter, time.thread_time
    under_way = [] if scheduler.drafts.speculation is not None else [executor.execute(_planned(scheduler))]
    while len(measured) < steps:
        cpu_began, began = cpu(), now()
        plan = scheduler.schedule()
        scheduled, cpu_scheduled = now(), cpu()
        assert plan is not None
        under_way.append(executor.execute(plan))
        result = under_way.pop(0).result()
        cpu_called, called = cpu(), now()
        outputs = scheduler.update(result)
        updated = now()
        wire.encode(CoreOutputs(outputs=outputs, stats=core.stats()))
        encoded, cpu_encoded = now(), cpu()
        cpu_seconds = cpu_scheduled - cpu_began + cpu_encoded - cpu_called
        measured.append(Parts(scheduled - began, updated - called, encoded - updated, cpu_seconds))
    for future in under_way:
        scheduler.update(future.result())
    return measured


def _planned(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.schedule()
    assert plan is not None
    return plan


def _measure_steps(core: EngineCore, steps: int) -> list[float]:
    """Whole calls of `EngineCore.step`, with the null worker and the hooks that are installed."""
    measured: list[float] = []
    now = time.perf_counter
    for _ in range(steps):
        began = now()
        core.step()
        measured.append(now() - began)
    return measured


def _report(
    config: EngineConfig,
    options: SchedulerOptions,
    parts: list[Parts],
    whole: list[float],
    with_text: list[float],
    evicted: int,
) -> Report:
    totals = [step.schedule + step.update + step.encode for step in parts]
    figures: dict[str, Figure] = {
        "bench": "scheduler",
        "running": options.running,
        "waiting": options.waiting,
        "steps": options.steps,
        "input_len": options.input_len,
        "drafts": options.drafts,
        "kv_tables": options.kv_tables,
        "block_size": config.block_size,
        "evicted_pages": evicted,
        **summary("step_ms", totals, QUANTILES, 1e3),
        **summary("schedule_ms", [step.schedule for step in parts], QUANTILES, 1e3),
        **summary("update_ms", [step.update for step in parts], QUANTILES, 1e3),
        **summary("encode_ms", [step.encode for step in parts], QUANTILES, 1e3),
        **summary("cpu_ms", [step.cpu for step in parts], QUANTILES, 1e3),
        **summary("core_step_ms", whole, QUANTILES, 1e3),
        **summary("engine_step_ms", with_text, QUANTILES, 1e3),
    }
    figures["step_ms"] = figures["step_ms_p50"]
    title = f"engine core without a model: {options.running} running, {options.waiting} waiting, {options.steps} steps"
    if options.drafts or options.kv_tables > 1:
        title += f", {options.drafts} drafts, {options.kv_tables} KV tables"
    report = Report(title, figures)
    for label, name in (
        ("step, ms", "step_ms"),
        ("  schedule and plan", "schedule_ms"),
        ("  update", "update_ms"),
        ("  encode the outputs", "encode_ms"),
        ("step, ms of processor", "cpu_ms"),
        ("EngineCore.step, ms", "core_step_ms"),
        ("LLMEngine.step, ms", "engine_step_ms"),
    ):
        cells = [f"{'best' if q == 0 else f'p{q}'} {figures[f'{name}_p{q}']:.4f}" for q in QUANTILES]
        report.row(label, *cells)
    report.row("pages evicted", str(evicted))
    return report
