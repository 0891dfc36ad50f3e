"""`engine bench scheduler`: the engine core's own work in a step, without a model.

Requests are put into slots and decode one token a step; others wait. The KV cache is just large enough, and before
anything is measured it is filled with the cached blocks of requests that have ended: so every page that a request
takes is one that the evictor gives up, as in a server that has run for a while.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from engine.bench.report import Report
from engine.bench.statistics import summary
from engine.bench.workload import Ask, Lengths, draw_asks
from engine.interfaces.executor import ExecutorNeed
from engine.kv.layout import make_layout
from engine.loop.assemble import assemble_core
from engine.plugin import Manifest, Registry, select
from engine.types import wire
from engine.types.messages import Outputs
from engine.types.model import CheckpointFiles, KVSpec, ModelDescription
from engine.types.outputs import CoreOutputs
from engine.types.params import SamplingParams
from engine.types.request import EngineRequest
from engine.types.start import CoreStart, WorkerStart

if TYPE_CHECKING:
    from engine.bench.report import Figure
    from engine.config.settings import EngineConfig
    from engine.loop.engine_core import EngineCore

QUANTILES = (50, 90, 99)
VOCABULARY = 32000
SPARE_TOKENS = 64
"""Room in each slot beyond the measured steps."""
SETTLE_STEPS = 16
"""Steps that are not measured, after the last change of the queues."""
_NULL_WORKER = "engine.bench.null_worker:NullWorker"


@dataclass(frozen=True, kw_only=True)
class SchedulerOptions:
    """What to measure: `steps` steps with `running` requests in slots and `waiting` behind them.

    Args:
        input_len: tokens of a prompt; up to a block more, so that requests fill their blocks in different steps.
    """

    running: int
    waiting: int
    steps: int
    input_len: int


class Parts(NamedTuple):
    """Seconds of one step: the plan, the update with its result, the outputs encoded for another process."""

    schedule: float
    update: float
    encode: float


def measure_scheduler(config: EngineConfig, options: SchedulerOptions) -> Report:
    """Run it. Raises PluginError where a driver cannot be had."""
    registry = Registry.discover()
    core = assemble_core(_start(config, registry, options), registry)
    try:
        _fill_cache(core, config, options)
        _fill_queues(core, config, options)
        pool, done = core.scheduler.kv.pool, core.scheduler.done_step
        evicted = pool.num_candidates
        parts = _measure_parts(core, options.steps)
        evicted -= pool.num_candidates
        whole = _measure_steps(core, options.steps)
        stats = core.stats()
        assert (stats.num_running, stats.num_waiting) == (options.running, options.waiting)
        assert stats.step_id - done >= 2 * options.steps
        core.check_integrity()
    finally:
        core.shutdown()
    return _report(config, options, parts, whole, evicted)


def _start(config: EngineConfig, registry: Registry, options: SchedulerOptions) -> CoreStart:
    """A core whose worker is the null worker; the other drivers are chosen as for any engine."""
    selections = (
        select(registry, "executor", ExecutorNeed(), config.asked("executor"), config.options_for("executor")),
        select(registry, "evictor", None, config.asked("evictor"), config.options_for("evictor")),
        select(
            registry,
            "scheduling_policy",
            None,
            config.asked("scheduling_policy"),
            config.options_for("scheduling_policy"),
        ),
    )
    spec = KVSpec(kind="full", num_kv_heads=1, head_size=1)
    max_model_len = _longest(config, options)
    pages_each = -(-max_model_len // config.block_size)
    worker = WorkerStart(
        choices=Manifest.of(selections).choices,
        model=ModelDescription(
            architecture="none",
            dtype="float32",
            vocab_size=VOCABULARY,
            hidden_size=1,
            num_layers=1,
            num_q_heads=1,
            max_model_len=max_model_len,
            kv_specs=(spec,),
        ),
        files=CheckpointFiles(name="none", folder="", weights=(), config={}),
        layout=make_layout((spec,), block_size=config.block_size, kv_itemsize=4, tokens_per_page={}),
        dtype="float32",
        device="cpu",
        max_model_len=max_model_len,
        max_num_seqs=options.running,
        max_num_batched_tokens=max(config.max_num_batched_tokens, options.running),
        num_kv_pages=1 + options.running * pages_each,
    )
    return CoreStart(
        worker=worker, worker_class=_NULL_WORKER, enable_prefix_caching=True, in_flight=config.in_flight or 2
    )


def _longest(config: EngineConfig, options: SchedulerOptions) -> int:
    return options.input_len + config.block_size + 2 * options.steps + SPARE_TOKENS


def _requests(prefix: str, asks: list[Ask]) -> list[EngineRequest]:
    return [
        EngineRequest(
            request_id=f"{prefix}-{index}",
            prompt_token_ids=ask.prompt,
            params=SamplingParams(max_tokens=ask.output_len, ignore_eos=True, seed=index),
        )
        for index, ask in enumerate(asks)
    ]


def _fill_cache(core: EngineCore, config: EngineConfig, options: SchedulerOptions) -> None:
    """Run requests of one token each until every page holds a cached block."""
    pool, block = core.scheduler.kv.pool, config.block_size
    length = core.scheduler.max_model_len // block * block - block
    count = 2 + pool.num_usable * block // length
    lengths, one = Lengths(length, length), Lengths(1, 1)
    for request in _requests("ended", draw_asks(count, lengths, one, (0, VOCABULARY), config.seed + 1)):
        core.add_request(request)
    while core.has_work():
        core.step()
    assert pool.num_free < block, "the cache is not full of cached blocks"


def _fill_queues(core: EngineCore, config: EngineConfig, options: SchedulerOptions) -> None:
    """Put requests into all slots, and others behind them, and let the slots decode for a while."""
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


def _measure_parts(core: EngineCore, steps: int) -> list[Parts]:
    """The parts of each step, driven by hand with one step under way while the next is planned."""
    scheduler, executor = core.scheduler, core.executor
    while scheduler.outstanding:
        core.step()
    measured: list[Parts] = []
    now = time.perf_counter
    future = None
    for _ in range(steps):
        began = now()
        plan = scheduler.schedule()
        planned = now()
        assert plan is not None
        before, future = future, executor.execute(plan)
        if before is None:
            continue
        result = before.result()
        called = now()
        outputs = scheduler.update(result)
        updated = now()
        wire.encode(Outputs(CoreOutputs(outputs=outputs, stats=core.stats())))
        measured.append(Parts(planned - began, updated - called, now() - updated))
    assert future is not None
    scheduler.update(future.result())
    return measured


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
    config: EngineConfig, options: SchedulerOptions, parts: list[Parts], whole: list[float], evicted: int
) -> Report:
    totals = [sum(step) for step in parts]
    figures: dict[str, Figure] = {
        "bench": "scheduler",
        "running": options.running,
        "waiting": options.waiting,
        "steps": options.steps,
        "input_len": options.input_len,
        "block_size": config.block_size,
        "evicted_pages": evicted,
        **summary("step_ms", totals, QUANTILES, 1e3),
        **summary("schedule_ms", [step.schedule for step in parts], QUANTILES, 1e3),
        **summary("update_ms", [step.update for step in parts], QUANTILES, 1e3),
        **summary("encode_ms", [step.encode for step in parts], QUANTILES, 1e3),
        **summary("core_step_ms", whole, QUANTILES, 1e3),
    }
    figures["step_ms"] = figures["step_ms_p50"]
    report = Report(
        f"engine core without a model: {options.running} running, {options.waiting} waiting, {options.steps} steps",
        figures,
    )
    for label, name in (
        ("step, ms", "step_ms"),
        ("  schedule and plan", "schedule_ms"),
        ("  update", "update_ms"),
        ("  encode the outputs", "encode_ms"),
        ("EngineCore.step, ms", "core_step_ms"),
    ):
        cells = [f"p{q} {figures[f'{name}_p{q}']:.4f}" for q in QUANTILES]
        report.row(label, *cells)
    report.row("pages evicted", str(evicted))
    return report
