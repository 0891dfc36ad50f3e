"""Rotary positions (Su et al. 2021), in ptrs: queries and keys in one launch, with the norms of their heads or
without."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine_cuda.dependents import MayDepend
from engine_cuda.ops_triton.launching import power_of_2, start_dependent

HEADS = 8
"""Heads of a program."""


@triton.jit
def angles_of(positions, cos_sin, token, HALF: tl.constexpr, BLOCK: tl.constexpr):
    """(cosines, sines) [BLOCK] of a token's position."""
    offs_d = tl.arange(0, BLOCK)
    ptrs = cos_sin + tl.load(positions + token) * (2 * HALF) + offs_d
    cos = tl.load(ptrs, mask=offs_d < HALF, other=0.0)
    sin = tl.load(ptrs + HALF, mask=offs_d < HALF, other=0.0)
    return cos, sin


@triton.jit
def heads_of(
    x, weight, part, heads, stride, eps, NORM: tl.constexpr, SIZE: tl.constexpr, HALF: tl.constexpr,
    BLOCK: tl.constexpr, REST: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """(elements i, elements i + HALF, those behind 2 * HALF) of HEADS heads of one token, of SIZE elements each, in
    float32; with NORM normed first, and rounded where that operation rounds. stride: of heads."""
    offs_d = tl.arange(0, BLOCK)
    offs_h = part * HEADS + tl.arange(0, HEADS)
    mask_h = (offs_h < heads)[:, None]
    mask = mask_h & (offs_d < HALF)[None]
    ptrs = x + offs_h[:, None] * stride
    first = tl.load(ptrs + offs_d[None], mask=mask, other=0.0).to(tl.float32)
    second = tl.load(ptrs + HALF + offs_d[None], mask=mask, other=0.0).to(tl.float32)
    offs_r = 2 * HALF + tl.arange(0, REST)
    rest = tl.zeros((HEADS, REST), tl.float32)
    if SIZE > 2 * HALF:
        rest = tl.load(ptrs + offs_r[None], mask=mask_h & (offs_r < SIZE)[None], other=0.0).to(tl.float32)
    if NORM:
        dtype = x.dtype.element_ty
        squares = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
        if SIZE > 2 * HALF:
            squares += tl.sum(rest * rest, axis=1)
        scale = tl.rsqrt(squares / SIZE + eps)[:, None]
        by = tl.load(weight + offs_d, mask=offs_d < HALF, other=0.0).to(tl.float32)[None]
        first = ((first * scale).to(dtype).to(tl.float32) * by).to(dtype).to(tl.float32)
        by = tl.load(weight + HALF + offs_d, mask=offs_d < HALF, other=0.0).to(tl.float32)[None]
        second = ((second * scale).to(dtype).to(tl.float32) * by).to(dtype).to(tl.float32)
        if SIZE > 2 * HALF:
            by = tl.load(weight + offs_r, mask=offs_r < SIZE, other=0.0).to(tl.float32)[None]
            rest = ((rest * scale).to(dtype).to(tl.float32) * by).to(dtype).to(tl.float32)
    return first, second, rest


@triton.jit
def turn(
    x, weight, part, heads, stride, angles, eps, NORM: tl.constexpr, SIZE: tl.constexpr, HALF: tl.constexpr,
    BLOCK: tl.constexpr, REST: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Rotate the pairs (i, i + HALF) of HEADS heads of one token in place; with NORM they are normed first."""
    first, second, rest = heads_of(x, weight, part, heads, stride, eps, NORM, SIZE, HALF, BLOCK, REST, HEADS)
    cos, sin = angles
    dtype = x.dtype.element_ty
    offs_d = tl.arange(0, BLOCK)
    offs_h = part * HEADS + tl.arange(0, HEADS)
    mask_h = (offs_h < heads)[:, None]
    mask = mask_h & (offs_d < HALF)[None]
    ptrs = x + offs_h[:, None] * stride
    tl.store(ptrs + offs_d[None], (first * cos[None] - second * sin[None]).to(dtype), mask=mask)
    tl.store(ptrs + HALF + offs_d[None], (second * cos[None] + first * sin[None]).to(dtype), mask=mask)
    if NORM:  # noqa: SIM102 (Triton decides each before it compiles what is inside)
        if SIZE > 2 * HALF:
            offs_r = 2 * HALF + tl.arange(0, REST)
            tl.store(ptrs + offs_r[None], rest.to(dtype), mask=mask_h & (offs_r < SIZE)[None])


@triton.jit
def rope_kernel(
    qk, positions, cos_sin, heads, q_strides, k_strides, q_programs, HALF: tl.constexpr, BLOCK: tl.constexpr,
    HEADS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid: (T, programs of the query heads, then of the key heads).

    qk: (q, k). heads: how many q has, and k. q_strides, k_strides: of tokens, of heads.
    """
    start_dependent(DEPENDENT)
    q, k = qk
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    angles = angles_of(positions, cos_sin, token, HALF, BLOCK)
    if part < q_programs:
        turn(
            q + token * q_strides[0], None, part, heads[0], q_strides[1], angles, 0.0, False, 2 * HALF, HALF, BLOCK, 1,
            HEADS,
        )  # fmt: skip
    else:
        turn(
            k + token * k_strides[0], None, part - q_programs, heads[1], k_strides[1], angles, 0.0, False, 2 * HALF,
            HALF, BLOCK, 1, HEADS,
        )  # fmt: skip


@triton.jit
def qk_norm_rope_kernel(
    qk, weights, positions, cos_sin, heads, q_strides, k_strides, q_programs, eps, SIZE: tl.constexpr,
    HALF: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr, HEADS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """As `rope_kernel`. weights: of the norms of q's heads, and of k's."""
    start_dependent(DEPENDENT)
    q, k = qk
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    angles = angles_of(positions, cos_sin, token, HALF, BLOCK)
    if part < q_programs:
        turn(
            q + token * q_strides[0], weights[0], part, heads[0], q_strides[1], angles, eps, True, SIZE, HALF, BLOCK,
            REST, HEADS,
        )  # fmt: skip
    else:
        turn(
            k + token * k_strides[0], weights[1], part - q_programs, heads[1], k_strides[1], angles, eps, True, SIZE,
            HALF, BLOCK, REST, HEADS,
        )  # fmt: skip


class RotaryPositions(MayDepend):
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
                (q, k), positions, cos_sin, (q.shape[1], k.shape[1]), q.stride()[:2], k.stride()[:2], q_programs,
                half, power_of_2(half), HEADS, bool(self.dependent),
                num_warps=max(1, power_of_2(half) * HEADS // 256), **self.dependent,
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
                (q, k), (q_weight, k_weight), positions, cos_sin, (q.shape[1], k.shape[1]), q.stride()[:2],
                k.stride()[:2], q_programs, eps, size, half, power_of_2(half), power_of_2(size - 2 * half), HEADS,
                bool(self.dependent), num_warps=max(1, power_of_2(half) * HEADS // 256), **self.dependent,
            )  # fmt: skip
        return q, k
