"""What the attention drivers in Triton need of a GPU."""

from __future__ import annotations

from engine.interfaces.attention import AttentionNeed
from engine_cuda.machine import machine

FP8 = "float8_e4m3fn"
FIRST = (8, 0)
"""Compute capability of Ampere: for Turing, Triton computes products without tensor cores, in more registers and shared
memory than there are."""
FIRST_WITH_FP8 = (8, 9)
"""Of Ada; before it, there are no conversions to and from fp8."""


def wrong_capability(need: AttentionNeed) -> list[str]:
    """Why the GPUs that are computed on cannot serve; empty where they can, or where there are none of NVIDIA's."""
    capability = machine().capability if need.device.partition(":")[0] == "cuda" else None
    if capability is None:
        return []
    found = ".".join(map(str, capability))
    if capability < FIRST:
        return [f"it needs compute capability 8.0 or later, the GPU has {found}"]
    if capability < FIRST_WITH_FP8 and need.kind != "encoder" and need.kv_dtype == FP8:
        return [f"a cache of fp8 needs compute capability 8.9 or later, the GPU has {found}"]
    return []
