"""The card of the host platform: what can be known of the processor without torch."""

from __future__ import annotations

import os
import platform
from pathlib import Path

from engine.interfaces.platform import PlatformCard, PlatformFacts, PlatformNeed

DTYPES = ("float32", "float64", "bfloat16", "float16")
FAST_BFLOAT16 = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
"""Words of /proc/cpuinfo (x86 and ARM) for processors that multiply bfloat16 themselves."""


class HostPlatform(PlatformCard):
    """Any machine, through plain torch on its processor: no capture, no padding, ordinary memory."""

    priority = 0
    framework = "torch"
    body = "engine.builtin.platform_host.body:HostPlatformBody"

    @classmethod
    def unsupported(cls, need: PlatformNeed) -> list[str]:
        if need.dtype != "auto" and need.dtype not in DTYPES:
            return [f"dtype {need.dtype} is not one of {', '.join(DTYPES)}"]
        return []

    @classmethod
    def describe(cls) -> PlatformFacts:
        name, features = _processor()
        # Where bfloat16 is emulated, float32 is faster, holds every bfloat16 number, and only costs memory.
        best = ("bfloat16", "float32", "float64", "float16") if features & FAST_BFLOAT16 else DTYPES
        return PlatformFacts(device="cpu", name=f"{name}, {_cores()} cores", dtypes=best)


def _processor() -> tuple[str, frozenset[str]]:
    """Its name and its features; a machine without /proc/cpuinfo has the name that Python knows, and no features."""
    name, features = platform.processor() or platform.machine() or "processor", frozenset[str]()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return name, features
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            name = value.strip()
        elif key.strip() in ("flags", "Features"):
            features = frozenset(value.split())
        elif not line.strip():
            break  # the other cores say the same
    return name, features


def _cores() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1
