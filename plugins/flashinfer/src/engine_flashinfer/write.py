"""Keys and values into their pages, so that what no query sees cannot hurt.

FlashInfer's kernels read no value past a row's end. But a row of fewer drafts may be padded in a captured step, with
places that it has not reached: their values get the weight 0, and 0 * NaN is NaN. So no page holds a value that is not
finite: where a token's values are not, they are stored as 0, and its keys as NaN. Keys that are not seen are masked, so
the token hurts nobody; who sees it still gets NaN, as it must.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def write_pages(
    k: torch.Tensor, v: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, slots: torch.Tensor
) -> None:
    """Store tokens at their slots; what fp8 cannot hold becomes its largest number. One launch, and for fp8 four before
    it: not every GPU that FlashInfer serves converts fp8 by itself. All may be captured.

    Args:
        k, v: [T, num_kv_heads, head_size], the last dimension contiguous.
        k_pages, v_pages: [num_pages, tokens_per_block, num_kv_heads, head_size], of equal strides; the last two
            dimensions contiguous.
        slots: int64 [T]; page * tokens_per_block + place.
    """
    fp8 = k_pages.dtype.itemsize == 1
    if fp8:
        k, v = (_in_fp8(x, k_pages.dtype) for x in (k, v))
        k_pages, v_pages = k_pages.view(torch.uint8), v_pages.view(torch.uint8)
    tokens, heads, size = k.shape
    _write[(tokens,)](
        (k, v),
        (k_pages, v_pages),
        slots,
        k.stride()[:2],
        v.stride()[:2],
        k_pages.stride()[:2],
        HEADS=heads,
        SIZE=size,
        PER_BLOCK=k_pages.shape[1],
        HEADS_POWER=triton.next_power_of_2(heads),
        SIZE_POWER=triton.next_power_of_2(size),
        FP8=fp8,
        num_warps=4,
    )


def _in_fp8(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """As bytes."""
    limits = torch.finfo(dtype)
    return values.clamp(limits.min, limits.max).to(dtype).view(torch.uint8)


@triton.jit
def _write(
    kv,
    pages,  # of keys and of values, with the same strides
    slots,
    k_strides,  # token, head
    v_strides,
    page_strides,  # page, place
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    PER_BLOCK: tl.constexpr,
    HEADS_POWER: tl.constexpr,
    SIZE_POWER: tl.constexpr,
    FP8: tl.constexpr,
):
    k, v = kv
    k_pages, v_pages = pages
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    page = slot // PER_BLOCK
    place = slot - page * PER_BLOCK
    offs_h = tl.arange(0, HEADS_POWER)[:, None]
    offs_d = tl.arange(0, SIZE_POWER)[None, :]
    mask = (offs_h < HEADS) & (offs_d < SIZE)
    keys = tl.load(k + token * k_strides[0] + offs_h * k_strides[1] + offs_d, mask=mask, other=0)
    values = tl.load(v + token * v_strides[0] + offs_h * v_strides[1] + offs_d, mask=mask, other=0)
    if FP8:  # e4m3: NaN has all seven bits
        broken = (values & 127) == 127
    else:
        if v.dtype.element_ty.primitive_bitwidth < 32:
            keys, values = keys.to(tl.float32), values.to(tl.float32)
        broken = (tl.abs(values) < float("inf")) == 0
    row_is_broken = tl.max(broken.to(tl.int32), axis=1)[:, None] > 0
    values = tl.where(broken, 0, values)
    keys = tl.where(row_is_broken, 127 if FP8 else float("nan"), keys)
    offs = page * page_strides[0] + place * page_strides[1] + offs_h * SIZE + offs_d
    tl.store(k_pages + offs, keys.to(k_pages.dtype.element_ty), mask=mask)
    tl.store(v_pages + offs, values.to(v_pages.dtype.element_ty), mask=mask)
