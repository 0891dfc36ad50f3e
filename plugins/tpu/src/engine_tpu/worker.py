"""The worker of platform `tpu`: what executors start in the place of the core's own. It imports no torch."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import jax
import ml_dtypes
import msgspec
import numpy as np
from jax.sharding import Mesh

from engine.interfaces.context import WorkerContext
from engine.interfaces.drafter import DrafterCard, DrafterOptions
from engine.interfaces.executor import StepFuture
from engine.interfaces.kv_connector import KVConnectorWorker
from engine.plugin import HookRelay, PluginList, Registry, Selection
from engine.plugin.manifest import Blame, check_choices, check_hooks, restore
from engine.types.errors import (
    ConfigError,
    DeviceMemoryError,
    EngineDeadError,
    EngineError,
    InvalidRequestError,
    KVCacheTooSmallError,
)
from engine.types.plan import Masks, StepPlan
from engine.types.start import WorkerReady, WorkerStart
from engine_kit.host_memory import cache_memory
from engine_kit.model_config import unsupported_ranks
from engine_kit.transfers import Transfers
from engine_tpu import attention, attention_pallas
from engine_tpu.attention import Form
from engine_tpu.buckets import Bucket, Buckets
from engine_tpu.device import open_mesh
from engine_tpu.drafting import Drafting
from engine_tpu.edits import Edits
from engine_tpu.models.decoder import Decoder
from engine_tpu.models.forms import form_of
from engine_tpu.pages import STAGED, DevicePages
from engine_tpu.platform import TpuOptions, sizes_of
from engine_tpu.runner import Runner
from engine_tpu.steps import Steps, sites_of
from engine_tpu.weights import Matrices, Shards, Tensors, nbytes

logger = logging.getLogger(__name__)

MIN_PAGES = 2
"""The null page and one to use."""
_DTYPES = {
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
}
_BESIDE = frozenset({"adapter", "communicator", "experts", "logits_processor", "ops", "quantization"})
"""Points whose drivers would work in the worker, and do not here."""
_BUILT = ("platform", "model", "drafter", "kv_connector")
"""Points whose drivers work here."""
_UTILIZATION = 0.9
"""Of a TPU's memory that the engine takes, where nobody says."""
_KEPT_BITS = 5
"""Of a number of pages that was measured: a few bytes more or less must not compile everything anew."""


class JaxWorker:
    """Devices at work, as one: implements `engine.interfaces.executor.Worker`.

    Args:
        message: everything to build it from.
        registry: what is installed; None to find out (tests pass their own).
    """

    def __init__(self, message: WorkerStart, registry: Registry | None = None) -> None:
        self._start = message
        self._registry = registry
        self._runner: Runner | None = None
        self._connectors: dict[str, KVConnectorWorker] = {}
        self._stopping: Callable[[], None] | None = None
        self._profile: str | None = None
        self._blame = Blame(message.choices)

    def start(self) -> WorkerReady:
        """Load the model, allocate the pool, compile every bucket, and tell the hooks.

        Raises ConfigError where a setting is not served here, or there is no such device; CheckpointError,
        KVCacheTooSmallError; DeviceMemoryError where the weights, or what steps take, find no room.
        """
        try:
            with self._blame:
                return self._build()
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            remedy = "use more devices, a smaller model or fewer KV pages, or free the device's memory"
            raise DeviceMemoryError("start the engine", str(error).splitlines()[0], remedy) from error

    def _build(self) -> WorkerReady:
        began, start = time.monotonic(), self._start
        registry = (self._registry or Registry.discover()).following(PluginList(start.plugins, "by the launcher"))
        check_hooks(registry, "worker", start.hook_plugins)
        mine = tuple(choice for choice in start.choices if choice.point in _BUILT)
        check_choices(registry, mine)
        built = restore(registry, mine)
        connectors = [one for one in built if one.point == "kv_connector"]
        chosen = {one.point: one for one in built}
        options = cast("TpuOptions", chosen["platform"].options)
        _refuse(start)
        drafting, most_drafts = _drafting(start, chosen.get("drafter"))
        relay = HookRelay("worker", registry, options=start.hook_options)
        size = options.tensor_parallel
        _check_division(start, options)
        mesh = open_mesh(options, size, start.data_parallel_rank * size)
        shards = Shards(mesh, size, _DTYPES[start.dtype])
        model = Decoder(start.model, Matrices(shards, options.weights, options.expert_parallel), start.max_model_len)
        params = model.load(Tensors(start.files.weights))
        described = start.model.sites
        sites = sites_of(
            start.layout,
            start.model.num_layers,
            lambda layer: Form(model.scale, described[layer].sliding_window, described[layer].soft_cap),
        )
        cache_dtype = _DTYPES[start.kv_cache_dtype or start.dtype]
        sizes = sizes_of(options.rows), sizes_of(options.tokens)
        buckets = Buckets(start.max_num_seqs, start.max_num_batched_tokens, *sizes, most_drafts)
        steps = Steps(
            model,
            params,
            shards,
            start.layout,
            sites,
            start.max_num_seqs,
            start.max_model_len,
            cache_dtype,
            _attention(start, options, mesh, cache_dtype, max(size.rows for size in buckets)),
        )
        num_pages, step_bytes = self._num_pages(steps, buckets, STAGED if connectors else 0)
        memory = steps.memory(num_pages)
        pages = DevicePages(steps, memory)
        runner = Runner(start, steps, memory, buckets, drafting, self._connected(connectors, pages))
        if options.warm_up:
            warming = time.monotonic()
            runner.warm_up(_tell)
            if connectors:
                pages.warm_up()
            logger.info("compiled %d buckets in %.1f s", len(list(buckets)), time.monotonic() - warming)
        steps.compiled.serve()
        self._runner = runner
        ready = WorkerReady(
            num_pages=num_pages,
            weight_bytes=nbytes(params),
            cache_bytes=nbytes(memory.pools),
            num_parameters=model.num_parameters,
            load_seconds=time.monotonic() - began,
            step_bytes=step_bytes,
            captured=tuple(sorted(size.rows for size in buckets if size.decodes)) if options.warm_up else (),
        )
        if relay.worker_started:
            relay.worker_started(info=ready)
        ready = msgspec.structs.replace(ready, broken=registry.broken(), hook_failures=relay.failures.told())
        if stopping := relay.worker_stopping:
            self._stopping = partial(stopping, info=ready)
        return ready

    def _connected(self, chosen: Sequence[Selection[Any]], pages: DevicePages) -> Transfers | None:
        """Who moves pages, with the connectors at work; None where there are none."""
        for one in chosen:
            context = WorkerContext(start=self._start, options=one.options)
            self._connectors[one.candidate.name] = one.build(context, "worker")
        for connector in self._connectors.values():
            connector.register(pages)
        return Transfers(self._start, self._connectors) if chosen else None

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

    def _at_work(self, asked: str) -> Runner:
        if self._runner is None:
            raise EngineDeadError(asked, "the worker is not started, or shut down", "start an engine anew")
        return self._runner

    def start_profile(self) -> None:
        """Record what is computed from now on, with JAX's profiler.

        Raises ConfigError where no folder is given or it cannot be written to, InvalidRequestError where a profile is
        being taken, EngineError where JAX refuses.
        """
        folder = self._start.profile_dir
        if folder is None:
            raise ConfigError("start a profile", "no folder is given for it", "start the engine with --profile-dir")
        if self._profile is not None:
            raise InvalidRequestError("start a profile", "one is being taken already", "stop it first")
        refused = f"take a profile into {folder!r}"
        try:
            os.makedirs(folder, mode=0o700, exist_ok=True)
        except OSError as error:
            raise ConfigError(refused, str(error), "name another --profile-dir") from error
        if not os.access(folder, os.W_OK):
            raise ConfigError(refused, "it cannot be written to", "name another --profile-dir")
        name = str(Path(folder) / f"tpu-{time.time_ns()}-core{self._start.data_parallel_rank}")
        try:
            jax.profiler.start_trace(name)
        except Exception as error:  # JAX's, of any kind: a step does not fail because nobody can watch it
            raise EngineError("start a profile", f"JAX's profiler: {error}") from error
        self._profile = name

    def stop_profile(self) -> str:
        """The folder with what was recorded.

        Raises InvalidRequestError where nothing is being recorded, EngineError where it cannot be written.
        """
        folder, self._profile = self._profile, None
        if folder is None:
            raise InvalidRequestError("stop a profile", "none is being taken", "start one first")
        try:
            jax.profiler.stop_trace()
        except Exception as error:
            remedy = "see that there is space, or name another folder"
            raise EngineError(f"write the profile {folder!r}", str(error), remedy) from error
        return folder

    def shutdown(self) -> None:
        """Let go of the model and the pool. Idempotent."""
        stopping, self._stopping = self._stopping, None
        if stopping is not None:
            stopping()
        if self._profile is not None:
            try:
                self.stop_profile()
            except EngineError as error:
                logger.warning("%s", error)
        self._runner = None
        for connector in self._connectors.values():
            connector.close()
        self._connectors = {}

    # -- memory ------------------------------------------------------------------------------------------------------
    def _num_pages(self, steps: Steps, buckets: Buckets, staged: int) -> tuple[int, int | None]:
        """The pages of the pool, and the bytes of a largest step where it was measured. Raises KVCacheTooSmallError.

        staged: bytes for pages on their way, where that was measured.
        """
        start, page_bytes = self._start, steps.page_bytes
        if start.num_kv_pages is not None:
            num_pages, step_bytes, asked = start.num_kv_pages, None, f"--num-kv-pages {start.num_kv_pages}"
        elif start.kv_cache_memory is not None:
            num_pages, step_bytes = start.kv_cache_memory // page_bytes, None
            asked = f"--kv-cache-memory {start.kv_cache_memory}"
        else:
            pool, step_bytes = _profiled(start, steps, buckets)
            pool -= staged
            num_pages = max(0, pool) // page_bytes
            spare = max(0, num_pages.bit_length() - _KEPT_BITS)
            num_pages = num_pages >> spare << spare
            asked = f"a KV cache in the {max(0, pool):,} bytes that weights and steps leave for it"
        if num_pages < MIN_PAGES:
            raise KVCacheTooSmallError(
                asked,
                f"that is {num_pages} pages of {page_bytes:,} bytes; page 0 is for padding, {MIN_PAGES} are needed",
                f"give at least {MIN_PAGES * page_bytes:,} bytes, lower --max-num-batched-tokens, or free memory",
            )
        return num_pages, step_bytes


def _profiled(start: WorkerStart, steps: Steps, buckets: Buckets) -> tuple[int, int]:
    """(bytes for the pool, bytes of a largest step): what weights and the largest bucket leave of all memory.

    The largest has the most draws, too, and rows may edit all their logits.
    """
    memory = steps.memory(MIN_PAGES)
    edits = Edits(steps, memory, start.max_num_seqs + 1, start.model.vocab_size)
    largest = next(iter(buckets))

    def step() -> None:
        steps.run_padding(memory, largest, edits.run_padding)

    stats = [device.memory_stats() for device in steps.devices]
    if not all(stats):  # the processor's
        found = cache_memory(step, start.memory_utilization, start.data_parallel_size)
        steps.compiled.forget()
        return found.pool_bytes, found.step_bytes
    step()
    steps.compiled.forget()
    utilization = _UTILIZATION if start.memory_utilization is None else start.memory_utilization
    after = [device.memory_stats() for device in steps.devices]
    step_bytes = max(now["peak_bytes_in_use"] - was["bytes_in_use"] for was, now in zip(stats, after, strict=True))
    left = min(int(now["bytes_limit"] * utilization) - now["bytes_in_use"] for now in after)
    return (left - step_bytes) * len(stats), step_bytes * len(stats)


def _refuse(start: WorkerStart) -> None:
    """Raise ConfigError for what the launcher may ask of any platform, and this worker does without."""
    model, asked = start.model, "platform=tpu"
    for choice in start.choices:
        if choice.point in _BESIDE:
            found = "its worker has no place for drivers of that point"
            raise ConfigError(f"{asked} with {choice.point}={choice.driver}", found, "leave it out")
        if choice.point == "checkpoint" and not all(
            file.endswith(".safetensors") for file in start.files.weights or "?"
        ):
            found = f"driver '{choice.driver}' of {start.files.name} has no safetensors files, which its worker reads"
            raise ConfigError(f"{asked} with checkpoint={choice.driver}", found, "name a model with such files")
    if not model.generates:
        found = "its worker generates text alone"
        raise ConfigError(f"{asked} with an engine that pools", found, "use another platform")
    if model.prompt_embeds:
        raise ConfigError(f"{asked} with prompt_embeds", "its worker embeds tokens alone", "leave it out")
    if start.layout.mark_bytes:
        raise ConfigError(f"{asked} with kv_canary", "its worker marks no pages", "leave --kv-canary out")
    if start.batch_invariant:
        found = "XLA compiles another product for each bucket, and a row's bits depend on it"
        raise ConfigError(f"{asked} with batch_invariant", found, "leave --batch-invariant out")
    if start.kv_cache_dtype is not None and start.kv_cache_dtype not in _DTYPES:
        found = f"its worker keeps {', '.join(_DTYPES)}: of 8 bits fp8 alone, with scales of 1"
        remedy = "take --kv-cache-dtype fp8, or leave it out"
        raise ConfigError(f"{asked} with kv_cache_dtype {start.kv_cache_dtype}", found, remedy)
    forms = {(group.kind in ("full", "sliding"), group.num_kv_heads, group.head_size) for group in start.layout.groups}
    if len(forms) > 1 or not next(iter(forms))[0]:
        found = "its layers' caches have several forms, or none that this worker has"
        raise ConfigError(f"{asked} with {model.architecture}", found, "use another platform")


def _drafting(start: WorkerStart, chosen: Selection[Any] | None) -> tuple[Drafting | None, int]:
    """The drafter at work, and how many drafts a row has at most. Raises ConfigError for what is not served here."""
    if chosen is None:
        return None, 0
    options, asked = cast("DrafterOptions", chosen.options), f"platform=tpu with drafter={chosen.candidate.name}"
    if cast("type[DrafterCard]", chosen.card).branches(options):
        found = "it proposes trees, and this worker's attention computes chains"
        raise ConfigError(asked, found, "let it propose chains, or name another drafter")
    if options.acceptance != "exact":
        found = "this worker draws each token as without drafts, and keeps drafts that equal it"
        raise ConfigError(f"{asked} and acceptance={options.acceptance}", found, "set --drafter.acceptance exact")
    drafter = chosen.build(WorkerContext(start=start, options=options))
    return Drafting(drafter, chosen.candidate, start.max_num_seqs + 1, start.max_model_len), options.num_tokens


def _check_division(start: WorkerStart, options: TpuOptions) -> None:
    """Raise ConfigError where the model does not divide over so many devices."""
    size, form = options.tensor_parallel, form_of(start.model)
    asked = f"platform.tensor_parallel={size} with {start.model.architecture}"
    widths = {} if form.sparse and all(form.sparse) else {"intermediate_size": form.inner}
    if form.experts is not None:
        widths |= (
            {"experts": form.experts.count} if options.expert_parallel else {"an expert's size": form.experts.inner}
        )
    elif options.expert_parallel:
        raise ConfigError("platform.expert_parallel=true", "the model has no routed experts", "leave it out")
    if options.expert_parallel and size == 1:
        found = "there is one device, which has all experts"
        raise ConfigError("platform.expert_parallel=true", found, "leave it out, or give --platform.tensor_parallel")
    if reasons := unsupported_ranks(start.model, size, **widths):
        raise ConfigError(asked, "; ".join(reasons), "divide it over fewer devices")


def _attention(
    start: WorkerStart, options: TpuOptions, mesh: Mesh, cache_dtype: np.dtype, rows: int
) -> Callable[..., jax.Array]:
    """What attends, rows at most. Raises ConfigError where the kernel is asked for and cannot serve the model."""
    on_tpu = mesh.devices.flat[0].platform == "tpu"
    if options.attention == "xla" or (options.attention == "auto" and not on_tpu):
        return attention.attend
    group = start.layout.groups[0]
    itemsize = min(cache_dtype.itemsize, _DTYPES[start.dtype].itemsize)
    why = attention_pallas.unsupported(group.head_size, group.tokens_per_block, itemsize, rows, start.max_model_len)
    if start.dtype == "float64":
        why = "a TPU's kernels have no float64"
    if not why:
        return partial(attention_pallas.attend, interpret=not on_tpu)
    if options.attention == "pallas":
        raise ConfigError("platform.attention=pallas", why, "leave it out: XLA's form serves then")
    logger.warning("attention is XLA's own form: %s", why)
    return attention.attend


def _tell(number: int, count: int, bucket: Bucket) -> None:
    what = f"{bucket.rows} rows" if bucket.decodes else f"{bucket.tokens} tokens of {bucket.rows} rows"
    logger.info("compiling %d of %d: %s", number + 1, count, what)
