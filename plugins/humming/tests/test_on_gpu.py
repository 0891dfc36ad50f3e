"""Driver `humming` over Humming itself, on a GPU: the suite of its point, and layers of real models' sizes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("engine_sdk", reason="engine-sdk is not installed")

from by_library import Layers, slow
from of_case import OfForm
from written import CASES

from engine.interfaces.quantization import LayerShape
from engine.types.parallel import Shard
from engine_quantization.methods import method_of
from engine_quantization.readers import taken_apart
from engine_quantization.trial import widened
from engine_sdk.conformance import QuantizationConformance

SHAPES = ((1536, 1024), (6144, 4096), (4096, 14336), (28672, 4096))
"""[O, I] of a projection of Qwen3-0.6B, and of those of Llama 3.1 8B."""
QUICK = ("awq", "deepseek")
"""Of other forms, and of larger layers, hundreds of kernels are compiled: they are slow."""


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


class Drawn(Layers):
    """Of a form."""

    def __init__(self, name: str) -> None:
        pytest.importorskip("humming", reason="humming-kernels is not installed")
        from engine_humming.body import HummingBody

        self.config = {"quantization_config": CASES[name].stored}
        start = SimpleNamespace(model=SimpleNamespace(config=self.config))
        context = SimpleNamespace(start=start, options=None, device=torch.device("cuda"), dtype=torch.bfloat16)
        super().__init__(HummingBody(context), torch.Tensor.double)

    def layer(self, outputs: int, inputs: int, kind: str = "linear") -> tuple[Any, torch.Tensor]:
        """Its weights are those that its tensors stand for by the readers, which other tests hold to the formulas."""
        shape = LayerShape(("layer",), kind, Shard.of(inputs), (Shard.of(outputs),), False)
        tensors = {}
        for one in self.body.tensors(shape):
            dtype = getattr(torch, sorted(one.dtypes)[0])
            if one.key in ("scales", "weight_scale", "weight_scale_inv"):
                drawn = torch.rand(one.shape, generator=self.random, device=self.device).mul_(0.01).add_(0.001).half()
            elif one.key == "g_idx":
                drawn = torch.arange(inputs, device=self.device, dtype=torch.int32) // 32
            elif dtype.is_floating_point:
                drawn = torch.randn(one.shape, generator=self.random, device=self.device).to(dtype)
            elif one.key == "weight_shape":
                drawn = torch.tensor([outputs, inputs], device=self.device)
            else:
                bounds = torch.iinfo(dtype)
                wide = torch.randint(bounds.min, bounds.max, one.shape, generator=self.random, device=self.device)
                drawn = wide.to(dtype)
            tensors[one.key] = drawn
        form = method_of(self.config["quantization_config"]).form("layer", kind)
        assert form is not None
        codes, _ = taken_apart(shape, form, tensors)
        return self.body.pack(shape, tensors), widened(codes, slice(None)).double()


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*QUICK, *(slow(name) for name in ("gptq", "gptq 8 groups", "w8a16", "fp8 channel"))])
@pytest.mark.parametrize(("outputs", "inputs"), [SHAPES[0], *(slow(*shape) for shape in SHAPES[1:])])
def test_products(name: str, outputs: int, inputs: int) -> None:
    """Beside float64."""
    Drawn(name).hold_products(outputs, inputs, 2.0**-6)  # bfloat16 rounds by 2**-9, and scales by as much


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["awq", slow("deepseek")])
def test_experts(name: str) -> None:
    """Of Qwen3-30B-A3B, beside float64."""
    Drawn(name).hold_experts(128, 8, 2048, 768, 2.0**-5)
