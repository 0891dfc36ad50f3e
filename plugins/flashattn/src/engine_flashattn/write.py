"""Keys and values into their pages, so that what no query sees cannot hurt.

The libraries multiply values of a tile that no query of it sees by 0, and 0 * NaN is NaN. So no page that was begun
holds
a value that is not finite: where a token's values are not, they are stored as 0, and its keys as NaN. Keys that are not
seen are masked by all libraries, so the token hurts nobody; who sees it still gets NaN, as it must. And the token that
begins a page clears the values of the places after it, which may hold anything.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

COLUMNS = 128
"""Elements of a place that are cleared at once."""


def write_pages(
    k: torch.Tensor, v: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, slots: torch.Tensor
) -> None:
    """Store tokens at their slots. One launch, which may be captured.

    Args:
        k, v: [T, num_kv_heads, head_size], the last dimension contiguous.
        k_pages, v_pages: [num_pages, tokens_per_block, num_kv_heads, head_size], of equal strides; the last two
            dimensions contiguous.
        slots: int64 [T]; page * tokens_per_block + place.
    """
    tokens, heads, size = k.shape
    per_block = k_pages.shape[1]
    _write[(tokens,)](
        k,
        v,
        k_pages,
        v_pages,
        slots,
        tokens,
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        k_pages.stride(0),
        k_pages.stride(1),
        HEADS=heads,
        SIZE=size,
        PER_BLOCK=per_block,
        HEADS_POWER=triton.next_power_of_2(heads),
        SIZE_POWER=triton.next_power_of_2(size),
        PLACES=min(32, triton.next_power_of_2(per_block)),
        COLUMNS=COLUMNS,
        num_warps=4,
    )


@triton.jit
def _write(
    k,
    v,
    k_pages,
    v_pages,
    slots,
    tokens,
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    page_stride,
    place_stride,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    PER_BLOCK: tl.constexpr,
    HEADS_POWER: tl.constexpr,
    SIZE_POWER: tl.constexpr,
    PLACES: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    page = slot // PER_BLOCK
    place = slot - page * PER_BLOCK
    head = tl.arange(0, HEADS_POWER)[:, None]
    element = tl.arange(0, SIZE_POWER)[None, :]
    inside = (head < HEADS) & (element < SIZE)
    keys = tl.load(k + token * k_token_stride + head * k_head_stride + element, mask=inside, other=0.0)
    values = tl.load(v + token * v_token_stride + head * v_head_stride + element, mask=inside, other=0.0)
    if v.dtype.element_ty.primitive_bitwidth < 32:
        keys, values = keys.to(tl.float32), values.to(tl.float32)
    broken = (tl.abs(values) < float("inf")) == 0
    row_is_broken = tl.max(broken.to(tl.int32), axis=1)[:, None] > 0
    values = tl.where(broken, 0.0, values)
    keys = tl.where(row_is_broken, float("nan"), keys)
    start = page * page_stride
    where = start + place * place_stride + head * SIZE + element
    tl.store(k_pages + where, keys.to(k_pages.dtype.element_ty), mask=inside)
    tl.store(v_pages + where, values.to(v_pages.dtype.element_ty), mask=inside)
    if place == 0:
        for first in range(1, PER_BLOCK, PLACES):
            later = first + tl.arange(0, PLACES)
            # A place that another token of this step takes is that token's.
            following = tl.load(slots + token + later, mask=token + later < tokens, other=-1)
            free = ((following != slot + later) & (later < PER_BLOCK))[:, None]
            for column in range(0, HEADS * SIZE, COLUMNS):
                place_column = column + tl.arange(0, COLUMNS)[None, :]
                cleared = v_pages + start + later[:, None] * place_stride + place_column
                nothing = tl.zeros([PLACES, COLUMNS], v_pages.dtype.element_ty)
                tl.store(cleared, nothing, mask=free & (place_column < HEADS * SIZE))
