"""The libraries' functions with their own signatures and rules, computed by `flash_double`: what adapters call here.

Signatures and rules are those of flash-attn 2.8.3, flash-attn-3 3.0 (hopper/flash_api.cpp) and tokenspeed-fa3
3.0.0.post20260810, flash-attn-4 4.0.0b36 and torch 2.13. What a library refuses is refused here, and what it leaves to
the caller is checked.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import torch
from flash_double import Kernel, Mask, attend_packed, attend_pages

from engine_flashattn.call import Attend
from engine_flashattn.implementations import fa2, fa3, fa4
from engine_flashattn.implementations import torch as torch_own
from engine_flashattn.table import Implementation

FA2_KERNEL = Kernel(keys=128, relative_alibi=True)


def check(condition: bool, rule: str) -> None:
    assert condition, f"the library's rule is broken: {rule}"


def check_lengths(*arrays: torch.Tensor) -> None:
    for array in arrays:
        check(array.dtype == torch.int32 and array.is_contiguous(), "lengths are int32 and contiguous")


def check_pages(table: torch.Tensor, rows: int, multiple: int, k: torch.Tensor, v: torch.Tensor) -> None:
    check(table.dtype == torch.int32 and table.stride(-1) == 1, "the table is int32, its rows contiguous")
    check(len(table) == rows, "the table has a row for each row")
    check(k.shape[1] % multiple == 0, f"a page holds a multiple of {multiple} tokens")
    for pages in (k, v):
        check(pages.dim() == 4 and pages.stride(-1) == 1, "pages are [page, token, head, element]")
        check(pages.stride(0) * pages.element_size() % 16 == 0 and pages.data_ptr() % 16 == 0, "16 bytes are loaded")


# -- flash-attn 2 --
def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    block_table=None,
):
    check_lengths(cu_seqlens_q, cu_seqlens_k)
    bounds, k_bounds = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    lengths = [b - a for a, b in pairwise(k_bounds)]
    check(max_seqlen_q >= max(b - a for a, b in pairwise(bounds)), "max_seqlen_q is a bound")
    check(max_seqlen_q > 1, "the short cut for rows of one query, with its own sums, is not taken")
    check(max_seqlen_k >= max(lengths), "max_seqlen_k is a bound")
    check(len(q) == bounds[-1], "q holds the rows' tokens")
    left, right = window_size if window_size[0] < max_seqlen_k else (-1, window_size[1])
    mask = Mask(left=left, right=0 if causal else right, scale=softmax_scale, cap=softcap, slopes=alibi_slopes)
    if block_table is None:
        out, sums = attend_packed(FA2_KERNEL, q, k, v, bounds, k_bounds, mask)
    else:
        check_pages(block_table, len(lengths), 256, k, v)
        out, sums = attend_pages(FA2_KERNEL, q, k, v, block_table, bounds, lengths, mask)
    return (out, sums, None) if return_attn_probs else out


def flash_attn_with_kvcache(
    q,
    k_cache,
    v_cache,
    k=None,
    v=None,
    rotary_cos=None,
    rotary_sin=None,
    cache_seqlens=None,
    cache_batch_idx=None,
    cache_leftpad=None,
    block_table=None,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    rotary_interleaved=True,
    alibi_slopes=None,
    num_splits=0,
    return_softmax_lse=False,
):
    check_lengths(cache_seqlens)
    rows, queries = q.shape[:2]
    check_pages(block_table, rows, 256, k_cache, v_cache)
    capacity = block_table.shape[1] * k_cache.shape[1]
    left, right = window_size if window_size[0] < capacity else (-1, window_size[1])
    mask = Mask(left=left, right=0 if causal else right, scale=softmax_scale, cap=softcap, slopes=alibi_slopes)
    bounds = list(range(0, rows * queries + 1, queries))
    out, sums = attend_pages(
        FA2_KERNEL, q.flatten(0, 1), k_cache, v_cache, block_table, bounds, cache_seqlens.tolist(), mask
    )
    out, sums = out.unflatten(0, (rows, queries)), sums.unflatten(1, (rows, queries)).transpose(0, 1)
    return (out, sums) if return_softmax_lse else out


# -- flash-attn 3 --
FA3_SCHEMA = (
    "flash_attn_3::fwd(Tensor q, Tensor k, Tensor v, Tensor(k_new!)? k_new, Tensor(v_new!)? v_new, Tensor? q_v, "
    "Tensor(out!)? out, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? cu_seqlens_k_new, Tensor? seqused_q, "
    "Tensor? seqused_k, int? max_seqlen_q, int? max_seqlen_k, Tensor? page_table, Tensor? kv_batch_idx, "
    "Tensor? leftpad_k, Tensor? rotary_cos, Tensor? rotary_sin, Tensor? seqlens_rotary, Tensor? q_descale, "
    "Tensor? k_descale, Tensor? v_descale, float softmax_scale, bool is_causal, int window_size_left = -1, "
    "int window_size_right = -1, int attention_chunk = 0, float softcap = 0.0, bool is_rotary_interleaved = False, "
    "Tensor? scheduler_metadata = None, int num_splits = 0, bool? pack_gqa = None, int sm_margin = 0) "
    "-> (Tensor(out!), Tensor, Tensor, Tensor)"
)
"""The operator's, from hopper/flash_api.cpp."""
FA3_METADATA_SCHEMA = (
    "flash_attn_3::get_scheduler_metadata(int batch_size, int max_seqlen_q, int max_seqlen_k, int num_heads, "
    "int num_heads_k, int headdim, int headdim_v, ScalarType qkv_dtype, Tensor seqused_k, Tensor? cu_seqlens_q = None, "
    "Tensor? cu_seqlens_k = None, Tensor? cu_seqlens_k_new = None, Tensor? seqused_q = None, "
    "Tensor? leftpad_k = None, int? page_size = None, int max_seqlen_k_new = 0, bool is_causal = False, "
    "int window_size_left = -1, int window_size_right = -1, int attention_chunk = 0, bool has_softcap = False, "
    "int num_splits = 0, bool? pack_gqa = None, int sm_margin = 0) -> Tensor"
)
FA3_PROCESSORS = 132


def flash_attn_3_metadata(**given: Any) -> torch.Tensor:
    """What the rows are and what it was asked with, in place of who computes what; a counter at the end."""
    schema = torch._C.parse_schema(FA3_METADATA_SCHEMA)
    needed = {argument.name for argument in schema.arguments if not argument.has_default_value()}
    check(needed <= given.keys() <= {argument.name for argument in schema.arguments}, "its arguments")
    check(given["headdim"] == given["headdim_v"], "values are as wide as keys")
    check_lengths(given["seqused_k"], given["cu_seqlens_q"])
    check(len(given["seqused_k"]) == given["batch_size"], "a length a row")
    asked = [int(given[name]) for name in FA3_AGREED]
    asked += [given["max_seqlen_k"], given["num_heads"], given["num_heads_k"], given["page_size"], given["headdim"]]
    return torch.cat((given["seqused_k"], given["cu_seqlens_q"], torch.tensor([*asked, 0], dtype=torch.int32)))


FA3_AGREED = ("max_seqlen_q", "is_causal", "window_size_left", "window_size_right", "num_splits")


def check_metadata(given: dict[str, Any]) -> None:
    """What was worked out is for this call, and its counter was left at 0."""
    q, k, table = given["q"], given["k"], given["page_table"]
    again = flash_attn_3_metadata(
        **{name: given[name] for name in (*FA3_AGREED, "seqused_k", "cu_seqlens_q")},
        batch_size=len(table), max_seqlen_k=table.shape[1] * k.shape[1], num_heads=q.shape[1], num_heads_k=k.shape[2],
        headdim=q.shape[2], headdim_v=q.shape[2], qkv_dtype=q.dtype, page_size=k.shape[1],
    )  # fmt: skip
    check(given["scheduler_metadata"].equal(again), "the metadata is of this step and of this bound")
    check(given["num_splits"] > 1, "undivided, the counter would be cleared by a launch of its own")


def flash_attn_3_fwd(**given: Any) -> tuple[torch.Tensor, torch.Tensor, None, None]:
    q, k, v, out = given["q"], given["k"], given["v"], given["out"]
    start, lengths, table = given["cu_seqlens_q"], given["seqused_k"], given["page_table"]
    check_lengths(start, lengths)
    check_pages(table, len(lengths), 1, k, v)
    bounds, left, right = start.tolist(), given["window_size_left"], given["window_size_right"]
    check(given["max_seqlen_q"] >= max(b - a for a, b in pairwise(bounds)), "max_seqlen_q is a bound")
    check(len(q) >= bounds[-1] and out.shape == q.shape and out.stride(-1) == 1, "q and out hold the rows' tokens")
    check(given.get("cu_seqlens_k") is None, "no cu_seqlens_k with pages")
    check(1 <= given["num_splits"] <= 256, "a bound that every replay keeps")
    if given.get("scheduler_metadata") is not None:
        check_metadata(given)
    left = -1 if left >= table.shape[1] * k.shape[1] - 1 else left
    right = 0 if given["is_causal"] else right
    mask = Mask(left=left, right=right, scale=given["softmax_scale"], cap=given["softcap"])
    by_tiles = k.shape[1] % 128 == 0 and given["max_seqlen_q"] * (q.shape[1] // k.shape[2]) > 128
    kernel = Kernel(keys=128, clears_past_end=not by_tiles)
    found, of_rows = attend_pages(kernel, q, k, v, table, bounds, lengths.tolist(), mask)
    out[: bounds[-1]] = found[: bounds[-1]]
    sums = of_rows.new_full((q.shape[1], len(q)), torch.nan)  # nobody writes what comes after the last row
    sums[:, : bounds[-1]] = of_rows[:, : bounds[-1]]
    return out, sums, None, None


# -- flash-attn 4 --
def flash_attn_4_fwd(
    q,
    k,
    v,
    qv=None,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    seqused_q=None,
    seqused_k=None,
    max_seqlen_q=None,
    max_seqlen_k=None,
    min_seqlen_k=None,
    page_table=None,
    softmax_scale=None,
    causal=False,
    softcap=None,
    window_size_left=None,
    window_size_right=None,
    learnable_sink=None,
    num_splits=1,
    return_lse=False,
    out=None,
    lse=None,
):
    check_lengths(cu_seqlens_q, seqused_k)
    check_pages(page_table, len(seqused_k), 1, k, v)
    bounds = cu_seqlens_q.tolist()
    check(max_seqlen_q >= max(b - a for a, b in pairwise(bounds)), "max_seqlen_q is a bound")
    check(max_seqlen_k >= int(seqused_k.max()), "max_seqlen_k is a bound")
    check(not causal or (window_size_left is None and window_size_right is None), "causal is no window")
    left = -1 if window_size_left is None else window_size_left
    right = 0 if causal else -1 if window_size_right is None else window_size_right
    mask = Mask(left=left, right=right, scale=softmax_scale, cap=softcap or 0.0)
    # Whatever the page size, what lies past the end counts: pages by TMA, and entries past the last one.
    found, sums = attend_pages(
        Kernel(keys=128, clears_past_end=False), q, k, v, page_table, bounds, seqused_k.tolist(), mask
    )
    out.copy_(found)
    return out, sums if return_lse else None, None, None, None


# -- torch --
def varlen_attn(
    query,
    key,
    value,
    cu_seq_q,
    cu_seq_k,
    max_q,
    max_k,
    *,
    return_aux=None,
    scale=None,
    window_size=(-1, -1),
    enable_gqa=False,
    seqused_k=None,
    block_table=None,
    num_splits=None,
):
    heads = key.shape[2] if block_table is not None else key.shape[1]
    check(enable_gqa or query.shape[1] == heads, "grouped heads are asked for")
    check_lengths(cu_seq_q, cu_seq_k)
    bounds, (left, right) = cu_seq_q.tolist(), window_size
    check(max_q > 1 and max_q >= max(b - a for a, b in pairwise(bounds)), "max_q is a bound, and no short cut is taken")
    mask = Mask(left=-1 if left >= max_k else left, right=right, scale=scale)
    if block_table is None:
        out, sums = attend_packed(FA2_KERNEL, query, key, value, bounds, cu_seq_k.tolist(), mask)
    else:
        check(num_splits == 1, "rows are not divided")
        check_lengths(seqused_k)
        check_pages(block_table, len(seqused_k), 256, key, value)
        check(max_k >= int(seqused_k.max()), "max_k is a bound")
        out, sums = attend_pages(FA2_KERNEL, query, key, value, block_table, bounds, seqused_k.tolist(), mask)
    return (out, sums) if return_aux is not None and return_aux.lse else out


class AuxRequest(NamedTuple):
    lse: bool = False


def double_of(implementation: Implementation) -> Attend:
    """The adapter of an implementation, over its library's double."""
    if implementation.name == "fa2":
        return fa2.bind(flash_attn_varlen_func, flash_attn_with_kvcache)
    if implementation.name == "fa3":
        schema = torch._C.parse_schema(FA3_SCHEMA)
        return fa3.bind(flash_attn_3_fwd, schema, flash_attn_3_metadata, FA3_PROCESSORS)
    if implementation.name == "fa4":
        return fa4.bind(flash_attn_4_fwd, divides=True)
    return torch_own.bind(varlen_attn, AuxRequest)
