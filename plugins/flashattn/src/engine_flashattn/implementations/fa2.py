"""FlashAttention 2 (package flash-attn, Dao-AILab; Dao 2023).

Rows of equally many queries go through `flash_attn_with_kvcache`, which divides long rows over the GPU; others through
`flash_attn_varlen_func`, which does not. What its source (2.8.3) says, and this module heeds:

- Pages are read by their strides (`k_batch_stride = k.stride(0)`), and hold a multiple of 256 tokens.
- With a longest row of one query, the varlen function folds query heads into rows and divides keys; what it then leaves
  in the logarithms of the sums was found wrong more than once. It is told two at least, and does neither.
- Causal ALiBi adds slope * key instead of slope * (key - query): weights are the same, the sums are not.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from engine_flashattn.call import Attend, KernelCall


def load() -> Attend:
    """Raises ImportError."""
    from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

    return bind(flash_attn_varlen_func, flash_attn_with_kvcache)


def bind(varlen: Callable[..., Any], with_kvcache: Callable[..., Any]) -> Attend:
    """The library's two functions in the body's form."""
    return partial(_attend, varlen, with_kvcache)


def _attend(varlen: Callable[..., Any], with_kvcache: Callable[..., Any], call: KernelCall) -> torch.Tensor | None:
    plan = call.plan
    if plan.row_tokens is not None and not call.encoder:
        sums = _uniform(with_kvcache, call, plan.row_tokens)
    else:
        sums = _ragged(varlen, call)
    if sums is None or call.alibi_slopes is None or call.encoder or _is_local(call):
        return sums
    places = plan.kv_index[: len(call.q)].to(torch.float32)
    return sums - call.alibi_slopes.unsqueeze(1) * places


def _is_local(call: KernelCall) -> bool:
    """Whether the library masks both sides; a window that holds all keys is none to it."""
    return 0 <= call.window < call.plan.max_seq_len


def _window(call: KernelCall) -> tuple[int, int]:
    return (call.window, 0) if call.window >= 0 else (-1, -1)


def _uniform(with_kvcache: Callable[..., Any], call: KernelCall, row_tokens: int) -> torch.Tensor | None:
    plan = call.plan
    result = with_kvcache(
        call.q.unflatten(0, (plan.num_rows, row_tokens)),
        call.k,
        call.v,
        cache_seqlens=plan.seq_lens,
        block_table=plan.block_table,
        softmax_scale=call.scale,
        causal=True,
        window_size=_window(call),
        softcap=call.soft_cap,
        alibi_slopes=call.alibi_slopes,
        num_splits=call.num_splits,
        return_softmax_lse=call.want_sums,
    )
    found, sums = result if call.want_sums else (result, None)
    call.out.unflatten(0, (plan.num_rows, row_tokens)).copy_(found)
    return None if sums is None else sums.transpose(0, 1).flatten(1)  # from [R, heads, queries]


def _ragged(varlen: Callable[..., Any], call: KernelCall) -> torch.Tensor | None:
    plan = call.plan
    keys: dict[str, Any] = {
        "causal": False,
        "cu_seqlens_k": plan.query_start_loc,
        "max_seqlen_k": plan.max_query_len,
        "window_size": (call.window, call.window),
    }
    if not call.encoder:
        keys = {
            "causal": True,
            "cu_seqlens_k": plan.key_start_loc,
            "max_seqlen_k": plan.max_seq_len,
            "window_size": _window(call),
            "block_table": plan.block_table,
        }
    result = varlen(
        call.q,
        call.k,
        call.v,
        cu_seqlens_q=plan.query_start_loc,
        max_seqlen_q=max(2, plan.max_query_len),
        softmax_scale=call.scale,
        softcap=call.soft_cap,
        alibi_slopes=call.alibi_slopes,
        return_attn_probs=call.want_sums,
        **keys,
    )
    found, sums = result[:2] if call.want_sums else (result, None)
    call.out.copy_(found)
    return sums
