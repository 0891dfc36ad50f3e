"""The core's harness with a model of routed experts, dealt over ranks, which are threads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import harness
import msgspec
import pytest
import test_real_schedules as real
import torch
from harness import CONFIG, HIDDEN, choice, registry
from thread_ranks import ThreadExecutor

from engine.types.model import ModelDescription
from engine.types.parallel import Parallel
from engine.types.start import WorkerStart
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
    "two cores": (Parallel(dp=2, ep=True), "gather", {}),
    "two cores of two ranks, moving": (Parallel(dp=2, tp=2, ep=True), "gather", MOVING),
    "three cores, all_to_all, moving": (Parallel(dp=3, ep=True), "all_to_all", MOVING),
    "two cores in stages": (Parallel(dp=2, pp=2, ep=True), "gather", {}),
    "shared sequences, moving": (Parallel(tp=2, cp=2, ep=True), "gather", MOVING),
    "shared sequences in stages": (Parallel(tp=2, pp=2, cp=2, ep=True), "all_to_all", MOVING),
    "two cores of shared sequences": (Parallel(dp=2, cp=2, ep=True), "all_to_all", {}),
    "two cores of two ranks in stages": (Parallel(dp=2, tp=2, pp=2, ep=True), "all_to_all", MOVING),
    "two cores of two ranks, shared sequences": (Parallel(dp=2, tp=2, cp=2, ep=True), "gather", MOVING),
    "two cores of shared sequences in stages": (Parallel(dp=2, pp=2, cp=2, ep=True), "gather", MOVING),
}
"""How the model is divided, by which driver, and its options: among them every combination of 1 and 2 that has experts
to deal, and at most eight ranks."""
WINDOW = 6
"""Of the sliding layers: two ranks that share sequences can share it."""


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
        patch.setattr(harness, "WINDOW", WINDOW)
        patch.setitem(CONFIG, "sliding_window", WINDOW)
        patch.setattr(real.Crew, "__init__", crew)
        real.worker_for.cache_clear()
        yield parallel
    for each in list(ThreadExecutor.started):
        each.shutdown()
    real.worker_for.cache_clear()


def each_way(*quick: str, cores: bool = False, moving: bool = False) -> Any:
    """A test of each way over one engine core, or over several; those that are not named are slow. moving: of those
    alone in which experts move."""
    rows = [
        pytest.param(name, marks=() if name in quick else pytest.mark.slow)
        for name, (parallel, _, options) in WAYS.items()
        if (parallel.dp > 1) is cores and (options is MOVING or not moving)
    ]
    return pytest.mark.parametrize("way", rows, indirect=True)
