"""What a library computes is held to the codes; what is right passes, in each dtype."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from engine.interfaces.quantization import LayerShape
from engine.types.errors import ConfigError
from engine.types.parallel import Shard
from engine_quantization.readers import Codes
from engine_quantization.trial import ExpertsTrial, hold_to, product, widened

OUTPUTS, INPUTS = 24, 384
LAYER = LayerShape(("layer",), "linear", Shard.of(INPUTS), (Shard.of(OUTPUTS),), False)


def codes(seed: int = 0) -> Codes:
    """Of 4 bits, in groups of 32, with weights as large as any model has."""
    random = torch.Generator().manual_seed(seed)
    drawn = torch.randint(16, (OUTPUTS, INPUTS), generator=random, dtype=torch.uint8)
    scales = torch.rand(OUTPUTS, INPUTS // 32, generator=random).add(0.5).mul(4)
    zeros = torch.randint(16, scales.shape, generator=random, dtype=torch.uint8)
    return Codes(drawn, 4, scales, zeros, None, 32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_is_right_passes(dtype: torch.dtype) -> None:
    held, bias = codes(), torch.arange(OUTPUTS) / 8
    weight = widened(held, slice(None))
    assert torch.equal(product(torch.eye(INPUTS), held, None).T, weight)
    hold_to(LAYER, held, bias, lambda x: (x.float() @ weight.T + bias).to(dtype), dtype, "it")


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda x, weight: x @ weight.roll(1, 0).T, "computes 1 x 384 x 24 wrongly: .* of the largest number off"),
        (lambda x, weight: (x @ weight.T)[:, :-1], r"wrongly: the result is \[1, 23\], not \[1, 24\]"),
        (lambda x, weight: torch.full((len(x), OUTPUTS), float("nan")), "wrongly: nan of the largest"),
        (lambda x, weight: x @ weight, "it says: mat1 and mat2"),
    ],
)
def test_what_is_wrong_does_not(wrong: Callable[..., torch.Tensor], says: str) -> None:
    weight = widened(codes(), slice(None))
    with pytest.raises(ConfigError, match=says):
        hold_to(LAYER, codes(), None, lambda x: wrong(x.float(), weight), torch.bfloat16, "it")


def test_experts() -> None:
    """Joined ones, where one of them is another."""
    weights = [widened(codes(seed), slice(None)) for seed in range(3)]

    def joined(order: list[int]) -> Callable[..., torch.Tensor]:
        def experts(x: torch.Tensor, ids: torch.Tensor, of_each: torch.Tensor) -> torch.Tensor:
            every = torch.stack([x.float() @ weights[expert].T for expert in order], dim=1)
            chosen = every.gather(1, ids.long().unsqueeze(-1).expand(-1, -1, OUTPUTS))
            return (chosen * of_each.unsqueeze(-1)).sum(1)

        return experts

    def one(expert: int, rows: torch.Tensor) -> torch.Tensor:
        return rows.float() @ weights[expert].T

    trial = ExpertsTrial(3, INPUTS, one, torch.bfloat16, torch.device("cpu"), "it")
    trial.hold(joined([0, 1, 2]), 2.0**-6)
    with pytest.raises(ConfigError, match="multiply with 3 experts by it.*expert=stored-triton"):
        trial.hold(joined([0, 2, 2]), 2.0**-6)
