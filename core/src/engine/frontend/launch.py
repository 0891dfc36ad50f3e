"""The launcher: from settings to a plan of the whole engine, in plain data.

Every driver is chosen here, once, from facts that need no torch: the model's config.json and the platform's
description. Cards are imported, bodies are not. What comes out is a `Launch`: the start message of the engine core
(with the manifest that every process checks), and what the frontend itself needs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, cast

import msgspec

from engine.frontend.chat_template import read_template
from engine.frontend.client import client_of_several
from engine.frontend.connectors import choose_connectors, preemption_mode
from engine.frontend.constraint_check import ConstraintCheck
from engine.frontend.generation_config import read_generation_config, sampling_defaults
from engine.frontend.parsers import choose_parsers, parser_needs, template_source
from engine.frontend.pooling_launch import check_whole_prompts, decide_runner
from engine.frontend.quantization import choose_quantization, quantization_needs
from engine.interfaces.attention import AttentionCard, AttentionNeed
from engine.interfaces.checkpoint import CheckpointCard
from engine.interfaces.communicator import CommunicatorNeed
from engine.interfaces.drafter import DrafterNeed
from engine.interfaces.executor import ExecutorNeed
from engine.interfaces.kv_connector import KVConnectorNeed
from engine.interfaces.logits_processor import PARAMETERS, LogitsProcessorCard, LogitsProcessorNeed
from engine.interfaces.model import ModelCard, ModelNeed
from engine.interfaces.ops import OPERATIONS, OpsNeed
from engine.interfaces.platform import PlatformCard, PlatformFacts, PlatformNeed
from engine.interfaces.router import RouterNeed
from engine.interfaces.scheduling_policy import SchedulingPolicyCard
from engine.interfaces.tokenizer import TokenizerNeed
from engine.kv.layout import make_layout
from engine.plugin import (
    Manifest,
    Registry,
    Selection,
    select,
    select_architecture,
    select_claims,
    select_default_model,
    select_fitting,
    select_in_turn,
    select_kinds,
    select_ordered,
    select_set,
)
from engine.plugin.hook_options import check_hook_options
from engine.plugin.manifest import hook_choices
from engine.types.errors import ConfigError, EngineError, ManifestError, ModelNotFoundError, UnsupportedModelError
from engine.types.kv import KVLayout, kv_heads_on_rank
from engine.types.model import CheckpointFiles, ModelDescription
from engine.types.start import CoreStart, WorkerStart
from engine.types.structured_outputs import KINDS

if TYPE_CHECKING:
    from engine.config.settings import EngineConfig

CORE_WORKER = "engine.runner.worker:Worker"
"""The worker of platforms that bring none of their own."""
DEFAULT_IN_FLIGHT = 2
"""Pipeline stages + 1."""

_COMPUTED = ("full", "sliding", "mla", "encoder")
"""Kinds of layer that the runner computes."""
_ITEM_SIZES = {"float8_e4m3fn": 1, "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
_CACHE_DTYPES = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn"}
"""Torch's names of what users call otherwise."""
_HOLDS = {
    "float16": ("float16", "float32", "float64"),
    "bfloat16": ("bfloat16", "float32", "float64"),
    "float32": ("float32", "float64"),
    "float64": ("float64",),
}
"""The dtypes that hold every value of a dtype."""


@dataclass(frozen=True)
class Launch:
    """Everything that is decided before anything is built.

    Attributes:
        config: the settings.
        registry: what is installed.
        start: the engine core's start message.
        manifest: the chosen drivers, as every process checks them.
        selections: the same, with their cards, and with the reasons why others were not chosen.
        tokenizer: the tokenizer's selection, one of `selections`.
        tokenizer_folder: where its files lie.
        chat_template: that which the user gives in place of the model's.
        idle: for points of which no driver is at work, what one would be asked, by kind.
    """

    config: EngineConfig
    registry: Registry
    start: CoreStart
    manifest: Manifest
    selections: tuple[Selection, ...]
    tokenizer: Selection
    tokenizer_folder: str
    chat_template: str | None = None
    idle: Mapping[str, Mapping[str, object]] = field(default_factory=dict)

    @property
    def model(self) -> ModelDescription:
        """What the model is."""
        return self.start.worker.model

    @property
    def files(self) -> CheckpointFiles:
        """The checkpoint."""
        return self.start.worker.files

    @property
    def has_chat_template(self) -> bool:
        """Whether conversations can be rendered, as far as the tokenizer's card can tell."""
        return bool(template_source(self.tokenizer, self.tokenizer_folder, False, self.chat_template))

    @property
    def logits_processors(self) -> tuple[type[LogitsProcessorCard], ...]:
        """The cards of the logits processors at work."""
        cards = [selection.card for selection in self.selections if selection.point == "logits_processor"]
        return cast("tuple[type[LogitsProcessorCard], ...]", tuple(cards))

    @property
    def orders_by_priority(self) -> bool:
        """Whether the chosen scheduling policy heeds the priorities of requests."""
        (policy,) = (selection.card for selection in self.selections if selection.point == "scheduling_policy")
        return cast("type[SchedulingPolicyCard]", policy).orders_by_priority

    @property
    def router(self) -> Selection | None:
        """What chooses among several engine cores; None where there is one."""
        return next((selection for selection in self.selections if selection.point == "router"), None)

    @property
    def grammars(self) -> tuple[Selection, ...]:
        """The grammar drivers at work: for each kind of constraint (`Selection.kind`) in the order of their turns."""
        return tuple(selection for selection in self.selections if selection.point == "grammar")

    @cached_property
    def constraints(self) -> ConstraintCheck:
        """What these drivers can enforce."""
        return ConstraintCheck(self.grammars)

    @property
    def tool_parser(self) -> Selection | None:
        """What finds the calls of tools in a text; None where nothing does."""
        return next((selection for selection in self.selections if selection.point == "tool_parser"), None)

    @property
    def reasoning_parser(self) -> Selection | None:
        """What divides thoughts from answers; None where nothing does."""
        return next((selection for selection in self.selections if selection.point == "reasoning_parser"), None)

    @property
    def max_model_len(self) -> int:
        """Most tokens of one request."""
        return self.start.worker.max_model_len

    @property
    def model_name(self) -> str:
        """The model's name for people and for the API."""
        return self.model_names[0]

    @property
    def model_names(self) -> tuple[str, ...]:
        """All names by which requests may ask for it."""
        given = self.config.served_model_name
        return (self.files.name,) if given is None else tuple(name.strip() for name in given.split(","))


def launch(config: EngineConfig, registry: Registry | None = None) -> Launch:
    """Decide everything about an engine with these settings.

    Args:
        config: validated settings.
        registry: what is installed; None looks. The settings' list of plugins is applied to it.

    Raises:
        ModelNotFoundError, CheckpointError, UnsupportedModelError, ConfigError, PluginError: each says what was
            asked, where a file or the environment asked it, what was found and what to do.
    """
    try:
        return _launch(config, registry)
    except EngineError as error:
        config.add_place(error)
        raise


def _launch(config: EngineConfig, registry: Registry | None) -> Launch:
    registry = (Registry.discover() if registry is None else registry).following(config.plugin_list)
    checkpoint, files = _checkpoint(config, registry)
    platform = _one(config, registry, "platform", PlatformNeed(dtype=config.dtype))
    facts = cast("type[PlatformCard]", platform.card).describe()
    generation_config = read_generation_config(config, files)
    architecture, model = _model(config, registry, files, facts, generation_config)
    dtype = choose_dtype(config.dtype, model.dtype, facts)
    kv_dtype = _CACHE_DTYPES.get(config.kv_cache_dtype, config.kv_cache_dtype)
    kv_dtype = dtype if kv_dtype == "auto" else kv_dtype
    model = decide_runner(config, files, model)
    sampling = sampling_defaults(config, generation_config, model.generates)
    model = msgspec.structs.replace(model, sampling=sampling)
    max_model_len = _max_model_len(config, model)
    check_whole_prompts(model, max_model_len, config)

    needs = attention_needs(
        model,
        block_size=config.block_size,
        dtype=dtype,
        kv_dtype=kv_dtype,
        facts=facts,
        size=config.tensor_parallel_size,
    )
    attention = _attention(config, registry, needs)
    ops = select_ordered(
        registry,
        "ops",
        {op: OpsNeed(operation=op, dtype=dtype, device=facts.device, framework=facts.framework) for op in OPERATIONS},
        config.asked("ops"),
        config.options_for("ops"),
        together=[("pack_linear", "linear")],
    )
    quantization_need = quantization_needs(architecture, model, dtype, facts)
    quantization = choose_quantization(config, registry, architecture, model, quantization_need)
    size = config.tensor_parallel_size
    communicator_need = CommunicatorNeed(world_size=size, device=facts.device, framework=facts.framework)
    communicators = _communicators(config, registry, communicator_need)
    executor = _one(config, registry, "executor", ExecutorNeed(world_size=config.tensor_parallel_size))
    evictor = _one(config, registry, "evictor", None)
    policy = _one(config, registry, "scheduling_policy", None)
    grammars = select_in_turn(registry, "grammar", None, KINDS, config.asked("grammar"), config.options_for("grammar"))
    processors = _processors(config, registry, model, facts)
    tokenizer_folder = _tokenizer_folder(config, registry, files)
    tokenizer = _one(config, registry, "tokenizer", TokenizerNeed(folder=tokenizer_folder))

    layout = _layout(config, model, attention, needs, kv_dtype)
    connector_need = KVConnectorNeed(
        page_bytes=layout.page_bytes,
        swap_space=config.swap_space,
        world_size=size,
        device=facts.device,
        framework=facts.framework,
    )
    connectors = choose_connectors(config, registry, connector_need)
    drafter_need = DrafterNeed(dtype=dtype, device=facts.device, framework=facts.framework)
    drafter = _optional(config, registry, "drafter", drafter_need)

    selections = (
        *(platform, *communicators, *ops, *attention.values(), *quantization, executor, evictor),
        *(architecture, checkpoint, tokenizer, policy, *grammars, *connectors, *drafter),
    )
    router_need = RouterNeed(num_ranks=config.data_parallel_size, enable_prefix_caching=config.enable_prefix_caching)
    selections += (*processors, *_router(config, registry, router_need))
    chat_template = read_template(config.chat_template)
    parsers = parser_needs(tokenizer, tokenizer_folder, model, chat_template)
    selections += choose_parsers(config, registry, parsers)
    seldom: dict[str, Mapping[str, object]] = {
        "communicator": {"": communicator_need},
        "drafter": {"": drafter_need},
        "kv_connector": {"": connector_need},
        "quantization": quantization_need,
        "router": {"": router_need},
        **{point: {"": need} for point, need in parsers.items()},
    }
    at_work = {selection.point for selection in selections}
    idle = {point: needs for point, needs in seldom.items() if point not in at_work}
    manifest = Manifest.of(selections)
    worker = WorkerStart(
        choices=manifest.choices,
        model=model,
        files=files,
        layout=layout,
        dtype=dtype,
        device=facts.device,
        max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        kv_cache_memory=config.kv_cache_memory,
        num_kv_pages=config.num_kv_pages,
        size=config.tensor_parallel_size,
        swap_space=config.swap_space,
        kv_cache_dtype=kv_dtype,
        memory_utilization=config.memory_utilization,
        hook_options=check_hook_options(registry, config.hook_options),
        hook_plugins=hook_choices(registry, ("core", "worker")),
        plugins=config.plugin_list.text,
        log_format=config.log_format,
        profile_dir=None if config.profile_dir is None else str(Path(config.profile_dir).absolute()),
    )
    platform_card = cast("type[PlatformCard]", platform.card)
    start = CoreStart(
        worker=worker,
        worker_class=platform_card.worker or CORE_WORKER,
        enable_prefix_caching=config.enable_prefix_caching and not model.whole_prompts,
        prefix_caching_hash_algo=config.prefix_caching_hash_algo,
        enable_jump_ahead=config.enable_jump_ahead,
        in_flight=DEFAULT_IN_FLIGHT if config.in_flight is None else config.in_flight,
        long_prefill_token_threshold=config.long_prefill_token_threshold,
        preemption_mode=preemption_mode(config),
        tokenizer_folder=tokenizer_folder,
        step_timeout=platform_card.step_timeout if config.step_timeout is None else config.step_timeout,
        grammar_warm_up=config.grammar_warm_up,
    )
    return Launch(config, registry, start, manifest, selections, tokenizer, tokenizer_folder, chat_template, idle)


def check_attached(found: Launch, start: CoreStart) -> Launch:
    """What was decided here, with the start message that cores got from another process.

    Raises ManifestError where other drivers are chosen here than there.
    """
    if found.start.worker.choices != start.worker.choices:
        raise ManifestError(
            "start an API process",
            "it finds other plugins installed than the process that started the engine",
            "start the server again",
        )
    return replace(found, start=start)


def choose_dtype(asked: str, stored: str, facts: PlatformFacts) -> str:
    """The dtype to compute in: what is asked for; for "auto" the platform's best that can hold the checkpoint's.

    Where bfloat16 is emulated, say, a platform lists float32 first, and a bfloat16 checkpoint is computed in that.

    Raises ConfigError where the platform does not compute in the asked dtype.
    """
    if asked != "auto":
        if asked not in facts.dtypes:
            raise ConfigError(
                f"dtype={asked}", f"{facts.name} computes in {', '.join(facts.dtypes)}", "choose one of these, or auto"
            )
        return asked
    holding = _HOLDS.get(stored, ())
    return next((dtype for dtype in facts.dtypes if dtype in holding), facts.dtypes[0])


def _one(config: EngineConfig, registry: Registry, point: str, need: object) -> Selection:
    return select(registry, point, need, config.asked(point), config.options_for(point))


def _optional(config: EngineConfig, registry: Registry, point: str, need: object) -> tuple[Selection, ...]:
    """The driver of an optional point; nothing where the user names none.

    Raises ConfigError where there are options and no driver to take them; PluginError as `select`.
    """
    asked, options = config.asked(point), config.options_for(point)
    if asked is not None:
        return (select(registry, point, need, asked, options),)
    if options:
        name, value = next(iter(options.items()))
        raise ConfigError(
            f"set {point}.{name} to {value!r}",
            f"no {point} is chosen, and without one there is none",
            f"choose one with {registry.points[point].option_flag} DRIVER, or leave the option out",
        )
    return ()


def _router(config: EngineConfig, registry: Registry, need: RouterNeed) -> tuple[Selection, ...]:
    """Nothing where there is nothing to choose. Raises ConfigError where the user names something for that."""
    asked, options = config.asked("router"), config.options_for("router")
    if need.num_ranks > 1:
        client_of_several(registry)
        return (select(registry, "router", need, asked, options),)
    if config.data_parallel_restarts:
        raise ConfigError(
            f"data_parallel_restarts={config.data_parallel_restarts}",
            "there is one engine core, and with it the engine dies",
            "raise --data-parallel-size, or leave restarts to what supervises the server",
        )
    if asked is not None or options:
        named = f"router={asked}" if asked is not None else f"set router.{next(iter(options))}"
        raise ConfigError(named, "there is one engine core, which takes every request", "raise --data-parallel-size")
    return ()


def _checkpoint(config: EngineConfig, registry: Registry) -> tuple[Selection, CheckpointFiles]:
    asked, options = config.asked("checkpoint"), config.options_for("checkpoint")
    if config.model is None:
        selection, name = select_default_model(registry, asked=asked, options=options)
    else:
        name = config.model
        selection = select_claims(registry, "checkpoint", name, asked, options)
    return selection, cast("type[CheckpointCard]", selection.card).resolve(name)


def _model(
    config: EngineConfig,
    registry: Registry,
    files: CheckpointFiles,
    facts: PlatformFacts,
    generation_config: Mapping[str, object],
) -> tuple[Selection, ModelDescription]:
    stated = files.config.get("architectures") or []
    architectures = [str(name) for name in stated] if isinstance(stated, (list, tuple)) else []
    selection = select_architecture(
        registry,
        architectures,
        ModelNeed(
            architecture=architectures[0] if architectures else "",
            config=files.config,
            framework=facts.framework,
            world_size=config.tensor_parallel_size,
        ),
        config.asked("model"),
        config.options_for("model"),
    )
    model = cast("type[ModelCard]", selection.card).describe(files.config)
    for file in (generation_config, files.generation_config):
        if generation_eos := _token_ids(file.get("eos_token_id")):
            return selection, msgspec.structs.replace(model, eos_token_ids=generation_eos)
    return selection, model


def _token_ids(value: object) -> tuple[int, ...]:
    """A token id or a list of them, as generation_config.json states it."""
    if isinstance(value, (list, tuple)):
        return tuple(token for token in value if isinstance(token, int))
    return (value,) if isinstance(value, int) else ()


def _max_model_len(config: EngineConfig, model: ModelDescription) -> int:
    if config.max_model_len is None:
        return min(model.max_model_len, model.pooler.max_tokens or model.max_model_len)
    if config.max_model_len > model.max_model_len:
        raise ConfigError(
            f"max_model_len={config.max_model_len}",
            f"the model was made for {model.max_model_len} positions",
            f"choose {model.max_model_len} or less",
        )
    return config.max_model_len


def _attention(config: EngineConfig, registry: Registry, needs: Mapping[str, AttentionNeed]) -> dict[str, Selection]:
    chosen = select_kinds(registry, "attention", needs, config.asked("attention"), config.options_for("attention"))
    return {selection.kind: selection for selection in chosen}


def _communicators(config: EngineConfig, registry: Registry, need: CommunicatorNeed) -> list[Selection]:
    """In order of preference. None for one rank, unless the user names one, which then says why it is of no use."""
    asked, options = config.asked("communicator"), config.options_for("communicator")
    if need.world_size == 1 and asked is None and not options:
        return []
    return select_fitting(registry, "communicator", need, asked, options)


def attention_needs(
    model: ModelDescription,
    *,
    block_size: int,
    dtype: str,
    facts: PlatformFacts,
    size: int = 1,
    kv_dtype: str | None = None,
) -> dict[str, AttentionNeed]:
    """What is asked of attention on each of `size` ranks, for each kind of layer of a model. The cache's elements have
    type `kv_dtype`; None: `dtype`.

    Raises:
        UnsupportedModelError: layers of one kind differ in form, or the runner cannot compute a kind.
        ConfigError: KV heads can be neither divided over the ranks nor copied evenly.
    """
    needs: dict[str, AttentionNeed] = {}
    for layer, spec in enumerate(model.kv_specs):
        if spec.kind not in _COMPUTED:
            raise UnsupportedModelError(
                f"load {model.architecture}",
                f"layer {layer} is of kind '{spec.kind}'; pages for it are managed, but no runner computes it yet",
                f"use a model whose layers are of kind {', '.join(_COMPUTED)}",
            )
        need = AttentionNeed(
            kind=spec.kind,
            head_size=spec.head_size,
            num_q_heads=model.num_q_heads // size,
            num_kv_heads=kv_heads_on_rank(spec.num_kv_heads, size) if spec.kind != "state" else 0,
            dtype=dtype,
            kv_dtype=kv_dtype or dtype,
            device=facts.device,
            block_size=block_size,
            sliding_window=spec.sliding_window,
            soft_cap=model.soft_cap,
            features=frozenset(model.attention_features),
            framework=facts.framework,
            rope_size=spec.rope_size,
        )
        if needs.setdefault(spec.kind, need) != need:
            raise UnsupportedModelError(
                f"load {model.architecture}",
                f"layer {layer} differs from other layers of kind '{spec.kind}' in heads, head size or window",
                "this engine serves one form of attention for each kind of layer",
            )
    return needs


def _processors(
    config: EngineConfig, registry: Registry, model: ModelDescription, facts: PlatformFacts
) -> tuple[Selection, ...]:
    chosen = select_set(
        registry,
        "logits_processor",
        LogitsProcessorNeed(vocab_size=model.vocab_size, device=facts.device, framework=facts.framework),
        PARAMETERS,
        config.asked("logits_processor"),
        config.options_for("logits_processor"),
    )
    claimed: dict[str, str] = {}
    for selection in chosen:
        name = selection.candidate.name
        for key in cast("type[LogitsProcessorCard]", selection.card).extra_args:
            if key in claimed:
                raise ConfigError(
                    f"start with logits processors '{claimed[key]}' and '{name}'",
                    f"both take the request's argument {key!r}",
                    "name one of them",
                )
            claimed[key] = name
    return tuple(chosen)


def _layout(
    config: EngineConfig,
    model: ModelDescription,
    attention: Mapping[str, Selection],
    needs: Mapping[str, AttentionNeed],
    kv_dtype: str,
) -> KVLayout:
    tokens = {
        kind: cast("type[AttentionCard]", selection.card).tokens_per_page(needs[kind])
        for kind, selection in attention.items()
    }
    return make_layout(
        model.kv_specs,
        block_size=config.block_size,
        kv_itemsize=_ITEM_SIZES[kv_dtype],
        tokens_per_page=tokens,
        size=config.tensor_parallel_size,
    )


def _tokenizer_folder(config: EngineConfig, registry: Registry, files: CheckpointFiles) -> str:
    """The folder of --tokenizer: a path, or a model's name; the model's own where none is given."""
    if config.tokenizer is None or config.tokenizer == config.model:
        return files.folder
    if Path(config.tokenizer).is_dir():
        return config.tokenizer
    try:
        selection = select_claims(registry, "checkpoint", config.tokenizer)
        return cast("type[CheckpointCard]", selection.card).resolve(config.tokenizer).folder
    except ModelNotFoundError as error:
        raise ConfigError(
            f"tokenizer={config.tokenizer}", "it is no folder, and no model has that name", "name a folder"
        ) from error
