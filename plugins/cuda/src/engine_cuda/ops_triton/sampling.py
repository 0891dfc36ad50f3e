"""The draw of tokens without a sort, and what becomes of drafts.

Three launches, whatever the rows ask for: what each block of a row holds (`blocks`), the few logits that filters can
keep (`candidates`), and one program for each row, which picks its token. The second and third leave at once where there
is nothing to do.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.interfaces.ops import PURPOSE_ACCEPT, PURPOSE_RESIDUAL, PURPOSE_SAMPLE, SamplingRows
from engine_cuda.ops_triton.blocks import (
    BLOCK,
    is_drawn,
    load_logits,
    look_at_blocks,
    relative_weight,
    scale_of,
    whole,
)
from engine_cuda.ops_triton.candidates import CAPACITY, block_totals, collect, is_filtered
from engine_cuda.ops_triton.kept import EQUAL, KEPT, LEAST, MOST, RESIDUAL, first_above, reaching, threshold, weigh
from engine_cuda.ops_triton.keys import number_of
from engine_cuda.ops_triton.launching import power_of_2
from engine_cuda.ops_triton.philox import random_bits, share_of

TILE = 8192
"""Items that a program goes through at once, at most."""
ROWS = 256
"""Rows of a program that only counts."""
_SAMPLE: tl.constexpr = tl.constexpr(PURPOSE_SAMPLE)
_ACCEPT: tl.constexpr = tl.constexpr(PURPOSE_ACCEPT)
_RESIDUAL: tl.constexpr = tl.constexpr(PURPOSE_RESIDUAL)


@triton.jit
def _most_likely(row, peaks, num_blocks, vocab, PADDED: tl.constexpr, BLOCK: tl.constexpr):
    """The first token with the largest logit."""
    offs_b = tl.arange(0, PADDED)
    each = tl.load(peaks + offs_b, mask=offs_b < num_blocks, other=float("-inf"))
    top = tl.max(each, axis=0)
    offs_v = tl.min(tl.where(each == top, offs_b, PADDED), axis=0) * BLOCK + tl.arange(0, BLOCK)
    x = load_logits(row, offs_v, offs_v < vocab)
    return tl.min(tl.where(x == top, offs_v, vocab - 1), axis=0)


@triton.jit
def _unfiltered(row, totals, vocab, scale, bits, SHIFT: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr):
    """The draw from a whole row: the block in which the sum is exceeded, then the token in that.

    totals: the first four of `block_totals`.
    """
    each, own, factor, relative = totals
    offs_b = tl.arange(0, PADDED)
    target = share_of(tl.sum(relative, axis=0), bits)
    chosen = tl.sum((tl.cumsum(relative, axis=0) <= target).to(tl.int32), axis=0)
    chosen = tl.minimum(chosen, PADDED - 1)
    here = offs_b == chosen
    rest = target - tl.sum(tl.where(offs_b < chosen, relative, 0), axis=0)
    share = tl.sum(tl.where(here, factor, 0.0), axis=0)
    rest = (rest.to(tl.float64) / tl.maximum(share, 1e-30).to(tl.float64)).to(tl.int64)
    rest = tl.minimum(rest, tl.sum(tl.where(here, own, 0), axis=0) - 1)  # the sums before are rounded
    offs_v = chosen * BLOCK + tl.arange(0, BLOCK)
    x = load_logits(row, offs_v, offs_v < vocab)
    weight = whole(relative_weight(x, tl.max(tl.where(here, each, float("-inf")), axis=0), scale), SHIFT)
    running = tl.cumsum(tl.where(offs_v < vocab, weight, 0), axis=0)
    return chosen * BLOCK + tl.sum((running <= rest).to(tl.int32), axis=0)


@triton.jit
def pick_kernel(
    logits, row_stride, vocab, rows, first_pass, candidates, num_blocks, drafts, drawn, REJECT: tl.constexpr,
    PROBS: tl.constexpr, SHIFT: tl.constexpr, PADDED: tl.constexpr, CAPACITY: tl.constexpr, BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """drawn: (tokens [R], broken [R]: whether a row holds a NaN). Grid: R.

    rows: the fields of `SamplingRows`. first_pass: (peaks, sums, found, spoilt). candidates: (values, ids). drafts:
    (tokens, their distributions, the stride of these).
    """
    temperature, top_k, top_p, min_p, seeds, positions = rows
    peaks, sums, found, spoilt = first_pass
    tokens, broken = drawn
    values, ids = candidates
    draft_ids, draft_probs, probs_stride = drafts
    index = tl.program_id(0).to(tl.int64)
    offs_b = tl.arange(0, PADDED)
    unfit = tl.load(spoilt + index * num_blocks + offs_b, mask=offs_b < num_blocks, other=0)
    tl.store(broken + index, tl.max(unfit.to(tl.int32), axis=0) > 0)
    row, heat = logits + index * row_stride, tl.load(temperature + index)
    token = tl.full((), 0, tl.int32)
    if is_drawn(heat):
        scale, seed, position = scale_of(heat), tl.load(seeds + index), tl.load(positions + index)
        k, p, floor = tl.load(top_k + index), tl.load(top_p + index), tl.load(min_p + index)
        each, own, factor, relative, peak = block_totals(index, peaks, sums, num_blocks, scale, PADDED)
        filtered = is_filtered(k, p, floor, vocab)
        draft, probs = tl.full((), -1, tl.int32), logits
        if REJECT:
            draft = tl.load(draft_ids + index)
            if PROBS:
                probs = draft_probs + index * probs_stride
        bits = random_bits(seed, position, _SAMPLE)
        if filtered | (draft >= 0):
            count = tl.where(filtered, tl.load(found + index), CAPACITY + 1)
            listed = count <= CAPACITY
            if not listed:
                count = vocab
            items = (row, values + index * CAPACITY, ids + index * CAPACITY, listed, count)
            scores = (peak, scale, floor)
            key, last_equal = tl.full((), LEAST, tl.int32), tl.full((), MOST, tl.int32)
            limited = (k > 0) & (k < vocab)
            if limited:
                key = threshold(items, scores, key, k, True, SHIFT, TILE)
            if limited | (floor > 0.0) | (p >= 1.0):
                total, _, _ = reaching(items, scores, key, False, SHIFT, TILE)
            else:  # only what top_p can keep was collected, but it is a share of the whole row
                total = tl.sum(relative, axis=0)
            if p < 1.0:
                goal = tl.ceil(p.to(tl.float64) * total.to(tl.float64)).to(tl.int64)
                goal = tl.maximum(tl.minimum(goal, total), 1)  # of a row without a number nothing reaches 1
                key = threshold(items, scores, key, goal, False, SHIFT, TILE)
                more, _, _ = reaching(items, scores, key + 1, False, SHIFT, TILE)
                one = tl.maximum(whole(relative_weight(number_of(key), peak, scale), SHIFT), 1)
                room = (goal - more + one - 1) // one  # of those that equal the last, how many belong to the prefix
                last_equal = first_above(
                    items, scores, (key, last_equal), (draft, probs, total), vocab, room - 1, EQUAL, PROBS, REJECT,
                    SHIFT, TILE,
                )  # fmt: skip
                total = weigh(
                    items, scores, (key, last_equal), (draft, probs, total), 0, vocab - 1, KEPT, PROBS, REJECT,
                    SHIFT, TILE,
                )  # fmt: skip
            kept, drafted = (key, last_equal), (draft, probs, total)
            kind, target = KEPT, share_of(total, bits)
            accepted = False
            if REJECT:  # noqa: SIM102 (decided when it is compiled, the next when it runs)
                if draft >= 0:
                    q = tl.full((), 1.0, tl.float64)
                    if PROBS:
                        q = tl.load(probs + draft).to(tl.float64)
                    own_weight = weigh(items, scores, kept, drafted, draft, draft, KEPT, PROBS, REJECT, SHIFT, TILE)
                    u = random_bits(seed, position, _ACCEPT).to(tl.float64) * (1.0 / (1 << 53))
                    accepted = u * q * total.to(tl.float64) < own_weight.to(tl.float64)
                    rest = weigh(items, scores, kept, drafted, 0, vocab - 1, RESIDUAL, PROBS, REJECT, SHIFT, TILE)
                    other = random_bits(seed, position, _RESIDUAL)
                    if rest > 0:
                        kind, target = RESIDUAL, share_of(rest, other)
                    else:  # rounding left nothing of p = q
                        target = share_of(total, other)
            if accepted:
                token = draft
            else:
                token = first_above(items, scores, kept, drafted, vocab, target, kind, PROBS, REJECT, SHIFT, TILE)
        else:
            token = _unfiltered(row, (each, own, factor, relative), vocab, scale, bits, SHIFT, PADDED, BLOCK)
    else:
        token = _most_likely(row, peaks + index * num_blocks, num_blocks, vocab, PADDED, BLOCK)
    tl.store(tokens + index, tl.minimum(tl.maximum(token, 0), vocab - 1))


@triton.jit(do_not_specialize=["rows"])
def verify_kernel(tokens, drafts, start, counts, rows, ROWS: tl.constexpr):
    """counts[r] = tokens of row r up to and with the first that is not the draft after it. Grid: blocks of rows."""
    offs_m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mask = offs_m < rows
    place = tl.load(start + offs_m, mask=mask, other=0)
    same, count = mask, tl.zeros_like(offs_m)
    while tl.max(same.to(tl.int32), axis=0) > 0:  # a row's last position has no draft
        token = tl.load(tokens + place, mask=same, other=0)
        same = same & (token == tl.load(drafts + place, mask=same, other=-1))
        count += same.to(tl.int32)
        place += 1
    tl.store(counts + offs_m, count + 1, mask=mask)


class Sampling:
    """The operations `draw`, `sample`, `reject` and `verify`. Logits [R, V] are read as they come, and once, but for
    what filters keep: each number in float32."""

    def draw(self, logits: torch.Tensor, rows: SamplingRows) -> tuple[torch.Tensor, torch.Tensor]:
        """A token of each row, int32 [R], and which rows hold a NaN, bool [R]. See `engine.interfaces.ops.Ops.draw`."""
        return _pick(logits, rows, None, None)

    def sample(self, logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
        """Draw one token for each row: int32 [R]. See `engine.interfaces.ops.Ops.sample`."""
        return _pick(logits, rows, None, None)[0]

    def reject(
        self, logits: torch.Tensor, rows: SamplingRows, drafts: torch.Tensor, draft_probs: torch.Tensor | None
    ) -> torch.Tensor:
        """A draft, or a token that replaces it, for each row: int32 [R]. See `engine.interfaces.ops.Ops.reject`."""
        return _pick(logits, rows, drafts, draft_probs)[0]

    def verify(self, tokens: torch.Tensor, drafts: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
        """How many tokens each row gives: int32 [R]. See `engine.interfaces.ops.Ops.verify`."""
        rows = len(start) - 1
        counts = torch.empty(rows, dtype=torch.int32, device=tokens.device)
        if rows:
            verify_kernel[(triton.cdiv(rows, ROWS),)](tokens, drafts, start, counts, rows, ROWS)
        return counts


def _pick(
    logits: torch.Tensor, rows: SamplingRows, drafts: torch.Tensor | None, draft_probs: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.empty(len(logits), dtype=torch.int32, device=logits.device)
    broken = torch.empty(len(logits), dtype=torch.bool, device=logits.device)
    if not len(logits):
        return tokens, broken
    if logits.shape[1] == 1:  # nothing is left to chance; Triton 3.6 ends in an assertion of its own where this is 1
        return tokens.zero_(), logits.isnan().any(dim=-1)
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    if draft_probs is not None and draft_probs.stride(1) != 1:
        draft_probs = draft_probs.contiguous()
    tile = min(TILE, max(BLOCK, power_of_2(logits.shape[1])))
    blocks = look_at_blocks(logits, rows.temperature)
    candidates = collect(logits, rows, blocks)
    pick_kernel[(len(logits),)](
        logits, logits.stride(0), logits.shape[1], tuple(rows),
        (blocks.peaks, blocks.sums, blocks.found, blocks.spoilt), tuple(candidates), blocks.num_blocks,
        (drafts, draft_probs, 0 if draft_probs is None else draft_probs.stride(0)), (tokens, broken),
        drafts is not None, draft_probs is not None, blocks.shift, blocks.padded, CAPACITY, BLOCK, tile,
        num_warps=max(4, tile // 512),
    )  # fmt: skip
    return tokens, broken
