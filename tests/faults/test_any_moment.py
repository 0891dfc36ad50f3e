"""Somebody dies or hangs at a moment that a seed draws: while the engine starts, reads prompts, decodes, or moves
experts. Clients are told in time, other engine cores go on, one that is lost stands again, and nothing is left."""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import time
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest

from engine import LLM, EngineArgs, SamplingParams
from engine.frontend.request_state import OutputKind
from engine.types.errors import EngineDeadError, EngineError, RankDeadError
from engine_kit.async_llm import AsyncLLM

SILENCE = 3.0
"""Seconds of `--step-timeout`; ranks have half of it."""
TOLD_SECONDS = 2.0
"""How long clients may wait after it has been seen."""
SETTINGS: dict[str, Any] = {
    "dtype": "float64", "num_kv_pages": 200, "max_num_seqs": 8, "max_num_batched_tokens": 64, "step_timeout": SILENCE,
}  # fmt: skip
DENSE: dict[str, dict[str, Any]] = {
    "tp": {"tensor_parallel_size": 2},
    "pp": {"pipeline_parallel_size": 2},
    "tp pp": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
    "dp": {"data_parallel_size": 2, "data_parallel_restarts": 1},
    "dp tp": {"data_parallel_size": 2, "tensor_parallel_size": 2, "data_parallel_restarts": 1},
}
MOVING = {
    "enable_expert_parallel": True, "experts.redundant": 2, "experts.rebalance_every": 3, "experts.step_bytes": 1,
}  # fmt: skip
SHARED: dict[str, dict[str, Any]] = {
    "ep tp": {"tensor_parallel_size": 2, **MOVING},
    "ep dp": {"data_parallel_size": 2, **MOVING},
    "ep dp tp": {"data_parallel_size": 2, "tensor_parallel_size": 2, **MOVING},
    "ep dp pp": {"data_parallel_size": 2, "pipeline_parallel_size": 2, **MOVING},
}
REQUESTS = 6
EXAMPLES = int(os.environ.get("EXAMPLES", "1"))


class Fault(NamedTuple):
    """What happens, and when: so long after the start began, or after requests were sent."""

    kind: str
    phase: str
    after: float
    victim: float

    @classmethod
    def drawn(cls, seed: int) -> Fault:
        draw = random.Random(seed)
        phase = draw.choice(["start", "prompt", "decode", "decode", "idle"])
        after = {"start": draw.uniform(0, 2.5), "prompt": draw.uniform(0, 0.1), "decode": draw.uniform(0.1, 1.0)}
        return cls(draw.choice(["killed", "stopped"]), phase, after.get(phase, 0.3), draw.random())

    @property
    def seconds(self) -> float:
        """Until it has to be known by everybody."""
        return TOLD_SECONDS + (SILENCE if self.kind == "stopped" else 0.0)

    async def happen(self, before: set[int]) -> None:
        """To one of the processes that this one has started since, once there is one."""
        until = time.monotonic() + 60
        while not (found := [one for one in psutil.Process().children(recursive=True) if self._is_one(one, before)]):
            assert time.monotonic() < until, "nobody is there whom it could happen to"
            await asyncio.sleep(0.01)
        victim = sorted(found, key=lambda one: one.pid)[int(self.victim * len(found))]
        victim.send_signal(signal.SIGKILL if self.kind == "killed" else signal.SIGSTOP)

    @staticmethod
    def _is_one(process: psutil.Process, before: set[int]) -> bool:
        return process.pid not in before and _runs(process)


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE and process.name() != "test-template")
    except psutil.Error:
        return False


def asked(tokens: int) -> list[tuple[Any, SamplingParams]]:
    prompts = [{"prompt_token_ids": [(7 * i + j) % 250 + 3 for j in range(5 + 60 * (i % 2))]} for i in range(REQUESTS)]
    params = [
        SamplingParams(temperature=(i % 3) / 2, seed=i, max_tokens=tokens, ignore_eos=True) for i in range(REQUESTS)
    ]
    return list(zip(prompts, params, strict=True))


def quiet(model: str, tokens: int) -> list[list[int]]:
    """What one process gives that nothing happens to."""
    with LLM(model=model, **SETTINGS) as llm:
        prompts, params = zip(*asked(tokens), strict=True)
        return [list(o.outputs[0].token_ids) for o in llm.generate(list(prompts), list(params), use_tqdm=False)]


async def suffer(model: str, how: dict[str, Any], fault: Fault, expected: list[list[int]], timed: bool = True) -> None:
    """Start, ask, have it happen, and look at everything that has to be so; how soon, where that is `timed`."""
    before = {one.pid for one in psutil.Process().children(recursive=True)}
    goes_on = "data_parallel_restarts" in how
    llm = AsyncLLM(EngineArgs(model=model, **SETTINGS, **how))
    began = 0.0
    try:
        starting = asyncio.ensure_future(llm.start())
        if fault.phase == "start":
            await asyncio.sleep(fault.after)
            await fault.happen(before)
            began = time.monotonic()
            try:
                await asyncio.wait_for(starting, 60)
            except EngineError as refused:
                assert re.search("rank|engine core", str(refused)), refused
                assert time.monotonic() - began < fault.seconds
                return
            began = time.monotonic()  # it had just told that it stands: whoever asks is told
        await asyncio.wait_for(starting, 60)
        seen: list[list[int]] = [[] for _ in expected]
        ended: dict[int, float] = {}
        errors: dict[int, EngineError] = {}

        async def follow(i: int, kind: OutputKind) -> None:
            try:
                stream = await llm.submit(*asked(len(expected[i]))[i], kind=kind)
                async for output in stream:
                    seen[i] = list(output.outputs[0].token_ids)
            except EngineError as error:
                errors[i] = error
            ended[i] = time.monotonic()

        kinds = [OutputKind.FINAL if i % 3 == 2 else OutputKind.CUMULATIVE for i in range(REQUESTS)]
        if fault.phase in ("prompt", "decode"):
            clients = [asyncio.ensure_future(follow(i, kind)) for i, kind in enumerate(kinds)]
            await asyncio.sleep(fault.after)
            await fault.happen(before)
            began = time.monotonic()
        else:
            if fault.phase == "idle":
                await asyncio.sleep(fault.after)
                await fault.happen(before)
                began = time.monotonic()
            clients = [asyncio.ensure_future(follow(i, kind)) for i, kind in enumerate(kinds)]
        await asyncio.wait_for(asyncio.gather(*clients), 60)

        for i, tokens in enumerate(expected):
            assert seen[i] == tokens[: len(seen[i])], f"request {i} got other tokens"
            assert i in errors or seen[i] == tokens, f"request {i} ended as if it had all"
        for i, error in errors.items():
            assert isinstance(error, (EngineDeadError, RankDeadError)), error
            assert re.search(r"rank \d|engine core", str(error)), error
            assert not timed or ended[i] - began < fault.seconds, (
                f"request {i} was told after {ended[i] - began:.1f} s: {error}"
            )
        if not goes_on:
            until = began + (fault.seconds if timed else 60)
            while llm.alive() and time.monotonic() < until:
                await asyncio.sleep(0.05)
            assert not llm.alive()
            return
        assert len(errors) < REQUESTS, "the other core goes on"
        assert all(isinstance(error, RankDeadError) for error in errors.values()), errors
        until = time.monotonic() + 60
        while [core.alive for core in llm.cores] != [True, True]:
            assert time.monotonic() < until, "it does not stand again"
            await asyncio.sleep(0.05)
        errors.clear()
        await asyncio.wait_for(asyncio.gather(*(follow(i, OutputKind.FINAL) for i in range(REQUESTS))), 60)
        assert not errors and seen == expected
    finally:
        llm.shutdown()


@pytest.fixture(scope="module")
def dense() -> list[list[int]]:
    return quiet("tiny", 60)


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[list[int]]]:
    """A random mixture of experts of the bundled model's tokenizer, and what it says."""
    import torch
    import transformers

    from engine_tiny import __file__ as here

    folder = tmp_path_factory.mktemp("mixtral")
    torch.manual_seed(1)
    config = transformers.MixtralConfig(
        vocab_size=4096, hidden_size=32, intermediate_size=24, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=6, num_experts_per_tok=2, initializer_range=0.2,
    )  # fmt: skip
    transformers.MixtralForCausalLM(config).save_pretrained(folder)
    (tokenizer,) = Path(here).parent.rglob("tokenizer.json")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((tokenizer.parent / name).read_bytes())
    return str(folder), quiet(str(folder), 120)


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=() if seed == 1 else pytest.mark.slow) for seed in range(20 * EXAMPLES)]
)
def test_each_with_a_whole_model(seed: int, dense: list[list[int]], nothing_left: Path) -> None:
    how = list(DENSE)[seed % len(DENSE)]
    timed = seed != 1  # that one runs beside other tests
    asyncio.run(suffer("tiny", DENSE[how], Fault.drawn(seed), dense, timed))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20 * EXAMPLES))
def test_all_with_shared_experts(seed: int, experts: tuple[str, list[list[int]]], nothing_left: Path) -> None:
    """None goes on without the others, whose experts move all the time."""
    model, expected = experts
    how = list(SHARED)[seed % len(SHARED)]
    asyncio.run(suffer(model, SHARED[how], Fault.drawn(1000 + seed), expected))
