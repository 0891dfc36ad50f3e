"""Whatever the schedule (chunks, batches, prefix hits, steps in flight, preemption, aborts), a request that pools gets
what it gets alone; in float64. And results that do not fit the plan stop the engine."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from pooling_models import Oracle, pooled, prompts, unit

from engine import EngineArgs, LLMEngine, PoolingParams
from engine.process.wire import decoder, encode
from engine.types.errors import EngineDeadError
from engine.types.plan import PooledRows, StepResult

WISHES = (
    PoolingParams(),
    PoolingParams(pooling_type="mean", normalize=False),
    PoolingParams(pooling_type="cls", dimensions=9),
    PoolingParams(task="token_embed", normalize=False),
)
SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"in_flight": 1},
    {"in_flight": 3, "max_num_batched_tokens": 7},
    {"max_num_batched_tokens": 1, "max_num_seqs": 2},
    {"enable_prefix_caching": False},
    {"num_kv_pages": 24},
    {"swap_space": "1MiB"},
    {"long_prefill_token_threshold": 5},
)


def start(folder: Any, **settings: Any) -> LLMEngine:
    defaults = {
        "num_kv_pages": 40, "block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 24, "max_model_len": 41,
        "runner": "pooling",
    }  # fmt: skip
    return LLMEngine.from_engine_args(EngineArgs(model=str(folder), dtype="float64", **(defaults | settings)))


def given(seed: int) -> list[list[int]]:
    """Prompts that begin alike, some as long as may be."""
    rng = random.Random(seed)
    prefix = prompts((24,), seed)[0]
    lengths = [41, *(rng.randint(1, 40) for _ in range(9))]
    return [(prefix[: rng.choice([0, 8, 24])] + ids)[: len(ids)] for ids in prompts(lengths, seed + 1)]


def expected(oracle: Oracle, ids: list[int], wish: PoolingParams) -> np.ndarray:
    states = oracle.states(ids)
    if wish.task == "token_embed":
        return states
    vector = pooled(states, wish.pooling_type or "last")[: wish.dimensions]
    return vector if wish.normalize is False else unit(vector)


@pytest.mark.parametrize(
    ("architecture", "settings"),
    [
        *(("LlamaModel", settings) for settings in SETTINGS),
        *(
            pytest.param(
                "Qwen2Model", settings, marks=() if "num_kv_pages" in settings or not settings else pytest.mark.slow
            )
            for settings in SETTINGS
        ),
    ],
    ids=str,
)
def test_any_schedule_gives_the_request_alone(checkpoints, architecture: str, settings: dict[str, Any]) -> None:
    """Requests come one after the other; one in six is aborted, and some running ones lose their pages."""
    folder = checkpoints(architecture, **({"sliding": 6} if architecture == "Qwen2Model" else {}))
    oracle = Oracle(folder, torch.float64)
    with start(folder, **settings) as engine:
        core, found, preempted, aborted = engine.client.core, {}, 0, set()  # type: ignore[attr-defined]
        for seed in range(4):
            rng, ids = random.Random(seed), given(seed)
            waiting = [(f"{seed}-{i}", prompt, rng.choice(WISHES)) for i, prompt in enumerate(ids)]
            wanted = {name: (prompt, wish) for name, prompt, wish in waiting}
            while waiting or engine.has_unfinished_requests():
                while waiting and rng.random() < 0.6:
                    name, prompt, wish = waiting.pop(0)
                    engine.add_request(name, prompt, wish)
                    if rng.random() < 1 / 6:
                        aborted.add(name)
                if aborted and rng.random() < 0.3:
                    engine.abort_request(aborted & engine.frontend.outputs._requests.keys())
                running = list(core.scheduler.running.values())
                if running and rng.random() < 0.5 and preempted < 3 * (seed + 1):
                    core.scheduler.states.preempt(rng.choice(running))
                    preempted += 1
                found.update({output.request_id: output for output in engine.step()})
                core.check_integrity()
            for name, (prompt, wish) in wanted.items():
                if name in found:
                    np.testing.assert_allclose(found[name].pooled, expected(oracle, prompt, wish), atol=1e-12)
                    assert found[name].finished and found[name].outputs[0].finish_reason == "stop"
                else:
                    assert name in aborted
        assert preempted >= 4 and len(found) > 25
        for _ in range(4):  # what the host tier is still to be told
            engine.step()
        assert core.stats().pages_used == 0 and not core.has_work()
        assert core.stats().generation_tokens == 0
        hits = sum(output.num_cached_tokens for output in found.values())
        assert (hits > 0) == settings.get("enable_prefix_caching", True)


def broken(result: StepResult, how: str) -> StepResult:
    if result.pooled is None:
        return result
    row, begin, data = result.pooled.row, result.pooled.start, result.pooled.data
    changed = {
        "nothing": None,
        "another row": PooledRows(row=row + 1, start=begin, data=data),
        "a matrix for a vector": PooledRows(row=row, start=begin, data=[x[None] for x in data]),
        "too few tokens": PooledRows(row=row, start=begin, data=[x[:-1] for x in data]),
        "a gap": PooledRows(row=row, start=begin + 1, data=[x[1:] for x in data]),
    }[how]
    return msgspec.structs.replace(result, pooled=changed)


@pytest.mark.parametrize(
    ("how", "task"),
    [
        ("nothing", "embed"),
        ("nothing", "token_embed"),
        ("another row", "embed"),
        ("a matrix for a vector", "embed"),
        ("too few tokens", "token_embed"),
        ("a gap", "token_embed"),
    ],
)
def test_results_that_do_not_fit_the_plan(checkpoints, how: str, task: str) -> None:
    """A request would wait for ever, or get half an answer: the engine stops, and says whose fault it is."""
    with start(checkpoints("LlamaModel")) as engine:
        executor = engine.client.core.executor  # type: ignore[attr-defined]
        launch = executor.execute

        class Broken:
            def __init__(self, future: Any) -> None:
                self.done = future.done
                self.result = lambda timeout=None: broken(future.result(timeout), how)

        executor.execute = lambda plan: Broken(launch(plan))
        engine.add_request("a", prompts((30,))[0], PoolingParams(task=task))
        outputs = []
        while engine.has_unfinished_requests():
            outputs += engine.step()
        assert [output.request_id for output in outputs] == ["a"]
        assert isinstance(outputs[0].error, EngineDeadError)
        assert "row 0 has no result, or one of another form" in str(outputs[0].error)
        assert outputs[0].pooled is None or len(outputs[0].pooled) < 30


def test_results_travel() -> None:
    data = [np.arange(3, dtype=np.float32), np.ones((2, 2))]
    rows = PooledRows(row=np.array([0, 2], np.int32), start=np.array([-1, 5], np.int32), data=data)
    sent = StepResult(step_id=3, tokens=np.full(3, -1, np.int32), pooled=rows)
    back = decoder(StepResult).decode(encode(sent))
    assert back.pooled is not None
    assert [x.dtype for x in back.pooled.data] == [np.float32, np.float64]
    for one, other in zip(back.pooled.data, data, strict=True):
        np.testing.assert_array_equal(one, other)
