"""What is done to logits and tokens around the draw: checks, masks, penalties, places."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.types.plan import BROKEN

BLOCK = 4096
"""Logits of a program."""
WORDS = 64
"""Words of a bitmask of a program: 2,048 logits."""
TOKENS = 512
"""Tokens of a program that goes through what a row holds."""


@triton.jit
def check_kernel(logits, out, broken, row_stride, vocab, WIDEN: tl.constexpr, BLOCK: tl.constexpr):
    """out = logits in float32; broken[r] = 1 where row r holds a NaN, else it stays. Grid: (blocks of V, R)."""
    row = tl.program_id(1).to(tl.int64)
    offs_v = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offs_v < vocab
    x = tl.load(logits + row * row_stride + offs_v, mask=mask, other=0.0).to(tl.float32)
    if WIDEN:
        tl.store(out + row * vocab + offs_v, x, mask=mask)
    if tl.max((x != x).to(tl.int32), axis=0) > 0:
        tl.store(broken + row, 1)


@triton.jit(do_not_specialize=["count"])
def mask_tokens_kernel(logits, rows, tokens, row_stride, count, BLOCK: tl.constexpr):
    """logits[rows[i], tokens[i]] = -inf. Grid: blocks of all i."""
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < count
    row = tl.load(rows + offs, mask=mask, other=0)
    token = tl.load(tokens + offs, mask=mask, other=0)
    tl.store(logits + row * row_stride + token, float("-inf"), mask=mask)


@triton.jit
def bitmask_kernel(logits, rows, bits, left, row_stride, words, vocab, WORDS: tl.constexpr):
    """-inf where the bit is 0; left[i] = 1 where another logit than -inf is left in row i. Grid: (blocks of words, m).

    Logits that are forbidden are not read, the others not written.
    """
    entry = tl.program_id(1).to(tl.int64)
    offs_w = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    bit = tl.arange(0, 32)
    held = tl.load(bits + entry * words + offs_w, mask=offs_w < words, other=0)
    allowed = ((held[:, None] >> bit[None]) & 1) != 0
    offs_v = offs_w[:, None] * 32 + bit[None]
    ptrs = logits + tl.load(rows + entry) * row_stride + offs_v
    x = tl.load(ptrs, mask=allowed & (offs_v < vocab), other=float("-inf"))
    tl.store(ptrs, float("-inf"), mask=(allowed == 0) & (offs_v < vocab))
    if tl.max(tl.max((x != float("-inf")).to(tl.int32), axis=1), axis=0) > 0:
        tl.store(left + entry, 1)


@triton.jit
def stuck_kernel(logits, rows, bits, left, row_stride, words, vocab, WORDS: tl.constexpr):
    """In rows of which nothing is left: 0 where the bit is 0. Grid: (blocks of words, m)."""
    entry = tl.program_id(1).to(tl.int64)
    if tl.load(left + entry) == 0:
        offs_w = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
        bit = tl.arange(0, 32)
        held = tl.load(bits + entry * words + offs_w, mask=offs_w < words, other=0)
        offs_v = offs_w[:, None] * 32 + bit[None]
        forbidden = ((held[:, None] >> bit[None]) & 1) == 0
        ptrs = logits + tl.load(rows + entry) * row_stride + offs_v
        tl.store(ptrs, 0.0, mask=forbidden & (offs_v < vocab))


PROMPT: tl.constexpr = tl.constexpr(1 << 30)
"""The bit of a count that says that the prompt holds the token."""


@triton.jit(do_not_specialize=["token_stride", "length"])
def count_kernel(counts, tokens, token_stride, length, num_prompt, num_tokens, vocab, TOKENS: tl.constexpr):
    """counts[i, t] = how often row i's output holds t, and PROMPT where its prompt does. Grid: (blocks of L, m)."""
    entry = tl.program_id(1).to(tl.int64)
    offs = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    mask = (offs < tl.load(num_tokens + entry)) & (offs < length)
    prompt = offs < tl.load(num_prompt + entry)
    token = tl.load(tokens + entry * token_stride + offs, mask=mask, other=0)
    tl.atomic_add(counts + entry * vocab + token, 1, mask=mask & (prompt == 0), sem="relaxed")
    tl.atomic_or(counts + entry * vocab + token, PROMPT, mask=mask & prompt, sem="relaxed")


@triton.jit(do_not_specialize=["token_stride", "length"])
def penalise_kernel(
    logits, rows, row_stride, counts, tokens, token_stride, length, num_tokens, penalties, vocab, TOKENS: tl.constexpr
):
    """Each token's penalties once: by whoever takes its count away. Grid: (blocks of L, m).

    penalties: (presence, frequency, repetition) [m].
    """
    presence, frequency, repetition = penalties
    entry = tl.program_id(1).to(tl.int64)
    offs = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    mask = (offs < tl.load(num_tokens + entry)) & (offs < length)
    token = tl.load(tokens + entry * token_stride + offs, mask=mask, other=0)
    held = tl.atomic_and(counts + entry * vocab + token, 0, mask=mask, sem="relaxed")
    mask_first = mask & (held != 0)
    count = (held & (PROMPT - 1)).to(tl.float32)
    ptrs = logits + tl.load(rows + entry) * row_stride + token
    x = tl.load(ptrs, mask=mask_first, other=0.0)
    factor = tl.load(repetition + entry)
    x = tl.where(x > 0, x / factor, x * factor)
    x -= tl.load(frequency + entry) * count + tl.where(count > 0, tl.load(presence + entry), 0.0)
    tl.store(ptrs, x, mask=mask_first)


@triton.jit(do_not_specialize=["count"])
def place_kernel(
    tokens, broken, table, slots, places, told, table_stride, count, BROKEN: tl.constexpr, BLOCK: tl.constexpr
):
    """table[slots[i], places[i]] = tokens[i]; told[i] = the token, or BROKEN. Grid: blocks of R."""
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < count
    token = tl.load(tokens + offs, mask=mask, other=0)
    slot = tl.load(slots + offs, mask=mask, other=0)
    place = tl.load(places + offs, mask=mask, other=0)
    tl.store(table + slot * table_stride + place, token, mask=mask)
    unfit = tl.load(broken + offs, mask=mask, other=0) != 0
    tl.store(told + offs, tl.where(unfit, BROKEN, token), mask=mask)


class Logits:
    """Edits and checks. Logits are float32 [R, V], dense in V, but for `check_logits`, which makes them so."""

    def check_logits(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """logits [R, V] -> (the same in float32, bool [R]: which rows hold a NaN)."""
        rows, vocab = logits.shape
        x = logits if logits.stride(1) == 1 else logits.contiguous()
        widen = logits.dtype != torch.float32
        out = torch.empty(rows, vocab, dtype=torch.float32, device=x.device) if widen else logits
        broken = torch.zeros(rows, dtype=torch.bool, device=x.device)
        if logits.numel():
            check_kernel[(triton.cdiv(vocab, BLOCK), rows)](x, out, broken, x.stride(0), vocab, widen, BLOCK)
        return out, broken

    def mask_tokens(self, logits: torch.Tensor, rows: torch.Tensor, tokens: torch.Tensor) -> None:
        """Set logits[rows[i], tokens[i]] to -inf, in place. rows, tokens int64 [m]."""
        if count := len(rows):
            mask_tokens_kernel[(triton.cdiv(count, TOKENS),)](logits, rows, tokens, logits.stride(0), count, TOKENS)

    def apply_bitmask(self, logits: torch.Tensor, rows: torch.Tensor, bits: torch.Tensor) -> None:
        """Set logits[rows[i], t] to -inf, in place, where bit t % 32 of bits[i, t // 32] is 0; to 0 in a row that is
        left without another logit than -inf. rows int64 [m]; bits int32 [m, ceil(V / 32)]."""
        if not len(rows):
            return
        bits, vocab = bits.contiguous(), logits.shape[1]
        left = torch.zeros(len(rows), dtype=torch.int32, device=logits.device)
        grid, words = (triton.cdiv(triton.cdiv(vocab, 32), WORDS), len(rows)), bits.shape[1]
        bitmask_kernel[grid](logits, rows, bits, left, logits.stride(0), words, vocab, WORDS)
        stuck_kernel[grid](logits, rows, bits, left, logits.stride(0), words, vocab, WORDS)

    def penalties(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        tokens: torch.Tensor,
        num_prompt: torch.Tensor,
        num_tokens: torch.Tensor,
        presence: torch.Tensor,
        frequency: torch.Tensor,
        repetition: torch.Tensor,
    ) -> None:
        """Apply penalties to `logits[rows]` in place: repetition (Keskar et al. 2019), then frequency and presence.

        Tokens are counted by atomic additions; what is not a row's token is neither counted nor read.
        """
        vocab, length = logits.shape[1], tokens.shape[1]
        if not tokens.numel():
            return
        if tokens.stride(1) != 1:
            tokens = tokens.contiguous()
        counts = torch.zeros(len(rows), vocab, dtype=torch.int32, device=logits.device)
        grid, stride = (triton.cdiv(length, TOKENS), len(rows)), tokens.stride(0)
        count_kernel[grid](counts, tokens, stride, length, num_prompt, num_tokens, vocab, TOKENS)
        penalise_kernel[grid](
            logits, rows, logits.stride(0), counts, tokens, stride, length, num_tokens,
            (presence, frequency, repetition), vocab, TOKENS,
        )  # fmt: skip

    def place_tokens(
        self, tokens: torch.Tensor, broken: torch.Tensor, table: torch.Tensor, slot: torch.Tensor, place: torch.Tensor
    ) -> torch.Tensor:
        """Write tokens int32 [R] to table[slot[i], place[i]]; int32 [R], `BROKEN` where broken[i], else the token."""
        told = torch.empty_like(tokens)
        if count := len(tokens):
            place_kernel[(triton.cdiv(count, TOKENS),)](
                tokens, broken, table, slot, place, told, table.stride(0), count, BROKEN, TOKENS
            )
        return told
