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


class Seat(msgspec.Struct, frozen=True, kw_only=True):
    """The machine that a worker runs on.

    Args:
        node: its name, see `engine.interfaces.nodes.Node`; "" for the one that its core runs on.
        address: by which other machines reach it.
        device: the worker's, of those that it sees there.
        sharers: workers of the engine on that machine, which share what it has.
    """

    node: str = ""
    address: str = ""
    device: int = 0
    sharers: int = 1


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
        home: the private directory of the core's process, in which those of its ranks are made: they go with it.
        meeting: one where the workers of several engine cores meet that share experts; who starts the cores makes it.
        num_threads: most processor threads that the worker may compute with; None leaves it to the framework. An
            executor of several ranks divides them.
        data_parallel_rank, data_parallel_size: this engine core's place among those behind the same server.
        first_dp_rank: of the first of these cores, among those of all servers.
        seats: of each worker of this core where several machines are in use. Empty: all run on the core's machine,
            which all cores share, and of several devices this core's workers have those from data_parallel_rank *
            parallel.world on. See `seat`.
        store: "HOST:PORT" where workers on several machines meet: a torch.distributed.TCPStore; the executor makes it.
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
    home: str = ""
    meeting: str = ""
    num_threads: int | None = None
    data_parallel_rank: int = 0
    data_parallel_size: int = 1
    first_dp_rank: int = 0
    seats: tuple[Seat, ...] = ()
    store: str = ""
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
    def dp_rank(self) -> int:
        """Of this engine core, among those of all servers."""
        return self.first_dp_rank + self.data_parallel_rank

    @property
    def sites(self) -> tuple[KVSpec, ...]:
        """Whose places the layout's groups name: the model's, and behind them those of its draft models."""
        return sum((draft.model.sites for draft in self.drafts), self.model.sites)

    @property
    def seat(self) -> Seat:
        """This worker's."""
        if self.seats:
            return self.seats[self.place.rank]
        world = self.parallel.world
        return Seat(device=self.data_parallel_rank * world + self.place.rank, sharers=world * self.data_parallel_size)

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


class NodesLink(msgspec.Struct, frozen=True):
    """How an engine core asks the head to start its workers on other machines: see `engine_kit.machines`.

    Args:
        address, key: where the head hears, and its public key.
        core: this core's number for the head.
        here: the address of the core's own machine.
        timeout: see `engine.interfaces.nodes.Nodes`.
    """

    address: str
    key: bytes
    core: int
    here: str
    timeout: float


class CoreStart(msgspec.Struct, frozen=True, kw_only=True):
    """Everything an engine core needs to build itself: the launcher's decisions, and its workers' start message.
    What is not named below is the setting of its name.

    Args:
        worker: of no rank yet: executors make each rank's of it, see `engine.interfaces.executor.rank_starts`.
        worker_class: "pkg.mod:Class" of the worker.
        preemption_mode: "recompute" or "swap"; for the latter `worker.choices` names a connector.
        tokenizer_folder: where the tokenizer's files lie: grammars read its vocabulary.
        lockstep: where cores meet that step together, "tcp://HOST:PORT"; "": in the directory `worker.meeting`.
        lockstep_token: a file with what they show each other; "": nothing.
        step_timeout: seconds of silence after which a frontend takes a core in another process for hung.
        nodes: None where the core starts its workers on its own machine.
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
    lockstep: str = ""
    lockstep_token: str = ""
    nodes: NodesLink | None = None
