"""One setting offline, step by step: `python -m tests.gpu.rehearsal.offline NAME`, which the command calls."""

from __future__ import annotations

import gc
import statistics
import sys
import time
from typing import Any

import numpy as np
import torch

from engine import LLM, SamplingParams
from tests.gpu.rehearsal.counts import Counters, launches, waits
from tests.gpu.rehearsal.report import tell
from tests.gpu.rehearsal.settings import BASE, SETTINGS, Setting

ROWS = (1, 8)
PROMPT, WARM, STEPS, ARRIVALS = 100, 8, 32, 8


def params(setting: Setting, row: int) -> SamplingParams:
    """More tokens than are rehearsed: no row ends among the steps that are counted."""
    drawn: dict[str, Any] = {"temperature": 0.0}
    if setting.sampled:
        drawn = {"temperature": 0.8, "top_p": 0.9, "top_k": 50, "seed": row}
    return SamplingParams(max_tokens=4 * (WARM + STEPS), ignore_eos=True, **drawn)


def decode(engine: Any, setting: Setting, rows: int, counters: Counters, arrive: bool = False) -> dict[str, Any]:
    """Steps in which `rows` rows decode: milliseconds of the host, launches by name, what waited for the device. With
    `arrive` a prompt is computed beside them in each."""
    draw, names, begun = np.random.default_rng(0), [f"{rows}-{row}" for row in range(rows)], set()
    for row, name in enumerate(names):
        prompt = {"prompt_token_ids": draw.integers(1, 250, PROMPT).tolist()}
        engine.add_request(name, prompt, params(setting, row))

    def step(arrives: bool = False) -> None:
        if arrives:
            begun.add(arrival := f"prompt {len(begun)}")
            prompt = {"prompt_token_ids": draw.integers(1, 250, PROMPT).tolist()}
            engine.add_request(arrival, prompt, SamplingParams(temperature=0.0, max_tokens=1))
        for output in engine.step():
            if output.error is not None:
                raise output.error
            begun.add(output.request_id)

    while len(begun) < rows:
        step()
    for _ in range(WARM):
        step(arrive)
    gc.collect()
    torch.cuda.set_sync_debug_mode("error")
    counters.reset()
    taken = []
    steps = ARRIVALS if arrive else STEPS
    for _ in range(steps):
        start = time.perf_counter()
        step(arrive)
        taken.append(1000 * (time.perf_counter() - start))
    counted = counters.read()
    torch.cuda.set_sync_debug_mode("default")
    engine.abort_request(names)
    while engine.has_unfinished_requests():
        engine.step()
    return {
        "rows": rows,
        "milliseconds": round(statistics.median(taken), 3),
        "arrive": arrive,
        "graphs": round(counted.get("graphs", 0) / steps, 2),
        "launches": launches(counted, steps),
        "waits": waits(counted, steps),
    }


def main(name: str) -> None:
    """Tells the command of each number of rows."""
    setting = next(each for each in SETTINGS if each.name == name)
    counters, start = Counters(), time.perf_counter()
    with LLM(model=setting.model, **{**BASE, **setting.changes}) as llm:
        tell({"started": round(time.perf_counter() - start, 1)})
        for rows in ROWS:
            tell(decode(llm.llm_engine, setting, rows, counters))
        if setting.arrive:
            tell(decode(llm.llm_engine, setting, ROWS[-1], counters, arrive=True))
    tell({"ended": True})


if __name__ == "__main__":
    main(sys.argv[1])
