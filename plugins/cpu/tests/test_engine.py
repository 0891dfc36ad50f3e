"""The engine with this package's drivers, as a user chooses them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

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
OURS = {"ops": "cpu", "attention": "cpu"}
PROMPTS = [{"prompt_token_ids": np.random.default_rng(i).integers(0, 256, 7 + 20 * i).tolist()} for i in range(3)]


def tokens(llm: LLM) -> list[list[int]]:
    return [list(o.outputs[0].token_ids) for o in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]


def test_two_ranks_give_one_ranks_tokens(native) -> None:
    """With the bundled model, in float64. A killed rank is a typed error, and no memory is left of it."""
    with LLM(**SETTINGS) as llm:
        expected = tokens(llm)
    with LLM(tensor_parallel_size=2, communicator="shm", **SETTINGS) as llm:
        assert tokens(llm) == expected
        pids = llm.llm_engine.client.core.executor._ranks.pids  # type: ignore[attr-defined]
        for pid in pids:
            assert any("memfd:engine-shm" in m.path for m in psutil.Process(pid).memory_maps())
        os.kill(pids[1], signal.SIGKILL)
        with pytest.raises(EngineDeadError, match=r"rank 1 of 2"):
            tokens(llm)
        assert not any(map(psutil.pid_exists, pids))


def test_it_is_preferred(native) -> None:
    """`auto` takes it, and keeps the reference driver behind it."""
    from engine.config.settings import EngineConfig
    from engine.frontend.launch import launch
    from engine_cpu._native import levels

    choices = launch(EngineConfig(tensor_parallel_size=2, dtype="float32")).start.worker.choices
    assert next(c.driver for c in choices if c.point == "communicator") == "shm"
    drivers = {c.kind: c.driver for c in choices if c.point == "ops"}
    assert drivers["reject"] == "torch"
    assert drivers["linear"] == drivers["pack_linear"] == ("torch" if levels() == ["scalar"] else "cpu")
    attention = {c.kind: c.driver for c in choices if c.point == "attention"}
    assert attention == {"full": drivers["linear"]}
    exact = launch(EngineConfig(dtype="float64")).start.worker.choices
    assert {c.driver for c in exact if c.point == "ops"} == {"torch"}


@pytest.mark.parametrize("levels", ["best", pytest.param("all", marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_bundled_model_says_the_same(native, dtype: str, levels: str) -> None:
    """With a level's kernels as with the reference operations: log probabilities, and what greedy decoding draws as
    long as these leave no doubt."""
    if native.levels() == ["scalar"]:
        pytest.skip("this processor has neither AVX2 nor NEON")
    params = [
        SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=2),
        SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, logprobs=2, prompt_logprobs=1),
    ]
    prompts = ["Once upon a time", "What is the capital of France? Tell me in one word, please."]

    def run(**settings) -> list:
        with LLM(dtype=dtype, num_kv_pages=60, **settings) as llm:
            return [llm.generate([prompt], p, use_tqdm=False)[0] for prompt in prompts for p in params]

    expected = run(ops="torch", attention="torch")
    tolerance = {"float32": 1e-3, "bfloat16": 0.3}[dtype]
    for level in native.levels() if levels == "all" else ["auto"]:
        for output, reference in zip(
            run(**{"ops.level": level, "attention.level": level}, **OURS), expected, strict=True
        ):
            for entry, other in zip(output.prompt_logprobs or (), reference.prompt_logprobs or (), strict=True):
                if entry:
                    token = next(iter(entry))
                    assert abs(entry[token].logprob - other[token].logprob) < tolerance, level
            found, wanted = output.outputs[0], reference.outputs[0]
            for token, right, entry in zip(found.token_ids, wanted.token_ids, wanted.logprobs, strict=True):
                first, second = sorted((e.logprob for e in entry.values()), reverse=True)[:2]
                if first - second < tolerance:
                    break
                assert token == right, level


@pytest.mark.parametrize("kv_cache_dtype", ["float32", "bfloat16", "int8", "fp8"])
def test_greedy_tokens_do_not_depend_on_the_batch(native, kv_cache_dtype: str) -> None:
    """Long prompts in chunks, and short ones beside them: the reference attention's tokens, as long as its two most
    likely ones are apart."""
    if native.levels() == ["scalar"]:
        pytest.skip("this processor has neither AVX2 nor NEON")
    generator = np.random.default_rng(5)
    prompts = [{"prompt_token_ids": generator.integers(0, 256, n).tolist()} for n in (3, 40, 130, 300)]
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=2)
    settings = {
        "dtype": "float32", "kv_cache_dtype": kv_cache_dtype, "num_kv_pages": 100, "max_num_seqs": 4,
        "max_num_batched_tokens": 64, "ops": "torch",
    }  # fmt: skip
    with LLM(attention="torch", **settings) as llm:
        expected = llm.generate(prompts, params, use_tqdm=False)
    with LLM(attention="cpu", **settings) as llm:
        batched = llm.generate(prompts, params, use_tqdm=False)
        alone = [llm.generate([prompt], params, use_tqdm=False)[0] for prompt in prompts]
    compared = 0
    for found in (batched, alone):
        for output, reference in zip(found, expected, strict=True):
            wanted = reference.outputs[0]
            for token, right, entry in zip(output.outputs[0].token_ids, wanted.token_ids, wanted.logprobs, strict=True):
                first, second = sorted((e.logprob for e in entry.values()), reverse=True)[:2]
                if first - second < 1e-2:
                    break
                assert token == right
                compared += 1
    assert compared > 100


def test_an_engine_starts_without_torchs_compiler() -> None:
    """Under the guard of a recorded step too: `torch._dynamo`, with sympy and Triton, takes longer than torch does."""
    script = (
        "import sys\n"
        "from engine import LLM, SamplingParams\n"
        "LLM(model='tiny', platform='cpu').generate('Once', SamplingParams(max_tokens=2), use_tqdm=False)\n"
        "print(*sorted({'torch', 'torch._dynamo', 'sympy', 'triton', 'transformers'} & sys.modules.keys()))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "torch\n"), done.stderr
