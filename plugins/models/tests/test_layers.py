"""Layers by themselves, of blocks that are plain functions."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.interfaces.model import State
from engine_models.deepseek import DeepseekLayer
from engine_models.layers import ParallelLayer, PostNormLayer, PreNormLayer, SandwichLayer
from engine_models.qwen_next import Qwen3NextLayer
from engine_reference.ops_torch.ops import TorchOpsBody

TOKENS, SIZE = 9, 6


class Doubled:
    """In the place of a norm."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    def add(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        total = x if residual is None else x + residual
        return 2 * total, total


class Counted:
    """In the place of a feed-forward block."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.rows.append(len(x))
        return x.tanh()


def mixed(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """In the place of attention: what comes of a token depends on all up to it."""
    return x.cumsum(0) + positions[:, None]


def of_parts(kind: type, context: Any, **parts: Any) -> Any:
    """A layer that makes its own parts, with others in their place."""
    made: Any = object.__new__(kind)
    vars(made).update(parts, _ops=context.ops)
    return made


def layer(kind: str, mlp: Counted) -> Any:
    context: Any = SimpleNamespace(ops=TorchOpsBody(None))  # type: ignore[arg-type]
    norm, attention, block = Doubled(), mixed, mlp
    match kind:
        case "pre":
            return PreNormLayer(context, norm, attention, norm, block, scale=0.5)
        case "sandwich":
            return SandwichLayer(context, norm, attention, norm, norm, block, norm)  # type: ignore[arg-type]
        case "post":
            return PostNormLayer(context, attention, norm, block, norm)  # type: ignore[arg-type]
        case "parallel":
            return ParallelLayer(context, norm, attention, block)  # type: ignore[arg-type]
        case "deepseek":
            return of_parts(DeepseekLayer, context, attention_norm=norm, attention=attention, mlp_norm=norm, mlp=block)
        case "qwen3 next":
            mixer: dict[str, Any] = {"attention": attention, "delta": None}
            return of_parts(Qwen3NextLayer, context, mixer_norm=norm, **mixer, mlp_norm=norm, mlp=block)
        case "qwen3 next, linear":
            mixer = {"attention": None, "delta": lambda x: x.cumsum(0)}
            return of_parts(Qwen3NextLayer, context, mixer_norm=norm, **mixer, mlp_norm=norm, mlp=block)
    return ParallelLayer(context, norm, attention, block, norm)  # type: ignore[arg-type]


KINDS = ("pre", "sandwich", "post", "parallel", "parallel of two norms", "deepseek", "qwen3 next", "qwen3 next, linear")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("first", [True, False])
def test_rows_that_nobody_reads_are_not_computed(kind: str, first: bool) -> None:
    """Behind the attention; the others are as ever."""
    random = torch.Generator().manual_seed(0)
    hidden, residual = torch.randn(2, TOKENS, SIZE, generator=random)
    positions, wanted = torch.arange(TOKENS), torch.tensor([3, 8])
    states = []
    mlp = Counted()
    for more in ({}, {"wanted": wanted}):
        state = State(hidden=hidden.clone(), positions=positions, **more)
        if not first:
            state["residual"] = residual.clone()
        layer(kind, mlp)(state)
        states.append(state)
    assert mlp.rows == [TOKENS, len(wanted)]
    whole, part = states
    assert "wanted" not in part
    for name in ("hidden", "residual"):
        torch.testing.assert_close(part[name], whole[name][wanted])
