"""`engine bench throughput`: a whole batch offline, as `LLM.generate` runs it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.types.params import SamplingParams
from engine_bench.counting import Work
from engine_bench.probe import probe
from engine_bench.report import Report
from engine_bench.roofline import add_achieved, add_machine, best
from engine_bench.session import Session, open_session
from engine_bench.workload import Ask, Lengths, draw_asks
from engine_kit.llm import LLM

if TYPE_CHECKING:
    from engine.embedding import EngineConfig
    from engine.types.outputs import RequestOutput

_WARMUP = Lengths(8, 8)


@dataclass(frozen=True, kw_only=True)
class ThroughputOptions:
    """What to measure. nano-vllm's bench is 256 requests with 100 to 1024 tokens in and 100 to 1024 out, drawn
    uniformly, at temperature 0.6 with end of sequence ignored."""

    num_requests: int
    inputs: Lengths
    outputs: Lengths
    temperature: float


def measure_throughput(config: EngineConfig, options: ThroughputOptions) -> Report:
    """Run it. Raises ConfigError for lengths that do not fit, and the errors of the engine."""
    with open_session(config) as session:
        session.check_lengths(options.inputs, options.outputs)
        ids = (0, session.plan.model.vocab_size)
        asks = draw_asks(options.num_requests, options.inputs, options.outputs, ids, config.seed)
        _generate(session, draw_asks(1, _WARMUP, _WARMUP, ids, config.seed + 1), options.temperature)
        before = probe(session.dtype)
        first, began = session.engine.stats(), time.perf_counter()
        outputs = _generate(session, asks, options.temperature)
        seconds, last = time.perf_counter() - began, session.engine.stats()
        after = probe(session.dtype)

        steps = last.step_id - first.step_id
        report = _report(session, options, outputs, seconds, steps)
        report.figures["num_preemptions"] = last.num_preemptions - first.num_preemptions
        add_achieved(report, "achieved", "", count_batch(session, asks, outputs, steps), seconds, best(before, after))
        add_machine(report, before, after)
        return report


def _generate(session: Session, asks: list[Ask], temperature: float) -> list[RequestOutput]:
    params = [SamplingParams(temperature=temperature, max_tokens=ask.output_len, ignore_eos=True) for ask in asks]
    prompts = [{"prompt_token_ids": ask.prompt} for ask in asks]
    return LLM.from_engine(session.engine).generate(prompts, params, use_tqdm=False)  # type: ignore[arg-type]


def count_batch(session: Session, asks: list[Ask], outputs: list[RequestOutput], steps: int) -> Work:
    """The work of a batch: the weights once a step; each prompt as one chunk after what the prefix cache held; each
    further token by itself. What preemption made the engine compute again is not counted: it is of no use to anyone.
    """
    counter = session.counter
    work = counter.steps(steps)
    for ask, output in zip(asks, outputs, strict=True):
        n, cached = len(ask.prompt), output.num_cached_tokens
        work += counter.chunk(cached, n - cached, sampled=1)
        work += counter.decodes(n, len(output.outputs[0].token_ids) - 1)
    return work


def _report(
    session: Session, options: ThroughputOptions, outputs: list[RequestOutput], seconds: float, steps: int
) -> Report:
    tokens_in = sum(len(output.prompt_token_ids) for output in outputs)
    tokens_out = sum(len(output.outputs[0].token_ids) for output in outputs)
    title = (
        f"throughput of {session.title()}: {options.num_requests} requests at once, "
        f"{options.inputs} tokens in, {options.outputs} out"
    )
    report = Report(
        title,
        {
            "bench": "throughput",
            **session.figures(),
            "num_requests": len(outputs),
            "seconds": seconds,
            "steps": steps,
            "input_tokens": tokens_in,
            "output_tokens": tokens_out,
            "requests_per_s": len(outputs) / seconds,
            "output_tokens_per_s": tokens_out / seconds,
            "total_tokens_per_s": (tokens_in + tokens_out) / seconds,
        },
    )
    report.row("requests", f"{len(outputs)} in {seconds:.2f} s", f"{len(outputs) / seconds:.2f} requests/s")
    report.row("output tokens", f"{tokens_out}", f"{tokens_out / seconds:.1f} tokens/s")
    total = tokens_in + tokens_out
    report.row("all tokens", f"{total}", f"{total / seconds:.1f} tokens/s")
    report.row("steps", f"{steps}", f"{seconds / steps * 1e3:.2f} ms a step")
    return report
