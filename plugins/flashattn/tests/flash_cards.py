"""Cards of driver `flash` for one library each: over its double, on the processor; and over itself, on a GPU."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import ClassVar

from engine.interfaces.attention import AttentionNeed
from engine_flashattn.card import FlashAttention
from engine_flashattn.installed import Facts, facts
from engine_flashattn.table import FA2, FA3, FA4, TORCH, Implementation, common_reasons, machine_reasons

HOPPER = Facts(((9, 0),), {"fa2": "2.8.3", "fa3": "3.0.0", "fa4": "4.0.0b36", "torch": "2.13.0"})
DTYPES = ("float64", "float32", "bfloat16", "float16")


class DoubleFlash(FlashAttention):
    """Everything that the card of `flash` says, but for the device, and for dtypes that only a double computes in."""

    implementation: ClassVar[Implementation]
    body = "flash_body:DoubleBody"

    @classmethod
    def tokens_per_page(cls, need: AttentionNeed) -> int:
        return math.lcm(need.block_size, cls.implementation.page_multiple)

    @classmethod
    def unsupported(cls, need: AttentionNeed) -> list[str]:
        if need.dtype not in DTYPES or (need.kind != "encoder" and need.kv_dtype != need.dtype):
            return ["a dtype"]
        if need.dtype == "float64" and "sinks" in need.features:
            return ["sinks are applied in float32"]
        as_served = replace(need, device="cuda", dtype="bfloat16", kv_dtype="bfloat16")
        return [*common_reasons(as_served), *cls.implementation.reasons(as_served, HOPPER)]


class Fa2(DoubleFlash):
    """Over the double of FlashAttention 2."""

    implementation = FA2


class Fa3(DoubleFlash):
    """Over the double of FlashAttention 3."""

    implementation = FA3


class Fa4(DoubleFlash):
    """Over the double of FlashAttention 4."""

    implementation = FA4


class Torch(DoubleFlash):
    """Over the double of torch's own varlen_attn."""

    implementation = TORCH


class Kernels(Fa3):
    """Over the double of FlashAttention 3, with kernels of ours alone."""

    body = "flash_body:KernelBody"


class OneOnGpu(FlashAttention):
    """What the card of `flash` says where one library alone is installed."""

    implementation: ClassVar[Implementation]

    @classmethod
    def tokens_per_page(cls, need: AttentionNeed) -> int:
        return math.lcm(need.block_size, cls.implementation.page_multiple)

    @classmethod
    def unsupported(cls, need: AttentionNeed) -> list[str]:
        return [*common_reasons(need), *machine_reasons(facts()), *cls.implementation.reasons(need, facts())]


class Fa2OnGpu(OneOnGpu):
    """FlashAttention 2 itself."""

    implementation = FA2


class Fa3OnGpu(OneOnGpu):
    """FlashAttention 3 itself."""

    implementation = FA3


class Fa4OnGpu(OneOnGpu):
    """FlashAttention 4 itself."""

    implementation = FA4


class TorchOnGpu(OneOnGpu):
    """torch's own varlen_attn itself."""

    implementation = TORCH
