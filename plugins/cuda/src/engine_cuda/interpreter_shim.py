"""What Triton's interpreter does otherwise than a GPU, and what stands in for it. (Cards ask `interpreter`: no torch.)

- It cuts off what it should round: values are rounded to the cache's type before they are written (`rounded`), results
  are made in float32 and rounded by torch (`written_for`), and products are of float32 (`widens`).
- It casts float32 to e4m3 wrongly: halves away from zero instead of to even, nothing of what is below 2**-6, no
  saturation, no NaN. So interpreted kernels count in whole numbers what the hardware does in one step (`to_e4m3`).
- It has no assembly: who waits for flags of others asks for them with an atomic addition of 0 (`wait_for`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine_cuda.interpreter import interpreted

INTERPRETED: tl.constexpr = tl.constexpr(interpreted())
"""For kernels: which of two ways is compiled."""
PROCESSORS = 3
"""Multiprocessors that the interpreter is taken to have: few, so that small examples are divided."""


def rounded(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """In the cache's type, with what fp8 cannot hold as its largest number: what `attention_storing.stored` does but
    for its rule for NaN."""
    if dtype.itemsize == 1:
        limits = torch.finfo(dtype)
        values = values.clamp(limits.min, limits.max)
    return values.to(dtype)


def written_for(out: torch.Tensor, interpreted: bool) -> torch.Tensor:
    """What a kernel writes in the place of `out`: itself, or a dense float32 tensor that is copied to it afterwards,
    where the interpreter would round or the elements of `out` do not lie together."""
    if out.stride(-1) == 1 and not (interpreted and out.dtype != torch.float32):
        return out
    return torch.empty(out.shape, dtype=torch.float32, device=out.device)


def widens(dtype: torch.dtype, interpreted: bool) -> bool:
    """Whether products are computed in float32 instead of `dtype`."""
    return interpreted or dtype == torch.float32


@triton.jit
def to_e4m3(values):
    """float32 -> the codes of e4m3 as uint8: the nearest number, half to even, at most 448 in size; NaN stays NaN."""
    if INTERPRETED:
        bits = values.to(tl.int32, bitcast=True)
        size = bits & 0x7FFFFFFF
        # 3 of 23 bits behind the point are kept, and the exponent's zero is 7 instead of 127.
        normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
        # Added to 1.5 * 2**23, a float32 is rounded to a whole number of steps of 2**-9, in the lowest bits.
        small = (tl.abs(values) * 512.0 + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000
        code = tl.where(size < (121 << 23), small, tl.minimum(normal, 0x7E))
        code = tl.where(size > 0x7F800000, 0x7F, code)
        return (code | ((bits >> 24) & 0x80)).to(tl.uint8)
    return values.to(tl.float8e4nv).to(tl.uint8, bitcast=True)


_WAIT: tl.constexpr = tl.constexpr(
    """
    {
        .reg .b64 flag;
        .reg .b32 thread;
        .reg .pred early, other;
        mov.u32 thread, %tid.x;
        mov.b64 flag, $2;
        setp.ge.u32 other, thread, 32;
        @other bra done;
    again:
        ld.acquire.sys.global.b64 flag, [$1];
        setp.lt.s64 early, flag, $2;
        @early bra again;
    done:
        mov.b64 $0, flag;
    }
    """
)
"""Each thread waits for a flag of its own: a loop around a sum over threads would exchange numbers between threads
that may have left it at different times. The first 32 threads have all flags among them, and alone ask for them: where
all of a program's did, as many as 512 read a word that a GPU elsewhere is about to write."""


@triton.jit
def wait_for(flags, value):
    """Wait until every flag [n], n at most 32, is at least `value` [n], int64, and see with them all that was written
    before they were. A barrier of the program has to follow: 32 of its threads wait."""
    if INTERPRETED:
        while tl.min(tl.atomic_add(flags, tl.zeros_like(value), sem="acquire", scope="sys") - value, 0) < 0:
            pass
    else:
        tl.inline_asm_elementwise(_WAIT, "=l,l,l", [flags, value], dtype=tl.int64, is_pure=False, pack=1)
