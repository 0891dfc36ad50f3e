"""Layers whose norms and activation round the rows that they make, beside those by operations one after the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from plain import PlainOps, open_model, run

from engine.interfaces.quantization import LayerShape, StoredTensor, plain_tensors
from engine_sdk.conformance.model.ranks import on_ranks
from engine_sdk.toy_adapter import ToyAdapters

IDS = [5, 17, 40, 8, 99]
OPS = PlainOps()


class Matrix(NamedTuple):
    """One that rounds nothing, and notes what it is asked for."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    least: int
    asked: list[str]

    def rounds(self, rows: int) -> bool:
        return rows >= self.least

    def after_norm(
        self, x: torch.Tensor, residual: torch.Tensor | None, norm: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.asked.append("norm" if residual is None else "sum and norm")
        normed, total = (
            (OPS.rms_norm(x, norm, eps), x) if residual is None else OPS.add_rms_norm(x, residual, norm, eps)
        )
        return torch.nn.functional.linear(normed, self.weight, self.bias), total

    def after_silu(self, gate_up: torch.Tensor) -> torch.Tensor:
        self.asked.append("silu")
        return torch.nn.functional.linear(OPS.silu_mul(gate_up), self.weight, self.bias)


class Rounds:
    """A driver of quantization with such matrices."""

    def __init__(self, least: int = 1) -> None:
        self.least = least
        self.asked: list[str] = []

    def tensors(self, layer: LayerShape) -> Sequence[StoredTensor]:
        return plain_tensors(layer, cast=True)

    def pack(self, layer: LayerShape, tensors: Mapping[str, torch.Tensor]) -> Any:
        return Matrix(tensors["weight"], tensors.get("bias"), self.least, self.asked)

    def linear(self, x: torch.Tensor, packed: Any) -> torch.Tensor:
        self.asked.append("alone")
        return torch.nn.functional.linear(x, packed.weight, packed.bias)


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"])
def test_what_a_layer_asks_for(checkpoints, architecture: str) -> None:
    """The same logits; attention's product alone, and all of them with one row too few."""
    folder = checkpoints(architecture)
    expected = run(open_model(folder, torch.float64), IDS)
    for least in (len(IDS), len(IDS) + 1):
        driver = Rounds(least)
        model = open_model(folder, torch.float64, quantization={"linear": driver})
        torch.testing.assert_close(run(model, IDS), expected, rtol=1e-10, atol=1e-10)
        layer = ["sum and norm", "alone", "sum and norm", "silu"] if least <= len(IDS) else ["alone"] * 4
        asked = layer * len(model.layers)
        assert driver.asked == (["norm", *asked[1:]] if least <= len(IDS) else asked)


def test_the_last_layers_rows_may_be_few(checkpoints) -> None:
    """Behind its attention it has those that are read: as many as round, or fewer."""
    wanted = torch.tensor([1, 4])
    folder = checkpoints("LlamaForCausalLM")
    found = []

    class Gathers(PlainOps):
        def gather_rows(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
            return x[index]

    for least, ending in ((9, ["alone"] * 2), (3, ["alone"] * 2), (2, ["sum and norm", "silu"])):
        driver = Rounds(least)
        model = open_model(folder, torch.float64, ops=Gathers(), quantization={"linear": driver})
        layer = list(model.layers)[-1]
        draw = torch.Generator().manual_seed(0)
        hidden, residual = torch.randn(2, len(IDS), layer.attention.qkv.shape.inputs.length, generator=draw).double()
        state: Any = {
            "hidden": hidden, "residual": residual, "positions": torch.arange(len(IDS)), "wanted": wanted,
        }  # fmt: skip
        layer(state)
        found.append(state["hidden"] + state["residual"])
        assert driver.asked[-2:] == ending and "wanted" not in state
    for each in found:
        torch.testing.assert_close(each, found[0], rtol=1e-10, atol=1e-10)


def test_where_a_product_is_not_all_that_a_layer_gives(checkpoints) -> None:
    """With adapters all are left alone; over ranks the last, whose products are summed."""
    folder, driver = checkpoints("LlamaForCausalLM"), Rounds()
    run(open_model(folder, torch.float64, quantization={"linear": driver}, adapters=ToyAdapters()), IDS)
    assert set(driver.asked) == {"alone"}
    expected = run(open_model(folder, torch.float64), IDS)
    of_ranks = Rounds(), Rounds()

    def compute(group: Any) -> torch.Tensor:
        model = open_model(
            folder, torch.float64, quantization={"linear": of_ranks[group.rank]}, tp_rank=group.rank,
            tp_size=group.size, group=group,
        )  # fmt: skip
        return run(model, IDS)

    for found in on_ranks(2, compute):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    for each in of_ranks:
        assert each.asked[:4] == ["norm", "alone", "sum and norm", "alone"] and "silu" not in each.asked
