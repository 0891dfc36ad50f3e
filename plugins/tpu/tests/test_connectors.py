"""Connectors on the JAX worker: pages go to host memory and to stores, and come back; tokens are those without."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("jax", reason="JAX is not installed")

import ml_dtypes
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax_engines import VOCAB_SIZE, jax_engine, tokens_of, torch_engine, watched, worker_of

from engine import LLM, SamplingParams
from engine.process import wire
from engine_reference.connector_host.scheduler_half import Copies
from engine_tpu import pages as pages_module
from engine_tpu.pages import DevicePages, Moving

HEADS: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 2}
"""On four devices, each head of keys lies on two."""
FEW = {"rows": "4", "tokens": "32"}
CROWDED: dict[str, Any] = {"dtype": "float64", "num_kv_pages": 14}
"""Pages of 16 tokens: four requests do not fit."""


def counts(llm: LLM, connector: str) -> dict[str, int]:
    """What a connector has counted."""
    return {event: count for driver, event, count in llm.llm_engine.stats().kv_connectors if driver == connector}


def asked(number: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Five prompts, of which two begin alike."""
    rng = np.random.default_rng(number)
    prompts = [rng.integers(0, VOCAB_SIZE, n).tolist() for n in rng.integers(18, 46, 5)]
    prompts[1][:17] = prompts[0][:17]
    params = [
        SamplingParams(temperature=0.8 * (n % 2), seed=n, max_tokens=int(rng.integers(8, 30)), ignore_eos=True)
        for n in range(len(prompts))
    ]
    return prompts, params


def talk(llm: LLM, number: int) -> list[list[list[int]]]:
    """Two turns of five conversations: what was said comes back, with a little more."""
    prompts, params = asked(number)
    turns = []
    for _ in range(2):
        turns.append(tokens_of(llm, prompts, params))
        prompts = [[*prompt, *said, 7][:64] for prompt, said in zip(prompts, turns[-1], strict=True)]
    return turns


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)])
def test_the_swap_tier(size: int, checkpoints: Any) -> None:
    """In too few pages requests are swapped, and blocks that the device gave up come back from host memory: the tokens
    of an engine with room for all. Nothing is compiled in service."""
    folder, platform = checkpoints("LlamaForCausalLM", **HEADS), FEW | {"tensor_parallel": size}
    with (
        jax_engine(folder, FEW, dtype="float64") as plain,
        jax_engine(folder, platform, swap_space=1 << 20, **CROWDED) as swapping,
    ):

        @given(st.integers(0, 2**32 - 1))
        @settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck))
        def run(number: int) -> None:
            assert talk(swapping, number) == talk(plain, number)

        run()
        stats = swapping.llm_engine.stats()
        assert stats.num_swap_preemptions == stats.num_preemptions > 0
        assert counts(swapping, "host")["loaded_tokens"] > 0
        assert stats.swap_pages_used == stats.pages_used == 0
        assert worker_of(swapping)._runner._steps.compiled.met == 0


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["Gemma2ForCausalLM", "Qwen3MoeForCausalLM"])
def test_other_caches(architecture: str, checkpoints: Any, tmp_path: Path) -> None:
    """Windows beside full attention, whose pages live less long, and caches of 8 bits: swapped and stored, on one
    device and on two, with a drafter and without."""
    gemma = architecture.startswith("Gemma")
    folder = checkpoints(
        architecture, **HEADS, **({"query_pre_attn_scalar": 10, "sliding_window": 20} if gemma else {})
    )
    sizes = {} if gemma else {"kv_cache_dtype": "fp8"}
    with jax_engine(folder, FEW, dtype="float64", **sizes) as plain:
        wanted = [talk(plain, number) for number in range(2)]
    stored = {"kv_connector": {"path": str(tmp_path)}}
    both = {"kv_connector": "host,file", "swap_space": 1 << 20, **CROWDED, **sizes}
    for size, more in ((1, {}), (2, {"drafter": "ngram"})):
        with jax_engine(folder, FEW | {"tensor_parallel": size}, stored, **both, **more) as llm:
            assert [talk(llm, number) for number in range(2)] == wanted
            assert counts(llm, "host")["loaded_tokens"] > 0
            assert size == 1 or counts(llm, "file")["loaded_tokens"] > 0


def test_a_store_of_several_engines(checkpoints: Any, tmp_path: Path) -> None:
    """What an engine has stored another finds, whatever its mesh and buckets. One with rounded weights finds nothing,
    nor does one of torch's, nor finds what these have stored one of the first kind."""
    folder = checkpoints("LlamaForCausalLM", **HEADS)
    stored: dict[str, Any] = {"kv_connector": {"path": str(tmp_path)}}
    sizes: dict[str, Any] = {"dtype": "float64", "kv_connector": "file"}

    def run(options: dict[str, Any] | None) -> tuple[Any, int]:
        """The conversations' tokens, and those of the prompts that came from the store."""
        if options is None:
            engine = torch_engine(folder, options=stored, **sizes)
        else:
            engine = jax_engine(folder, FEW | options, stored, **sizes)
        with engine as llm:
            first = tokens_of(llm, [[*range(40)]], [SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)])
            return first, counts(llm, "file")["loaded_tokens"]

    rounded, found = run({"weights": "int8"})
    assert not found
    wanted, found = run(None)
    assert not found, "the torch engine reads pages of JAX's"
    assert run({}) == (wanted, 0), "a JAX engine reads pages of the torch engine's, or of rounded weights"
    for options in ({}, {"tensor_parallel": 4}, {"tensor_parallel": 2, "rows": "1,2"}):
        assert run(options) == (wanted, 32), options
    assert run({"weights": "int8"}) == (rounded, 32) and run(None) == (wanted, 32)


def test_aborts(checkpoints: Any, tmp_path: Path) -> None:
    """Requests end at any time, with pages on their way to and from both connectors: the others' tokens are right, and
    all pages come back."""
    folder = checkpoints("LlamaForCausalLM", **HEADS)
    stored = {"kv_connector": {"path": str(tmp_path)}}
    connectors = {"kv_connector": "file,host", "swap_space": 1 << 20}
    with (
        jax_engine(folder, FEW, dtype="float64") as plain,
        jax_engine(folder, FEW, stored, **connectors, **CROWDED | {"num_kv_pages": 9}) as llm,
    ):
        engine, rng, whole = llm.llm_engine, np.random.default_rng(0), 0
        for turn in range(6):
            prompts, params = asked(turn % 2)
            wanted = tokens_of(plain, prompts, params)
            names = [f"{turn} {n}" for n in range(len(prompts))]
            for name, prompt, param in zip(names, prompts, params, strict=True):
                engine.add_request(name, {"prompt_token_ids": prompt}, param)
            said, aborted = dict[str, list[int]](), set[str]()
            until = time.monotonic() + 60
            while engine.has_unfinished_requests() or engine.stats().pages_used:
                assert time.monotonic() < until, "a request does not end, or its pages do not come back"
                for output in engine.step():
                    if output.finished:
                        said[output.request_id] = list(output.outputs[0].token_ids)
                running = [name for name in names if name not in said and name not in aborted]
                if running and rng.random() < 0.05:
                    aborted.add(str(rng.choice(running)))
                    engine.abort_request(list(aborted))
            for name, tokens in zip(names, wanted, strict=True):
                assert name in aborted or said[name] == tokens
            whole += len(names) - len(aborted)
            assert engine.stats().swap_pages_used == 0
        assert 10 < whole < 28 and counts(llm, "file")["loaded_tokens"] > 0
        assert engine.stats().num_swap_preemptions > 0


def test_what_moving_pages_costs_the_host(checkpoints: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With connectors at work, a step that moves nothing is one copy to the device and waits for nothing; one that
    moves pages out waits for nothing either."""
    folder = checkpoints("LlamaForCausalLM", **HEADS)
    stored = {"kv_connector": {"path": str(tmp_path)}}
    connectors = {"kv_connector": "host,file", "swap_space": 1 << 20}
    with jax_engine(folder, FEW, stored, **connectors, **CROWDED) as llm:
        steps = watched(llm, monkeypatch)
        talk(llm, 0)
        assert worker_of(llm)._runner._steps.compiled.met == 0
    still = [step for step in steps if not step.plan.sections and not step.plan.new_slots and step.plan.num_rows]
    assert len(still) > 20 and all((step.sent, step.waits) == (1, 0) for step in still)
    decode = wire.decoder(Copies).decode
    moving = [(decode(step.plan.sections["host"]), step) for step in steps if "host" in (step.plan.sections or {})]
    leaving = [step for copies, step in moving if copies.out_page.size and not copies.in_page.size]
    assert len(leaving) > 5 and not any(step.waits for step in leaving)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "fp8"])
def test_pages_lie_alike_on_every_mesh(dtype: str, checkpoints: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any number of pages, written and read: byte by byte, in the same order on 1, 2, 4 and 8 devices, of which several
    have one head; others are left alone. Little is under way at once, and the cache is changed in place."""
    folder = checkpoints("LlamaForCausalLM", **HEADS)
    cache = "fp8" if dtype == "fp8" else "auto"
    sizes = {"dtype": "bfloat16" if dtype == "fp8" else dtype, "kv_cache_dtype": cache, "num_kv_pages": 200}
    first, rng = None, np.random.default_rng(0)
    numbers = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "fp8": ml_dtypes.float8_e4m3fn}[dtype]
    for size in (1, 2, 4, 8):
        with jax_engine(folder, FEW | {"tensor_parallel": size, "warm_up": False}, **sizes) as llm:
            steps, memory = worker_of(llm)._runner._steps, worker_of(llm)._runner._memory
            page_bytes = llm.llm_engine.plan.start.worker.layout.page_bytes
            monkeypatch.setattr(pages_module, "_MOST_BYTES", 64 * page_bytes)
            monkeypatch.setattr(pages_module, "STAGED", 70 * page_bytes)
            pages = DevicePages(steps, memory)
            assert pages.page_bytes == page_bytes
            _bound(pages, monkeypatch)
            if first is None:
                first = rng.integers(0, 255, (200, pages.page_bytes), np.uint8)
            pages.write(np.arange(200, dtype=np.int32), first)
            for count in (0, 1, 3, 85, 199):
                some = rng.permutation(200)[:count].astype(np.int32)
                assert np.array_equal(pages.read(some)(), first[some])
            moved = rng.permutation(200)[:23].astype(np.int32)
            before, content = pages.read(moved), pages.read(moved[::-1])
            pages.write(moved, content())
            assert np.array_equal(before(), first[moved]), "what was read before"
            first[moved] = first[moved[::-1]]
            assert np.array_equal(pages.read(np.arange(200, dtype=np.int32))(), first)
            seen = _values(steps, memory, 5, numbers)
            layer = first[5].view(numbers).reshape(2, 2, 2, 16, -1)  # layers, heads, keys and values, tokens, elements
            assert np.array_equal(seen.view(np.uint8), np.ascontiguousarray(layer[1, :, 0]).view(np.uint8))
            for key, compiled in steps.compiled._functions.items():
                if "from the host" in str(key):
                    needs, pools = compiled.memory_analysis(), sum(pool.nbytes for pool in memory.pools) // size
                    assert needs.alias_size_in_bytes >= pools and needs.temp_size_in_bytes < pools / 2, key


def _bound(pages: DevicePages, monkeypatch: pytest.MonkeyPatch) -> None:
    """More bytes under way than there may be are an error, at any time."""

    class Bounded(Moving):
        def __init__(self, array: Any, num_bytes: int, wanted: bool) -> None:
            assert num_bytes + sum(one.num_bytes for one in pages._under_way) <= pages_module.STAGED
            super().__init__(array, num_bytes, wanted)

    monkeypatch.setattr(pages_module, "Moving", Bounded)


def _values(steps: Any, memory: Any, page: int, numbers: Any) -> np.ndarray:
    """The keys of a page in the second layer, a head at a time, as attention has them: [heads, page size, D]."""
    per_device = memory.pools[1].shape[1] // 2 // len(steps.devices)
    copies = per_device * len(steps.devices) // steps.kv_heads
    shards = sorted(memory.pools[1].addressable_shards, key=lambda shard: steps.devices.index(shard.device))
    heads = np.concatenate([np.asarray(shard.data)[page, :per_device] for shard in shards])
    return heads[::copies].view(numbers)
