"""Layers by four products that take in what lies around them, beside those by operations one after the other."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from plain import PlainOps, open_model, run

from engine.types.parallel import Stage
from engine_sdk.conformance.model.ranks import on_ranks
from engine_sdk.toy_adapter import ToyAdapters

IDS = [5, 17, 40, 8, 99]


class Matrix(NamedTuple):
    """One that takes them in, and notes what it is asked for."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    most: int
    asked: list[str]

    def fits(self, rows: int, normed: bool) -> bool:
        return rows <= self.most

    def normed(self, x: torch.Tensor, norm: torch.Tensor, eps: float, gated: bool) -> torch.Tensor:
        self.asked.append("gated" if gated else "normed")
        y = torch.nn.functional.linear(PlainOps().rms_norm(x, norm, eps), self.weight, self.bias)
        return PlainOps().silu_mul(y) if gated else y

    def added(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        self.asked.append("added")
        return torch.nn.functional.linear(x, self.weight, self.bias) + residual


class AroundOps(PlainOps):
    """Ops whose matrices are such."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.asked: list[str] = []

    def pack_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Any:
        return Matrix(weight, bias, self.most, self.asked)

    def linear(self, x: torch.Tensor, packed: Any) -> torch.Tensor:
        return torch.nn.functional.linear(x, packed.weight, packed.bias)


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"])
def test_four_products_a_layer(checkpoints, architecture: str) -> None:
    """The same hidden states; as many rows as fit, and not one more."""
    folder = checkpoints(architecture)
    expected = run(open_model(folder, torch.float64), IDS)
    for most, layer in ((len(IDS), ["normed", "added", "gated", "added"]), (len(IDS) - 1, [])):
        ops = AroundOps(most)
        model = open_model(folder, torch.float64, ops=ops)
        torch.testing.assert_close(run(model, IDS), expected, rtol=1e-10, atol=1e-10)
        assert ops.asked == layer * len(model.layers)


def test_where_a_product_is_not_all_that_a_layer_gives(checkpoints) -> None:
    """With adapters, over ranks and on one of several stages they are left alone."""
    folder, ops = checkpoints("LlamaForCausalLM"), AroundOps(9)
    run(open_model(folder, torch.float64, ops=ops, adapters=ToyAdapters()), IDS)
    on_ranks(
        2,
        lambda group: run(
            open_model(folder, torch.float64, ops=ops, tp_rank=group.rank, tp_size=group.size, group=group), IDS
        ),
    )
    layers = open_model(folder, torch.float64, ops=ops, stage=Stage(count=2, stop=1)).layers
    state: Any = {"hidden": torch.zeros(1, 8, dtype=torch.float64)}
    assert ops.asked == [] and not next(iter(layers))._few_rows(state)
