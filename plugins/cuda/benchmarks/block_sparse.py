"""What `block_sparse` costs by length beside the reference's full attention, both in plain torch on the processor:
`python plugins/cuda/benchmarks/block_sparse.py`. One thread; medians of five turns (A B A B) of one layer's attention,
of a decode of one token, and of the last 1,024 tokens of a prompt."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch

from engine_sdk.conformance.attention.case import Case, Form
from engine_sdk.conformance.contexts import worker_context
from engine_sdk.conformance.subject import Subject

FORM = Form(num_kv_heads=4, group_size=2, head_size=64)
LENGTHS, CHUNK, TURNS = (2048, 8192, 32768), 1024, 5
OPTIONS = {"block": 64, "local": 4, "stride": 8, "sinks": 1, "plain": True}


def forward(driver: str, options: dict[str, object], rows: list[range]) -> Callable[[], None]:
    """A step's plan and one layer's attention."""
    subject = Subject.installed("attention", driver, options)
    body = subject.body()(worker_context(subject))
    case = Case(FORM, rows, int(len(rows[0]) == 1), FORM.block_size)
    cache, (out, _) = case.write_history(body), case.outputs()
    body.write(case.layer, case.new_k, case.new_v, cache, body.plan(case.batch, case.group))

    def run() -> None:
        plan = body.plan(case.batch, case.group)
        body.forward(case.layer, case.q, case.new_k, case.new_v, cache, plan, out)

    return run


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    print(f"pattern {OPTIONS}; 8 query heads, 4 KV heads of 64, float32; milliseconds")
    print(f"{'':24}{'keys':>8}{'torch':>10}{'block_sparse':>14}")
    for what, count in (("decode", 1), (f"prompt, last {CHUNK:,}", CHUNK)):
        for length in LENGTHS:
            rows = [range(length - count, length)]
            runs = [partial(forward, "torch", {}), partial(forward, "block_sparse", dict(OPTIONS))]
            made = [run(rows) for run in runs]
            seconds: list[list[float]] = [[], []]
            for turn in range(TURNS + 1):
                for run, took in zip(made, seconds, strict=True):
                    start = time.thread_time()
                    run()
                    if turn:
                        took.append(time.thread_time() - start)
            full, sparse = (statistics.median(took) * 1e3 for took in seconds)
            print(f"{what:24}{length:8,}{full:10.2f}{sparse:14.2f}")


if __name__ == "__main__":
    main()
