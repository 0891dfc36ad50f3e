"""Pipeline stages that are processes, as a user starts them: with the bundled model, and when a stage is lost."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from pathlib import Path

import psutil
import pytest

from engine import LLM, SamplingParams
from engine.types.errors import EngineDeadError

SETTINGS = {"dtype": "float64", "max_num_seqs": 4, "max_num_batched_tokens": 32, "num_kv_pages": 80, "block_size": 4}
PROMPTS = ["Once upon a time", "The little dog", "A", "One day, a girl named Lily went to the park and"]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=3, max_tokens=12, ignore_eos=True, logprobs=2, repetition_penalty=1.1),
    SamplingParams(temperature=0.8, top_p=0.9, seed=4, max_tokens=12, ignore_eos=True, prompt_logprobs=2),
    SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, presence_penalty=0.5),
]


def outcome(llm: LLM) -> list[object]:
    """Tokens, and the log probabilities of prompts, to four decimals."""
    return [
        (
            list(o.outputs[0].token_ids),
            [
                None if entry is None else {t: round(v.logprob, 4) for t, v in entry.items()}
                for entry in o.prompt_logprobs or ()
            ],
        )
        for o in llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    ]


def ranks_of(llm: LLM) -> tuple[list[int], Path]:
    """The processes of its ranks, and their directory."""
    ranks = llm.llm_engine.client.core.executor._ranks  # type: ignore[attr-defined]
    return ranks.pids, Path(ranks.directory)


@pytest.fixture(scope="module")
def expected() -> list[object]:
    with LLM(**SETTINGS) as one:
        return outcome(one)


@pytest.mark.parametrize(
    "settings",
    [
        {"pipeline_parallel_size": 2, "pipeline_parallel_split": "2,4"},
        pytest.param({"pipeline_parallel_size": 2, "tensor_parallel_size": 2}, marks=pytest.mark.slow),
        pytest.param({"pipeline_parallel_size": 3, "in_flight": 1}, marks=pytest.mark.slow),
        {"pipeline_parallel_size": 2, "drafter": "draft_model"},
        pytest.param({"pipeline_parallel_size": 2, "drafter": "medusa"}, marks=pytest.mark.slow),
        pytest.param({"pipeline_parallel_size": 2, "drafter": "suffix"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_bundled_model_in_stages(expected: list[object], settings: dict[str, object]) -> None:
    with LLM(**SETTINGS, **settings) as llm:
        pids, directory = ranks_of(llm)
        assert outcome(llm) == expected
        assert sorted(entry.name for entry in directory.iterdir() if re.fullmatch(r"[tp]p-\d", entry.name)) == (
            ["pp-0", "pp-1", "tp-0", "tp-2"] if len(pids) == 4 else ["pp-0"]
        )
    assert not any(map(psutil.pid_exists, pids)) and not directory.exists()


def test_each_stage_swaps_its_own_pages(expected: list[object]) -> None:
    """A crowded cache in two stages gives the tokens of a roomy one in one."""
    crowded = SETTINGS | {"num_kv_pages": 12, "swap_space": "4MiB", "pipeline_parallel_size": 2}
    with LLM(**crowded) as llm:
        assert outcome(llm) == expected
        stats = llm.llm_engine.stats()
        assert stats.num_swap_preemptions == stats.num_preemptions > 0
        ready = llm.llm_engine.client.worker
        page_bytes = ready.cache_bytes // ready.num_pages  # of both stages, which have as many layers
        assert stats.swap_pages_total == (4 << 20) // (page_bytes // 2)


@pytest.mark.parametrize("stage", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("fate", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_stage_that_is_lost_ends_the_engine(stage: int, fate: signal.Signals) -> None:
    """In the midst of steps: a typed error names it, in time, and nothing is left."""
    with LLM(**SETTINGS, pipeline_parallel_size=2, **{"executor.step_timeout": 2}) as llm:
        pids, directory = ranks_of(llm)
        endless = [SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)] * len(PROMPTS)
        threading.Timer(0.3, os.kill, (pids[stage], fate)).start()
        began = time.monotonic()
        with pytest.raises(EngineDeadError, match=rf"rank {stage} of 2 \(process {pids[stage]}"):
            while True:
                llm.generate(PROMPTS, endless, use_tqdm=False)
        assert time.monotonic() - began < 30
        assert not any(map(psutil.pid_exists, pids)) and not directory.exists()
