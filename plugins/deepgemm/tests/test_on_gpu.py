"""Driver `deepgemm` over DeepGEMM itself, on a GPU: the suite of its point, and layers of real models' sizes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("engine_sdk", reason="engine-sdk is not installed")

from of_case import OfForm
from oracle_body import rounded_rows
from written import CASES

from engine.interfaces.quantization import LayerShape
from engine.types.parallel import Shard
from engine_kit.by_expert import by_expert
from engine_kit.routing import ExpertAct
from engine_sdk.conformance import QuantizationConformance

SHAPES = ((2112, 7168), (24576, 1536), (7168, 18432), (4608, 4096))
"""[O, I] of DeepSeek-V3's projections, and of Qwen3-8B's."""
ROWS = (1, 3, 16, 64, 100, 256, 1000, 4096)
NEAR = 2.0**-7
"""Of the largest number of a row's result, beside float64: bfloat16 rounds by 2**-9 of it."""


def slow(*values: Any) -> Any:
    """A kernel is compiled for each shape and most numbers of rows, by nvcc."""
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.gpu
class TestOnGpu(OfForm, QuantizationConformance):
    driver, device = "deepgemm", "cuda"
    case = CASES["deepseek"]
    stored = CASES["deepseek"].stored
    uncovered = CASES["deepseek"].uncovered
    __test__ = True


class Layers:
    """The driver's body, with layers of random codes and scales that are powers of two, which all its GPUs take."""

    def __init__(self) -> None:
        pytest.importorskip("deep_gemm", reason="sgl-deep-gemm is not installed")
        from engine_deepgemm.body import DeepGemmBody
        from engine_deepgemm.card import DeepGemmOptions

        config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
        start = SimpleNamespace(model=SimpleNamespace(config=config), max_num_batched_tokens=1, max_num_seqs=1)
        self.body = DeepGemmBody(
            SimpleNamespace(
                start=start, options=DeepGemmOptions(warm_up=False), device=torch.device("cuda"), dtype=torch.bfloat16
            )
        )
        self.random = torch.Generator("cuda").manual_seed(0)

    def layer(self, outputs: int, inputs: int, kind: str = "linear") -> tuple[object, torch.Tensor]:
        codes = torch.randn(outputs, inputs, generator=self.random, device="cuda").to(torch.float8_e4m3fn)
        blocks = -(-outputs // 128), -(-inputs // 128)
        scales = torch.exp2(torch.randint(-9, -5, blocks, generator=self.random, device="cuda").float())
        shape = LayerShape(("layer",), kind, Shard.of(inputs), (Shard.of(outputs),), False)
        packed = self.body.pack(shape, {"weight": codes, "weight_scale_inv": scales})
        wide = scales.double().repeat_interleave(128, 0)[:outputs].repeat_interleave(128, 1)[:, :inputs]
        return packed, codes.double() * wide

    def rows(self, count: int, inputs: int) -> torch.Tensor:
        return torch.randn(count, inputs, generator=self.random, device="cuda").bfloat16()


def near(found: torch.Tensor, expected: torch.Tensor, bound: float) -> None:
    apart = (found.double() - expected).abs().amax(1) / expected.abs().amax(1)
    assert float(apart.max()) <= bound


@pytest.mark.gpu
@pytest.mark.parametrize(("outputs", "inputs"), [SHAPES[0], *(slow(*shape) for shape in SHAPES[1:])])
def test_products(outputs: int, inputs: int) -> None:
    """Beside float64."""
    layers = Layers()
    packed, meant = layers.layer(outputs, inputs)
    for count in ROWS:
        x = layers.rows(count, inputs)
        near(layers.body.linear(x, packed), rounded_rows(x, layers.body._powers) @ meant.T, NEAR)


@pytest.mark.gpu
@pytest.mark.parametrize(("experts", "chosen", "hidden", "inner"), [(128, 8, 2048, 768), slow(64, 6, 2048, 1408)])
def test_experts(experts: int, chosen: int, hidden: int, inner: int) -> None:
    """Of Qwen3-30B-A3B and DeepSeek-V2-Lite, beside float64; a captured step gives what others chose later."""
    layers, act = Layers(), ExpertAct()
    made = [(layers.layer(2 * inner, hidden, "expert"), layers.layer(hidden, inner, "expert")) for _ in range(experts)]
    packed = layers.body.pack_experts([(first[0], last[0]) for first, last in made])

    def one(expert: int, rows: torch.Tensor) -> torch.Tensor:
        (_, first), (_, last) = made[expert]
        gate, up = (rounded_rows(rows.bfloat16(), layers.body._powers) @ first.T).bfloat16().double().chunk(2, dim=1)
        between = (torch.nn.functional.silu(gate) * up).bfloat16()
        return (rounded_rows(between, layers.body._powers) @ last.T).bfloat16().double()

    def draw(count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        scores = torch.rand(count, experts, generator=layers.random, device="cuda")
        weights, ids = scores.topk(chosen)
        ids = ids.int()
        ids[0, 0] = experts  # nobody's
        return layers.rows(count, hidden), ids, weights

    for count in (1, 16, 256, 2048):
        x, ids, weights = draw(count)
        expected = by_expert(x.double(), ids, weights.double(), experts, one)
        near(layers.body.experts(x, packed, ids, weights, act), expected, 2.0**-4)
    x, ids, weights = draw(16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layers.body.experts(x, packed, ids, weights, act)
    for tensor, other in zip((x, ids, weights), draw(16), strict=True):
        tensor.copy_(other)
    graph.replay()
    assert torch.equal(out, layers.body.experts(x, packed, ids, weights, act))
