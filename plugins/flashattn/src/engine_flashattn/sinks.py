"""Sinks for libraries that have none: they follow exactly from an output and its logarithm of the sum.

A sink adds exp(sink) to the sum that weights are divided by, and nothing to the output (Xiao et al. 2023). So the
output is multiplied by sum / (sum + exp(sink)) = 1 / (1 + exp(sink - lse)).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def apply_sinks(out: torch.Tensor, sums: torch.Tensor, sinks: torch.Tensor, lse: torch.Tensor | None) -> None:
    """Change out in place, and write lse. One launch, which may be captured.

    Args:
        out: [T, num_q_heads, head_size], without sinks; the last dimension contiguous.
        sums: float32 [num_q_heads, T]; natural logarithms of the sums, without sinks.
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
        out.stride(0),
        out.stride(1),
        sums.stride(0),
        sums.stride(1),
        target.stride(0),
        target.stride(1),
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
    out_token_stride,
    out_head_stride,
    sums_head_stride,
    sums_token_stride,
    lse_token_stride,
    lse_head_stride,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    HEADS_POWER: tl.constexpr,
    SIZE_POWER: tl.constexpr,
    WITH_LSE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS_POWER)
    element = tl.arange(0, SIZE_POWER)[None, :]
    real = head < HEADS
    total = tl.load(sums + head * sums_head_stride + token * sums_token_stride, mask=real, other=0.0)
    sink = tl.load(sinks + head, mask=real, other=0.0)
    top = tl.maximum(total, sink)
    both = top + tl.log(tl.exp(total - top) + tl.exp(sink - top))
    where = out + token * out_token_stride + head[:, None] * out_head_stride + element
    inside = real[:, None] & (element < SIZE)
    values = tl.load(where, mask=inside, other=0.0)
    scaled = values.to(tl.float32) * tl.exp(total - both)[:, None]
    tl.store(where, scaled.to(out.dtype.element_ty), mask=inside)
    if WITH_LSE:
        tl.store(lse + token * lse_token_stride + head * lse_head_stride, both, mask=real)
