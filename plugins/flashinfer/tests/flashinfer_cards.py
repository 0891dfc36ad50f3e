"""The card of driver `flashinfer` over the double of its library, which serves the processor."""

from __future__ import annotations

from dataclasses import replace

from engine.interfaces.attention import AttentionNeed
from engine_flashinfer.card import FP8, HEAD_SIZES, FlashInferAttention, _layer_reasons

DTYPES = ("float64", "float32", "bfloat16", "float16")


class DoubleFlashInfer(FlashInferAttention):
    """Everything that the card says, but for the device, and for dtypes and heads that only a double computes."""

    body = "flashinfer_body:DoubleBody"

    @classmethod
    def unsupported(cls, need: AttentionNeed) -> list[str]:
        if need.dtype not in DTYPES or need.kv_dtype not in (need.dtype, FP8):
            return ["a dtype"]
        if need.dtype == "float64" and "sinks" in need.features:
            return ["sinks are applied to sums in float32"]
        kv_dtype = "bfloat16" if need.kv_dtype == need.dtype else FP8
        return _layer_reasons(replace(need, dtype="bfloat16", kv_dtype=kv_dtype, head_size=HEAD_SIZES[0]))
