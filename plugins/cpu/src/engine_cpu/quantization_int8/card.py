"""The card of quantization driver `int8`."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from engine.interfaces.quantization import Rounding
from engine_cpu.levels import Level
from engine_cpu.quantization_card import ROW, NativeQuantization


class Int8Options(BaseModel):
    """Options of `int8`.

    Attributes:
        level: the processor features to compute with, as `--ops.level`; the result has the same bits at all of them.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    level: Level = "auto"


class Int8Quantization(NativeQuantization):
    """8 bits a weight and a scale for each output; rows rounded to 8 bits by a scale of their own."""

    priority = 10
    Options = Int8Options
    body = "engine_cpu.quantization_int8.body:Int8Body"

    @classmethod
    def rounding(cls, kind: str, options: Int8Options) -> Rounding:
        """One step of 128 to either side."""
        return Rounding(2.0**-7, 0, ROW, 0)
