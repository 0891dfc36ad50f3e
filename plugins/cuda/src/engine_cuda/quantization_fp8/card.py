"""The card of quantization driver `fp8`."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from engine.interfaces.quantization import KINDS, QuantizationCard, QuantizationNeed, Rounding
from engine_cuda.interpreter import wrong_device
from engine_cuda.nvidia import wrong_gpu
from engine_cuda.seen import RAN

DTYPES = ("bfloat16", "float16")
STORED = ("float16", "bfloat16", "float32", "float64")
CAPABILITY = (8, 9)
"""Ada's, the first whose tensor cores multiply such numbers; Hopper has 9.0."""
UNSERVED = 12
"""Major number of Blackwell's smaller GPUs, for which torch's product has no scales of rows (pytorch issue 192707)."""
MOST_ROWS = 4
"""Rows that the kernel for few of them takes."""
STEP = 16 / 448
"""Half the distance of the largest two numbers of e4m3, as a share of its largest: numbers further down are closer."""


class Fp8Options(BaseModel):
    """Options of `fp8`.

    Attributes:
        weights: "channel": a scale for each output; "tensor": one for the whole layer, as some checkpoints have it.
        fast_accum: let the tensor cores add up products in fewer bits than float32, which Hopper does faster.
        few_rows: steps of up to so many rows are not rounded: they wait for the weights alone, which a kernel of ours
            reads as they are stored. 0: rows are rounded whatever their number, and a row's result has the same
            rounding in every step.
        fused: norms and activations whose rows a product alone reads round them as they make them, in one launch. The
            codes are those of two (of `ops` "triton"), a norm's but for the order in which its squares are added up.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    weights: Literal["channel", "tensor"] = "channel"
    fast_accum: bool = True
    few_rows: int = Field(default=MOST_ROWS, ge=0, le=MOST_ROWS)
    fused: bool = True


class Fp8Quantization(QuantizationCard):
    """Weights and rows in 8-bit floats (e4m3), multiplied as such; a scale for each output and for each row."""

    priority = 10
    framework = "torch"
    kinds = frozenset(KINDS)
    Options = Fp8Options
    body = "engine_cuda.quantization_fp8.body:Fp8Body"

    @classmethod
    def rounding(cls, kind: str, options: Fp8Options) -> Rounding | None:
        """Three bits behind the point. Of one scale for a whole layer nothing is said: it is no group of inputs."""
        if options.weights == "tensor":
            return None
        return Rounding(STEP + 2.0**-20, 0, STEP + 2.0**-20, 0)

    @classmethod
    def unsupported(cls, need: QuantizationNeed) -> list[str]:
        reasons = [*wrong_device(need.device), *wrong_gpu(need.device, CAPABILITY, without=UNSERVED)]
        if need.dtype not in DTYPES:
            reasons.append(f"dtype {need.dtype} is not one of {', '.join(DTYPES)}")
        if need.stored_dtype not in STORED:
            reasons.append(f"the checkpoint's weights are {need.stored_dtype}, it rounds {', '.join(STORED)}")
        return reasons

    @classmethod
    def remarks(cls, need: QuantizationNeed) -> list[str]:
        return [RAN]
