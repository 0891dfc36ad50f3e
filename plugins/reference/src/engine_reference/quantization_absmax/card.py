"""The card of quantization driver `absmax`."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from engine.interfaces.quantization import KINDS, QuantizationCard, QuantizationNeed, Rounding

STORED = ("float16", "bfloat16", "float32", "float64")


class AbsmaxOptions(BaseModel):
    """Options of `absmax`.

    Attributes:
        bits: of a weight.
        group_size: so many inputs of an output share a scale; 0: all of them.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    bits: Literal[4, 8] = 8
    group_size: int = Field(default=0, ge=0)


class AbsmaxQuantization(QuantizationCard):
    """Weights rounded to 8 or 4 bits, and back for each multiplication: it saves memory and costs time.

    On any device and in any dtype: what faster drivers are compared with.
    """

    framework = "torch"
    kinds = frozenset(KINDS)
    Options = AbsmaxOptions
    body = "engine_reference.quantization_absmax.absmax:AbsmaxBody"

    @classmethod
    def rounding(cls, kind: str, options: AbsmaxOptions) -> Rounding:
        """Half a step, but a whole one for what is as large as the largest, with the other sign; groups' scales have 11
        bits."""
        scale = 2.0**-11 if options.group_size else 0.0
        return Rounding(2.0 ** (1 - options.bits) + scale, options.group_size)

    @classmethod
    def unsupported(cls, need: QuantizationNeed) -> list[str]:
        """Weights that are no plain numbers."""
        if need.stored_dtype in STORED:
            return []
        return [f"the checkpoint's weights are {need.stored_dtype}, it rounds {', '.join(STORED)}"]
