"""The host's processor, for platforms whose device it is. Without torch, and cheap: cards ask."""

from __future__ import annotations

import os
import platform
from pathlib import Path

DTYPES = ("float32", "float64", "bfloat16", "float16")
FAST_BFLOAT16 = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
"""Features of processors that multiply bfloat16 themselves."""


def best_dtypes(features: frozenset[str]) -> tuple[str, ...]:
    """That torch computes in, best first. Where bfloat16 is emulated, float32 is faster, holds every bfloat16 number,
    and only costs memory."""
    return ("bfloat16", "float32", "float64", "float16") if features & FAST_BFLOAT16 else DTYPES


def processor() -> tuple[str, frozenset[str]]:
    """Its name, and its features by the words of /proc/cpuinfo (x86 and ARM).

    A machine without that file has the name that Python knows, and no features.
    """
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


def cores() -> int:
    """That this process may run on."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1
