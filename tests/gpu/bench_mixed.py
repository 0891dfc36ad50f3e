"""Prompts that arrive while others decode: what an arrival takes from those, its steps eager and captured.

python -m tests.gpu.bench_mixed --model dummy:0.6B --title 0.6B
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from engine import EngineConfig, SamplingParams
from engine.embedding import OutputKind
from engine.types.errors import EngineError
from engine_bench.session import Session, open_session
from tests.gpu.bench_engine import wait
from tests.gpu.rows import Row, tell

MODES = {"eager": "never", "captured": "auto"}
"""Of mixed steps, by what `platform.capture_mixed` is set to."""
DECODES, CONTEXT, EVERY = 64, 200, 6
SHORTEST, LONGEST, OUTPUTS = 128, 448, 4
"""Of a prompt that arrives, and what it generates. With the rows that decode it is a step of at most 512 tokens."""
STEADY, ARRIVALS, WARM = 128, 64, 8


class Arrivals:
    """Rows that decode all the time, and prompts that come every few steps.

    Args:
        session: the engine.
    """

    def __init__(self, session: Session) -> None:
        self.engine = session.engine
        self.vocab_size = session.plan.model.vocab_size
        self.random = np.random.default_rng(0)
        self.number = 0
        self.tokens = 0
        self.begun: set[str] = set()

    def ask(self, prompt_len: int, output_len: int) -> str:
        """Queue a request of random ids; its name."""
        self.number += 1
        ids = self.random.integers(0, self.vocab_size, prompt_len).tolist()
        params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
        self.engine.add_request(str(self.number), {"prompt_token_ids": ids}, params, output_kind=OutputKind.DELTA)
        return str(self.number)

    def step(self) -> float:
        """Seconds until the next step's tokens came. Raises a request's error."""
        began = time.perf_counter()
        for output in self.engine.step():
            if output.error is not None:
                raise output.error
            self.tokens += len(output.outputs[0].token_ids)
            self.begun.add(output.request_id)
        return time.perf_counter() - began

    def settle(self) -> None:
        """All rows decode."""
        steps = STEADY + (WARM + ARRIVALS) * EVERY * 2 + 64
        names = {self.ask(CONTEXT, steps) for _ in range(DECODES)}
        while not names <= self.begun:
            self.step()
        for _ in range(8):
            self.step()
        wait()

    def arrive(self, count: int) -> tuple[list[float], list[float], list[tuple[float, int]]]:
        """So many prompts, one after the other.

        Returns the seconds of every step; of every prompt to its first token; and of every prompt the seconds and the
        steps from its coming until all its work is behind.
        """
        gaps, firsts, spans = [], [], []
        for length in self.random.integers(SHORTEST, LONGEST + 1, count):
            name, first, taken = self.ask(int(length), OUTPUTS), 0.0, []
            while name not in self.begun:
                taken.append(self.step())
                first += taken[-1]
            while len(taken) < EVERY:
                taken.append(self.step())
            gaps += taken
            firsts.append(first)
            spans.append((sum(taken), len(taken)))
        return gaps, firsts, spans


def of(values: Sequence[float]) -> str:
    """The median and the 99th percentile, in milliseconds."""
    half, most = np.percentile(values, (50, 99)) * 1e3
    return f"{half:.2f} / {most:.2f}"


def measure(session: Session, what: str) -> Row:
    """One engine's row."""
    work = Arrivals(session)
    work.settle()
    steady = float(np.median([work.step() for _ in range(STEADY)]))
    work.arrive(WARM)
    wait()
    work.tokens, began = 0, time.perf_counter()
    gaps, firsts, spans = work.arrive(ARRIVALS)
    wait()
    rate = work.tokens / (time.perf_counter() - began)
    added = [seconds - steps * steady for seconds, steps in spans]
    work.engine.abort_request([str(number) for number in range(1, work.number + 1)])
    while work.engine.has_unfinished_requests():
        work.engine.step()
    figures = {
        "steady_ms": steady * 1e3,
        "tokens_s": rate,
        "added_p50_ms": float(np.median(added)) * 1e3,
        "added_p99_ms": float(np.percentile(added, 99)) * 1e3,
        "gap_p99_ms": float(np.percentile(gaps, 99)) * 1e3,
        "first_p50_ms": float(np.median(firsts)) * 1e3,
    }
    result = (
        f"{rate:,.0f} tokens/s; ms at p50 / p99: an arrival adds {of(added)}, between tokens {of(gaps)}, "
        f"first token {of(firsts)}; a step without arrivals {steady * 1e3:.2f} ms"
    )
    return Row(what=what, result=result, figures=figures)


def run(asked: argparse.Namespace) -> None:
    """One engine, in this process."""
    settings: dict[str, Any] = {
        "model": asked.model,
        "platform": "cuda",
        "platform.capture": "always",
        "attention": "triton",
        "dtype": "bfloat16",
        "max_model_len": 2048,
        "max_num_seqs": DECODES + 16,
        "enable_prefix_caching": False,
        "platform.capture_mixed": MODES[asked.mode],
    }
    settings |= dict(setting.split("=", 1) for setting in asked.set)
    what = f"{asked.title}, {DECODES} rows decode, a prompt every {EVERY} steps: {asked.mode}"
    began = time.perf_counter()
    try:
        with open_session(EngineConfig(**settings)) as session:
            started = time.perf_counter() - began
            row = measure(session, what)
            row.result += f"; started in {started:.1f} s"
            tell(row)
    except (EngineError, RuntimeError) as error:
        tell(Row(what=what, result=f"failed: {type(error).__name__}: {error}"[:300]))


def main() -> None:
    """One row a mode, each in a process of its own."""
    flags = argparse.ArgumentParser(prog="python -m tests.gpu.bench_mixed", description=__doc__)
    flags.add_argument("--model", default="dummy:0.6B")
    flags.add_argument("--title", default="0.6B")
    flags.add_argument("--mode", choices=MODES, help="one alone, in this process")
    flags.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="settings of the engine")
    asked = flags.parse_args()
    if asked.mode is not None:
        run(asked)
        return
    for mode in MODES:
        subprocess.run([sys.executable, "-m", "tests.gpu.bench_mixed", *sys.argv[1:], "--mode", mode], check=False)


if __name__ == "__main__":
    main()
