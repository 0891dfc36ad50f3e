"""The engine with this package's drivers, as a user chooses them."""

from __future__ import annotations

import os
import signal

import numpy as np
import psutil
import pytest

from engine import LLM, SamplingParams
from engine.types.errors import EngineDeadError

SETTINGS = {"dtype": "float64", "max_num_seqs": 4, "max_num_batched_tokens": 24, "num_kv_pages": 60, "block_size": 4}
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=3, max_tokens=12, ignore_eos=True, logprobs=2, repetition_penalty=1.1),
    SamplingParams(temperature=0.8, top_p=0.9, seed=4, max_tokens=12, ignore_eos=True),
]
PROMPTS = [{"prompt_token_ids": np.random.default_rng(i).integers(0, 256, 7 + 20 * i).tolist()} for i in range(3)]


def tokens(llm: LLM) -> list[list[int]]:
    return [list(o.outputs[0].token_ids) for o in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]


def test_two_ranks_give_one_ranks_tokens(native) -> None:
    """With the bundled model, in float64. A killed rank is a typed error, and no memory is left of it."""
    with LLM(**SETTINGS) as llm:
        expected = tokens(llm)
    with LLM(tensor_parallel_size=2, communicator="shm", **SETTINGS) as llm:
        assert tokens(llm) == expected
        pids = llm.llm_engine.client._core.executor._ranks.pids  # type: ignore[attr-defined]
        for pid in pids:
            assert any("memfd:engine-shm" in m.path for m in psutil.Process(pid).memory_maps())
        os.kill(pids[1], signal.SIGKILL)
        with pytest.raises(EngineDeadError, match=r"rank 1 of 2"):
            tokens(llm)
        assert not any(map(psutil.pid_exists, pids))


def test_it_is_preferred(native) -> None:
    """`auto` takes it, and keeps the reference driver behind it."""
    from engine.config import EngineConfig
    from engine.frontend.launch import launch

    choices = launch(EngineConfig(tensor_parallel_size=2)).start.worker.choices
    assert next(c.driver for c in choices if c.point == "communicator") == "shm"
