"""The card of quantization driver `int4`."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from engine.interfaces.quantization import Rounding
from engine_cpu.levels import Level
from engine_cpu.quantization_card import ROW, NativeQuantization


class Int4Options(BaseModel):
    """Options of `int4`.

    Attributes:
        group_size: so many inputs of an output share a scale: fewer are more exact, more are smaller and faster.
        head_bits: of the layer that makes logits, which takes an error hardest; 8 is as `int8` stores it.
        level: the processor features to compute with, as `--ops.level`; the result has the same bits at all of them.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    group_size: Literal[32, 64, 128] = 32
    head_bits: Literal[4, 8] = Field(default=8)
    level: Level = "auto"


class Int4Quantization(NativeQuantization):
    """4 bits a weight and a 16-bit scale for each group of inputs; rows rounded to 8 bits in the same groups."""

    priority = 5
    Options = Int4Options
    body = "engine_cpu.quantization_int4.body:Int4Body"

    @classmethod
    def rounding(cls, kind: str, options: Int4Options) -> Rounding:
        """One step of 8 to either side, with scales of 11 bits; the head as `int8` where it has 8 bits."""
        if kind == "head" and options.head_bits == 8:
            return Rounding(2.0**-7, 0, ROW, 0)
        return Rounding(2.0**-3 + 2.0**-11, options.group_size, ROW, options.group_size)
