"""FlashAttention 3 for Hopper (module flash_attn_3._C, Dao-AILab; Shah et al. 2024).

The library's Python functions take no output to write into; its operator does, which torch's own `torch.nn.attention`
calls too. What its source (hopper/flash_api.cpp) says, and this module heeds:

- Pages are read by their strides (`k_batch_stride = k.stride(0)`) and hold any number of tokens. Where a page holds
  whole tiles, they are loaded with what lies after the row's end; otherwise that is 0.
- With pages, the longest row is taken to be what the block table holds, so a captured launch is right for longer rows.
  How many pieces a row is divided into is settled on the device, below a bound that is given to it.
- Who computes what is worked out by a kernel before each layer's, from lengths alone. `get_scheduler_metadata` is that
  kernel alone: the layer that opens a pass calls it, and the layers after it are given what it found. So it is part of
  a captured step, and what a replay reads was worked out by the same replay, from its own lengths and for the bound
  that all its layers were captured with. An array from outside the graph can belong to another bound, which read
  memory that was not there (vllm pull request 20301).
- What divides rows leaves the array's counter at 0 for the next layer. Undivided, that takes a launch more each layer,
  which is the one that was saved: then the library is left to work it out.
- Rows packed without pages are loaded by tiles that reach into the next row's values: encoders are not served.

Builds differ: arguments are looked up in the operator's schema, features in the flags that it was built with
(`engine_flashattn.installed`). Of the sinks argument of some builds neither the dtype nor what it does to the sums is
written down anywhere: sinks are applied afterwards, as for the others.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
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
SCHEDULING = "scheduler_metadata"
TILE = 128
"""Queries of a tile, counting each head of a group, and keys of one; 64 to 192 by the size of heads."""
MOST_SPLITS = 128
"""What the library's own choice goes up to."""


def load() -> Attend:
    """Raises ImportError; ConfigError where the operator takes other arguments."""
    importlib.import_module("flash_attn_3._C")  # registers the operators, whatever Python modules lie around it

    library = torch.ops.flash_attn_3
    metadata = library.get_scheduler_metadata.default if hasattr(library, "get_scheduler_metadata") else None
    processors = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
    return bind(library.fwd.default, library.fwd.default._schema, metadata, processors)


def bind(
    operator: Callable[..., Any],
    schema: torch.FunctionSchema,
    metadata: Callable[..., torch.Tensor] | None,
    processors: int,
) -> Attend:
    """The library's operators in the body's form. Arguments without a default that are not given are None.

    Args:
        operator, schema: `fwd`.
        metadata: `get_scheduler_metadata`; None of a build without it.
        processors: the GPU's multiprocessors.
    """
    names = {argument.name for argument in schema.arguments}
    missing = NAMES - names
    if missing:
        raise ConfigError(
            "attention.implementation fa3",
            f"the installed FlashAttention 3 takes no {', '.join(sorted(missing))}",
            "pip install --upgrade flash-attn-3 --find-links https://download.pytorch.org/whl/flash-attn-3/",
        )
    nothing = {argument.name: None for argument in schema.arguments if not argument.has_default_value()}
    return _FlashAttention3(operator, nothing, metadata if SCHEDULING in names else None, processors)


def most_splits(call: KernelCall, processors: int) -> int:
    """Into how many pieces a row is divided at most: as many as let one row fill the GPU, had it the GPU to itself.

    It follows from shapes that a captured step keeps. Of rows of equally many queries the library wants no more: it
    gives each multiprocessor 1.1 times its share of tiles, those of all rows counted.
    """
    kv_heads = call.k.shape[2]
    query_tiles = -(-call.plan.max_query_len * (call.q.shape[1] // kv_heads) // TILE)
    key_tiles = -(-call.plan.max_seq_len // TILE)
    return max(1, min(-(-processors // (kv_heads * query_tiles)), key_tiles, MOST_SPLITS))


class _FlashAttention3:
    """An `Attend`."""

    def __init__(
        self,
        operator: Callable[..., Any],
        nothing: dict[str, None],
        metadata: Callable[..., torch.Tensor] | None,
        processors: int,
    ) -> None:
        self._operator = operator
        self._nothing = nothing
        self._metadata = metadata
        self._processors = processors

    def __call__(self, call: KernelCall) -> torch.Tensor | None:
        plan = call.plan
        common: dict[str, Any] = {
            "cu_seqlens_q": plan.query_start_loc,
            "seqused_k": plan.seq_lens,
            "max_seqlen_q": plan.max_query_len,
            "is_causal": True,
            "window_size_left": call.window,
            "window_size_right": 0 if call.window >= 0 else -1,
            "num_splits": call.num_splits or most_splits(call, self._processors),
        }
        if call.opens:
            plan.schedule = self._schedule(call, common)
        given: dict[str, Any] = {
            **self._nothing,
            **common,
            "q": call.q,
            "k": call.k,
            "v": call.v,
            "out": call.out,
            "page_table": plan.block_table,
            "softmax_scale": call.scale,
            "softcap": call.soft_cap,
        }
        if plan.schedule is not None:
            given[SCHEDULING] = plan.schedule
        _, sums, *_ = self._operator(**given)
        return sums if call.want_sums else None

    def _schedule(self, call: KernelCall, common: dict[str, Any]) -> torch.Tensor | None:
        """int32 [some]; None where each layer's call works it out for itself."""
        if self._metadata is None or common["num_splits"] == 1:
            return None
        _, per_page, kv_heads, head_size = call.k.shape
        return self._metadata(
            **common,
            batch_size=call.plan.num_rows,
            max_seqlen_k=call.plan.max_seq_len,
            num_heads=call.q.shape[1],
            num_heads_k=kv_heads,
            headdim=head_size,
            headdim_v=head_size,
            qkv_dtype=call.q.dtype,
            page_size=per_page,
            has_softcap=call.soft_cap > 0,
        )
