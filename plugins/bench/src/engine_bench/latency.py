"""`engine bench latency`: one stream at a time."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

from engine.embedding import OutputKind
from engine.types.errors import ConfigError
from engine.types.params import SamplingParams
from engine_bench.counting import Work
from engine_bench.probe import probe
from engine_bench.report import Report
from engine_bench.roofline import add_achieved, add_machine, best
from engine_bench.session import Session, open_session
from engine_bench.statistics import median, summary
from engine_bench.workload import Ask, Lengths, draw_asks

if TYPE_CHECKING:
    from engine.embedding import EngineConfig

QUANTILES = (10, 50, 90)


@dataclass(frozen=True, kw_only=True)
class LatencyOptions:
    """What to measure: `repeats` streams after `warmup` unmeasured ones, each with a prompt of its own."""

    input_len: int
    output_len: int
    repeats: int
    warmup: int


@dataclass
class Stream:
    """When the tokens of one request came, in seconds from the call that queued it."""

    times: list[float] = field(default_factory=list)

    @property
    def ttft(self) -> float:
        """Time to the first token."""
        return self.times[0]

    @property
    def gaps(self) -> list[float]:
        """From each token to the next."""
        return [after - before for before, after in pairwise(self.times)]

    @property
    def decode_seconds(self) -> float:
        """From the first token to the last."""
        return self.times[-1] - self.times[0]


def measure_latency(config: EngineConfig, options: LatencyOptions) -> Report:
    """Run it. Raises ConfigError for lengths that do not fit, and the errors of the engine."""
    if options.output_len < 2:
        raise ConfigError(
            f"--output-len {options.output_len}", "one token has no time between tokens", "ask for at least 2"
        )
    with open_session(config) as session:
        inputs, outputs = Lengths(options.input_len, options.input_len), Lengths(options.output_len, options.output_len)
        session.check_lengths(inputs, outputs)
        ids = (0, session.plan.model.vocab_size)
        asks = draw_asks(options.warmup + options.repeats, inputs, outputs, ids, config.seed)
        for index, ask in enumerate(asks[: options.warmup]):
            run_stream(session, f"warmup-{index}", ask)
        before = probe(session.dtype)
        streams = [run_stream(session, f"{index}", ask) for index, ask in enumerate(asks[options.warmup :])]
        after = probe(session.dtype)
        report = _report(session, options, streams)
        machine = best(before, after)
        prefill, decode = count_stream(session, options)
        add_achieved(
            report, "prefill achieved", "prefill_", prefill, median([stream.ttft for stream in streams]), machine
        )
        add_achieved(report, "decode achieved", "decode_", decode, median([s.decode_seconds for s in streams]), machine)
        add_machine(report, before, after)
        return report


def run_stream(session: Session, request_id: str, ask: Ask) -> Stream:
    """One request, alone, its tokens drawn greedily. Raises its error."""
    engine, stream = session.engine, Stream()
    params = SamplingParams(temperature=0.0, max_tokens=ask.output_len, ignore_eos=True)
    began = time.perf_counter()
    engine.add_request(request_id, {"prompt_token_ids": ask.prompt}, params, output_kind=OutputKind.DELTA)
    while engine.has_unfinished_requests():
        for output in engine.step():
            now = time.perf_counter() - began
            if output.error is not None:
                raise output.error
            stream.times += [now] * len(output.outputs[0].token_ids)
    return stream


def count_stream(session: Session, options: LatencyOptions) -> tuple[Work, Work]:
    """The work until the first token (the prompt in chunks of the step's budget), and that from there to the last."""
    counter, budget = session.counter, session.plan.config.max_num_batched_tokens
    prefill = Work()
    for start in range(0, options.input_len, budget):
        size = min(budget, options.input_len - start)
        prefill += counter.steps(1) + counter.chunk(start, size, sampled=int(start + size == options.input_len))
    steps = options.output_len - 1
    return prefill, counter.steps(steps) + counter.decodes(options.input_len, steps)


def _report(session: Session, options: LatencyOptions, streams: list[Stream]) -> Report:
    rate = median([(len(stream.times) - 1) / stream.decode_seconds for stream in streams])
    title = (
        f"latency of {session.title()}: one stream, {options.input_len} tokens in, {options.output_len} out, "
        f"{options.repeats} times"
    )
    report = Report(
        title,
        {
            "bench": "latency",
            **session.figures(),
            "input_len": options.input_len,
            "output_len": options.output_len,
            "repeats": options.repeats,
            "output_tokens": sum(len(stream.times) for stream in streams),
            **summary("ttft_ms", [stream.ttft for stream in streams], QUANTILES, 1e3),
            **summary("itl_ms", [gap for stream in streams for gap in stream.gaps], QUANTILES, 1e3),
            **summary("e2e_ms", [stream.times[-1] for stream in streams], QUANTILES, 1e3),
            "decode_tokens_per_s": rate,
        },
    )
    report.quantiles("time to first token, ms", "ttft_ms", QUANTILES)
    report.quantiles("time per token, ms", "itl_ms", QUANTILES)
    report.quantiles("whole request, ms", "e2e_ms", QUANTILES)
    report.row("decoding", f"{rate:.1f} tokens/s")
    return report
