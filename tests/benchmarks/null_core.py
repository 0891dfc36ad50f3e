"""Engine cores whose worker computes nothing, for measurements of everything else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine.interfaces.drafter import DrafterNeed
from engine.interfaces.executor import ExecutorNeed
from engine.kv.layout import make_layout
from engine.kv.tables import BlockTable
from engine.loop.assemble import assemble_core
from engine.plugin import Registry, choose_one
from engine.plugin.points import DRAFTER, EVICTOR, EXECUTOR, SCHEDULING_POLICY, Point
from engine.types.kv import KVLayout
from engine.types.model import CheckpointFiles, KVSpec, ModelDescription
from engine.types.start import CoreStart, WorkerStart

if TYPE_CHECKING:
    from engine.embedding import EngineConfig
    from engine.loop.engine_core import EngineCore

VOCABULARY = 32000
SLIDING_WINDOW = 128
_SLIDING = KVSpec(kind="sliding", num_kv_heads=8, head_size=128, sliding_window=SLIDING_WINDOW)
KV_SPECS = (KVSpec(kind="full", num_kv_heads=8, head_size=128), _SLIDING, _SLIDING)
"""The first n of these make a cache of n tables: sliding layers that outnumber the full ones are dealt to two."""
_NULL_WORKER = "tests.benchmarks.null_worker:NullWorker"


@dataclass(frozen=True, kw_only=True)
class NullSizes:
    """The engine around the null worker.

    Args:
        max_num_seqs, max_num_batched_tokens, max_model_len: as for any engine.
        kv_tables: 1 .. 3.
        drafts: for each request and step, always as many; 0: no drafter.
        num_kv_pages: None for as many as `max_num_seqs` requests of the greatest length hold.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    kv_tables: int = 1
    drafts: int = 0
    num_kv_pages: int | None = None


def null_core(config: EngineConfig, sizes: NullSizes) -> EngineCore:
    """A started core; its executor, evictor and policy are chosen as for any engine. Raises PluginError."""
    registry = Registry.discover(plugins=config.plugin_list)
    needs: dict[Point[Any, Any], object] = {EXECUTOR: ExecutorNeed(), EVICTOR: None, SCHEDULING_POLICY: None}
    selections = [
        choose_one(registry, point, need, config.asked(point.name), config.options_for(point.name))
        for point, need in needs.items()
    ]
    if sizes.drafts:
        options = {"num_tokens": sizes.drafts, "adaptive": False}
        selections.append(choose_one(registry, DRAFTER, DrafterNeed(dtype="float32", device="cpu"), "ngram", options))
    specs = KV_SPECS[: sizes.kv_tables]
    layout = make_layout(specs, block_size=config.block_size, kv_itemsize=2, tokens_per_page={})
    worker = WorkerStart(
        choices=tuple(selection.choice() for selection in selections),
        model=ModelDescription(
            architecture="none",
            dtype="float32",
            vocab_size=VOCABULARY,
            hidden_size=1,
            num_layers=len(specs),
            num_q_heads=8,
            max_model_len=sizes.max_model_len,
            kv_specs=specs,
        ),
        files=CheckpointFiles(name="none", folder="", weights=(), config={}),
        layout=layout,
        dtype="float32",
        device="cpu",
        max_model_len=sizes.max_model_len,
        max_num_seqs=sizes.max_num_seqs,
        max_num_batched_tokens=sizes.max_num_batched_tokens,
        num_kv_pages=sizes.num_kv_pages or 1 + sizes.max_num_seqs * pages_each(layout, sizes),
        plugins=config.plugin_list.text,
    )
    start = CoreStart(
        worker=worker, worker_class=_NULL_WORKER, enable_prefix_caching=True, in_flight=config.in_flight or 2
    )
    return assemble_core(start, registry)


def pages_each(layout: KVLayout, sizes: NullSizes) -> int:
    """The most pages that a decoding request of the greatest length holds, and those that its steps in flight keep."""
    tables = [BlockTable(table, 1, sizes.max_model_len) for table in layout.tables]
    held = sum(table.most_live(sizes.max_model_len, 1 + sizes.drafts) for table in tables)
    return held + sum(table.window is not None for table in tables) + (len(tables) if sizes.drafts else 0)
