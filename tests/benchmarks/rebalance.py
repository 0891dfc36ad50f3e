"""What moving experts between ranks costs a step: `python -m tests.benchmarks.rebalance`.

Two engines of two ranks with whole experts decode the same requests in turns (A B A B): in one the experts stay where
they are, in the other they are dealt anew every so many steps and move, by whatever tokens choose. Prints the
median, the 99th percentile and the longest of their steps, and by how much the longest step of the second is longer
than the first's median: that is what one step stalls at most. The bar is 50 ms. Nothing else should compute on the
machine, which needs two processors and memory for two models.
"""

from __future__ import annotations

import argparse
import time
from contextlib import ExitStack
from typing import Any

import numpy as np

from engine import LLM, SamplingParams
from tests.benchmarks.peers.checkpoint import checkpoint
from tests.benchmarks.peers.dimensions import MODELS
from tests.benchmarks.peers.environment import default_cache

BAR = 50.0
"""Milliseconds."""


def decode_ms(llm: LLM, rows: int, steps: int, seed: int) -> list[float]:
    """Of each step in which all requests decode."""
    engine, random = llm.llm_engine, np.random.default_rng(seed)
    params = SamplingParams(temperature=1.0, seed=seed, max_tokens=steps + 8, ignore_eos=True)
    ids = [f"{seed}-{row}" for row in range(rows)]
    for request_id in ids:
        engine.add_request(request_id, {"prompt_token_ids": random.integers(3, 250, 16).tolist()}, params)
    found: list[float] = []
    for step in range(steps + 4):
        began = time.perf_counter()
        engine.step()
        if step >= 4:  # prompts, and what is under way with them
            found.append(1000 * (time.perf_counter() - began))
    engine.abort_request(ids)
    while engine.has_unfinished_requests():
        engine.step()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="1B-A0.3B", help="a mixture of the peers' benchmark")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--rows", type=int, default=8, help="requests that decode")
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--every", type=int, default=16, help="steps after which experts are dealt anew")
    parser.add_argument("--redundant", type=int, default=2)
    parser.add_argument("--step-bytes", default="8MiB")
    options = parser.parse_args()
    common: dict[str, Any] = {
        "model": str(checkpoint(MODELS[options.model], default_cache())), "dtype": options.dtype,
        "executor": "process", "executor.threads": 1, "tensor_parallel_size": 2, "communicator": "shm",
        "enable_expert_parallel": True, "max_num_seqs": options.rows, "max_model_len": options.steps + 32,
        "kv_cache_memory": "256MiB", "enable_prefix_caching": False, "experts.redundant": options.redundant,
    }  # fmt: skip
    moving = {"experts.rebalance_every": options.every, "experts.step_bytes": options.step_bytes}
    found: dict[str, list[float]] = {"experts stay": [], "experts move": []}
    with ExitStack() as stack:
        engines = [stack.enter_context(LLM(**common, **more)) for more in ({}, moving)]
        for turn in range(options.rounds + 1):
            for name, llm in zip(found, engines, strict=True):
                steps = decode_ms(llm, options.rows, options.steps, turn)
                found[name] += steps if turn else []  # the first warms up
    print(f"{options.model}, {options.rows} requests that decode, two ranks of one thread, ms a step")
    print(f"{'':14}  {'median':>7}  {'99 %':>7}  {'longest':>7}")
    for name, steps in found.items():
        print(f"{name:14}  {np.median(steps):7.1f}  {np.percentile(steps, 99):7.1f}  {max(steps):7.1f}")
    stall = max(found["experts move"]) - float(np.median(found["experts stay"]))
    print(f"the longest step of the second is {stall:.1f} ms longer than the first's median; the bar is {BAR:g}")


if __name__ == "__main__":
    main()
