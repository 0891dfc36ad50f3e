"""torch's own `torch.nn.attention.varlen.varlen_attn`: FlashAttention 2 as torch carries it, with a block table.

Which arguments it has differs between versions; the card looks for the block table in its text. Divided rows were wrong
in it more than once (pytorch issues 194167 and 179760): they are never asked for, neither by name nor by the short cut
that it takes where no row has more than one query, for which it is told two. So it reads long rows slowly where rows
are
few: it is what serves where no FlashAttention is installed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from engine_flashattn.call import Attend, KernelCall


def load() -> Attend:
    """Raises ImportError."""
    from torch.nn.attention.varlen import AuxRequest, varlen_attn

    return bind(varlen_attn, AuxRequest)


def bind(varlen_attn: Callable[..., Any], request: Callable[..., Any]) -> Attend:
    """torch's function in the body's form; of versions that can divide rows, without it."""
    can_divide = "num_splits" in inspect.signature(varlen_attn).parameters
    return partial(_attend, varlen_attn, request, {"num_splits": 1} if can_divide else {})


def _attend(
    varlen_attn: Callable[..., Any], request: Callable[..., Any], undivided: dict[str, int], call: KernelCall
) -> torch.Tensor | None:
    plan = call.plan
    if call.encoder:
        keys: dict[str, Any] = {
            "cu_seq_k": plan.query_start_loc,
            "max_k": plan.max_query_len,
            "window_size": (call.window, call.window),
        }
    else:
        keys = {
            # The lengths are those of seqused_k; the other array has to be there.
            "cu_seq_k": plan.query_start_loc if plan.key_start_loc is None else plan.key_start_loc,
            "max_k": plan.max_seq_len,
            "seqused_k": plan.seq_lens,
            "block_table": plan.block_table,
            "window_size": (call.window, 0),
            **undivided,
        }
    result = varlen_attn(
        call.q,
        call.k,
        call.v,
        cu_seq_q=plan.query_start_loc,
        max_q=max(2, plan.max_query_len),
        return_aux=request(lse=call.want_sums),
        scale=call.scale,
        enable_gqa=call.q.shape[1] != call.k.shape[-2],
        **keys,
    )
    found, sums = result if call.want_sums else (result, None)
    call.out.copy_(found)
    return sums
