"""Sinks, which FlashInfer's plain kernels have not: they follow exactly from an output and its logarithm of the sum.

A sink adds exp(sink) to the sum that weights are divided by, and nothing to the output (Xiao et al. 2023). So the
output is multiplied by sum / (sum + exp(sink)).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def apply_sinks(out: torch.Tensor, sums: torch.Tensor, sinks: torch.Tensor, lse: torch.Tensor | None) -> None:
    """Change out in place, and write lse. One launch, which may be captured.

    Args:
        out: [T, num_q_heads, head_size], without sinks; dense.
        sums: float32 [T, num_q_heads]; natural logarithms of the sums, without sinks; dense.
        sinks: float32 [num_q_heads].
        lse: float32 [T, num_q_heads]; the same with sinks.
    """
    tokens, heads, size = out.shape
    target = sums if lse is None else lse
    _sinks[(tokens,)](
        out,
        sums,
        sinks,
        target,
        target.stride(),
        HEADS=heads,
        SIZE=size,
        HEADS_POWER=triton.next_power_of_2(heads),
        SIZE_POWER=triton.next_power_of_2(size),
        WITH_LSE=lse is not None,
        num_warps=4,
    )


@triton.jit
def _sinks(
    out,
    sums,
    sinks,
    lse,
    lse_strides,  # token, head
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    HEADS_POWER: tl.constexpr,
    SIZE_POWER: tl.constexpr,
    WITH_LSE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    offs_h = tl.arange(0, HEADS_POWER)
    offs_d = tl.arange(0, SIZE_POWER)[None, :]
    mask_h = offs_h < HEADS
    total = tl.load(sums + token * HEADS + offs_h, mask=mask_h, other=0.0)
    sink = tl.load(sinks + offs_h, mask=mask_h, other=0.0)
    top = tl.maximum(total, sink)
    both = top + tl.log(tl.exp(total - top) + tl.exp(sink - top))
    ptrs = out + (token * HEADS + offs_h[:, None]) * SIZE + offs_d
    mask = mask_h[:, None] & (offs_d < SIZE)
    values = tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)
    tl.store(ptrs, (values * tl.exp(total - both)[:, None]).to(out.dtype.element_ty), mask=mask)
    if WITH_LSE:
        tl.store(lse + token * lse_strides[0] + offs_h * lse_strides[1], both, mask=mask_h)
