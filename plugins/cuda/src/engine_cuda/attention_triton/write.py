"""The kernel that stores a step's keys and values in the cache."""

from __future__ import annotations

import triton
import triton.language as tl

from engine_cuda.attention_storing import stored


@triton.jit(do_not_specialize=("num_tokens",))
def write_kernel(
    k,  # [T, H, D]
    v,
    k_cache,
    v_cache,
    slot_mapping,  # int64 [T]
    num_tokens,
    k_token,
    k_head,
    v_token,
    v_head,
    cache_page,
    cache_head,
    cache_token,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,  # SIZE, up to a power of two
    PAGE: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Program (i, h): TOKENS tokens of KV head h, both key and value. The views of k and v have the same strides."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    head = tl.program_id(1).to(tl.int64)
    element = tl.arange(0, WIDTH)
    there = token < num_tokens
    mask = there[:, None] & (element < SIZE)[None]
    slot = tl.load(slot_mapping + token, mask=there, other=0)
    at = (slot // PAGE * cache_page + slot % PAGE * cache_token + head * cache_head)[:, None] + element[None]
    token = token.to(tl.int64)
    keys = tl.load(k + (token * k_token + head * k_head)[:, None] + element[None], mask=mask, other=0.0)
    values = tl.load(v + (token * v_token + head * v_head)[:, None] + element[None], mask=mask, other=0.0)
    keys, values = stored(keys, values, k_cache.dtype.element_ty)
    tl.store(k_cache + at, keys, mask=mask)
    tl.store(v_cache + at, values, mask=mask)
