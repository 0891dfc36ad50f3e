"""Experts dealt over ranks under the schedules of the core's own tests, in float64: any chunks, prefix hits,
preemptions, steps in flight and aborts give each request exactly the tokens that it gets alone from one rank, also
while experts move. Ranks are threads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import harness
import msgspec
import pytest
import test_real_schedules as real
import torch
from harness import CONFIG, HIDDEN, VOCAB, choice, registry
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from schedules import Planned, Schedule, Settings, examples, run_schedule, schedules
from thread_ranks import ThreadExecutor

from engine.interfaces.step import StepPart
from engine.types.model import ModelDescription
from engine.types.parallel import Parallel
from engine.types.params import SamplingParams
from engine.types.start import WorkerStart
from engine_moe.dealt.rebalancing import Rebalancing
from engine_moe.ops_moe.card import OPERATIONS

EXPERTS, INNER = 6, 10
MOE: dict[str, Any] = {
    "architectures": ["Qwen2MoeForCausalLM"],
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": INNER,
    "shared_expert_intermediate_size": INNER,
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
}
MOVING = {"redundant": 2, "rebalance_every": 3, "step_bytes": 1}
WAYS: dict[str, tuple[Parallel, str, dict[str, Any]]] = {
    "gather": (Parallel(tp=2, ep=True), "gather", {}),
    "gather, moving": (Parallel(tp=2, ep=True), "gather", MOVING),
    "gather in stages, moving": (Parallel(tp=2, pp=2, ep=True), "gather", MOVING),
    "all_to_all, moving": (Parallel(tp=2, ep=True), "all_to_all", MOVING),
}
"""How the model is divided, by which driver, and its options."""
QUICK = ("gather, moving",)


def weights(model: ModelDescription | None = None, seed: int = 5) -> Iterator[tuple[str, torch.Tensor]]:
    """Those of the harness, with experts in the place of each dense block; the first ones are chosen most."""
    generator = torch.Generator().manual_seed(seed)

    def tensor(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator) * 0.5

    for name, found in _dense(model, seed):
        if not name.endswith("mlp.gate_proj.weight") and ".mlp." in name:
            continue
        if ".mlp." not in name:
            yield name, found
            continue
        mlp = name.removesuffix(".gate_proj.weight")
        yield f"{mlp}.gate.weight", tensor(EXPERTS, HIDDEN) * torch.linspace(1.5, 0.5, EXPERTS).unsqueeze(1)
        for part in ("shared_expert", *(f"experts.{expert}" for expert in range(EXPERTS))):
            yield f"{mlp}.{part}.gate_proj.weight", tensor(INNER, HIDDEN)
            yield f"{mlp}.{part}.up_proj.weight", tensor(INNER, HIDDEN)
            yield f"{mlp}.{part}.down_proj.weight", tensor(HIDDEN, INNER)
        yield f"{mlp}.shared_expert_gate.weight", tensor(1, HIDDEN)


_dense, _message = harness.random_weights, harness.start_message


@pytest.fixture(scope="module")
def way(request: pytest.FixtureRequest) -> Iterator[Parallel]:
    """The harness's model has experts, which are divided in this way where there are several ranks."""
    parallel, driver, options = WAYS[request.param]

    def message(**changes: Any) -> WorkerStart:
        made, found = _message(**changes), registry()
        kept = [one for one in made.choices if one.point != "model"]
        added = [choice(found, "ops", "moe", operation) for operation in sorted(OPERATIONS)]
        added += [choice(found, "model", "Qwen2MoeForCausalLM"), choice(found, "experts", "local")]
        model = msgspec.structs.replace(made.model, architecture="Qwen2MoeForCausalLM", config={**CONFIG, **MOE})
        return msgspec.structs.replace(made, choices=(*kept, *added), model=model)

    def crew(self: Any, start: WorkerStart) -> None:
        found = registry()
        kept = [one for one in start.choices if one.point != "experts"]
        chosen = (*kept, choice(found, "experts", driver, options=options))
        made(self, msgspec.structs.replace(start, choices=chosen))

    made = real.Crew.__init__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(real, "start_message", message)
        patch.setattr(real, "ALONE", {})
        patch.setattr(harness, "random_weights", weights)
        patch.setattr(real.Crew, "__init__", crew)
        real.worker_for.cache_clear()
        yield parallel
    for each in list(ThreadExecutor.started):
        each.shutdown()
    real.worker_for.cache_clear()


def each_way(*quick: str) -> Any:
    rows = [pytest.param(name, marks=() if name in quick else pytest.mark.slow) for name in WAYS]
    return pytest.mark.parametrize("way", rows, indirect=True)


def moved(core: Any) -> int:
    """Experts that came to another place, on the ranks of the core."""
    parts: list[StepPart] = [part for worker in core.executor.worker.workers for part in worker._runner._parts]
    return sum(part.moved for part in parts if isinstance(part, Rebalancing))


@each_way(*QUICK)
@given(schedule=schedules(VOCAB, max_requests=5), seed=st.integers(0, 2**32))
@hypothesis_settings(max_examples=examples(2), deadline=None, suppress_health_check=list(HealthCheck))
def test_every_request_gets_the_tokens_that_it_gets_alone(way: Parallel, schedule: Schedule, seed: int) -> None:
    schedule = real.with_sampling(schedule, seed)
    schedule = replace(schedule, settings=replace(schedule.settings, in_flight=way.pp + 1))
    core, _ = real.make_core(schedule.settings, parallel=way)
    outcomes = run_schedule(core, schedule)
    for request in schedule.requests:
        real.check(request, outcomes[request.request_id])


@each_way("gather, moving", "all_to_all, moving")
def test_experts_move_while_requests_run(way: Parallel) -> None:
    settings = Settings(
        num_pages=26, max_num_seqs=5, max_num_batched_tokens=17, max_model_len=40, in_flight=way.pp + 1,
        enable_prefix_caching=True,
    )  # fmt: skip
    requests = tuple(
        Planned(
            request_id=f"r{i}",
            prompt=tuple((7 * i + j) % VOCAB for j in range(3 + i)),
            params=SamplingParams(temperature=(i % 3) * 0.6, max_tokens=21, seed=i, ignore_eos=True),
            arrives=i // 3,
        )
        for i in range(7)
    )
    core, _ = real.make_core(settings, parallel=way)
    before = moved(core)
    outcomes = run_schedule(core, Schedule(settings=settings, requests=requests))
    for request in requests:
        real.check(request, outcomes[request.request_id])
    assert core.stats().num_preemptions > 0
    assert moved(core) > before, "nothing moved"
    crew: Any = core.executor
    counted = [sum(numbers) for numbers in zip(*crew.worker.call("expert_tokens"), strict=True)]
    assert len(counted) == EXPERTS and min(counted) > 0


@pytest.mark.slow
@each_way(*WAYS)
@given(schedule=st.booleans().flatmap(lambda crowded: schedules(VOCAB, crowded=crowded)), seed=st.integers(0, 2**32))
@hypothesis_settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
def test_many_schedules(way: Parallel, schedule: Schedule, seed: int) -> None:
    schedule = real.with_sampling(schedule, seed)
    schedule = replace(schedule, settings=replace(schedule.settings, in_flight=way.pp + 1))
    core, _ = real.make_core(schedule.settings, parallel=way)
    outcomes = run_schedule(core, schedule)
    for request in schedule.requests:
        real.check(request, outcomes[request.request_id])
