"""FlashAttention 3 for Hopper (package flash-attn-3, Dao-AILab; Shah et al. 2024).

The library's Python functions take no output to write into; its operator does, which torch's own `torch.nn.attention`
calls too. What its source (hopper/flash_api.cpp) says, and this module heeds:

- Pages are read by their strides (`k_batch_stride = k.stride(0)`) and hold any number of tokens. Where a page holds
  whole tiles, they are loaded with what lies after the row's end; otherwise that is 0.
- With pages, the longest row is taken to be what the block table holds, so a captured launch is right for longer rows.
  How many pieces a row is divided into is settled on the device, below a bound that follows from shapes.
- Rows packed without pages are loaded by tiles that reach into the next row's values: encoders are not served.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from engine.types.errors import ConfigError
from engine_flashattn.call import Attend, KernelCall

NAMES = frozenset(
    {
        "q", "k", "v", "out", "cu_seqlens_q", "seqused_k", "max_seqlen_q", "page_table", "softmax_scale", "is_causal",
        "window_size_left", "window_size_right", "softcap", "num_splits",
    }
)  # fmt: skip
"""Arguments of the operator that are given."""


def load() -> Attend:
    """Raises ImportError; ConfigError where the operator takes other arguments."""
    importlib.import_module("flash_attn_3._C")  # registers the operator, whatever Python modules lie around it

    operator = torch.ops.flash_attn_3.fwd.default
    return bind(operator, operator._schema)


def bind(operator: Callable[..., Any], schema: torch.FunctionSchema) -> Attend:
    """The library's operator in the body's form. Arguments without a default that are not given are None."""
    missing = NAMES - {argument.name for argument in schema.arguments}
    if missing:
        raise ConfigError(
            "attention.implementation fa3",
            f"the installed FlashAttention 3 takes no {', '.join(sorted(missing))}",
            "pip install --upgrade flash-attn-3 --find-links https://download.pytorch.org/whl/flash-attn-3/",
        )
    nothing = {argument.name: None for argument in schema.arguments if not argument.has_default_value()}
    return partial(_attend, operator, nothing)


def _attend(operator: Callable[..., Any], nothing: dict[str, None], call: KernelCall) -> torch.Tensor | None:
    plan = call.plan
    given: dict[str, Any] = {
        **nothing,
        "q": call.q,
        "k": call.k,
        "v": call.v,
        "out": call.out,
        "cu_seqlens_q": plan.query_start_loc,
        "seqused_k": plan.seq_lens,
        "max_seqlen_q": plan.max_query_len,
        "page_table": plan.block_table,
        "softmax_scale": call.scale,
        "is_causal": True,
        "window_size_left": call.window,
        "window_size_right": 0 if call.window >= 0 else -1,
        "softcap": call.soft_cap,
        "num_splits": call.num_splits,
    }
    _, sums, *_ = operator(**given)
    return sums if call.want_sums else None
