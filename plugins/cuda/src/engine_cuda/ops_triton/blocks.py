"""The first pass over logits: what each block of a row holds, so that what follows reads few of them.

A row is cut in blocks of a fixed size, whatever the batch: so are all sums, and a row's token does not depend on the
rows beside it. Weights are whole numbers, exp((logit - largest) / temperature) in units of 2^-shift of the largest,
whose sums are exact in any order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from engine_cuda.ops_triton.launching import power_of_2

BLOCK = 1024
"""Logits of a block."""
EACH = 4
"""Blocks of a program of the first pass."""
LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def load_logits(row, offs_v, mask):
    """Logits of a row in float32; -inf in the place of NaN, and where nothing is."""
    x = tl.load(row + offs_v, mask=mask, other=float("-inf")).to(tl.float32)
    return tl.where(x == x, x, float("-inf"))


@triton.jit
def relative_weight(x, peak, scale):
    """exp((x - peak) / temperature) for x <= peak, float32, 1 at the peak; scale = log2(e) / temperature."""
    return tl.where(x == peak, 1.0, tl.exp2((x - peak) * scale))


@triton.jit
def whole(weight, SHIFT: tl.constexpr):
    """A weight of at most 1 as a whole number of 2^-SHIFT, int64."""
    return (weight * (1 << SHIFT)).to(tl.int64)


@triton.jit
def is_drawn(temperature):
    """Whether a row is drawn: by the bits, since a GPU may take the smallest numbers for 0."""
    return temperature.to(tl.int32, bitcast=True) > 0


@triton.jit
def scale_of(temperature):
    """log2(e) / temperature, finite."""
    return LOG2_E / tl.maximum(temperature, 1.1754944e-38)


@triton.jit
def blocks_kernel(
    logits, row_stride, vocab, temperature, first_pass, num_blocks, SHIFT: tl.constexpr, EACH: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """first_pass: (peaks [R, num_blocks]: each block's largest logit; sums: of its weights relative to that, of rows
    that are drawn; found [R]: set to 0; spoilt [R, num_blocks]: whether it holds a NaN). Grid: (num_blocks / EACH,
    R)."""
    peaks, sums, found, spoilt = first_pass
    row = tl.program_id(1).to(tl.int64)
    offs_b = tl.program_id(0) * EACH + tl.arange(0, EACH)
    offs_v = offs_b[:, None] * BLOCK + tl.arange(0, BLOCK)[None]
    mask_b = offs_b < num_blocks
    x = tl.load(logits + row * row_stride + offs_v, mask=offs_v < vocab, other=float("-inf")).to(tl.float32)
    tl.store(spoilt + row * num_blocks + offs_b, tl.max((x != x).to(tl.int32), axis=1) > 0, mask=mask_b)
    x = tl.where(x == x, x, float("-inf"))
    peak = tl.max(x, axis=1)
    tl.store(peaks + row * num_blocks + offs_b, peak, mask=mask_b)
    if tl.program_id(0) == 0:
        tl.store(found + row, 0)
    heat = tl.load(temperature + row)
    if is_drawn(heat):
        weight = whole(relative_weight(x, peak[:, None], scale_of(heat)), SHIFT)
        total = tl.sum(tl.where(offs_v < vocab, weight, 0), axis=1)
        tl.store(sums + row * num_blocks + offs_b, total, mask=mask_b)


class Blocks(NamedTuple):
    """What the first pass finds.

    Args:
        peaks: float32 [R, num_blocks].
        sums: int64 [R, num_blocks]; of rows that are drawn.
        found: int32 [R] of zeros, for the second pass.
        spoilt: bool [R, num_blocks]; which hold a NaN.
        num_blocks: of a row.
        padded: num_blocks, up to a power of 2.
        shift: of weights.
    """

    peaks: torch.Tensor
    sums: torch.Tensor
    found: torch.Tensor
    spoilt: torch.Tensor
    num_blocks: int
    padded: int
    shift: int


def shift_of(vocab: int) -> int:
    """So that a whole row of the largest weight stays below 2^62."""
    return min(44, 62 - vocab.bit_length())


def look_at_blocks(logits: torch.Tensor, temperature: torch.Tensor) -> Blocks:
    """The first pass, which reads all logits once. logits [R, V], dense in V, of a dtype that float32 holds."""
    rows, vocab = logits.shape
    num_blocks, shift = triton.cdiv(vocab, BLOCK), shift_of(vocab)
    peaks = torch.empty(rows, num_blocks, dtype=torch.float32, device=logits.device)
    sums = torch.empty(rows, num_blocks, dtype=torch.int64, device=logits.device)
    found = torch.empty(rows, dtype=torch.int32, device=logits.device)
    spoilt = torch.empty(rows, num_blocks, dtype=torch.bool, device=logits.device)
    blocks_kernel[(triton.cdiv(num_blocks, EACH), rows)](
        logits, logits.stride(0), vocab, temperature, (peaks, sums, found, spoilt), num_blocks, shift, EACH, BLOCK
    )
    return Blocks(peaks, sums, found, spoilt, num_blocks, power_of_2(num_blocks), shift)
