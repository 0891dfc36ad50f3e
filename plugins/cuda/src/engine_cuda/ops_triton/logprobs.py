"""Log probabilities of chosen tokens and of the most likely ones, without a sort."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine_cuda.ops_triton.blocks import BLOCK, EACH, load_logits, look_at_blocks
from engine_cuda.ops_triton.candidates import block_totals
from engine_cuda.ops_triton.kept import LEAST
from engine_cuda.ops_triton.keys import key_of, number_of

_ONE_UNIT: tl.constexpr = tl.constexpr(0.6931471805599453)
"""log(2)."""


@triton.jit
def rank_kernel(
    logits, row_stride, vocab, tokens, peaks, larger, num_blocks, EACH: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """larger[i]: how many logits of row i are larger than its token's. Grid: (num_blocks / EACH, m).

    Blocks whose peak is not are not read.
    """
    row = tl.program_id(1).to(tl.int64)
    own = tl.load(logits + row * row_stride + tl.load(tokens + row))
    offs_b = tl.program_id(0) * EACH + tl.arange(0, EACH)
    nearest = tl.load(peaks + row * num_blocks + offs_b, mask=offs_b < num_blocks, other=float("-inf"))
    if tl.max(nearest, axis=0) > own:
        offs_v = tl.program_id(0) * (EACH * BLOCK) + tl.arange(0, EACH * BLOCK)
        x = load_logits(logits + row * row_stride, offs_v, offs_v < vocab)
        tl.atomic_add(larger + row, tl.sum((x > own).to(tl.int32), axis=0), sem="relaxed")


@triton.jit(do_not_specialize=["k"])
def logprobs_kernel(
    logits, row_stride, vocab, tokens, first_pass, num_blocks, found, k, SHIFT: tl.constexpr, PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """found: what `Ops.logprobs` gives. first_pass: (peaks, sums, what `rank_kernel` counts). Grid: m.

    The k most likely come from k rounds: the block with the largest peak, its largest logit that was not taken yet, and
    the peak that is then left to it. Of equal ones, lower tokens come first.
    """
    peaks, sums, larger = first_pass
    chosen, rank, top_ids, top_values = found
    row = tl.program_id(0).to(tl.int64)
    each, _own, _factor, relative, peak = block_totals(row, peaks, sums, num_blocks, 1.4426950408889634, PADDED)
    total = tl.sum(relative, axis=0).to(tl.float32)
    norm = peak + (tl.log2(total) - SHIFT) * _ONE_UNIT
    own = tl.load(logits + row * row_stride + tl.load(tokens + row))
    tl.store(chosen + row, own - norm)
    tl.store(rank + row, tl.load(larger + row) + 1)
    offs_b = tl.arange(0, PADDED)
    keys = tl.where(offs_b < num_blocks, key_of(each), LEAST)
    last_key, last_token = tl.full((), 2**31 - 1, tl.int32), tl.full((), -1, tl.int32)
    for turn in range(k):
        key = tl.max(keys, axis=0)
        at = tl.min(tl.where(keys == key, offs_b, PADDED), axis=0)
        offs_v = at * BLOCK + tl.arange(0, BLOCK)
        mask = offs_v < vocab
        held = key_of(load_logits(logits + row * row_stride, offs_v, mask))
        left = mask & ((held < last_key) | ((held == last_key) & (offs_v > last_token)))
        taken = tl.min(tl.where(left & (held == key), offs_v, vocab - 1), axis=0)
        tl.store(top_ids + row * k + turn, taken)
        tl.store(top_values + row * k + turn, number_of(key) - norm)
        rest = tl.max(tl.where(left & (offs_v != taken), held, LEAST), axis=0)
        keys = tl.where(offs_b == at, rest, keys)
        last_key, last_token = key, taken


class Logprobs:
    """The operation `logprobs`."""

    def logprobs(
        self, logits: torch.Tensor, tokens: torch.Tensor, k: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Log probabilities under softmax(logits).

        logits float32 [m, V], tokens int [m] -> (chosen float32 [m], rank int32 [m], top_ids int32 [m, k], top_values
        float32 [m, k]).
        """
        rows, vocab = logits.shape
        chosen = torch.empty(rows, dtype=torch.float32, device=logits.device)
        rank = torch.empty(rows, dtype=torch.int32, device=logits.device)
        top_ids = torch.empty(rows, k, dtype=torch.int32, device=logits.device)
        top_values = torch.empty(rows, k, dtype=torch.float32, device=logits.device)
        if rows:
            if logits.stride(1) != 1:
                logits = logits.contiguous()
            blocks = look_at_blocks(logits, torch.ones(rows, dtype=torch.float32, device=logits.device))
            rank_kernel[(triton.cdiv(blocks.num_blocks, EACH), rows)](
                logits, logits.stride(0), vocab, tokens, blocks.peaks, blocks.found, blocks.num_blocks, EACH, BLOCK
            )
            logprobs_kernel[(rows,)](
                logits, logits.stride(0), vocab, tokens, (blocks.peaks, blocks.sums, blocks.found), blocks.num_blocks,
                (chosen, rank, top_ids, top_values), k, blocks.shift, blocks.padded, BLOCK,
            )  # fmt: skip
        return chosen, rank, top_ids, top_values
