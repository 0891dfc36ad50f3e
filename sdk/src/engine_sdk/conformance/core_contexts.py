"""The contexts of bodies outside of workers. Without torch."""

from __future__ import annotations

from engine.interfaces.context import CoreContext, RouterContext
from engine.types.kv import KVGroup, KVLayout
from engine_sdk.conformance.subject import Subject


def core_context(subject: Subject, num_pages: int = 64, worker: str = "", max_num_seqs: int = 64) -> CoreContext:
    """For evictors, policies and executors: a pool of this many pages, the null page included."""
    group = KVGroup(
        index=0, kind="full", layers=(0,), num_kv_heads=1, head_size=1, sliding_window=None, tokens_per_block=16,
        layer_bytes=256,
    )  # fmt: skip
    return CoreContext(
        layout=KVLayout(block_size=16, page_bytes=256, groups=(group,)),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=4096,
        max_model_len=4096,
        num_pages=num_pages,
        worker=worker,
        options=subject.options,
    )


def router_context(subject: Subject, num_ranks: int) -> RouterContext:
    """For routers."""
    return RouterContext(
        num_ranks=num_ranks, max_num_seqs=64, block_size=16, cached_tokens=1 << 16, options=subject.options
    )
