"""`python -m tests.benchmarks overhead`: which part of a step is spent outside the executor.

`LLMEngine.step()` is a plan, its execution, the update with its result, and the outputs with their text. Of all this
only the execution is the model's; the rest is what the engine adds to it.
"""

from __future__ import annotations

import contextlib
import cProfile
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from engine.frontend.assemble import InProcessClient
from engine.plugin.points import KV_CONNECTOR
from engine.types.errors import ConfigError
from engine.types.params import SamplingParams
from engine_bench.report import Report
from engine_bench.session import Session, open_session
from engine_bench.statistics import median, summary
from engine_bench.workload import Lengths, draw_asks
from tests.benchmarks import filled
from tests.benchmarks.timed_executor import TimedExecutor, python_share

if TYPE_CHECKING:
    from engine.embedding import EngineConfig
    from engine.loop.engine_core import EngineCore

QUANTILES = (0, 50, 90)
SETTLE_STEPS = 4
"""Steps that are not measured, when all requests decode."""
SPARE_STEPS = 16
"""Further tokens of each request: none may end while others are measured."""


@dataclass(frozen=True, kw_only=True)
class OverheadOptions:
    """What to measure: `steps` steps in which `running` requests decode, each with text.

    Args:
        input_len: tokens of each prompt.
        temperature: of the sampling.
        filled: prompts are not computed: their pages hold other bytes, see `tests.benchmarks.filled`.
    """

    running: int
    steps: int
    input_len: int
    temperature: float
    filled: bool = False


class _Step(NamedTuple):
    """Seconds of one step: the whole, what was spent in the executor, and the processor's time of both."""

    whole: float
    inside: float
    cpu: float
    cpu_inside: float


def measure_overhead(config: EngineConfig, options: OverheadOptions) -> Report:
    """Run it. Raises ConfigError for what does not fit the engine, and the errors of the engine."""
    if options.filled:
        if config.asked("kv_connector") is not None:
            raise ConfigError("--filled", "a connector is named", f"leave {KV_CONNECTOR.option_flag} out")
        config = config.model_copy(update={"points": {**config.points, KV_CONNECTOR.name: filled.NAME}})
    with filled.installed() if options.filled else contextlib.nullcontext(), open_session(config) as session:
        core = _core(session)
        speculation = core.scheduler.drafts.speculation
        tokens_per_step = 1 if speculation is None else 1 + speculation.num_tokens
        profiled = max(2, options.steps // 4)
        # Those that begin first decode while others begin; with drafts a step brings several tokens.
        lasting = (SPARE_STEPS + options.steps + profiled + options.running) * tokens_per_step
        outputs = Lengths(lasting, lasting)
        _check_running(session, options.running)
        session.check_lengths(Lengths(options.input_len, options.input_len), outputs, "--input-len or --steps")
        executor = TimedExecutor(core.executor)
        core.executor = executor
        began = _begin(session, options, lasting, config.seed)
        steps = [_measured(session, executor) for _ in range(options.steps)]
        executor.profile = cProfile.Profile()
        for _ in range(profiled):
            session.engine.step()
        if session.engine.stats().num_running != options.running:
            raise ConfigError(
                f"{options.running} requests at once",
                "the KV cache could not hold them all to the end",
                "raise --kv-cache-memory, or measure fewer --running or --steps",
            )
        return _report(session, options, began, steps, python_share(executor.profile))


def _core(session: Session) -> EngineCore:
    """What the session's engine steps."""
    client = session.engine.client
    assert isinstance(client, InProcessClient)
    return client.core


def _check_running(session: Session, running: int) -> None:
    """Raise ConfigError where so many requests do not find a slot each."""
    if running > (most := session.plan.start.worker.max_num_seqs):
        raise ConfigError(
            f"{running} requests at once",
            f"the engine's max_num_seqs is {most}",
            "raise --max-num-seqs, or measure fewer",
        )


def _begin(session: Session, options: OverheadOptions, output_len: int, seed: int) -> int:
    """Queue the requests, and make steps until all of them decode -> how many."""
    lengths = Lengths(options.input_len, options.input_len), Lengths(output_len, output_len)
    for index, ask in enumerate(draw_asks(options.running, *lengths, (0, session.plan.model.vocab_size), seed)):
        params = SamplingParams(temperature=options.temperature, max_tokens=output_len, ignore_eos=True, seed=index)
        session.engine.add_request(str(index), {"prompt_token_ids": ask.prompt}, params)
    scheduler = _core(session).scheduler
    most, began = options.running * (1 + options.input_len), 0
    while began < most and (len(scheduler.running) < options.running or scheduler.prefilling):
        session.engine.step()
        began += 1
    for _ in range(SETTLE_STEPS):
        session.engine.step()
    return began


def _measured(session: Session, executor: TimedExecutor) -> _Step:
    inside, cpu_inside = executor.seconds, executor.cpu_seconds
    cpu_began, began = time.thread_time(), time.perf_counter()
    session.engine.step()
    whole, cpu = time.perf_counter() - began, time.thread_time() - cpu_began
    return _Step(whole, executor.seconds - inside, cpu, executor.cpu_seconds - cpu_inside)


def _report(session: Session, options: OverheadOptions, began: int, steps: list[_Step], python: float) -> Report:
    whole, inside = median([step.whole for step in steps]), median([step.inside for step in steps])
    outside = [step.whole - step.inside for step in steps]
    cpu, cpu_inside = sum(step.cpu for step in steps), sum(step.cpu_inside for step in steps)
    share = sum(outside) / sum(step.whole for step in steps)
    report = Report(
        f"a step of {session.title()}: {options.running} running, {options.steps} steps",
        {
            "bench": "overhead",
            **session.figures(),
            "running": options.running,
            "steps": options.steps,
            "input_len": options.input_len,
            "filled": options.filled,
            "steps_to_begin": began,
            **summary("step_ms", [step.whole for step in steps], QUANTILES, 1e3),
            **summary("executor_ms", [step.inside for step in steps], QUANTILES, 1e3),
            **summary("outside_ms", outside, QUANTILES, 1e3),
            **summary("outside_cpu_ms", [step.cpu - step.cpu_inside for step in steps], QUANTILES, 1e3),
            "outside_share": share,
            "outside_share_p50": median(outside) / whole,
            "outside_share_cpu": (cpu - cpu_inside) / cpu if cpu else 0.0,
            "executor_share_p50": inside / whole,
            "executor_python_share": python,
        },
    )
    for label, name in (
        ("step, ms", "step_ms"),
        ("  executor", "executor_ms"),
        ("  outside of it", "outside_ms"),
        ("  outside, of processor", "outside_cpu_ms"),
    ):
        cells = [f"{'best' if q == 0 else f'p{q}'} {report.figures[f'{name}_p{q}']:.4f}" for q in QUANTILES]
        report.row(label, *cells)
    report.row(
        "outside, of the time",
        f"{100 * share:.2f} %",
        f"{100 * float(report.figures['outside_share_p50']):.2f} % of medians",
        f"{100 * float(report.figures['outside_share_cpu']):.2f} % of processor",
    )
    report.row("Python in the executor", f"{100 * python:.2f} % of its time at most (by profile)")
    return report
