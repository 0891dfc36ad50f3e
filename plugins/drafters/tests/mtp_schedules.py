"""Drafter `mtp` under schedules of requests, in engines with models that bring a layer for further tokens: each request
gets what it gets alone, without drafts."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
from checkpoints import VOCAB_SIZE
from schedules import Outcome, Planned, Schedule, Settings, run_schedule

from engine import SamplingParams
from engine.config.settings import EngineConfig
from engine.frontend.launch import launch
from engine.loop.assemble import assemble_core

SETTINGS: dict[str, Any] = {"dtype": "float64", "max_model_len": 40, "block_size": 4}


def run(folder: Path, schedule: Schedule, **settings: Any) -> tuple[dict[str, Outcome], Any]:
    """What each request gets, and the statistics."""
    core = assemble_core(launch(EngineConfig(model=folder, **SETTINGS | settings)).start)
    try:
        return run_schedule(core, schedule), core.stats()
    finally:
        core.shutdown()


def sampled(schedule: Schedule) -> Schedule:
    """Some of its requests are, and some have penalties."""
    params = [
        msgspec.structs.replace(
            one.params, temperature=(0.0, 0.0, 0.8)[i % 3], seed=i, repetition_penalty=(1.0, 1.3)[i % 2], logprobs=None
        )
        for i, one in enumerate(schedule.requests)
    ]
    requests = zip(schedule.requests, params, strict=True)
    return replace(schedule, requests=tuple(replace(one, params=own) for one, own in requests))


def held(folder: Path, tables: int, schedule: Schedule, **settings: Any) -> Any:
    """Each request gets what it gets alone, without drafts, as far as it comes; gives the statistics.

    tables: of blocks, that the model has with the layer that drafts: each takes the pages that the schedule names.
    """
    asked, found = schedule.settings, sampled(schedule)
    settings = {
        "num_kv_pages": 1 + tables * (asked.num_pages - 1),
        "max_num_seqs": asked.max_num_seqs,
        "max_num_batched_tokens": asked.max_num_batched_tokens,
        "enable_prefix_caching": asked.enable_prefix_caching,
        "long_prefill_token_threshold": asked.long_prefill_token_threshold,
        "swap_space": 1 << 22 if asked.swap_pages else 0,
        "drafter": "mtp",
        "drafter.num_tokens": asked.num_drafts,
        "drafter.adaptive": asked.adaptive,
        **settings,
    }
    outcomes, stats = run(folder, found, **settings)
    alone = tuple(replace(one, arrives=0, aborted=None, timeout=None, parent=None) for one in found.requests)
    one_by_one = {"max_num_seqs": 1, "max_num_batched_tokens": 64, "enable_prefix_caching": False, "num_kv_pages": 99}
    expected, _ = run(folder, replace(found, requests=alone), **one_by_one)
    for request in found.requests:
        mine, theirs = outcomes[request.request_id], expected[request.request_id]
        if mine.finish_reason in ("abort", "error"):
            assert mine.tokens == theirs.tokens[: len(mine.tokens)]
        else:
            assert (mine.tokens, mine.finish_reason) == (theirs.tokens, theirs.finish_reason)
    return stats


WAYS: dict[str, dict[str, Any]] = {
    "alone": {},
    "swapped": {"swap_space": 1 << 22},
    "divided": {"tensor_parallel_size": 2},
}


RNG = random.Random(5)
SHARED = [RNG.randrange(1, VOCAB_SIZE) for _ in range(8)]
REQUESTS = tuple(
    Planned(
        request_id=f"r{i}",
        prompt=(*SHARED[: 8 * (i % 2)], *(RNG.randrange(1, VOCAB_SIZE) for _ in range(3 + i))),
        params=SamplingParams(max_tokens=19, ignore_eos=True),
        arrives=i // 3,
    )
    for i in range(6)
)
CROWDED = Settings(
    num_pages=16, max_num_seqs=5, max_num_batched_tokens=17, max_model_len=40, in_flight=2, enable_prefix_caching=True,
    num_drafts=3, adaptive=False,
)  # fmt: skip
