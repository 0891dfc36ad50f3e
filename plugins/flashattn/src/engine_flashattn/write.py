"""Keys and values into their pages, so that what no query sees cannot hurt.

The libraries multiply values of a tile that no query of it sees by 0, and 0 * NaN is NaN. So no page that was begun
holds a value that is not finite: where a token's values are not, they are stored as 0, and its keys as NaN. Keys that
are not seen are masked by all libraries, so the token hurts nobody; who sees it still gets NaN, as it must. And the
token that begins a page clears the values of the places after it, which may hold anything.
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
        (k, v),
        (k_pages, v_pages),
        slots,
        tokens,
        k.stride()[:2],
        v.stride()[:2],
        k_pages.stride()[:2],
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
    kv,
    pages,  # of keys and of values, with the same strides
    slots,
    tokens,
    k_strides,  # token, head
    v_strides,
    page_strides,  # page, place
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    PER_BLOCK: tl.constexpr,
    HEADS_POWER: tl.constexpr,
    SIZE_POWER: tl.constexpr,
    PLACES: tl.constexpr,
    COLUMNS: tl.constexpr,
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
    keys = tl.load(k + token * k_strides[0] + offs_h * k_strides[1] + offs_d, mask=mask, other=0.0)
    values = tl.load(v + token * v_strides[0] + offs_h * v_strides[1] + offs_d, mask=mask, other=0.0)
    if v.dtype.element_ty.primitive_bitwidth < 32:
        keys, values = keys.to(tl.float32), values.to(tl.float32)
    broken = (tl.abs(values) < float("inf")) == 0
    row_is_broken = tl.max(broken.to(tl.int32), axis=1)[:, None] > 0
    values = tl.where(broken, 0.0, values)
    keys = tl.where(row_is_broken, float("nan"), keys)
    start = page * page_strides[0]
    offs = start + place * page_strides[1] + offs_h * SIZE + offs_d
    tl.store(k_pages + offs, keys.to(k_pages.dtype.element_ty), mask=mask)
    tl.store(v_pages + offs, values.to(v_pages.dtype.element_ty), mask=mask)
    if place == 0:
        for first in range(1, PER_BLOCK, PLACES):
            offs_p = first + tl.arange(0, PLACES)
            # A place that another token of this step takes is that token's.
            following = tl.load(slots + token + offs_p, mask=token + offs_p < tokens, other=-1)
            free = ((following != slot + offs_p) & (offs_p < PER_BLOCK))[:, None]
            for column in range(0, HEADS * SIZE, COLUMNS):
                offs_n = column + tl.arange(0, COLUMNS)[None, :]
                cleared = v_pages + start + offs_p[:, None] * page_strides[1] + offs_n
                nothing = tl.zeros([PLACES, COLUMNS], v_pages.dtype.element_ty)
                tl.store(cleared, nothing, mask=free & (offs_n < HEADS * SIZE))
