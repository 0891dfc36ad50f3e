"""The one place in the core's process where drivers are built: executor, evictor, scheduling policy, grammar, the
tokenizer whose vocabulary grammars read, and the scheduler half of a connector."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import msgspec

from engine.interfaces.context import Answers, Clock, CoreContext, FrontContext, GrammarContext, SystemClock
from engine.interfaces.drafter import DrafterCard, DrafterOptions
from engine.interfaces.evictor import EvictorCard
from engine.interfaces.executor import Executor, rank_starts
from engine.interfaces.grammar import GrammarCard
from engine.interfaces.kv_connector import LOOKUP_SECONDS, KVConnectorCard
from engine.interfaces.lockstep import Lockstep
from engine.kv.manager import KVManager
from engine.loop.engine_core import EngineCore
from engine.plugin import Candidate, HookRelay, PluginList, Registry
from engine.plugin.loading import brought
from engine.plugin.manifest import Blame, check_choices, check_hooks, restore
from engine.scheduling.drafts import JumpForward, Speculation
from engine.scheduling.loading import Connector
from engine.scheduling.matchers import GrammarDriver
from engine.scheduling.preemption import Swapping
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.structured import Constraints, close
from engine.types.errors import ConfigError, KVCacheTooSmallError, ManifestError, PluginError
from engine.types.start import Choice, CoreStart

if TYPE_CHECKING:
    from engine.interfaces.tokenizer import Tokenizer


def assemble_core(
    start: CoreStart, registry: Registry | None = None, *, prepare: bool = False, clock: Clock | None = None
) -> EngineCore:
    """Build an engine core from the launcher's decisions: its executor, started, then everything around it.

    Args:
        start: the launcher's decisions.
        registry: what is installed; None looks.
        clock: of requests and drivers; None: the machine's.
        prepare: have grammars begin to get ready while the executor loads the model; `Constraints.warm_up` goes on.

    Raises:
        ManifestError: the launcher chose drivers that are not installed here.
        PluginError: a chosen driver cannot be loaded, or refuses its options.
        KVCacheTooSmallError: the workers' pool has no usable page.
        EngineError: a worker could not be started.
    """
    if start.in_flight < 1:
        raise ConfigError(f"in_flight={start.in_flight}", "it is below 1", "use 1 for no overlap, or 2")
    if registry is None:
        registry = Registry.discover()
    worker = start.worker
    registry = registry.following(PluginList(worker.plugins, "by the launcher"))
    check_choices(registry, worker.choices)
    check_hooks(registry, "core", worker.hook_plugins)
    page_bytes = max(start.layout.page_bytes for start in rank_starts(worker))  # of the largest stage
    context = CoreContext(
        layout=msgspec.structs.replace(worker.layout, page_bytes=page_bytes),
        max_num_seqs=worker.max_num_seqs,
        max_num_batched_tokens=worker.max_num_batched_tokens,
        max_model_len=worker.max_model_len,
        worker=start.worker_class,
        swap_space=worker.swap_space,
        step_timeout=start.step_timeout,
        clock=SystemClock() if clock is None else clock,
        parallel=worker.parallel,
        vocabulary=(vocabulary := Vocabulary(start, registry)),
        encode=vocabulary.encode,
        nodes=brought("machines", "start workers elsewhere").of_core(start.nodes) if start.nodes else None,
    )
    executor = _build("executor", start, registry, context)
    constraints: Constraints | None = None
    lockstep: Lockstep | None = None
    try:
        if worker.parallel.dp > 1:
            lockstep = brought("lockstep", "step together with other engine cores")(start)
            worker = msgspec.structs.replace(worker, meeting=lockstep.meeting)
        constraints = _constraints(start, registry, vocabulary, prepare)
        ready = executor.start(worker)
        if ready.num_pages < 2:
            raise KVCacheTooSmallError(
                "start the engine",
                f"the KV cache has {ready.num_pages} pages of {worker.layout.page_bytes} bytes, one of them unusable",
                "raise --kv-cache-memory or --num-kv-pages",
            )
        identity = brought("engine_identity", "name pages")(worker) if _choices(start, "kv_connector") else b""
        context = replace(context, num_pages=ready.num_pages, identity=identity)
        evictor = _build("evictor", start, registry, context)
        kv = KVManager(
            worker.layout,
            num_pages=ready.num_pages,
            max_num_seqs=worker.max_num_seqs,
            max_model_len=worker.max_model_len,
            evictor=evictor,
            enable_prefix_caching=start.enable_prefix_caching,
            hash_algo=start.prefix_caching_hash_algo,
            reuses=cast("type[EvictorCard]", restore(registry, _choices(start, "evictor"))[0].card).reuses,
        )
        if (begin_retention := brought("kv_retention")) is not None:
            shares = start.max_kv_retention, start.max_kv_retention_per_key
            begin_retention(kv, evictor, context.clock.monotonic, *shares)
        connectors = _connectors(start, registry, context)
        adapters = _adapters(start, registry, replace(context, tell=partial(_tell, executor)))
        scheduler = Scheduler(
            kv=kv,
            policy=_build("scheduling_policy", start, registry, context),
            max_num_seqs=worker.max_num_seqs,
            max_num_batched_tokens=worker.max_num_batched_tokens,
            max_model_len=worker.max_model_len,
            speculation=_speculation(start, registry),
            long_prefill_token_threshold=start.long_prefill_token_threshold,
            swapping=_swapping(start, registry, context, kv, connectors),
            connectors=connectors,
            constraints=constraints,
            adapters=adapters,
            jump_forward=_jump_forward(start, constraints, vocabulary),
            whole_prompts=worker.model.whole_prompts,
            vocab_size=worker.model.vocab_size,
            now=context.clock.monotonic,
            stages=worker.parallel.pp,
            blame=Blame(worker.choices),
        )
        hooks = HookRelay("core", registry, options=worker.hook_options)
        ready = msgspec.structs.replace(ready, broken=tuple(dict.fromkeys((*ready.broken, *registry.broken()))))
        core = EngineCore(
            scheduler=scheduler,
            executor=executor,
            worker_ready=ready,
            in_flight=start.in_flight,
            hooks=hooks,
            choices=worker.choices,
            drawing_rank=worker.parallel.world - 1,
            lockstep=lockstep,
        )
        core.calls |= {} if adapters is None else adapters.calls()
        return core
    except BaseException:
        if constraints is not None:
            constraints.shutdown()
        if lockstep is not None:
            lockstep.close()
        executor.shutdown()
        raise


def _speculation(start: CoreStart, registry: Registry) -> Speculation | None:
    """How many drafts requests get, by the options of the manifest's drafter; None where it names none.

    The drafter itself works in the workers.
    """
    choices = _choices(start, "drafter")
    if not choices:
        return None
    (chosen,) = restore(registry, choices)
    options = cast(DrafterOptions, chosen.options)
    depth = cast("type[DrafterCard]", chosen.card).branches(options)
    least = options.num_tokens if depth else 1  # part of a tree helps little
    cost = None if options.cost == "auto" else options.cost
    rule: Callable[..., Speculation] = brought("speculation", "draft tokens")
    return rule(start.worker.max_num_seqs, options.num_tokens, options.adaptive, cost, least, depth=depth)


def _jump_forward(start: CoreStart, constraints: Constraints | None, vocabulary: Vocabulary) -> JumpForward | None:
    """Over what constraints force; None where the user does not want it, or no grammar driver at work can tell, or
    stages before the last could not put back states."""
    if constraints is None or not constraints.takes_drafts or not start.enable_jump_forward:
        return None
    if start.worker.parallel.pp > 1 and any(site.kind == "state" for site in start.worker.model.sites):
        return None
    made: Callable[..., JumpForward] | None = brought("jump_forward")
    return None if made is None else made(start.worker.max_num_seqs, vocabulary, vocabulary.encode)


def _constraints(start: CoreStart, registry: Registry, vocabulary: Vocabulary, prepare: bool) -> Constraints | None:
    """The grammar drivers at work; None where the manifest names none."""
    chosen = restore(registry, _choices(start, "grammar"))
    if not chosen:
        return None
    model = start.worker.model
    ahead = {selection.kind: selection.candidate for selection in reversed(chosen)}.values()  # whose turn comes first
    turns: dict[str, list[GrammarDriver]] = {}
    drivers: dict[Candidate, GrammarDriver] = {}
    for selection in chosen:
        candidate = selection.candidate
        if candidate in registry.quarantine:
            continue
        turn = turns.setdefault(selection.kind, [])
        if candidate not in drivers:
            context = GrammarContext(
                vocab_size=model.vocab_size,
                vocabulary=vocabulary,
                options=selection.options,
                prepare=prepare and candidate in ahead,
            )
            card = cast("type[GrammarCard]", selection.card)
            try:
                drivers[candidate] = GrammarDriver(candidate, card, selection.build(context))
            except PluginError as error:
                if selection.asked:
                    close(drivers.values())
                    raise
                registry.quarantine[candidate] = error
                continue
        turn.append(drivers[candidate])
    if not drivers:
        raise next(registry.quarantine[selection.candidate] for selection in chosen)
    return Constraints(turns, model.vocab_size)


class Vocabulary:
    """What `GrammarContext.vocabulary` is. The core needs no tokenizer otherwise, so it is built when the first
    constraint is compiled, by the thread that compiles it. Thread-safe.

    Args:
        start: what names the tokenizer, and says where its files lie.
        registry: what is installed.
    """

    def __init__(self, start: CoreStart, registry: Registry) -> None:
        self._start = start
        self._registry = registry
        self._lock = threading.RLock()
        self._pieces: Sequence[bytes | None] | None = None
        self._built: Tokenizer | None = None

    def __call__(self) -> Sequence[bytes | None]:
        """The bytes that each token stands for; see `Tokenizer.vocabulary`. Raises TokenizerError."""
        with self._lock:
            if self._pieces is None:
                self._pieces = self._tokenizer().vocabulary()
            return self._pieces

    def encode(self, text: str) -> list[int]:
        """Ids of a text, without special tokens. Raises TokenizerError."""
        return self._tokenizer().encode(text, False)

    def _tokenizer(self) -> Tokenizer:
        with self._lock:
            if self._built is None:
                start, worker = self._start, self._start.worker
                context = FrontContext(folder=start.tokenizer_folder, files=worker.files, model=worker.model)
                self._built = cast("Tokenizer", _build("tokenizer", start, self._registry, context))
            return self._built


def _connectors(start: CoreStart, registry: Registry, context: CoreContext) -> list[Connector]:
    """Those that the manifest names, and before them what checks pages, where they have marks."""
    connectors = []
    if context.layout.mark_bytes:
        canary = brought("kv_canary", "check pages with --kv-canary")
        connectors.append(Connector(canary.candidate, canary.core(context), canary.card))
    for selection in restore(registry, _choices(start, "kv_connector")):
        half = selection.build(replace(context, options=selection.options), "core")
        patience = getattr(selection.options, "lookup_seconds", LOOKUP_SECONDS)
        card = cast("type[KVConnectorCard]", selection.card)
        connectors.append(Connector(selection.candidate, half, card, patience))
    return connectors


def _tell(executor: Executor, *told: Any) -> Answers:
    """To the halves of adapters in the workers. Where they are on this thread, they answer here."""
    ask: Callable[..., Answers] | None = getattr(executor, "ask", None)
    if ask is not None:
        return ask("adapt", *told)
    answers = executor.call("adapt", *told)
    return lambda: answers


def _adapters(start: CoreStart, registry: Registry, context: CoreContext) -> Any:
    """The half of the adapters' driver that works here; None where the manifest names none."""
    chosen = restore(registry, _choices(start, "adapter"))
    return chosen[0].build(replace(context, options=chosen[0].options), "core") if chosen else None


def _swapping(
    start: CoreStart, registry: Registry, context: CoreContext, kv: KVManager, connectors: Sequence[Connector]
) -> Swapping | None:
    """Where preempted requests leave their pages; None where they are computed again."""
    if start.preemption_mode != "swap":
        return None
    tier = next(connector for connector in connectors if connector.card.swaps)
    return Swapping(kv, tier, _build("scheduling_policy", start, registry, context))


def _build(point: str, start: CoreStart, registry: Registry, context: CoreContext | FrontContext) -> Any:
    """The body of the driver that the manifest names for a point."""
    choices = _choices(start, point)
    if len(choices) != 1:
        raise ManifestError(
            f"build the {point}",
            f"the manifest names {len(choices)} drivers for it: {', '.join(c.driver for c in choices) or 'none'}",
            "this is the launcher's mistake: report it",
            point=point,
        )
    (chosen,) = restore(registry, choices)
    return chosen.build(replace(context, options=chosen.options))


def _choices(start: CoreStart, point: str) -> list[Choice]:
    """The drivers that the manifest names for a point."""
    return [choice for choice in start.worker.choices if choice.point == point]
