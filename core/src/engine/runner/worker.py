"""The core's own worker: what executors start where the platform's card names no other."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

import msgspec
import torch

from engine.distributed.group import ProcessGroup
from engine.interfaces.adapter import AdapterWorker
from engine.interfaces.executor import StepFuture
from engine.interfaces.experts import CountsTokens
from engine.interfaces.kv_connector import KVConnectorWorker
from engine.interfaces.platform import CacheMemory
from engine.modeling.loading import out_of_memory
from engine.plugin import HookRelay, PluginList, Registry
from engine.plugin.loading import brought
from engine.plugin.manifest import Blame, check_hooks
from engine.runner.assemble import Assembly, assemble
from engine.runner.model_runner import ModelRunner
from engine.runner.walk import OneOfEachKind
from engine.types.errors import EngineDeadError, KVCacheTooSmallError
from engine.types.plan import Masks, StepPlan
from engine.types.start import WorkerReady, WorkerStart

MIN_PAGES = 2
"""The null page and one to use."""
MOST_PAGES = 2**31 - 1
"""What the int32 of a plan can name."""


class TorchWorker:
    """One rank's device at work. Implements `engine.interfaces.executor.Worker`.

    Args:
        message: everything to build it from.
        registry: what is installed; None to find out (tests pass their own).
    """

    def __init__(self, message: WorkerStart, registry: Registry | None = None) -> None:
        self._start = message
        self._registry = registry
        self._runner: ModelRunner | None = None
        self._groups: dict[str, ProcessGroup] = {}
        self._connectors: tuple[KVConnectorWorker, ...] = ()
        self._adapters: AdapterWorker | None = None
        self._experts: CountsTokens | None = None
        self._stopping: Callable[[], None] | None = None
        self._blame = Blame(sum((draft.choices for draft in message.drafts), message.choices))

    @torch.inference_mode()
    def start(self) -> WorkerReady:
        """Build the drivers, load the model, allocate the pool, and tell the hooks.

        Raises the errors of `engine.runner.assemble.assemble`, KVCacheTooSmallError, and DeviceMemoryError where what
        the worker keeps beside weights and pool finds no room.
        """
        try:
            with self._blame:
                return self._build()
        except torch.OutOfMemoryError as error:
            remedy = "lower --max-num-seqs, --max-model-len or --memory-utilization, or free the device's memory"
            raise out_of_memory("start the engine", error, remedy) from error

    def _build(self) -> WorkerReady:
        began = time.monotonic()
        start = self._start
        registry = (self._registry or Registry.discover()).following(PluginList(start.plugins, "by the launcher"))
        check_hooks(registry, "worker", start.hook_plugins)
        if start.num_threads is not None:
            torch.set_num_threads(min(start.num_threads, torch.get_num_threads()))  # OMP_NUM_THREADS may ask for fewer
        relay = HookRelay("worker", registry, options=start.hook_options)
        parts = assemble(start, registry)
        self._groups = parts.groups
        memory = _profile(start, parts)
        num_pages, page_bytes = _num_pages(start, memory), start.layout.page_bytes
        pool = parts.platform.allocate_pool(num_pages, page_bytes)
        parts.attention.bind(pool)
        self._connectors = tuple(parts.connectors.values())
        for connector in self._connectors:
            connector.register(pool)
        self._runner = ModelRunner(start, parts)
        self._adapters = parts.adapters
        self._experts = parts.experts
        captured = self._runner.capture()
        ready = WorkerReady(
            num_pages=num_pages,
            weight_bytes=sum(model.weight_bytes() for model in (parts.model, *parts.drafts)),
            cache_bytes=num_pages * page_bytes,
            num_parameters=parts.model.num_parameters(),
            load_seconds=time.monotonic() - began,
            step_bytes=None if memory is None else memory.step_bytes,
            captured=captured,
            not_captured=parts.not_captured,
        )
        if relay.worker_started:
            relay.worker_started(info=ready)
        ready = msgspec.structs.replace(ready, broken=registry.broken(), hook_failures=relay.failures.told())
        if stopping := relay.worker_stopping:
            self._stopping = partial(stopping, info=ready)
        return ready

    def execute(self, plan: StepPlan) -> StepFuture:
        """Launch a step. Raises EngineDeadError before `start` and after `shutdown`."""
        with self._blame:
            return self._at_work("run a step").execute(plan)

    def sample(self, step_id: int, masks: Masks) -> None:
        """Let the last step draw. Raises EngineDeadError before `start` and after `shutdown`."""
        with self._blame:
            self._at_work("sample a step").sample(step_id, masks)

    def drafts(self, step_id: int) -> list[list[int]]:
        """Those of the step that waits for its masks. Raises EngineDeadError before `start` and after `shutdown`."""
        with self._blame:
            return self._at_work("tell the drafts").drafts(step_id)

    def _at_work(self, asked: str) -> ModelRunner:
        if self._runner is None:
            raise EngineDeadError(asked, "the worker is not started, or shut down", "start an engine anew")
        return self._runner

    def adapt(self, what: str, *args: Any) -> Any:
        """See `engine.interfaces.adapter.AdapterWorker.told`. Raises EngineDeadError where there is none at work."""
        if self._runner is None or self._adapters is None:
            raise EngineDeadError("reach the adapters", "the worker is not started, shut down, or without any")
        return self._adapters.told(what, *args)

    def expert_tokens(self) -> list[int]:
        """See `engine.interfaces.experts.CountsTokens.tokens`; [] where nobody counts."""
        return self._experts.tokens() if self._experts is not None else []

    def start_profile(self) -> None:
        """Record what is computed from now on. See `engine_kit.profiler.Profiler`."""
        self._profiler.start()

    def stop_profile(self) -> str:
        """The file with what was recorded."""
        path: str = self._profiler.stop()
        return path

    @cached_property
    def _profiler(self) -> Any:
        return brought("profiler", "take a profile")(self._start)

    def shutdown(self) -> None:
        """Let go of the model, the pool and the other ranks. Idempotent."""
        stopping = self._stopping
        self._stopping = None
        if stopping is not None:
            stopping()
        self._runner = self._adapters = self._experts = None
        for connector in self._connectors:
            connector.close()
        self._connectors = ()
        for group in self._groups.values():
            group.close()


def _profile(start: WorkerStart, parts: Assembly) -> CacheMemory | None:
    """What the platform gives the pool, after a largest step; None where the user says so, or nothing is kept."""
    if start.num_kv_pages is not None or start.kv_cache_memory is not None or not start.layout.page_bytes:
        return None
    return parts.platform.kv_cache_memory(partial(_run_largest, start, parts), start.memory_utilization)


def _run_largest(start: WorkerStart, parts: Assembly) -> None:
    """Run the largest steps, from building their buffers to their results. The attention stays bound to a pool of two
    pages."""
    parts.attention.bind(parts.platform.allocate_pool(MIN_PAGES, start.layout.page_bytes))
    runner, drafter = ModelRunner(start, parts, OneOfEachKind(), profiles=True), parts.drafter
    num_drafts = drafter.num_tokens if drafter is not None and drafter.observes else None
    for step in brought("memory_profile", "see how much memory steps take")(start, num_drafts):
        runner.execute(step).result()
    runner.flush()


def _num_pages(start: WorkerStart, profiled: CacheMemory | None) -> int:
    """The pages of the pool, the null page included. Raises KVCacheTooSmallError for fewer than two."""
    page_bytes = start.layout.page_bytes
    if not page_bytes:
        # Pages of no byte. Where the model keeps nothing, two do; where no layer of this stage does, the others say.
        return (start.num_kv_pages or MOST_PAGES) if start.layout.tables else MIN_PAGES
    remedy = f"give at least {MIN_PAGES * page_bytes:,} bytes, lower --max-num-batched-tokens, or free memory"
    if start.num_kv_pages is not None:
        num_pages, asked = start.num_kv_pages, f"--num-kv-pages {start.num_kv_pages}"
    else:
        if profiled is None:
            assert start.kv_cache_memory is not None
            memory, asked = start.kv_cache_memory, f"--kv-cache-memory {start.kv_cache_memory}"
        else:
            memory = max(0, profiled.pool_bytes)
            asked = f"a KV cache in the {memory:,} bytes that {profiled.step_bytes:,} bytes for steps leave for it"
            remedy = (
                f"{MIN_PAGES * page_bytes - profiled.pool_bytes:,} bytes are missing: raise --memory-utilization, "
                "lower --max-num-batched-tokens or --max-num-seqs, quantise the weights, or free the device's memory"
            )
        num_pages = memory // page_bytes
    if num_pages < MIN_PAGES:
        raise KVCacheTooSmallError(
            asked,
            f"that is {num_pages} pages of {page_bytes:,} bytes; page 0 is kept for padding, so {MIN_PAGES} are needed",
            remedy,
        )
    return num_pages
