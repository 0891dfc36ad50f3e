"""The second pass of a draw: of rows with filters, the few logits that the filters can keep.

A bound on what is kept follows from the first pass: the k-th largest of the blocks' peaks for top_k; min_p itself; and
for top_p alone the weight below which a whole vocabulary could not make up what top_p leaves out. (Beside other filters
top_p is a share of what these keep, which is therefore collected as a whole.) What reaches the bound is collected in no
particular order: whatever is found in it later does not depend on it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from engine.interfaces.ops import SamplingRows
from engine_cuda.ops_triton.blocks import (
    BLOCK,
    EACH,
    Blocks,
    is_drawn,
    load_logits,
    relative_weight,
    scale_of,
)
from engine_cuda.ops_triton.keys import key_of, largest_with, number_of

CAPACITY = 8192
"""Logits of a row that are collected. A row with more (a flat distribution under top_p) is read as a whole, again and
again."""

WARPS = 8
"""Of a program: it keeps as many logits in registers as there are in its blocks, and where each of them goes."""


@triton.jit
def is_filtered(top_k, top_p, min_p, vocab):
    """Whether anything is dropped of a row that is drawn."""
    return ((top_k > 0) & (top_k < vocab)) | (top_p < 1.0) | (min_p > 0.0)


@triton.jit
def block_totals(row, peaks, sums, num_blocks, scale, PADDED: tl.constexpr):
    """Of the PADDED blocks of a row: (their largest logits, their sums, factors that make these relative to the row's
    peak, their sums relative to that; the row's peak, 0 where nothing is finite)."""
    offs_b = tl.arange(0, PADDED)
    mask = offs_b < num_blocks
    each = tl.load(peaks + row * num_blocks + offs_b, mask=mask, other=float("-inf"))
    own = tl.load(sums + row * num_blocks + offs_b, mask=mask, other=0)
    peak = tl.max(each, axis=0)
    peak = tl.where(peak == float("-inf"), 0.0, peak)
    factor = relative_weight(each, peak, scale)
    return each, own, factor, (own.to(tl.float64) * factor.to(tl.float64)).to(tl.int64), peak


@triton.jit
def candidates_kernel(
    logits, row_stride, vocab, filters, first_pass, candidates, num_blocks, SHIFT: tl.constexpr, PADDED: tl.constexpr,
    CAPACITY: tl.constexpr, EACH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """candidates: (values, ids) [R, CAPACITY], what can be kept. Grid: (num_blocks / EACH, R).

    filters: (temperature, top_k, top_p, min_p) [R]. first_pass: (peaks, sums, found); found [R] counts candidates.
    """
    temperature, top_k, top_p, min_p = filters
    peaks, sums, found = first_pass
    values, ids = candidates
    row = tl.program_id(1).to(tl.int64)
    heat = tl.load(temperature + row)
    k = tl.load(top_k + row)
    p = tl.load(top_p + row)
    floor = tl.load(min_p + row)
    if is_drawn(heat) & is_filtered(k, p, floor, vocab):
        scale = scale_of(heat)
        each, _own, _factor, relative, peak = block_totals(row, peaks, sums, num_blocks, scale, PADDED)
        limited = (k > 0) & (k < vocab)
        bound = float("-inf")
        if limited & (k <= num_blocks):
            bound = number_of(largest_with(key_of(each), k))
        least = floor
        if (p < 1.0) & (floor <= 0.0) & (limited == 0):
            mass = tl.sum(relative, axis=0).to(tl.float32) * (1.0 / (1 << SHIFT))
            least = 0.99 * (1.0 - p) * mass / vocab
        offs_b = tl.program_id(0) * EACH + tl.arange(0, EACH)
        nearest = tl.load(peaks + row * num_blocks + offs_b, mask=offs_b < num_blocks, other=float("-inf"))
        highest = tl.max(nearest, axis=0)
        if (highest >= bound) & (relative_weight(highest, peak, scale) >= least):
            offs_v = tl.program_id(0) * (EACH * BLOCK) + tl.arange(0, EACH * BLOCK)
            x = load_logits(logits + row * row_stride, offs_v, offs_v < vocab)
            kept = (x >= bound) & (x > float("-inf")) & (relative_weight(x, peak, scale) >= least)
            count = tl.sum(kept.to(tl.int32), axis=0)
            if count > 0:
                first = tl.atomic_add(found + row, count, sem="relaxed")
                index = first + tl.cumsum(kept.to(tl.int32), axis=0) - 1
                mask = kept & (index < CAPACITY)
                tl.store(values + row * CAPACITY + index, x, mask=mask)
                tl.store(ids + row * CAPACITY + index, offs_v, mask=mask)


class Candidates(NamedTuple):
    """What the second pass collects.

    Args:
        values: float32 [R, CAPACITY]; logits, of which `Blocks.found` are set.
        ids: int32 [R, CAPACITY]; their tokens.
    """

    values: torch.Tensor
    ids: torch.Tensor


def collect(logits: torch.Tensor, rows: SamplingRows, blocks: Blocks) -> Candidates:
    """The second pass: counts in `blocks.found` what it collects. logits as for the first."""
    count, vocab = logits.shape
    values = torch.empty(count, CAPACITY, dtype=torch.float32, device=logits.device)
    ids = torch.empty(count, CAPACITY, dtype=torch.int32, device=logits.device)
    candidates_kernel[(triton.cdiv(blocks.num_blocks, EACH), count)](
        logits, logits.stride(0), vocab, (rows.temperature, rows.top_k, rows.top_p, rows.min_p),
        (blocks.peaks, blocks.sums, blocks.found), (values, ids), blocks.num_blocks, blocks.shift, blocks.padded,
        CAPACITY, EACH, BLOCK, num_warps=WARPS,
    )  # fmt: skip
    return Candidates(values, ids)
