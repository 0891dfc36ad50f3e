"""The cards: what reads stored weights, and computes with them in torch or on a processor."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict

from engine.interfaces.quantization import KINDS, QuantizationCard, QuantizationNeed, Rounding
from engine_cpu.levels import Level, not_run
from engine_cpu.native import TAPE, why_not_built
from engine_quantization.methods import METHODS, method_of, reasons

ROW = 0.5 / 127 + 2.0**-20
"""How far a row's elements move, of the largest in their group: half a step of 127 to either side, in float32."""


class Stored(QuantizationCard):
    """Weights as AWQ, GPTQ, compressed-tensors, FP8, MXFP4 and bitsandbytes store them, widened for each product."""

    requires_minor = 3  # with it came `in_order`, and tensors of any length
    framework = "torch"
    kinds = frozenset(KINDS)
    rounds = False
    body = "engine_quantization.body:TorchBody"

    @classmethod
    def claims(cls, stored: Mapping[str, Any]) -> bool:
        return stored.get("quant_method") in METHODS

    @classmethod
    def covers(cls, stored: Mapping[str, Any], layer: str, kind: str) -> bool:
        return method_of(stored).form(layer, kind) is not None

    @classmethod
    def rounding(cls, kind: str, options: Any) -> Rounding | None:
        """Exact."""
        return Rounding(0.0)

    @classmethod
    def unsupported(cls, need: QuantizationNeed) -> list[str]:
        return reasons(need.stored) if need.stored is not None and cls.claims(need.stored) else []


class CpuOptions(BaseModel):
    """Options of `stored-cpu`.

    Attributes:
        level: the processor features to compute with, as `--ops.level`; the result has the same bits at all of them.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    level: Level = "auto"


class StoredCpu(Stored):
    """The same weights multiplied as they are stored, on a processor."""

    priority = 10
    captured_by = frozenset({TAPE})
    experts_captured_by = captured_by
    batch_invariant = True
    Options = CpuOptions
    body = "engine_quantization.native:NativeBody"

    @classmethod
    def rounding(cls, kind: str, options: CpuOptions) -> Rounding:
        """Weights are exact; rows are rounded where weights are whole numbers, in their groups."""
        return Rounding(0.0, 0, ROW, 0)

    @classmethod
    def unsupported(cls, need: QuantizationNeed) -> list[str]:
        found = [*super().unsupported(need), *why_not_built()]
        if need.device.partition(":")[0] != "cpu":
            found.append(f"it computes on the processor, not on {need.device}")
        if need.dtype not in ("float32", "bfloat16"):
            found.append(f"dtype {need.dtype} is not one of float32, bfloat16")
        return found

    @classmethod
    def remarks(cls, need: QuantizationNeed) -> list[str]:
        return not_run()


class StoredTriton(Stored):
    """The same weights multiplied as they are stored, on a GPU."""

    priority = 10
    body = "engine_quantization.triton_body:TritonBody"

    @classmethod
    def rounding(cls, kind: str, options: Any) -> Rounding:
        """Weights are exact; rows meet 8-bit floats with a scale for each output as such, as in driver `fp8`."""
        return Rounding(0.0, 0, 16 / 448 + 2.0**-20, 0)

    @classmethod
    def unsupported(cls, need: QuantizationNeed) -> list[str]:
        found = super().unsupported(need)
        if importlib.util.find_spec("engine_cuda") is None:
            return [*found, "engine-cuda is not installed"]
        from engine_cuda.interpreter import wrong_device

        found += wrong_device(need.device)
        if need.dtype not in ("float32", "bfloat16", "float16"):
            found.append(f"dtype {need.dtype} is not one of float32, bfloat16, float16")
        return found

    @classmethod
    def remarks(cls, need: QuantizationNeed) -> list[str]:
        return ["it was not run on a GPU yet: interpreted kernels passed its suite"]
