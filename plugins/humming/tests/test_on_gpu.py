"""Driver `humming` over Humming itself, on a GPU: the suite of its point, and layers of real models' sizes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("engine_sdk", reason="engine-sdk is not installed")

from of_case import OfForm
from written import CASES

from engine.interfaces.quantization import LayerShape
from engine.types.parallel import Shard
from engine_kit.by_expert import by_expert
from engine_kit.routing import ExpertAct
from engine_quantization.methods import method_of
from engine_quantization.readers import taken_apart
from engine_quantization.trial import widened
from engine_sdk.conformance import QuantizationConformance

SHAPES = ((1536, 1024), (6144, 4096), (4096, 14336), (28672, 4096))
"""[O, I] of a projection of Qwen3-0.6B, and of those of Llama 3.1 8B."""
QUICK = ("awq", "deepseek")
"""Of other forms, and of larger layers, hundreds of kernels are compiled: they are slow."""
ROWS = (1, 3, 16, 64, 100, 256, 1000, 4096)
NEAR = 2.0**-6
"""Of the largest number of a row's result, beside float64: bfloat16 rounds it by 2**-9, and scales by as much."""


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


def _suites() -> dict[str, type]:
    found = {}
    for name, case in CASES.items():
        if "nf4" in name:
            continue
        words = "".join(part.capitalize() for part in name.replace("-", " ").replace(".", "").split())
        members: dict[str, Any] = {"driver": "humming", "device": "cuda", "case": case, "stored": case.stored}
        members |= {"uncovered": case.uncovered, "__test__": True}
        suite = type(f"Test{words}OnGpu", (OfForm, QuantizationConformance), members)
        found[suite.__name__] = pytest.mark.gpu(suite if name in QUICK else pytest.mark.slow(suite))
    return found


globals().update(_suites())


class Layers:
    """The driver's body for a form, with layers of random codes: no checkpoint of this size is rounded in numpy."""

    def __init__(self, name: str) -> None:
        pytest.importorskip("humming", reason="humming-kernels is not installed")
        from engine_humming.body import HummingBody

        self.config = {"quantization_config": CASES[name].stored}
        start = SimpleNamespace(model=SimpleNamespace(config=self.config))
        context = SimpleNamespace(start=start, options=None, device=torch.device("cuda"), dtype=torch.bfloat16)
        self.body = HummingBody(context)
        self.random = torch.Generator("cuda").manual_seed(0)

    def layer(self, outputs: int, inputs: int, kind: str = "linear") -> tuple[Any, torch.Tensor]:
        """Its weights are those that its tensors stand for by the readers, which other tests hold to the formulas."""
        shape = LayerShape(("layer",), kind, Shard.of(inputs), (Shard.of(outputs),), False)
        tensors = {}
        for one in self.body.tensors(shape):
            dtype = getattr(torch, sorted(one.dtypes)[0])
            if one.key in ("scales", "weight_scale", "weight_scale_inv"):
                drawn = torch.rand(one.shape, generator=self.random, device="cuda").mul_(0.01).add_(0.001).half()
            elif one.key == "g_idx":
                drawn = torch.arange(inputs, device="cuda", dtype=torch.int32) // 32
            elif dtype.is_floating_point:
                drawn = torch.randn(one.shape, generator=self.random, device="cuda").to(dtype)
            elif one.key == "weight_shape":
                drawn = torch.tensor([outputs, inputs], device="cuda")
            else:
                bounds = torch.iinfo(dtype)
                wide = torch.randint(bounds.min, bounds.max, one.shape, generator=self.random, device="cuda")
                drawn = wide.to(dtype)
            tensors[one.key] = drawn
        form = method_of(self.config["quantization_config"]).form("layer", kind)
        assert form is not None
        codes, _ = taken_apart(shape, form, tensors)
        return self.body.pack(shape, tensors), widened(codes, slice(None)).double()

    def rows(self, count: int, inputs: int) -> torch.Tensor:
        return torch.randn(count, inputs, generator=self.random, device="cuda").bfloat16()


def near(found: torch.Tensor, expected: torch.Tensor, bound: float) -> None:
    apart = (found.double() - expected).abs().amax(1) / expected.abs().amax(1)
    assert float(apart.max()) <= bound


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*QUICK, *(slow(name) for name in ("gptq", "gptq 8 groups", "w8a16", "fp8 channel"))])
@pytest.mark.parametrize(("outputs", "inputs"), [SHAPES[0], *(slow(*shape) for shape in SHAPES[1:])])
def test_products(name: str, outputs: int, inputs: int) -> None:
    """Beside float64."""
    layers = Layers(name)
    packed, meant = layers.layer(outputs, inputs)
    for count in ROWS:
        x = layers.rows(count, inputs)
        near(layers.body.linear(x, packed), x.double() @ meant.T, NEAR)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["awq", slow("deepseek")])
def test_experts(name: str) -> None:
    """Of Qwen3-30B-A3B, beside float64; a captured step gives what others chose later."""
    experts, chosen, hidden, inner = 128, 8, 2048, 768
    layers, act = Layers(name), ExpertAct()
    made = [(layers.layer(2 * inner, hidden, "expert"), layers.layer(hidden, inner, "expert")) for _ in range(experts)]
    packed = layers.body.pack_experts([(first[0], last[0]) for first, last in made])

    def one(expert: int, rows: torch.Tensor) -> torch.Tensor:
        (_, first), (_, last) = made[expert]
        gate, up = (rows @ first.T).bfloat16().double().chunk(2, dim=1)
        return ((torch.nn.functional.silu(gate) * up).bfloat16().double() @ last.T).bfloat16().double()

    def draw(count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        scores = torch.rand(count, experts, generator=layers.random, device="cuda")
        weights, ids = scores.topk(chosen)
        ids = ids.int()
        ids[0, 0] = experts  # nobody's
        return layers.rows(count, hidden), ids, weights

    for count in (1, 16, 256, 2048):
        x, ids, weights = draw(count)
        expected = by_expert(x.double(), ids, weights.double(), experts, one)
        near(layers.body.experts(x, packed, ids, weights, act), expected, 2.0**-5)
    x, ids, weights = draw(16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layers.body.experts(x, packed, ids, weights, act)
    for tensor, other in zip((x, ids, weights), draw(16), strict=True):
        tensor.copy_(other)
    graph.replay()
    assert torch.equal(out, layers.body.experts(x, packed, ids, weights, act))
