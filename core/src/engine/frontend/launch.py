"""The launcher: from settings to a plan of the whole engine, in plain data.

Every driver is chosen here, once, from facts that need no torch: the model's config.json and the platform's
description. Cards are imported, bodies are not. What comes out is a `Launch`: the start message of the engine core
(with the manifest that every process checks), and what the frontend itself needs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import lcm
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from engine.frontend.drafts import Target, resolve_drafts, with_trees
from engine.frontend.needs import (
    TABLE,
    Facts,
    attention_needs,
    by_kind,
    model_needs,
    preemption_mode,
    template_source,
)
from engine.interfaces.adapter import AdapterNeed
from engine.interfaces.drafter import OFFERS, DrafterNeed
from engine.interfaces.model import ModelNeed
from engine.interfaces.platform import PlatformFacts, PlatformNeed
from engine.interfaces.tokenizer import TokenizerNeed
from engine.kv.layout import ITEM_BYTES, make_layout
from engine.plugin import Registry, Selection, choose, points
from engine.plugin.candidate import Candidate
from engine.plugin.choosing import default_model
from engine.plugin.discovery import duplicate
from engine.plugin.hints import how_to_install
from engine.plugin.loading import brought
from engine.plugin.manifest import hook_choices
from engine.plugin.options import check_hook_options
from engine.plugin.points import CardT, NeedT, Point
from engine.types.errors import ConfigError, DriverNotFoundError, EngineError, ManifestError, ModelNotFoundError
from engine.types.kv import KVLayout
from engine.types.model import CheckpointFiles, ModelDescription
from engine.types.parallel import Parallel, split_layers
from engine.types.start import CoreStart, WorkerStart

if TYPE_CHECKING:
    from engine.config.settings import EngineConfig
    from engine.interfaces.attention import AttentionNeed
    from engine.interfaces.checkpoint import CheckpointCard
    from engine.interfaces.tokenizer import TokenizerCard

CORE_WORKER = "engine.runner.worker:TorchWorker"
"""The worker of platforms that bring none of their own."""
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
        selections: the same, with their cards, and with the reasons why others were not chosen.
        tokenizer: the tokenizer's selection, one of `selections`.
        chat_template: that which the user gives in place of the model's.
        idle: for points of which no driver is at work, what one would be asked, by kind.
    """

    config: EngineConfig
    registry: Registry
    start: CoreStart
    selections: tuple[Selection[Any], ...]
    tokenizer: Selection[TokenizerCard]
    chat_template: str | None = None
    idle: Mapping[str, Mapping[str, object]] = field(default_factory=dict)

    def chosen(self, point: Point[CardT, Any]) -> tuple[Selection[CardT], ...]:
        """The drivers of a point at work; none where it has no use."""
        return tuple(selection for selection in self.selections if selection.point == point.name)

    def one(self, point: Point[CardT, Any]) -> Selection[CardT] | None:
        """The driver at work of a point that has one, or none."""
        return next(iter(self.chosen(point)), None)

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
        return bool(template_source(self.tokenizer, self.start.tokenizer_folder, False, self.chat_template))

    @property
    def renders_tools(self) -> bool:
        """Whether the chat template has a place for tools; True where the tokenizer's card does not tell it."""
        template = template_source(self.tokenizer, self.start.tokenizer_folder, True, self.chat_template)
        return not template or re.search(r"\btools\b", template) is not None

    @cached_property
    def constraints(self) -> Any:
        """What the grammar drivers at work can enforce, of ours an `engine_kit.request_checks.ConstraintCheck`."""
        return brought("request_checks", "take requests").ConstraintCheck(self.chosen(points.GRAMMAR))

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


class _Choices:
    """What has been chosen so far, by the user's names and options.

    Attributes:
        made: the drivers at work, by point.
        idle: see `Launch`.
    """

    def __init__(self, config: EngineConfig, registry: Registry) -> None:
        self._config = config
        self._registry = registry
        self.made: dict[str, list[Selection[Any]]] = {}
        self.idle: dict[str, Mapping[str, object]] = {}

    def choose(
        self,
        point: Point[CardT, NeedT],
        asks: Mapping[str, NeedT],
        together: tuple[tuple[str, ...], ...] = (),
        only: str | None = None,
    ) -> list[Selection[CardT]]:
        """The drivers of a point, which `made` has from then on; none of a point that is the platform's own. Where the
        user names none, `only` the driver of that name is asked."""
        asked, options = self._config.asked(point.name), self._config.options_for(point.name)
        platform = next(iter(self.made.get(points.PLATFORM.name, ())), None)
        if platform is not None and point.name in platform.card.own_points:
            if asked is not None or options:
                raise ConfigError(
                    f"{point.name}={asked}" if asked is not None else f"set an option of {point.name} to {options}",
                    f"platform '{platform.candidate.name}' ({platform.candidate.provenance}) brings its own",
                    f"leave {point.option_flag} and its options out, or name another platform",
                )
            self.made[point.name] = []
            return []
        chosen = choose(self._registry, point, asks, asked or only, options, together)
        chosen = [replace(one, asked=asked is not None) for one in chosen] if only is not None else chosen
        self.made[point.name] = chosen
        return chosen


def _launch(config: EngineConfig, registry: Registry | None) -> Launch:
    registry = (Registry.discover() if registry is None else registry).following(config.plugin_list)
    choices = _Choices(config, registry)
    name, whose = config.model, None
    if name is None:  # that card's own, also where another would claim the name
        default = default_model(registry, points.CHECKPOINT, config.asked("checkpoint"))
        name, whose = default.name, default.candidate.name
    (checkpoint,) = choices.choose(points.CHECKPOINT, {"": name}, only=whose)
    files = checkpoint.card.resolve(name)
    (platform,) = choices.choose(points.PLATFORM, {"": PlatformNeed(dtype=config.dtype)})
    device = platform.card.describe()
    tokens = config.max_num_batched_tokens or platform.card.step_tokens()
    config = config.model_copy(update={"max_num_batched_tokens": tokens})
    need = ModelNeed(
        architecture="",
        framework=device.framework,
        parallel=parallel_of(config),
        features=frozenset({"stages"} if config.pipeline_parallel_size > 1 else ()),
        batch_invariant=config.batch_invariant,
    )
    config, first_rank, lockstep = brought("data_parallel", "serve with engine cores")(config)
    if config.data_parallel_size > 1:
        client_of_several(registry)
    (implementation,) = choices.choose(points.MODEL, model_needs(need, files.config))
    model = implementation.card.describe(files.config)
    dtype = choose_dtype(config.dtype, model.dtype, device)
    kv_dtype = _CACHE_DTYPES.get(config.kv_cache_dtype, config.kv_cache_dtype)
    kv_dtype = dtype if kv_dtype == "auto" else kv_dtype
    model = _decide_runner(config, checkpoint, files, model.computed_in(dtype))
    model = msgspec.structs.replace(model, prompt_embeds=config.enable_prompt_embeds)
    model = brought("generation_config", "read generation_config.json")(config, files, model)
    max_model_len = _max_model_len(config, model)
    parallel = need.parallel
    split_layers(parallel, model.num_layers)

    offers = OFFERS if platform.card.worker is None else frozenset[str]()
    drafts_need = {"": DrafterNeed(dtype=dtype, device=device.device, offers=offers, framework=device.framework)}
    if not (drafter := choices.choose(points.DRAFTER, drafts_need)):
        choices.idle[points.DRAFTER.name] = drafts_need
    described = msgspec.structs.replace(model, max_model_len=max_model_len)
    target = Target(checkpoint, files, implementation.card, described, need)
    drafts = resolve_drafts(registry, drafter[0], target) if drafter else []
    asked = AdapterNeed(
        dtype=dtype, device=device.device, framework=need.framework, batch_invariant=need.batch_invariant
    )
    if not (adapters := choices.choose(points.ADAPTER, {"": asked})):
        choices.idle[points.ADAPTER.name] = {"": asked}
    if drafts and (memory := platform.card.memory()) is not None:
        fits = brought("draft_memory", "see whether the weights of model and drafts fit")
        fits(config, f"{device.name}: {memory:,} bytes", memory, dtype, parallel, files, [d.start for d in drafts])
    models = [model, *(draft.start.model for draft in drafts)]
    if drafter and drafter[0].card.branches(drafter[0].options):
        model, *others = models = [with_trees(one, drafter[0].options) for one in models]
        drafts = [draft.of(one) for draft, one in zip(drafts, others, strict=True)]
    (evictor,) = choices.choose(points.EVICTOR, {"": None})
    if evictor.card.reuses:
        model = msgspec.structs.replace(model, attention_features=(*model.attention_features, "kv_index"))
        models[0] = model
    needs = [
        need
        for one in models
        for need in attention_needs(
            one,
            block_size=config.block_size,
            dtype=dtype,
            kv_dtype=kv_dtype,
            facts=device,
            size=parallel.tp,
            shared=parallel.cp,
            batch_invariant=config.batch_invariant,
        )
    ]
    forms = by_kind(needs)
    if config.kv_cache_dtype != "auto" and forms.keys() <= {"encoder"}:
        raise ConfigError(f"kv_cache_dtype={config.kv_cache_dtype}", "no layer keeps keys and values", "leave it out")
    attention = choices.choose(points.ATTENTION, forms)
    pages = {one.kind: lcm(*(one.card.tokens_per_page(need) for need in forms[one.kind])) for one in attention}
    scales = {one.kind: max(one.card.scale_bytes(need) for need in forms[one.kind]) for one in attention}
    if points.ATTENTION.name in platform.card.own_points:
        pages = {kind: platform.card.tokens_per_page(kind, config.block_size) for kind in forms}
    tokenizer_folder = _tokenizer_folder(config, registry, files)
    (tokenizer,) = choices.choose(points.TOKENIZER, {"": TokenizerNeed(folder=tokenizer_folder)})
    layout = make_layout(
        [site for one in models for site in one.sites],
        block_size=config.block_size,
        kv_itemsize=ITEM_BYTES[kv_dtype],
        tokens_per_page=pages,
        scale_bytes=scales,
        size=parallel.tp,
    ).shared(parallel.cp)
    layout = _with_page_formats(layout, needs, attention, platform)
    layout = layout.marked() if config.kv_canary else layout
    facts = Facts(
        config=config,
        platform=device,
        implementation=implementation,
        model=model,
        dtype=dtype,
        parallel=parallel,
        layout=layout,
        tokenizer=tokenizer,
        tokenizer_folder=tokenizer_folder,
        chat_template=_chat_template(config),
        more_operations=frozenset().union(
            *(draft.implementation.card.operations for draft in drafts), *(one.card.operations for one in adapters)
        ),
    )
    for row in TABLE:
        asks, own = row.asks(facts), row.point.name in platform.card.own_points
        found = None if own or config.asked(row.point.name) else row.found(facts, asks, registry)
        if not (row.used(facts, asks) and choices.choose(row.point, asks, row.together, found)):
            choices.idle[row.point.name] = {} if own else asks
    selections = tuple(selection for point in points.POINTS for selection in choices.made.get(point, ()))
    worker = WorkerStart(
        choices=tuple(selection.choice() for selection in selections),
        model=model,
        files=files,
        layout=layout,
        dtype=dtype,
        device=device.device,
        max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        kv_cache_memory=config.kv_cache_memory,
        num_kv_pages=config.num_kv_pages,
        parallel=parallel,
        swap_space=config.swap_space,
        kv_cache_dtype=kv_dtype,
        memory_utilization=config.memory_utilization,
        hook_options=check_hook_options(registry, config.hook_options),
        hook_plugins=hook_choices(registry, ("core", "worker")),
        plugins=config.plugin_list.text,
        log_format=config.log_format,
        profile_dir=None if config.profile_dir is None else str(Path(config.profile_dir).absolute()),
        batch_invariant=config.batch_invariant,
        drafts=tuple(draft.with_stored(facts, registry) for draft in drafts),
        first_dp_rank=first_rank,
    )
    start = CoreStart(
        worker=worker,
        worker_class=platform.card.worker or CORE_WORKER,
        enable_prefix_caching=config.enable_prefix_caching and not model.whole_prompts,
        prefix_caching_hash_algo=config.prefix_caching_hash_algo,
        max_kv_retention=config.max_kv_retention,
        max_kv_retention_per_key=config.max_kv_retention_per_key,
        enable_jump_forward=config.enable_jump_forward,
        in_flight=parallel.pp + 1 if config.in_flight is None else config.in_flight,
        long_prefill_token_threshold=config.long_prefill_token_threshold,
        preemption_mode=preemption_mode(config),
        tokenizer_folder=tokenizer_folder,
        step_timeout=platform.card.step_timeout if config.step_timeout is None else config.step_timeout,
        grammar_warm_up=config.grammar_warm_up,
        lockstep=lockstep,
        lockstep_token=config.data_parallel_token_file or "",
    )
    brought("chosen_together", "check what was chosen")(config, start, choices.made)
    return Launch(config, registry, start, selections, tokenizer, facts.chat_template, choices.idle)


def _with_page_formats(
    layout: KVLayout, needs: Sequence[AttentionNeed], attention: Iterable[Selection[Any]], platform: Selection[Any]
) -> KVLayout:
    """The layout with the names of what its groups keep in pages. needs: of each site."""
    own = points.ATTENTION.name in platform.card.own_points
    of_kind = {one.kind: one for one in attention}
    groups = list(layout.groups)
    for at, group in enumerate(groups):
        if (one := platform if own else of_kind.get(group.kind)) is not None and group.table is not None:
            unnamed = f"{one.candidate.name}-{one.candidate.version} {one.options or ''}".rstrip()
            named = one.card.page_format(platform.options if own else needs[group.sites[0]]) or unnamed
            groups[at] = msgspec.structs.replace(group, page_format=named)
    return msgspec.structs.replace(layout, groups=tuple(groups))


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


def parallel_of(config: EngineConfig) -> Parallel:
    """Over how many workers the settings divide the model. Engine cores that deal no experts have each their own."""
    return Parallel(
        tp=config.tensor_parallel_size,
        pp=config.pipeline_parallel_size,
        split=tuple(int(part) for part in (config.pipeline_parallel_split or "").split(",") if part),
        cp=config.context_parallel_size,
        dp=config.data_parallel_size if config.enable_expert_parallel else 1,
        ep=config.enable_expert_parallel,
    )


def _decide_runner(
    config: EngineConfig, checkpoint: Selection[CheckpointCard], files: CheckpointFiles, model: ModelDescription
) -> ModelDescription:
    """The description with `generates` and `pooler` as this engine is to run it.

    `runner="auto"` pools where the model cannot generate, or where files beside it say how to pool its hidden states.

    Raises:
        ConfigError: the model cannot do what `runner` asks, or another setting contradicts it.
        CheckpointError, UnsupportedModelError: of these files.
    """
    if config.runner == "generate":
        if not model.generates:
            raise ConfigError(
                f"runner=generate with {model.architecture}",
                "it has no logits over the vocabulary",
                "leave runner out, or use a model that generates",
            )
        return model
    found = None
    if not model.pooler.num_labels:
        found = checkpoint.card.pooler(files, model.pooler)
    if model.generates and config.runner == "auto" and found is None:
        return model
    if config.asked("drafter") is not None:
        raise ConfigError(
            f"drafter={config.asked('drafter')} with an engine that pools", "it draws no token", "leave it out"
        )
    return msgspec.structs.replace(model, generates=False, pooler=found or model.pooler)


def _max_model_len(config: EngineConfig, model: ModelDescription) -> int:
    """The most tokens of a request. Raises ConfigError where the model was made for fewer."""
    if config.max_model_len is None:
        return min(model.max_model_len, model.pooler.max_tokens or model.max_model_len)
    if config.max_model_len > model.max_model_len:
        raise ConfigError(
            f"max_model_len={config.max_model_len}",
            f"the model was made for {model.max_model_len} positions",
            f"choose {model.max_model_len} or less",
        )
    return config.max_model_len


def _chat_template(config: EngineConfig) -> str | None:
    """The text of --chat-template, which is a file or the text itself. Raises ConfigError where it is neither."""
    given = config.chat_template
    if given is None:
        return None
    try:
        return Path(given).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        if "{" in given or "}" in given or "\n" in given:  # as hardly a path has, and every template
            return given
        found = f"as a file: {getattr(error, 'strerror', None) or error}"
        remedy = "name a file with a Jinja template, or pass its text"
        raise ConfigError(f"chat_template={given:.200}", found, remedy) from error


def _tokenizer_folder(config: EngineConfig, registry: Registry, files: CheckpointFiles) -> str:
    """The folder of --tokenizer: a path, or a model's name; the model's own where none is given."""
    if config.tokenizer is None or config.tokenizer == config.model:
        return files.folder
    if Path(config.tokenizer).is_dir():
        return config.tokenizer
    try:
        (checkpoint,) = choose(registry, points.CHECKPOINT, {"": config.tokenizer})
        return checkpoint.card.resolve(config.tokenizer).folder
    except ModelNotFoundError as error:
        raise ConfigError(
            f"tokenizer={config.tokenizer}", "it is no folder, and no model has that name", "name a folder"
        ) from error


def client_of_several(registry: Registry) -> Candidate:
    """What makes one of several engine cores: the one that is installed, see `engine.interfaces.client`.

    Raises DriverNotFoundError where nothing does, DuplicateDriverError where two do.
    """
    found = registry.candidates(points.CLIENT)
    if not found:
        raise DriverNotFoundError(
            "serve with several engine cores (data_parallel_size)",
            "nothing that is installed makes one of them",
            how_to_install(points.CLIENT),
            point=points.CLIENT,
        )
    if len(found) > 1:
        raise duplicate(points.CLIENT, found)
    return found[0]
