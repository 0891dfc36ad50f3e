"""Driver `deepgemm` over DeepGEMM itself, on a GPU: the suite of its point, and layers of real models' sizes."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("engine_sdk", reason="engine-sdk is not installed")

from by_library import Layers, slow
from of_case import OfForm
from oracle_body import rounded_rows
from written import CASES

from engine.interfaces.quantization import LayerShape
from engine.types.parallel import Shard
from engine_sdk.conformance import QuantizationConformance

SHAPES = ((2112, 7168), (24576, 1536), (7168, 18432), (4608, 4096))
"""[O, I] of DeepSeek-V3's projections, and of Qwen3-8B's."""


@pytest.mark.gpu
class TestOnGpu(OfForm, QuantizationConformance):
    driver, device = "deepgemm", "cuda"
    case = CASES["deepseek"]
    stored = CASES["deepseek"].stored
    uncovered = CASES["deepseek"].uncovered
    __test__ = True


class Drawn(Layers):
    """Scales are powers of two, which all of the library's GPUs take."""

    def __init__(self) -> None:
        pytest.importorskip("deep_gemm", reason="sgl-deep-gemm is not installed")
        from engine_deepgemm.body import DeepGemmBody
        from engine_deepgemm.card import DeepGemmOptions

        config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
        start = SimpleNamespace(model=SimpleNamespace(config=config), max_num_batched_tokens=1, max_num_seqs=1)
        options = DeepGemmOptions(warm_up=False)
        context = SimpleNamespace(start=start, options=options, device=torch.device("cuda"), dtype=torch.bfloat16)
        made = DeepGemmBody(context)
        super().__init__(made, partial(rounded_rows, power_of_two=made._powers))

    def layer(self, outputs: int, inputs: int, kind: str = "linear") -> tuple[Any, torch.Tensor]:
        codes = torch.randn(outputs, inputs, generator=self.random, device=self.device).to(torch.float8_e4m3fn)
        blocks = -(-outputs // 128), -(-inputs // 128)
        scales = torch.exp2(torch.randint(-9, -5, blocks, generator=self.random, device=self.device).float())
        shape = LayerShape(("layer",), kind, Shard.of(inputs), (Shard.of(outputs),), False)
        packed = self.body.pack(shape, {"weight": codes, "weight_scale_inv": scales})
        wide = scales.double().repeat_interleave(128, 0)[:outputs].repeat_interleave(128, 1)[:, :inputs]
        return packed, codes.double() * wide


@pytest.mark.gpu
@pytest.mark.parametrize(("outputs", "inputs"), [SHAPES[0], *(slow(*shape) for shape in SHAPES[1:])])
def test_products(outputs: int, inputs: int) -> None:
    """Beside float64. A kernel is compiled for each shape and most numbers of rows, by nvcc."""
    Drawn().hold_products(outputs, inputs, 2.0**-7)  # bfloat16 rounds by 2**-9


@pytest.mark.gpu
@pytest.mark.parametrize(("experts", "chosen", "hidden", "inner"), [(128, 8, 2048, 768), slow(64, 6, 2048, 1408)])
def test_experts(experts: int, chosen: int, hidden: int, inner: int) -> None:
    """Of Qwen3-30B-A3B and DeepSeek-V2-Lite, beside float64."""
    Drawn().hold_experts(experts, chosen, hidden, inner, 2.0**-4)
