"""The engine on models of real dimensions: decoding one stream and 256, a long prompt, nano-vllm's requests.

python -m tests.gpu.bench_engine --model dummy:llama-8B --title 8B --work decode1,decode256,prefill
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import numpy as np
import torch

from engine import LLM, EngineConfig, SamplingParams
from engine.frontend.request_state import OutputKind
from engine.types.errors import EngineError
from engine.types.start import WorkerStart
from engine_bench.session import Session, open_session
from tests.gpu.device_time import busy_seconds
from tests.gpu.roofline import Bits, Limits, decode_operations, least_seconds
from tests.gpu.rows import Row, tell
from tests.gpu.workload import nano_vllm

BARS = {
    ("0.6B", "decode1"): 0.62,
    ("8B", "decode1"): 3.95,
    ("0.6B", "decode256"): 8.5,
    ("8B", "decode256"): 14.5,
    ("8B", "prefill"): 200.0,
    ("8B fp8", "decode256"): 9.5,
    ("8B fp8", "prefill"): 130.0,
}
"""Milliseconds at most, on an H200 (other cards: read the shares beside them)."""
NANO_BAR, HOST_BAR = 27_000.0, 0.03
ROWS, CONTEXT, WINDOW, PROFILED = 256, 1024, 96, 16
PROMPT = 8192


def wait() -> None:
    """For the device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def in_fp8(start: WorkerStart) -> Bits:
    """What of the chosen engine is kept in 8 bits."""
    kinds = {choice.kind for choice in start.choices if (choice.point, choice.driver) == ("quantization", "fp8")}
    return Bits("linear" in kinds, "head" in kinds, (start.kv_cache_dtype or "").startswith("float8"))


class Bench:
    """One engine, measured.

    Args:
        session: it.
        title: of the model in the table.
        limits: of this machine, for the roofline.
    """

    def __init__(self, session: Session, title: str, limits: Limits) -> None:
        self.session = session
        self.fp8 = in_fp8(session.plan.start.worker)
        self.engine = session.engine
        self.title = title
        self.limits = limits
        self.number = 0
        self.random = np.random.default_rng(0)
        self.begun: set[str] = set()

    def bar(self, work: str, seconds: float) -> dict[str, Any]:
        """What a row says of a bar in milliseconds."""
        most = BARS.get((self.title, work))
        return {"share": "ms", "figures": {"ms": seconds * 1e3}, "bar": most, "at_most": True, "unit": "ms"}

    def ask(self, prompt_len: int, output_len: int) -> None:
        """Queue a request of random ids."""
        ids = self.random.integers(0, self.session.plan.model.vocab_size, prompt_len).tolist()
        params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
        self.number += 1
        self.engine.add_request(str(self.number), {"prompt_token_ids": ids}, params, output_kind=OutputKind.DELTA)

    def step(self) -> int:
        """The tokens of one step. Raises a request's error."""
        tokens = 0
        for output in self.engine.step():
            if output.error is not None:
                raise output.error
            tokens += len(output.outputs[0].token_ids)
            self.begun.add(output.request_id)
        return tokens

    def finish(self) -> None:
        """Step until no request is left."""
        while self.engine.has_unfinished_requests():
            self.step()

    def decode_seconds(self, rows: int, prompt_len: int, steps: int) -> tuple[float, float]:
        """Of one step in which all of so many rows decode: (seconds, of these the device's own, 0 where the profiler
        does not say), measured apart, one after the other."""
        for _ in range(rows):
            self.ask(prompt_len, steps + 2 * PROFILED + 24)
        self.begun.clear()
        while len(self.begun) < rows:  # each has its first token then
            self.step()
        for _ in range(4):
            self.step()
        wait()
        began, tokens = time.perf_counter(), 0
        while tokens < rows * steps:
            tokens += self.step()
        seconds = (time.perf_counter() - began) / (tokens / rows)
        busy = busy_seconds(self.step, PROFILED, f"{self.title}, {rows} rows of {prompt_len} and more")
        self.finish()
        return seconds, busy

    def decode1(self) -> Iterator[Row]:
        """One stream."""
        self.decode_seconds(1, 120, 8)
        seconds, _ = self.decode_seconds(1, 128, 128)
        work = self.session.counter.steps(1) + self.session.counter.decodes(200, 1)
        yield Row(
            what=f"{self.title}, batch 1 decode",
            fp8=self.fp8.linear,
            result=f"{seconds * 1e3:.2f} ms, {1 / seconds:,.0f} tokens/s",
            gb_s=work.read_bytes / seconds / 1e9,
            tflop_s=work.flops / seconds / 1e12,
            **self.bar("decode1", seconds),
        )

    def decode256(self) -> Iterator[Row]:
        """Many rows, at about a thousand tokens of context; and what of a step the device waits for the host."""
        prompt_len = CONTEXT - WINDOW // 2
        seconds, busy = self.decode_seconds(ROWS, prompt_len, WINDOW)
        config = self.session.plan.model.config
        operations = decode_operations(config, ROWS, CONTEXT, self.fp8)
        least = least_seconds(operations, self.limits)
        yield Row(
            what=f"{self.title}, batch {ROWS} decode at {CONTEXT} context",
            result=f"{seconds * 1e3:.2f} ms, {ROWS / seconds:,.0f} tokens/s; roofline {least * 1e3:.2f} ms "
            f"({least / seconds:.0%})",
            gb_s=sum(operation.num_bytes for operation in operations) / seconds / 1e9,
            tflop_s=sum(operation.flops for operation in operations) / seconds / 1e12,
            fp8=self.fp8.linear,
            **self.bar("decode256", seconds),
        )
        if busy:
            hidden = max(0.0, 1 - busy / seconds)
            yield Row(
                what=f"{self.title}, batch {ROWS}: host time not hidden",
                result=f"the device is busy {busy * 1e3:.2f} ms of {seconds * 1e3:.2f} ms",
                share="not_hidden",
                figures={"not_hidden": hidden},
                bar=HOST_BAR,
                at_most=True,
            )

    def prefill(self) -> Iterator[Row]:
        """One long prompt, several times."""
        times = []
        for _ in range(5):
            self.ask(PROMPT, 1)
            wait()
            began = time.perf_counter()
            self.finish()
            times.append(time.perf_counter() - began)
        seconds = median(times[1:])
        self.ask(PROMPT, 1)
        busy_seconds(self.finish, 1, f"{self.title}, a prompt of {PROMPT}")
        work = self.session.counter.steps(1) + self.session.counter.chunk(0, PROMPT, sampled=1)
        yield Row(
            what=f"{self.title}, 8k prefill",
            fp8=self.fp8.linear,
            result=f"{seconds * 1e3:.1f} ms, {PROMPT / seconds:,.0f} tokens/s",
            gb_s=work.read_bytes / seconds / 1e9,
            tflop_s=work.flops / seconds / 1e12,
            **self.bar("prefill", seconds),
        )

    def nano(self) -> Iterator[Row]:
        """nano-vllm's requests, offline."""
        requests = nano_vllm()
        llm = LLM.from_engine(self.engine)
        prompts: list[Any] = [{"prompt_token_ids": request.prompt} for request in requests]
        params = [SamplingParams(temperature=0.6, max_tokens=r.output_len, ignore_eos=True) for r in requests]
        llm.generate(prompts[:8], SamplingParams(temperature=0.6, max_tokens=16, ignore_eos=True), use_tqdm=False)
        self.engine.call("reset_prefix_cache")
        wait()
        began = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - began
        tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        yield Row(
            what=f"nano-vllm's workload, {self.title}",
            result=f"{tokens:,} tokens in {seconds:.2f} s",
            share="tokens_s",
            figures={"tokens_s": tokens / seconds},
            bar=NANO_BAR if self.title == "0.6B" else None,
            unit="tokens/s",
        )


WORK: dict[str, Callable[[Bench], Iterator[Row]]] = {
    "decode1": Bench.decode1,
    "nano": Bench.nano,
    "prefill": Bench.prefill,
    "decode256": Bench.decode256,
}


def main() -> None:
    """Measure what is asked for, and tell each row as soon as it is known."""
    flags = argparse.ArgumentParser(prog="python -m tests.gpu.bench_engine", description=__doc__)
    flags.add_argument("--model", required=True)
    flags.add_argument("--title", required=True)
    flags.add_argument("--work", default=",".join(WORK))
    flags.add_argument("--gb-s", type=float, default=1e9, help="of this machine")
    flags.add_argument("--tflop-s", type=float, default=1e9, help="of this machine, in bf16")
    flags.add_argument("--fp8-tflop-s", type=float, help="in fp8; left out, twice as many: data sheets say so")
    flags.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="settings of the engine")
    asked = flags.parse_args()
    settings: dict[str, Any] = {
        "model": asked.model,
        "platform": "cuda",
        "dtype": "bfloat16",
        "max_model_len": PROMPT + 64,
        "max_num_seqs": ROWS,
        "max_num_batched_tokens": 16384,
        "enable_prefix_caching": False,
        "platform.capture": "always",  # a step that cannot be captured fails here, and is not timed as it is
    }
    settings |= dict(setting.split("=", 1) for setting in asked.set)
    began = time.perf_counter()
    with open_session(EngineConfig(**settings)) as session:
        print(f"drivers: {[(c.point, c.kind, c.driver) for c in session.plan.start.worker.choices]}", flush=True)
        print(f"captured: {session.ready.captured}, because not: {session.ready.not_captured}", flush=True)
        attention = [choice.driver for choice in session.plan.start.worker.choices if choice.point == "attention"]
        tell(
            Row(
                what=f"{asked.title}: start",
                result=f"{time.perf_counter() - began:.1f} s, {session.ready.num_parameters / 1e9:.2f} G parameters, "
                f"{len(session.ready.captured)} captured buckets, attention {', '.join(dict.fromkeys(attention))}",
            )
        )
        limits = Limits(asked.gb_s, asked.tflop_s, asked.fp8_tflop_s or 2 * asked.tflop_s)
        bench = Bench(session, asked.title, limits)
        for name in asked.work.split(","):
            try:
                for row in WORK[name](bench):
                    tell(row)
            except (EngineError, RuntimeError) as error:
                tell(Row(what=f"{asked.title}: {name}", result=f"failed: {type(error).__name__}: {error}"[:300]))
                bench.engine.abort_request([str(number) for number in range(1, bench.number + 1)])
                bench.finish()
            gc.collect()


if __name__ == "__main__":
    main()
