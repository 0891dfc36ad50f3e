"""A step's keys and values go to the cache."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
import triton
import triton.language as tl

from engine.interfaces.attention import LayerCache
from engine_cuda.attention_storing import stored
from engine_cuda.interpreter_shim import rounded
from engine_cuda.ops_triton.launching import start_dependent

WRITTEN = 16
"""Tokens that one program writes."""


def store(
    k: torch.Tensor,
    v: torch.Tensor,
    cache: LayerCache,
    slot_mapping: torch.Tensor,
    interpreted: bool,
    dependent: Mapping[str, bool] = MappingProxyType({}),
) -> None:
    """Store k, v [T, H, D] in views [pages, H, tokens, D] of one pool, rounded where their type is narrower.

    dependent: see `engine_cuda.dependents.MayDepend`.
    """
    if k.stride(-1) != 1 or v.stride(-1) != 1:
        k, v = k.contiguous(), v.contiguous()
    if interpreted:
        k, v = (rounded(x, cache.k.dtype) for x in (k, v))
    tokens, heads, size = k.shape
    write_kernel[(triton.cdiv(tokens, WRITTEN), heads)](
        (k, v), (cache.k, cache.v), slot_mapping, tokens, k.stride()[:2], v.stride()[:2], cache.k.stride()[:3],
        HEAD_SIZE=size, BLOCK_D=max(16, triton.next_power_of_2(size)), PAGE=cache.k.shape[2], BLOCK_T=WRITTEN,
        DEPENDENT=bool(dependent), num_warps=4, **dependent,
    )  # fmt: skip


@triton.jit(do_not_specialize=("num_tokens",))
def write_kernel(
    kv,  # keys and values [T, H, D]
    caches,  # of keys and of values: views of one pool, with the same strides
    slot_mapping,  # int64 [T]
    num_tokens,
    k_strides,  # token, head
    v_strides,
    cache_strides,  # page, head, token
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,  # HEAD_SIZE, up to a power of two
    PAGE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Program (i, h): BLOCK_T tokens of KV head h, both key and value."""
    start_dependent(DEPENDENT)
    k_cache, v_cache = caches
    offs_t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    offs_d = tl.arange(0, BLOCK_D)
    head = tl.program_id(1).to(tl.int64)
    mask_t = offs_t < num_tokens
    mask = mask_t[:, None] & (offs_d < HEAD_SIZE)[None]
    slot = tl.load(slot_mapping + offs_t, mask=mask_t, other=0)
    page, within = slot // PAGE, slot % PAGE
    offs = page * cache_strides[0] + within * cache_strides[2] + head * cache_strides[1]
    offs_t = offs_t.to(tl.int64)
    k_ptrs = kv[0] + offs_t * k_strides[0] + head * k_strides[1]
    v_ptrs = kv[1] + offs_t * v_strides[0] + head * v_strides[1]
    keys = tl.load(k_ptrs[:, None] + offs_d[None], mask=mask, other=0.0)
    values = tl.load(v_ptrs[:, None] + offs_d[None], mask=mask, other=0.0)
    keys, values = stored(keys, values, k_cache.dtype.element_ty)
    tl.store(k_cache + offs[:, None] + offs_d[None], keys, mask=mask)
    tl.store(v_cache + offs[:, None] + offs_d[None], values, mask=mask)
