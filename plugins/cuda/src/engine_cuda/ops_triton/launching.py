"""Sizes of launches, and how they begin."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda

from engine_cuda.interpreter_shim import INTERPRETED


def power_of_2(n: int) -> int:
    """The smallest power of 2 that is at least n."""
    return 1 << max(n - 1, 0).bit_length()


@triton.jit
def start_dependent(DEPENDENT: tl.constexpr):
    """Before a kernel reads what others wrote, and before it writes: a dependent lets the next one begin, and waits for
    all before it."""
    if DEPENDENT and not INTERPRETED:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()
