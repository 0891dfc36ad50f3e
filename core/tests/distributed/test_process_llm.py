"""`LLM` over ranks that are processes: the real thing, started as a user starts it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import psutil
import pytest

from engine import LLM, SamplingParams
from engine.types.errors import CheckpointError, ConfigError, EngineDeadError, UnfitDriverError

SETTINGS = {"dtype": "float64", "max_num_seqs": 4, "max_num_batched_tokens": 24, "num_kv_pages": 60, "block_size": 4}
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=3, max_tokens=12, ignore_eos=True, logprobs=2, repetition_penalty=1.1),
    SamplingParams(temperature=0.8, top_p=0.9, seed=4, max_tokens=12, ignore_eos=True),
]
PROMPTS = [{"prompt_token_ids": np.random.default_rng(i).integers(0, 256, 7 + 20 * i).tolist()} for i in range(3)]


def tokens(llm: LLM) -> list[list[int]]:
    return [list(o.outputs[0].token_ids) for o in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]


def ranks_of(llm: LLM) -> tuple[list[int], Path]:
    """The processes of its ranks, and their directory."""
    ranks = llm.llm_engine.client.core.executor._ranks  # type: ignore[attr-defined]
    return ranks.pids, Path(ranks.directory)


def test_two_engines_side_by_side_and_a_killed_rank(checkpoints) -> None:
    """Both give one rank's tokens; one's end is a typed error that names the rank, and nothing to the other."""
    folder = checkpoints("LlamaForCausalLM", kv_heads=1, bias=True)
    with LLM(str(folder), **SETTINGS) as one:
        expected = tokens(one)
    with (
        LLM(str(folder), tensor_parallel_size=2, **SETTINGS) as llm,
        LLM(str(folder), tensor_parallel_size=2, **SETTINGS) as other,
    ):
        places = [ranks_of(llm), ranks_of(other)]
        assert tokens(llm) == tokens(other) == expected
        mapped = [m.path for pids, _ in places for pid in pids for m in psutil.Process(pid).memory_maps()]
        assert not [path for path in mapped if "/dev/shm" in path], "there is no shared memory to be left"
        os.kill(places[0][0][1], signal.SIGKILL)
        with pytest.raises(EngineDeadError, match=r"rank 1 of 2 \(process \d+, ended by signal 9\)"):
            tokens(llm)
        assert not any(map(psutil.pid_exists, places[0][0])) and not places[0][1].exists(), "nothing is left at once"
        with pytest.raises(EngineDeadError):
            tokens(llm)
        assert tokens(other) == expected
    for pids, directory in places:
        assert not any(map(psutil.pid_exists, pids)) and not directory.exists()


@pytest.mark.slow
@pytest.mark.parametrize("in_flight", [1, 2])
def test_four_ranks(checkpoints, in_flight: int) -> None:
    folder = checkpoints("Qwen2ForCausalLM", sliding=6, tie=True)
    with LLM(str(folder), **SETTINGS) as one:
        expected = tokens(one)
    with LLM(str(folder), tensor_parallel_size=4, in_flight=in_flight, **SETTINGS) as llm:
        assert tokens(llm) == expected


def test_each_rank_swaps_its_own_pages(checkpoints) -> None:
    """A crowded cache on two ranks gives the tokens of a roomy one on one."""
    folder = checkpoints("LlamaForCausalLM", kv_heads=1, bias=True)
    with LLM(str(folder), **SETTINGS) as one:
        expected = tokens(one)
    crowded = SETTINGS | {"num_kv_pages": 25, "swap_space": "1MiB"}
    with LLM(str(folder), tensor_parallel_size=2, **crowded) as llm:
        assert tokens(llm) == expected
        stats = llm.llm_engine.stats()
        assert stats.num_swap_preemptions == stats.num_preemptions > 0


@pytest.mark.slow
def test_a_stopped_rank_ends_the_engine(checkpoints) -> None:
    """A rank in a collective waits for it without an end: the step's time runs out."""
    folder = checkpoints("LlamaForCausalLM", kv_heads=1, bias=True)
    with LLM(str(folder), tensor_parallel_size=2, **SETTINGS, **{"executor.step_timeout": 2}) as llm:
        pids, directory = ranks_of(llm)
        os.kill(pids[1], signal.SIGSTOP)
        with pytest.raises(EngineDeadError, match=r"no answer for 2 s from rank 0 of 2 .*rank 1 of 2 .*, stopped\)"):
            tokens(llm)
        assert not any(map(psutil.pid_exists, pids)) and not directory.exists()


@pytest.mark.slow
def test_weights_that_are_broken(checkpoints, tmp_path: Path) -> None:
    """Both ranks say so, and their own error comes out."""
    folder = checkpoints("LlamaForCausalLM", kv_heads=1, bias=True)
    for file in folder.iterdir():
        data = file.read_bytes()
        (tmp_path / file.name).write_bytes(data[: len(data) // 2] if file.suffix == ".safetensors" else data)
    with pytest.raises(CheckpointError, match="truncated"):
        LLM(str(tmp_path), tensor_parallel_size=2, **SETTINGS)


def test_what_cannot_be_is_refused_at_start(checkpoints) -> None:
    folder = str(checkpoints("LlamaForCausalLM", kv_heads=1, bias=True))
    with pytest.raises(UnfitDriverError, match="it runs one worker, 2 are needed"):
        LLM(folder, tensor_parallel_size=2, executor="inline", **SETTINGS)
    with pytest.raises(UnfitDriverError, match="one rank has nobody to speak to"):
        LLM(folder, communicator="gloo", **SETTINGS)
    with pytest.raises(ConfigError, match="tensor_parallel_size"):
        LLM(folder, tensor_parallel_size=0, **SETTINGS)
