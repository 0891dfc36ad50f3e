"""The dispatch guard: what it lets through, what it refuses and how it says so; every first-party model under it."""

from typing import Any

import pytest
import torch
from checkpoints import ARCHITECTURES, LATENT_ARCHITECTURES
from plain import PlainOps, open_model, plain_walk, run

from engine.interfaces.model import State
from engine.types.errors import ContractError
from engine_kit.dispatch_guard import DispatchGuard


@pytest.mark.parametrize("features", [{}, {"tie": True, "rope": "yarn"}, {"sliding": 5}, {"bias": True}], ids=str)
@pytest.mark.parametrize("architecture", ARCHITECTURES + LATENT_ARCHITECTURES)
def test_first_party_models_pass(checkpoints, architecture: str, features: dict[str, Any]) -> None:
    """Forward and logits use ops, attention and views only, and give what they give without the guard."""
    folder = checkpoints(architecture, **features)
    guard = DispatchGuard()
    expected = run(open_model(folder, torch.float32), [3, 1, 4])
    for inference in (False, True):
        model = open_model(folder, torch.float32, guard)
        state = State(token_ids=torch.tensor([3, 1, 4], dtype=torch.int32), positions=torch.arange(3))
        with torch.inference_mode(inference), guard:
            logits = model.logits(model.forward(state, plain_walk))
        assert torch.equal(logits, expected)


def test_names_operation_and_line() -> None:
    x = torch.ones(2, 3)
    with pytest.raises(ContractError) as caught, DispatchGuard():
        x + 1
    line = caught.traceback[0].lineno + 1
    assert f"aten.add.Tensor at {__file__}:{line} (test_names_operation_and_line)" in str(caught.value)


@pytest.mark.parametrize(
    "compute",
    [
        lambda x: x * x,
        lambda x: x @ x.T,
        lambda x: x.add_(1),
        lambda x: x[0].copy_(x[1]),
        lambda x: x.float().half(),
        lambda x: x.T.contiguous(),
        lambda x: x.T.reshape(-1),
        lambda x: x[torch.tensor([0])],
        lambda x: torch.empty(2),
        lambda x: torch.cat((x, x)),
        lambda x: x.sum().item(),
        lambda x: bool(x[0, 0] > 0),
        lambda x: torch.nn.functional.silu(x),
    ],
)
@pytest.mark.parametrize("inference", [False, True])
def test_refuses_computation(compute: Any, inference: bool) -> None:
    x = torch.ones(2, 3)
    with pytest.raises(ContractError, match=r"test_guard\.py:\d+"), torch.inference_mode(inference), DispatchGuard():
        compute(x)


@pytest.mark.parametrize("inference", [False, True])
def test_accepts_views(inference: bool) -> None:
    x = torch.arange(24.0).view(2, 12)
    with torch.inference_mode(inference), DispatchGuard():
        a, b = x.split([4, 8], dim=-1)
        views = [
            a.unflatten(-1, (2, 2)),
            b.chunk(2, -1)[1],
            x[:, 1:3],
            x[1],
            x.T,
            x.unsqueeze(0).squeeze(0),
            x.reshape(4, 6),
            x.expand(2, 12),
            x.flatten(),
            x.view(torch.int32),
            x.detach(),
            x.contiguous(),
        ]
        shapes = [view.shape for view in views]
    assert len(shapes) == 12


def test_wrapped_objects_may_compute() -> None:
    """Methods, calls, and what they call; the permission ends with the call, also by an error."""
    guard = DispatchGuard()
    x = torch.ones(2, 4)

    class Thing:
        size = 3

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        def fail(self, x: torch.Tensor) -> None:
            raise ValueError(x + 1)

    ops, thing = guard.wrap(PlainOps()), guard.wrap(Thing())
    with guard:
        y = ops.silu_mul(x)
        z = thing(y)
        assert thing.size == 3
        with pytest.raises(ValueError):
            thing.fail(x)
        with pytest.raises(ContractError):
            x + 1
        with guard.allowed():
            z = z + 1
    assert torch.equal(z, PlainOps().silu_mul(x) * 2 + 1)
    assert torch.equal(ops.silu_mul(x) + 1, y + 1)  # inactive: nothing is refused


def test_walk_under_the_guard(checkpoints) -> None:
    """A layer that computes by itself is found, deep in a model."""
    guard = DispatchGuard()
    model = open_model(checkpoints("LlamaForCausalLM"), torch.float32, guard)
    first, layer = model.layers

    def scaled(state: State) -> None:
        layer(state)
        state["hidden"] = state["hidden"] * 0.5

    model.layers = [first, scaled]
    state = State(token_ids=torch.tensor([3], dtype=torch.int32), positions=torch.arange(1))
    with pytest.raises(ContractError, match=r"aten\.mul\.Tensor at .*test_guard.py:\d+ \(.*scaled\)"), guard:
        model.forward(state, plain_walk)
