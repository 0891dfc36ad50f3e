"""Engine cores around a `PagedWorker`, put together by hand."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import drafting
import numpy as np
from masking import constraints_of, jump_forward
from paged_worker import VOCAB, HoldingExecutor, PagedWorker, make_grammar
from schedules import Settings
from toy_store import ToyCard, ToyScheduler

from engine.interfaces.context import Clock, CoreContext, SystemClock
from engine.interfaces.kv_connector import Transferred
from engine.interfaces.scheduling_policy import SchedulingPolicy
from engine.kv.layout import make_layout
from engine.kv.manager import KVManager
from engine.loop.engine_core import EngineCore
from engine.plugin.candidate import Candidate
from engine.scheduling.loading import Connector
from engine.scheduling.preemption import Swapping
from engine.scheduling.scheduler import Scheduler
from engine.types.kv import KVLayout
from engine.types.model import CheckpointFiles, KVSpec, ModelDescription, StateTensor
from engine.types.start import WorkerStart
from engine_kit.kv_canary import CANARY
from engine_kit.kv_retention import begin as begin_retention
from engine_kit.speculation import Speculation
from engine_reference.connector_host.card import HostConnector
from engine_reference.connector_host.scheduler_half import HostScheduler
from engine_reference.evictor_lru import LRU
from engine_reference.policy_fcfs import FCFS

FULL = KVSpec(kind="full", num_kv_heads=2, head_size=4)


class HandClock:
    """Stands still until it is set."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def sliding(window: int, heads: int = 2) -> KVSpec:
    return KVSpec(kind="sliding", num_kv_heads=heads, head_size=4, sliding_window=window)


MLA = KVSpec(kind="mla", num_kv_heads=1, head_size=16)


def state(elements: int) -> KVSpec:
    states = (StateTensor(name="all", shape=(elements,), dtype="float32"),)
    return KVSpec(kind="state", num_kv_heads=0, head_size=0, states=states)


STATE = state(32)
WIDE_STATE = state(300)  # as large as the keys and values of 18 tokens
DRAFT = KVSpec(kind="full", num_kv_heads=2, head_size=4, model=1)
WIDE_DRAFT = KVSpec(kind="full", num_kv_heads=5, head_size=4, model=1)


def layout_of(*specs: KVSpec, block_size: int = 4) -> KVLayout:
    return make_layout(
        specs, block_size=block_size, kv_itemsize=4, tokens_per_page={"full": block_size, "sliding": block_size}
    )


LAYOUTS = {
    "full": layout_of(FULL),
    "full, blocks of 1": layout_of(FULL, block_size=1),
    "full and sliding": layout_of(FULL, sliding(6)),
    "full and sliding of other heads": layout_of(FULL, sliding(5, heads=1), block_size=2),
    "full and two windows": layout_of(FULL, sliding(3, heads=4), sliding(9, heads=4), block_size=2),
    "sliding": layout_of(sliding(7)),
    "latent": layout_of(MLA),
    "state": layout_of(STATE),
    "full and state": layout_of(FULL, STATE),
    "latent and draft": layout_of(MLA, DRAFT, block_size=2),
    "all kinds": layout_of(FULL, sliding(6), MLA, STATE, DRAFT),
    "full, and a draft layer of other heads": layout_of(FULL, FULL, WIDE_DRAFT),
    "full, and more sliding": layout_of(FULL, FULL, *[sliding(6)] * 5, WIDE_DRAFT, block_size=2),
    "full and large states": layout_of(FULL, *[WIDE_STATE] * 3, block_size=2),
    "sliding, window of 1": layout_of(FULL, sliding(1), block_size=3),
}


def worker_start(layout: KVLayout, settings: Settings) -> WorkerStart:
    """A start message with what `PagedWorker` reads."""
    model = ModelDescription(
        architecture="Paged", dtype="float64", vocab_size=13, hidden_size=8, num_layers=1, num_q_heads=1,
        max_model_len=settings.max_model_len, kv_specs=(FULL,),
    )  # fmt: skip
    return WorkerStart(
        choices=(),
        model=model,
        files=CheckpointFiles(name="", folder="", weights=(), config={}),
        layout=layout,
        dtype="float64",
        device="cpu",
        max_model_len=settings.max_model_len,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        num_kv_pages=settings.num_pages,
        swap_space=settings.swap_pages * layout.page_bytes,
    )


class LosingHost(HostScheduler):
    """Of worker halves whose loads may fail."""

    def take(self, news: Sequence[bytes]) -> Transferred:
        return Transferred(failed=np.concatenate([np.frombuffer(told, np.int32) for told in news]))


def host(context: CoreContext) -> list[Connector]:
    """The swap tier, where the context has space for one."""
    if not context.swap_space:
        return []
    return [Connector(candidate("kv_connector", "host"), LosingHost(context), HostConnector)]


def canary(context: CoreContext) -> list[Connector]:
    """What checks pages, where they have marks."""
    if not context.layout.mark_bytes:
        return []
    return [Connector(CANARY.candidate, CANARY.core(context), CANARY.card)]


def swapping(kv: KVManager, connectors: Sequence[Connector], queue: SchedulingPolicy) -> Swapping | None:
    """By the first of the connectors that swaps."""
    return next((Swapping(kv, connector, queue) for connector in connectors if connector.card.swaps), None)


def candidate(point: str, name: str) -> Candidate:
    """Where a driver of the tests' own comes from."""
    return Candidate(point, name, 0, "tests", "1.0", "tests:Driver")


def speculation(settings: Settings) -> Speculation | None:
    """As the settings have it."""
    if not settings.drafter:
        return None
    return Speculation(settings.max_num_seqs, settings.num_drafts, settings.adaptive)


def make_core(
    layout: KVLayout,
    settings: Settings,
    evictor: type = LRU,
    policy: type = FCFS,
    grammar: Any = None,
    worker: type[PagedWorker] = PagedWorker,
    clock: Clock | None = None,
    max_retention: float = 0.5,
    max_retention_per_key: float = 0.25,
) -> tuple[EngineCore, HoldingExecutor]:
    """A core, and the executor that it drives."""
    clock = SystemClock() if clock is None else clock
    if settings.canary and settings.enable_prefix_caching:
        layout = layout.marked()
    message = worker_start(layout, settings)
    hold = max(1, settings.in_flight - 1) if settings.hold else 0
    propose = drafting.make(settings.drafter, VOCAB) if settings.drafter else None
    executor = HoldingExecutor(
        worker(message, propose, settings.failing_loads, settings.toy),
        layout,
        settings.max_num_seqs,
        settings.max_model_len,
        hold,
    )
    context = CoreContext(
        layout=layout,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_model_len=settings.max_model_len,
        num_pages=settings.num_pages,
        swap_space=settings.swap_pages * layout.page_bytes,
        clock=clock,
    )
    kv = KVManager(
        layout,
        num_pages=settings.num_pages,
        max_num_seqs=settings.max_num_seqs,
        max_model_len=settings.max_model_len,
        evictor=evictor(context),
        enable_prefix_caching=settings.enable_prefix_caching,
    )
    begin_retention(kv, kv.pool._evictor, clock.monotonic, max_retention, max_retention_per_key)
    connectors = host(context)
    if settings.toy is not None:
        half = ToyScheduler(dataclasses.replace(context, options=settings.toy))
        connectors.insert(0, Connector(candidate("kv_connector", "toy"), half, ToyCard))
    connectors = [*canary(context), *connectors]
    scheduler = Scheduler(
        kv=kv,
        policy=policy(context),
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_model_len=settings.max_model_len,
        speculation=speculation(settings),
        long_prefill_token_threshold=settings.long_prefill_token_threshold,
        swapping=swapping(kv, connectors, policy(context)),
        connectors=connectors,
        constraints=constraints_of(grammar or make_grammar(), VOCAB, settings.drafts_under_masks),
        now=clock.monotonic,
    )
    if settings.jump_forward and settings.drafts_under_masks:
        scheduler.drafts.jump_forward = jump_forward(settings.max_num_seqs, VOCAB)
    ready = executor.start(message)
    core = EngineCore(scheduler=scheduler, executor=executor, worker_ready=ready, in_flight=settings.in_flight)
    return core, executor


def mismatches(core: EngineCore) -> int:
    """Pages that the canary has found wrong, and requests whose pages others were given."""
    counts = {name: count for connector, name, count in core.stats().kv_connectors if connector == "canary"}
    return counts.get("mismatches", 0) + counts.get("stolen", 0)
