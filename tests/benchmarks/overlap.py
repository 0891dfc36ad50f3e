"""`python -m tests.benchmarks overlap`: how much of a device's time the engine's own work leaves unused.

An executor whose device takes a fixed time for each step (see `device_executor`) serves requests that decode, some of
them under a constraint of a real grammar driver: a choice of long texts. A device that never waits gives
`running / step time` tokens per second; what arrives at the engine core's output is compared with that.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from engine.interfaces.context import GrammarContext
from engine.interfaces.grammar import Grammar, GrammarCard
from engine.plugin import Registry, choose
from engine.plugin.points import GRAMMAR
from engine.scheduling.gates import Gates
from engine.scheduling.matchers import GrammarDriver
from engine.scheduling.structured import Constraints
from engine.types.params import SamplingParams
from engine.types.request import EngineRequest
from engine.types.structured_outputs import StructuredOutputsParams
from engine_bench.report import Report
from tests.benchmarks.device_executor import DeviceExecutor
from tests.benchmarks.null_core import VOCABULARY, NullSizes, null_core

if TYPE_CHECKING:
    from engine.embedding import EngineConfig
    from engine.loop.engine_core import EngineCore
    from engine_bench.report import Figure

SETTLE_STEPS = 20
"""Steps that are not measured, after all requests have begun to decode."""
TEXTS = 4
"""To choose from; each is longer than what is measured, so that no request ends."""


@dataclass(frozen=True, kw_only=True)
class OverlapOptions:
    """What to measure.

    Args:
        running: requests that decode.
        constrained: of these, under a constraint.
        step_ms: what the device takes for a step.
        steps: measured in each round.
        rounds: of which the best is reported beside the median.
        input_len: tokens of a prompt.
    """

    running: int
    constrained: int
    step_ms: float
    steps: int
    rounds: int
    input_len: int


def measure_overlap(config: EngineConfig, options: OverlapOptions) -> Report:
    """Run it. Raises PluginError where a driver cannot be had."""
    most = options.steps * options.rounds + SETTLE_STEPS + 64
    sizes = NullSizes(
        max_num_seqs=options.running,
        max_num_batched_tokens=max(config.max_num_batched_tokens or 2048, options.running),
        max_model_len=options.input_len + 2 * most,
    )
    core = null_core(config, sizes)
    core.executor.shutdown()
    core.executor = DeviceExecutor(options.step_ms / 1e3, core.worker_ready.num_pages)
    rng = random.Random(0)
    constraint = StructuredOutputsParams(choice=["".join(rng.choices("abcdefgh", k=most)) for _ in range(TEXTS)])
    constraints, grammar = _constraints(config, constraint)
    core.scheduler.states.constraints = constraints
    core.scheduler.states.gates = Gates([constraints])
    try:
        _begin(core, options, most, constraint)
        rounds = [_measure(core, options.steps) for _ in range(options.rounds)]
        assert len(core.scheduler.running) == options.running, "a request ended"
        core.check_integrity()
    finally:
        core.shutdown()
    return _report(options, rounds, grammar if options.constrained else "")


def _constraints(config: EngineConfig, constraint: StructuredOutputsParams) -> tuple[Constraints, str]:
    """The first grammar driver for choices, over a vocabulary whose first 256 ids are the bytes, and its name; it has
    compiled the constraint once, so that the requests under it do not begin when the others have ended."""
    registry = Registry.discover(plugins=config.plugin_list)
    asked, options = config.asked("grammar"), config.options_for("grammar")
    chosen, *_ = choose(registry, GRAMMAR, {"choice": None}, asked, options)
    vocabulary = [bytes([token]) if token < 256 else None for token in range(VOCABULARY)]
    context = GrammarContext(vocab_size=VOCABULARY, vocabulary=lambda: vocabulary, options=chosen.options)
    grammar: Grammar = chosen.load_body()(context)
    grammar.compile(constraint, ())
    driver = GrammarDriver(chosen.candidate, cast("type[GrammarCard]", chosen.card), grammar)
    return Constraints({"choice": [driver]}, VOCABULARY), chosen.candidate.name


def _begin(core: EngineCore, options: OverlapOptions, most: int, constraint: StructuredOutputsParams) -> None:
    """Add the requests, and let all of them decode for a while."""
    rng = random.Random(0)
    for index in range(options.running):
        core.add_request(
            EngineRequest(
                request_id=f"request-{index}",
                prompt_token_ids=[rng.randrange(VOCABULARY) for _ in range(options.input_len)],
                params=SamplingParams(
                    max_tokens=2 * most,
                    ignore_eos=True,
                    seed=index,
                    structured_outputs=constraint if index < options.constrained else None,
                ),
            )
        )
    while len(core.scheduler.running) < options.running or core.scheduler.prefilling:
        core.step()
    for _ in range(SETTLE_STEPS):
        core.step()


@dataclass(frozen=True)
class _Round:
    """One measurement: tokens at the core's output, and the seconds that passed and that the loop's thread computed."""

    tokens: int
    seconds: float
    cpu_seconds: float


def _measure(core: EngineCore, steps: int) -> _Round:
    tokens, began, cpu = 0, time.monotonic(), time.thread_time()
    for _ in range(steps):
        tokens += sum(len(output.new_token_ids) for output in core.step().outputs)
    return _Round(tokens, time.monotonic() - began, time.thread_time() - cpu)


def _report(options: OverlapOptions, rounds: list[_Round], grammar: str) -> Report:
    most = options.running / (options.step_ms / 1e3)
    rates = sorted(one.tokens / one.seconds for one in rounds)
    median = rates[len(rates) // 2]
    cpu = min(one.cpu_seconds for one in rounds) / options.steps
    figures: dict[str, Figure] = {
        "bench": "overlap",
        "running": options.running,
        "constrained": options.constrained,
        "grammar": grammar,
        "device_step_ms": options.step_ms,
        "steps": options.steps,
        "rounds": options.rounds,
        "tokens_per_second": rates[-1],
        "share": rates[-1] / most,
        "share_median": median / most,
        "loop_cpu_ms": cpu * 1e3,
    }
    constrained = f"{options.constrained} of them constrained" + (f" by {grammar}" if grammar else "")
    report = Report(
        f"a device that takes {options.step_ms:g} ms a step: {options.running} running, {constrained}, "
        f"{options.rounds} rounds of {options.steps} steps",
        figures,
    )
    report.row("tokens/s", f"best {rates[-1]:,.0f}", f"median {median:,.0f}", f"the device's {most:,.0f}")
    report.row("share of the device's", f"best {rates[-1] / most:.3f}", f"median {median / most:.3f}")
    report.row("loop's CPU, ms a step", f"best {cpu * 1e3:.3f}")
    return report
