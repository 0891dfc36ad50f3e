"""What the cards of `int8` and `int4` have in common."""

from __future__ import annotations

import importlib

from engine.interfaces.quantization import KINDS, QuantizationCard, QuantizationNeed
from engine_cpu.levels import not_run
from engine_cpu.native import MODULE, TAPE, why_not_built

DTYPES = ("float32", "bfloat16")
ROW = 0.5 / 127 + 2.0**-20
"""How far a row's elements move, of the largest in their group: half a step of 127 to either side, in float32."""
STORED = ("float16", "bfloat16", "float32", "float64")


class NativeQuantization(QuantizationCard):
    """Weights of fewer bits, multiplied as integers with rows rounded to 8 bits."""

    framework = "torch"
    captured_by = frozenset({TAPE})
    experts_captured_by = captured_by
    batch_invariant = True
    kinds = frozenset(KINDS)

    @classmethod
    def unsupported(cls, need: QuantizationNeed) -> list[str]:
        reasons = why_not_built()
        if not reasons and importlib.import_module(MODULE).levels() == ["scalar"]:
            reasons.append(
                "this processor has neither AVX2 nor NEON, without which it is slower than weights as they are"
            )
        if need.device.partition(":")[0] != "cpu":
            reasons.append(f"it computes on the processor, not on {need.device}")
        if need.dtype not in DTYPES:
            reasons.append(f"dtype {need.dtype} is not one of {', '.join(DTYPES)}")
        if need.stored_dtype not in STORED:
            reasons.append(f"the checkpoint's weights are {need.stored_dtype}, it rounds {', '.join(STORED)}")
        return reasons

    @classmethod
    def remarks(cls, need: QuantizationNeed) -> list[str]:
        return not_run()
