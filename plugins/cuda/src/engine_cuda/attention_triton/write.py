"""A step's keys and values go to the cache."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
import triton
import triton.language as tl

from engine.interfaces.attention import LayerCache, Rotation
from engine_cuda.attention_storing import stored
from engine_cuda.interpreter_shim import rounded
from engine_cuda.ops_triton.launching import power_of_2, start_dependent
from engine_cuda.ops_triton.rotary import HEADS, angles_of, heads_of, turn

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


def store_rotated(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rotation: Rotation,
    cache: LayerCache,
    slot_mapping: torch.Tensor,
    dependent: Mapping[str, bool] = MappingProxyType({}),
) -> torch.Tensor:
    """Rotate q [T, Hq, D] in place, and store k, rotated, and v [T, H, D] as `store` does. Returns q."""
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    size, half = q.shape[2], rotation.cos_sin.shape[1] // 2
    q_programs, k_programs = (triton.cdiv(x.shape[1], HEADS) for x in (q, k))
    if len(q):
        rotated_write_kernel[(len(q), q_programs + k_programs)](
            (q, k, v), (cache.k, cache.v), slot_mapping, rotation.norms or (None, None), rotation.positions,
            rotation.cos_sin, (q.shape[1], k.shape[1]), q.stride()[:2], k.stride()[:2], v.stride()[:2],
            cache.k.stride()[:3], q_programs, rotation.eps, bool(rotation.norms), size, half, power_of_2(half),
            power_of_2(size - 2 * half), max(16, power_of_2(size)), cache.k.shape[2], HEADS,
            bool(dependent), num_warps=max(1, power_of_2(half) * HEADS // 256), **dependent,
        )  # fmt: skip
    return q


@triton.jit
def rotated_write_kernel(
    qkv, caches, slot_mapping, norms, positions, cos_sin, heads, q_strides, k_strides, v_strides, cache_strides,
    q_programs, eps, NORM: tl.constexpr, SIZE: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
    REST: tl.constexpr, BLOCK_D: tl.constexpr, PAGE: tl.constexpr, HEADS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """What `rope_kernel` or `qk_norm_rope_kernel` does, and then `write_kernel`. Grid: (T, programs of the query heads,
    then of the KV heads).

    qkv: (q, k, v). heads: how many q has, and k. *_strides: of tokens, of heads. norms: weights of q's norm and of k's,
    or None.
    """
    start_dependent(DEPENDENT)
    q, k, v = qkv
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    angles = angles_of(positions, cos_sin, token, HALF, BLOCK)
    if part < q_programs:
        q += token * q_strides[0]
        turn(q, norms[0], part, heads[0], q_strides[1], angles, eps, NORM, SIZE, HALF, BLOCK, REST, HEADS)
    else:
        part -= q_programs
        k += token * k_strides[0]
        first, second, rest = heads_of(
            k, norms[1], part, heads[1], k_strides[1], eps, NORM, SIZE, HALF, BLOCK, REST, HEADS
        )
        cos, sin = angles
        turned = first * cos[None] - second * sin[None]
        second = second * cos[None] + first * sin[None]
        offs_h = (part * HEADS + tl.arange(0, HEADS)).to(tl.int64)
        offs_v = tl.arange(0, BLOCK_D)
        mask_h = (offs_h < heads[1])[:, None]
        mask_v = mask_h & (offs_v < SIZE)[None]
        v_ptrs = v + token * v_strides[0] + offs_h[:, None] * v_strides[1]
        values = tl.load(v_ptrs + offs_v[None], mask=mask_v, other=0.0)
        slot = tl.load(slot_mapping + token)
        offs = slot // PAGE * cache_strides[0] + slot % PAGE * cache_strides[2] + offs_h[:, None] * cache_strides[1]
        offs_d = tl.arange(0, BLOCK)
        mask = mask_h & (offs_d < HALF)[None]
        dtype = k.dtype.element_ty
        turned, kept = stored(turned.to(dtype), values, caches[0].dtype.element_ty)
        second, kept = stored(second.to(dtype), values, caches[0].dtype.element_ty)
        tl.store(caches[0] + offs + offs_d[None], turned, mask=mask)
        tl.store(caches[0] + offs + HALF + offs_d[None], second, mask=mask)
        if SIZE > 2 * HALF:
            offs_r = 2 * HALF + tl.arange(0, REST)
            rest, kept = stored(rest.to(dtype), values, caches[0].dtype.element_ty)
            tl.store(caches[0] + offs + offs_r[None], rest, mask=mask_h & (offs_r < SIZE)[None])
        tl.store(caches[1] + offs + offs_v[None], kept, mask=mask_v)
