"""A kernel that only reads: the bandwidth that nothing else can pass."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

BLOCK, UNROLL, PROGRAMS_PER_CORE = 4096, 4, 8


@triton.jit
def read_kernel(words, sums, per_program, BLOCK: tl.constexpr, UNROLL: tl.constexpr):
    """words int32 [programs * per_program]; sums int32 [programs]: each program's sum of its words."""
    start = tl.program_id(0).to(tl.int64) * per_program
    place = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.int32)
    for piece in range(0, per_program, BLOCK * UNROLL):
        for part in tl.static_range(UNROLL):
            total += tl.load(words + start + piece + part * BLOCK + place)
    tl.store(sums + tl.program_id(0), tl.sum(total, axis=0))


def reader(words: torch.Tensor) -> tuple[Callable[[], torch.Tensor], int]:
    """A launch that reads int32 words and gives the programs' sums; and how many bytes it reads: all but less than a
    program's piece at the end."""
    cores = torch.cuda.get_device_properties(words.device).multi_processor_count if words.is_cuda else 1
    programs, piece = cores * PROGRAMS_PER_CORE, BLOCK * UNROLL
    per_program = words.numel() // programs // piece * piece
    if not per_program:
        raise ValueError(f"{words.numel()} words are too few for {programs} programs")
    sums = torch.zeros(programs, dtype=torch.int32, device=words.device)

    def launch() -> torch.Tensor:
        read_kernel[(programs,)](words, sums, per_program, BLOCK=BLOCK, UNROLL=UNROLL, num_warps=8)
        return sums

    return launch, programs * per_program * 4
