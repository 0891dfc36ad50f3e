"""Rotary positions (Su et al. 2021), in place: queries and keys in one launch, with the norms of their heads or
without."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine_cuda.ops_triton.launching import power_of_2

HEADS = 8
"""Heads of a program."""


@triton.jit
def _rotate(x, head, heads, stride, cos, sin, HALF: tl.constexpr, BLOCK: tl.constexpr):
    """Rotate the pairs (i, i + HALF) of some heads of one token."""
    pair = tl.arange(0, BLOCK)
    inside = (head < heads)[:, None] & (pair < HALF)[None]
    place = x + head[:, None] * stride + pair[None]
    first = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(place + HALF, mask=inside, other=0.0).to(tl.float32)
    tl.store(place, (first * cos[None] - second * sin[None]).to(x.dtype.element_ty), mask=inside)
    tl.store(place + HALF, (second * cos[None] + first * sin[None]).to(x.dtype.element_ty), mask=inside)


@triton.jit
def rope_kernel(
    q, k, positions, cos_sin, q_heads, k_heads, q_token, q_head, k_token, k_head, q_programs, HALF: tl.constexpr,
    BLOCK: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Grid: (T, programs of the query heads, then of the key heads)."""
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    pair, head = tl.arange(0, BLOCK), tl.arange(0, HEADS)
    angles = cos_sin + tl.load(positions + token) * (2 * HALF) + pair
    cos = tl.load(angles, mask=pair < HALF, other=0.0)
    sin = tl.load(angles + HALF, mask=pair < HALF, other=0.0)
    if part < q_programs:
        _rotate(q + token * q_token, part * HEADS + head, q_heads, q_head, cos, sin, HALF, BLOCK)
    else:
        _rotate(k + token * k_token, (part - q_programs) * HEADS + head, k_heads, k_head, cos, sin, HALF, BLOCK)


@triton.jit
def _norm_rotate(
    x, weight, head, heads, stride, cos, sin, eps, SIZE: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
    REST: tl.constexpr,
):  # fmt: skip
    """Norm some heads of one token, and rotate their pairs (i, i + HALF); rounded where the two operations round."""
    pair = tl.arange(0, BLOCK)
    there = (head < heads)[:, None]
    inside = there & (pair < HALF)[None]
    place = x + head[:, None] * stride + pair[None]
    first = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(place + HALF, mask=inside, other=0.0).to(tl.float32)
    squares = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
    if SIZE > 2 * HALF:
        rest = 2 * HALF + tl.arange(0, REST)
        rest_inside = there & (rest < SIZE)[None]
        rest_place = x + head[:, None] * stride + rest[None]
        third = tl.load(rest_place, mask=rest_inside, other=0.0).to(tl.float32)
        squares += tl.sum(third * third, axis=1)
    dtype = x.dtype.element_ty
    scale = tl.rsqrt(squares / SIZE + eps)[:, None]
    first_weight = tl.load(weight + pair, mask=pair < HALF, other=0.0).to(tl.float32)[None]
    second_weight = tl.load(weight + HALF + pair, mask=pair < HALF, other=0.0).to(tl.float32)[None]
    first = ((first * scale).to(dtype).to(tl.float32) * first_weight).to(dtype).to(tl.float32)
    second = ((second * scale).to(dtype).to(tl.float32) * second_weight).to(dtype).to(tl.float32)
    tl.store(place, (first * cos[None] - second * sin[None]).to(dtype), mask=inside)
    tl.store(place + HALF, (second * cos[None] + first * sin[None]).to(dtype), mask=inside)
    if SIZE > 2 * HALF:
        rest_weight = tl.load(weight + rest, mask=rest < SIZE, other=0.0).to(tl.float32)[None]
        tl.store(rest_place, ((third * scale).to(dtype).to(tl.float32) * rest_weight).to(dtype), mask=rest_inside)


@triton.jit
def qk_norm_rope_kernel(
    q, k, q_weight, k_weight, positions, cos_sin, q_heads, k_heads, q_token, q_head, k_token, k_head, q_programs, eps,
    SIZE: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Grid: (T, programs of the query heads, then of the key heads)."""
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    pair, head = tl.arange(0, BLOCK), tl.arange(0, HEADS)
    angles = cos_sin + tl.load(positions + token) * (2 * HALF) + pair
    cos = tl.load(angles, mask=pair < HALF, other=0.0)
    sin = tl.load(angles + HALF, mask=pair < HALF, other=0.0)
    if part < q_programs:
        _norm_rotate(
            q + token * q_token, q_weight, part * HEADS + head, q_heads, q_head, cos, sin, eps, SIZE, HALF, BLOCK, REST
        )
    else:
        _norm_rotate(
            k + token * k_token, k_weight, (part - q_programs) * HEADS + head, k_heads, k_head, cos, sin, eps, SIZE,
            HALF, BLOCK, REST,
        )  # fmt: skip


class RotaryPositions:
    """The operations `rope` and `qk_norm_rope`."""

    def rope(
        self, q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotate q [T, Hq, D] and k [T, Hkv, D] in place, which may be views of one projection.

        positions int64 [T], cos_sin float32 [max_position, rotary_dim].
        """
        q = q if q.stride(2) == 1 else q.contiguous()
        k = k if k.stride(2) == 1 else k.contiguous()
        half = cos_sin.shape[1] // 2
        q_programs, k_programs = (triton.cdiv(x.shape[1], HEADS) for x in (q, k))
        if len(positions):
            rope_kernel[(len(positions), q_programs + k_programs)](
                q, k, positions, cos_sin, q.shape[1], k.shape[1], q.stride(0), q.stride(1), k.stride(0), k.stride(1),
                q_programs, half, power_of_2(half), HEADS, num_warps=max(1, power_of_2(half) * HEADS // 256),
            )  # fmt: skip
        return q, k

    def qk_norm_rope(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        q_weight: torch.Tensor,
        k_weight: torch.Tensor,
        eps: float,
        positions: torch.Tensor,
        cos_sin: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Norm each head of q [T, Hq, D] and k [T, Hkv, D], and rotate it, in place, in one launch.

        q_weight, k_weight [D]; the others are `rope`'s.
        """
        q = q if q.stride(2) == 1 else q.contiguous()
        k = k if k.stride(2) == 1 else k.contiguous()
        size, half = q.shape[2], cos_sin.shape[1] // 2
        q_programs, k_programs = (triton.cdiv(x.shape[1], HEADS) for x in (q, k))
        if len(positions):
            qk_norm_rope_kernel[(len(positions), q_programs + k_programs)](
                q, k, q_weight, k_weight, positions, cos_sin, q.shape[1], k.shape[1], q.stride(0), q.stride(1),
                k.stride(0), k.stride(1), q_programs, eps, size, half, power_of_2(half), power_of_2(size - 2 * half),
                HEADS, num_warps=max(1, power_of_2(half) * HEADS // 256),
            )  # fmt: skip
        return q, k
