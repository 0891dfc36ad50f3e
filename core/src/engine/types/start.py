"""What a worker is told when it starts, and what it answers. Plain data: it also travels to other processes."""

from __future__ import annotations

from typing import Any

import msgspec

from engine.types.kv import KVLayout
from engine.types.model import CheckpointFiles, KVSpec, ModelDescription
from engine.types.parallel import Parallel, Place, Stage


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """One chosen driver, as the manifest writes it.

    Args:
        point, kind, driver: e.g. "attention", "full", "torch"; kind is "" where the point has none. For ops it is the
            operation's name.
        distribution, version: who offers it.
        value: the entry point's value, "pkg.mod:Card".
        options: validated options as plain data.
        asked: the user named it: where it breaks down, nothing else is tried.
    """

    point: str
    driver: str
    distribution: str
    version: str
    value: str
    kind: str = ""
    options: dict[str, Any] = msgspec.field(default_factory=dict)
    asked: bool = True


class DraftStart(msgspec.Struct, frozen=True, kw_only=True):
    """A draft model, as `WorkerStart` has the model that it drafts for.

    Args:
        choices: of points checkpoint, model and quantization.
        model: the description; its KV specs say which draft model it is, and whether its heads are divided.
        files: where the weights lie.
        parallel: of one rank where every worker has the whole.
        shares: see `engine.interfaces.model.ModelContext`.
        features: see `engine.interfaces.drafter.DraftModel`.
    """

    choices: tuple[Choice, ...]
    model: ModelDescription
    files: CheckpointFiles
    parallel: Parallel = Parallel()
    shares: frozenset[str] = frozenset()
    features: int = 0


class WorkerStart(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a worker needs to build itself. What is not named below is the setting of its name, see
    `engine.config.declaration.EngineSettings`.

    Args:
        choices: the manifest's entries; every process checks them against what is installed.
        model: the description; `files`: where the weights lie.
        layout: the KV pool's form.
        dtype: "float32", "bfloat16", "float16" or "float64": of weights and activations.
        device: torch's device string, e.g. "cpu".
        kv_cache_memory: bytes for this rank's pool; None asks the platform's memory profile.
        parallel: over how many workers the model is divided.
        place: this worker's among them.
        rendezvous: a private directory where the ranks of one machine meet; the executor makes it. "" for one rank.
        meeting: one where the workers of several engine cores meet that share experts; who starts the cores makes it.
        num_threads: most processor threads that the worker may compute with; None leaves it to the framework. An
            executor of several ranks divides them.
        data_parallel_rank, data_parallel_size: this engine core's place among those that serve the same model from
            the same machine. What the machine has is shared by all; of several devices, this core's ranks are
            those from data_parallel_rank * parallel.world on.
        kv_cache_dtype: of the pool's elements; None: `dtype`.
        memory_utilization: the share of the device's memory that the engine may take, weights and all; what the profile
            of a largest step leaves of it becomes pages, where neither pages nor their memory are given.
        hook_options: of hook plugins, by name: validated, as plain data.
        hook_plugins: those that listen in the core and in workers, which every process checks as it does `choices`;
            None: nobody said, and nothing is checked.
        drafts: the drafter's models; the first one's sites are of model 1. Workers that do not draw have none.
    """

    choices: tuple[Choice, ...]
    model: ModelDescription
    files: CheckpointFiles
    layout: KVLayout
    dtype: str
    device: str
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    kv_cache_memory: int | None = None
    num_kv_pages: int | None = None
    parallel: Parallel = Parallel()
    place: Place = Place()
    rendezvous: str = ""
    meeting: str = ""
    num_threads: int | None = None
    data_parallel_rank: int = 0
    data_parallel_size: int = 1
    swap_space: int = 0
    kv_cache_dtype: str | None = None
    memory_utilization: float | None = None
    hook_options: dict[str, dict[str, Any]] = msgspec.field(default_factory=dict)
    hook_plugins: tuple[Choice, ...] | None = None
    plugins: str = ""
    log_format: str = "text"
    profile_dir: str | None = None
    batch_invariant: bool = False
    drafts: tuple[DraftStart, ...] = ()

    @property
    def sites(self) -> tuple[KVSpec, ...]:
        """Whose places the layout's groups name: the model's, and behind them those of its draft models."""
        return sum((draft.model.sites for draft in self.drafts), self.model.sites)

    def of_draft(self, draft: DraftStart) -> WorkerStart:
        """What a worker would be told to build a draft model alone."""
        theirs = {choice.point for choice in draft.choices} | {"quantization"}
        others = tuple(choice for choice in self.choices if choice.point not in theirs)
        divided = draft.parallel == self.parallel.of_stage
        place = msgspec.structs.replace(self.place, stage=Stage()) if divided else Place(rank=self.place.rank)
        return msgspec.structs.replace(
            self,
            choices=(*others, *draft.choices),
            model=draft.model,
            files=draft.files,
            parallel=draft.parallel,
            place=place,
        )


class BrokenPlugin(msgspec.Struct, frozen=True, kw_only=True):
    """A plugin that nobody asked for by name and that was left out, as a process found it.

    Args:
        point, driver, distribution, version, value: as in `Choice`; the point of hook plugins is "hooks.<process>".
        found, remedy: what is wrong, and what mends it.
    """

    point: str
    driver: str
    distribution: str
    version: str
    value: str
    found: str
    remedy: str

    @property
    def provenance(self) -> str:
        """The distribution with its version, e.g. "engine-moon 1.0"."""
        return f"{self.distribution} {self.version}"


class WorkerReady(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's answer once the model is loaded and the pool allocated; an executor merges those of all ranks.

    Args:
        num_pages: pages of its pool, the null page included; merged, the smallest of all ranks.
        weight_bytes, cache_bytes: memory taken; merged, the sum.
        num_parameters: of the weights on this rank; merged, the sum, in which what several ranks hold counts for each.
        load_seconds: from start to ready; merged, the longest.
        step_bytes: memory that a largest step takes at its peak, as the profile found it; None where there was none.
            Merged, the sum.
        captured: rows of the decode steps that are captured and replayed.
        not_captured: why none can be, by drivers; None where the platform captures nothing anyway.
        broken: plugins that were left out; merged, those of every process that answered.
        hook_failures: (plugin, hook, how often it raised) while it started; merged, the sum.
    """

    num_pages: int
    weight_bytes: int
    cache_bytes: int
    num_parameters: int
    load_seconds: float
    step_bytes: int | None = None
    captured: tuple[int, ...] = ()
    not_captured: tuple[str, ...] | None = None
    broken: tuple[BrokenPlugin, ...] = ()
    hook_failures: tuple[tuple[str, str, int], ...] = ()


class CoreStart(msgspec.Struct, frozen=True, kw_only=True):
    """Everything an engine core needs to build itself: the launcher's decisions, and its workers' start message.
    What is not named below is the setting of its name.

    Args:
        worker: of no rank yet: executors make each rank's of it, see `engine.interfaces.executor.rank_starts`.
        worker_class: "pkg.mod:Class" of the worker.
        preemption_mode: "recompute" or "swap"; for the latter `worker.choices` names a connector.
        tokenizer_folder: where the tokenizer's files lie: grammars read its vocabulary.
        step_timeout: seconds of silence after which a frontend takes a core in another process for hung.
    """

    worker: WorkerStart
    worker_class: str
    enable_prefix_caching: bool = True
    enable_jump_forward: bool = True
    in_flight: int = 2
    prefix_caching_hash_algo: str = "xxhash"
    max_kv_retention: float = 0.5
    max_kv_retention_per_key: float = 0.25
    long_prefill_token_threshold: int = 0
    preemption_mode: str = "recompute"
    tokenizer_folder: str = ""
    step_timeout: float = 600.0
    grammar_warm_up: bool = False
