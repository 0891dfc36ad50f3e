"""FlashAttention 4 for Hopper and Blackwell (package flash-attn-4, Dao-AILab), written in CuTe DSL; a pre-release.

Kernels are compiled when a form is first asked for. The library's public function takes no output to write into; the
function under it does, which torch's own `torch.nn.attention` calls too. What its source (4.0.0b36) says:

- Pages are read by their strides, which must be multiples of 16 bytes (or the whole pool would be copied). They hold
  any number of tokens; by TMA where a page is a tile, and then with what lies after the row's end, which must be
  finite.
- Bounds that are numbers of the host must cover every replay of a captured launch.
- On Hopper it does not divide rows.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from engine.types.errors import ConfigError
from engine_flashattn.call import Attend, KernelCall

NAMES = frozenset(
    {
        "q", "k", "v", "cu_seqlens_q", "seqused_k", "max_seqlen_q", "max_seqlen_k", "page_table", "softmax_scale",
        "causal", "softcap", "window_size_left", "window_size_right", "num_splits", "return_lse", "out",
    }
)  # fmt: skip


def load() -> Attend:
    """Raises ImportError; ConfigError where the function takes other arguments."""
    from flash_attn.cute.interface import _flash_attn_fwd

    return bind(_flash_attn_fwd, divides=torch.cuda.get_device_capability()[0] >= 10)


def bind(function: Callable[..., Any], divides: bool) -> Attend:
    """The library's function in the body's form. divides: rows, on this GPU."""
    missing = NAMES - set(inspect.signature(function).parameters)
    if missing:
        raise ConfigError(
            "attention.implementation fa4",
            f"the installed FlashAttention 4 takes no {', '.join(sorted(missing))}",
            "pip install --upgrade --pre flash-attn-4",
        )
    return partial(_attend, function, divides)


def _attend(function: Callable[..., Any], divides: bool, call: KernelCall) -> torch.Tensor | None:
    plan = call.plan
    _, sums, *_ = function(
        q=call.q,
        k=call.k,
        v=call.v,
        cu_seqlens_q=plan.query_start_loc,
        seqused_k=plan.seq_lens,
        max_seqlen_q=plan.max_query_len,
        max_seqlen_k=plan.max_seq_len,
        page_table=plan.block_table,
        softmax_scale=call.scale,
        causal=call.window < 0,
        softcap=call.soft_cap or None,
        window_size_left=None if call.window < 0 else call.window,
        window_size_right=None if call.window < 0 else 0,
        num_splits=call.num_splits if divides else 1,
        return_lse=call.want_sums,
        out=call.out,
    )
    return sums if call.want_sums else None
