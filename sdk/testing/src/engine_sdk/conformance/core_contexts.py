"""The contexts of bodies outside of workers, and what workers are told at their start. Without torch."""

from __future__ import annotations

from typing import Any

from engine.interfaces.context import Clock, CoreContext, FrontContext, RouterContext, SystemClock
from engine.types.kv import KVGroup, KVLayout, KVTable
from engine.types.model import CheckpointFiles, KVSpec, ModelDescription
from engine.types.start import WorkerStart
from engine_sdk.conformance.subject import Subject


def core_context(
    subject: Subject, num_pages: int = 64, worker: str = "", max_num_seqs: int = 64, clock: Clock | None = None
) -> CoreContext:
    """For evictors, policies and executors: a pool of this many pages, the null page included. Tokens are bytes."""
    return CoreContext(
        layout=one_layer(256),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=4096,
        max_model_len=4096,
        num_pages=num_pages,
        worker=worker,
        vocabulary=lambda: [bytes([byte]) for byte in range(256)],
        encode=lambda text: list(text.encode()),
        options=subject.options,
        clock=SystemClock() if clock is None else clock,
    )


def one_layer(page_bytes: int) -> KVLayout:
    """One layer fills the pages."""
    table = KVTable(index=0, kind="full", window=None, tokens_per_block=16)
    group = KVGroup(
        index=0, kind="full", sites=(0,), num_kv_heads=1, head_size=1, sliding_window=None, tokens_per_block=16,
        layer_bytes=page_bytes,
    )  # fmt: skip
    return KVLayout(block_size=16, page_bytes=page_bytes, tables=(table,), groups=(group,))


def router_context(subject: Subject, num_ranks: int) -> RouterContext:
    """For routers."""
    return RouterContext(
        num_ranks=num_ranks, max_num_seqs=64, block_size=16, cached_tokens=1 << 16, options=subject.options
    )


def start_message(device: str = "cpu", dtype: str = "float32", **fields: Any) -> WorkerStart:
    """A start message, of a model of no weights. fields: replace its own."""
    model = ModelDescription(
        architecture="Conformance", dtype=dtype, vocab_size=256, hidden_size=64, num_layers=1, num_q_heads=4,
        max_model_len=4096, kv_specs=(KVSpec(kind="full", num_kv_heads=2, head_size=16),),
    )  # fmt: skip
    given: dict[str, Any] = {
        "choices": (), "model": model, "dtype": dtype, "device": device, "max_model_len": 4096, "max_num_seqs": 64,
        "max_num_batched_tokens": 4096, "layout": KVLayout(block_size=16, page_bytes=1 << 16, tables=(), groups=()),
        "files": CheckpointFiles(name="conformance", folder="", weights=(), config={}),
    }  # fmt: skip
    return WorkerStart(**(given | fields))


def front_context(subject: Subject) -> FrontContext:
    """For parsers: a model without files."""
    start = start_message()
    return FrontContext(folder="", files=start.files, model=start.model, options=subject.options)
