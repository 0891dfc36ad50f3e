"""What each point is asked: a table from the facts of a start to the needs of drivers, and when a point has a use."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, TypedDict, cast

from engine.interfaces.adapter import OPERATIONS as ADAPTING
from engine.interfaces.attention import AttentionNeed
from engine.interfaces.communicator import CommunicatorNeed
from engine.interfaces.executor import ExecutorCard, ExecutorNeed
from engine.interfaces.experts import OPERATIONS as EXPERT_OPERATIONS
from engine.interfaces.experts import ExpertsNeed
from engine.interfaces.kv_connector import KVConnectorNeed
from engine.interfaces.logits_processor import PARAMETERS, LogitsProcessorNeed
from engine.interfaces.model import ModelNeed
from engine.interfaces.nodes import NodesNeed
from engine.interfaces.ops import OPERATIONS, OpsCard, OpsNeed, ops_needs
from engine.interfaces.quantization import QuantizationNeed, stored_form
from engine.interfaces.reasoning_parser import ReasoningParserNeed
from engine.interfaces.router import RouterNeed
from engine.interfaces.tool_parser import ToolParserNeed
from engine.plugin import Registry, points
from engine.plugin.choosing import ranked
from engine.plugin.discovery import duplicate
from engine.plugin.loading import brought
from engine.plugin.points import CardT, NeedT, Point
from engine.types.errors import ConfigError, TokenizerError
from engine.types.kv import KVLayout
from engine.types.model import ModelDescription
from engine.types.parallel import Parallel
from engine.types.structured_outputs import KINDS as CONSTRAINTS

if TYPE_CHECKING:
    from engine.config.settings import EngineConfig
    from engine.interfaces.model import ModelCard
    from engine.interfaces.platform import PlatformFacts
    from engine.interfaces.tokenizer import TokenizerCard
    from engine.plugin import Selection


class DevicePlace(TypedDict):
    """Where tensors lie, as most needs have it."""

    device: str
    framework: str


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What is known of a start when the points of `TABLE` are chosen.

    Attributes:
        config: the settings.
        platform: what the device's driver says of it.
        implementation: the model's driver.
        model: as this engine is to run it.
        dtype: of activations.
        parallel: over how many workers the model is divided.
        layout: of the KV cache.
        tokenizer: the tokenizer's driver.
        tokenizer_folder: where its files lie.
        chat_template: that which the user gives in place of the model's.
        more_operations: what the bodies of draft models and adapters call.
    """

    config: EngineConfig
    platform: PlatformFacts
    implementation: Selection[ModelCard]
    model: ModelDescription
    dtype: str
    parallel: Parallel
    layout: KVLayout
    tokenizer: Selection[TokenizerCard]
    tokenizer_folder: str
    chat_template: str | None
    more_operations: frozenset[str] = frozenset()

    @property
    def place(self) -> DevicePlace:
        """Where tensors lie."""
        return DevicePlace(device=self.platform.device, framework=self.platform.framework)

    def template(self, with_tools: bool) -> str:
        """The source of the chat template; see `template_source`."""
        return template_source(self.tokenizer, self.tokenizer_folder, with_tools, self.chat_template)


@dataclass(frozen=True)
class Row(Generic[CardT, NeedT]):
    """One point of the table.

    Attributes:
        point: the point.
        asks: from the facts, what a driver is asked, by kind.
        used: whether the point has a use with these facts. Raises ConfigError where the user wants it, and it has none.
        together: kinds that are taken from one driver.
        found: the driver that is taken where the user names none, if the facts say which; else it is left to the point.
    """

    point: Point[CardT, NeedT]
    asks: Callable[[Facts], Mapping[str, NeedT]]
    used: Callable[[Facts, Mapping[str, NeedT]], bool] = lambda facts, asks: True
    together: tuple[tuple[str, ...], ...] = ()
    found: Callable[[Facts, Mapping[str, NeedT], Registry], str | None] = lambda facts, asks, registry: None


# -- when a point has a use --------------------------------------------------------------------------------------------
def _several_ranks(facts: Facts, asks: Mapping[str, CommunicatorNeed]) -> bool:
    """None is used by one rank, unless the user names one, which then says why it is of no use."""
    return asks[""].world_size > 1 or _wanted(facts.config, "communicator")


def _several_cores(facts: Facts, asks: Mapping[str, RouterNeed]) -> bool:
    if asks[""].num_ranks > 1:
        return True
    config = facts.config
    if config.data_parallel_restarts:
        raise ConfigError(
            f"data_parallel_restarts={config.data_parallel_restarts}",
            "there is one engine core, and with it the engine dies",
            "raise --data-parallel-size, or leave restarts to what supervises the server",
        )
    if _wanted(config, "router"):
        asked = config.asked("router")
        named = f"set router.{next(iter(config.options_for('router')))}" if asked is None else f"router={asked}"
        raise ConfigError(named, "there is one engine core, which takes every request", "raise --data-parallel-size")
    return False


def _connects(facts: Facts, asks: Mapping[str, KVConnectorNeed]) -> bool:
    swaps = preemption_mode(facts.config) == "swap"
    return cast("bool", brought("connects", "find out whether pages go elsewhere")(facts.config, asks[""], swaps))


def preemption_mode(config: EngineConfig) -> str:
    """ "swap" or "recompute": what is asked for, else "swap" where there is space for it.

    Raises ConfigError where mode and space contradict each other.
    """
    mode, space = config.preemption_mode, config.swap_space
    if mode == "swap" and not space:
        raise ConfigError(
            "preemption_mode=swap",
            "swap_space is 0",
            "say how much host memory swapped pages may take: --swap-space 4GiB",
        )
    if mode == "recompute" and space:
        raise ConfigError(
            f"swap_space={space} with preemption_mode=recompute",
            "requests that are computed again need no swap space",
            "leave one of them out",
        )
    return "swap" if space else "recompute"


def _has_layers(facts: Facts, asks: Mapping[str, QuantizationNeed]) -> bool:
    asked, driver = facts.config.asked("quantization"), facts.implementation.candidate
    if asked is not None and not asks:
        raise ConfigError(
            f"quantization={asked} with {facts.model.architecture}",
            f"its driver '{driver.name}' ({driver.provenance}) has no layer whose weights another may store",
            f"leave {points.QUANTIZATION.option_flag} out, or name another driver with --model-impl",
        )
    return True


def _has_experts(facts: Facts, asks: Mapping[str, ExpertsNeed]) -> bool:
    return EXPERT_OPERATIONS[-1] in _ops(facts)


def _wanted(config: EngineConfig, point: str) -> bool:
    return config.asked(point) is not None or bool(config.options_for(point))


# -- what drivers are asked --------------------------------------------------------------------------------------------
def model_needs(need: ModelNeed, config: dict[str, Any]) -> dict[str, ModelNeed]:
    """What a model's drivers are asked, by architecture, in the order of its config.json; "" where it states none."""
    stated = config.get("architectures") or []
    architectures = [str(name) for name in stated] if isinstance(stated, (list, tuple)) else []
    return {name: replace(need, architecture=name, config=config) for name in architectures or [""]}


def attention_needs(
    model: ModelDescription,
    *,
    block_size: int,
    dtype: str,
    facts: PlatformFacts,
    size: int = 1,
    shared: int = 1,
    kv_dtype: str | None = None,
    batch_invariant: bool = False,
) -> tuple[AttentionNeed, ...]:
    """What is asked of attention on each of `size` ranks, for each of the model's sites. The cache's elements have type
    `kv_dtype`; None: `dtype`. See `AttentionNeed.of` for the others.

    Raises ConfigError where KV heads can be neither divided over the ranks nor copied evenly.
    """
    features = frozenset(model.attention_features)
    common = {"block_size": block_size, "dtype": dtype, "kv_dtype": kv_dtype or dtype, "features": features}
    place = {"device": facts.device, "framework": facts.framework}
    return tuple(
        AttentionNeed.of(site, size, shared, **common, **place, batch_invariant=batch_invariant) for site in model.sites
    )


def by_kind(needs: Iterable[AttentionNeed]) -> dict[str, tuple[AttentionNeed, ...]]:
    """The different needs of each kind of layer: its driver has to serve them all. States ask for no attention."""
    found: dict[str, dict[AttentionNeed, None]] = {}
    for need in needs:
        if need.kind == "state":
            continue
        found.setdefault(need.kind, {})[need] = None
    return {kind: tuple(forms) for kind, forms in found.items()}


def quantization_needs(facts: Facts) -> dict[str, QuantizationNeed]:
    """What is asked of those who store the model's weights, by kind of layer."""
    can = facts.implementation.card.quantized
    kinds = [kind for kind in points.QUANTIZATION.kinds if kind in can and (kind != "head" or facts.model.generates)]
    return {
        kind: QuantizationNeed(
            kind=kind,
            dtype=facts.dtype,
            stored_dtype=facts.model.dtype,
            batch_invariant=facts.config.batch_invariant,
            stored=stored_form(facts.model.config),
            **facts.place,
        )
        for kind in kinds
    }


def reads_stored(facts: Facts, asks: Mapping[str, QuantizationNeed], registry: Registry) -> str | None:
    """The driver of the form in which the weights are stored, see `engine_kit.stored_weights`."""
    if stored_form(facts.model.config) is None:
        return None
    return cast("str", brought("stored_weights", "find who reads stored weights")(facts, asks, registry))


def _swap_tier(facts: Facts, asks: Mapping[str, KVConnectorNeed], registry: Registry) -> str | None:
    """The first that swaps; None leaves the error to the choice."""
    swaps = preemption_mode(facts.config) == "swap"
    return cast("str | None", brought("swap_tier", "find who swaps pages")(asks, registry)) if swaps else None


def _ops(facts: Facts) -> dict[str, OpsNeed]:
    called, invariant = facts.implementation.card.operations | facts.more_operations, facts.config.batch_invariant
    return ops_needs(called, dtype=facts.dtype, batch_invariant=invariant, **facts.place)


def _nodes_of_executor(facts: Facts, asks: Mapping[str, NodesNeed], registry: Registry) -> str | None:
    """The driver that comes with the executor that the user names."""
    named, (cards, _) = facts.config.asked("executor"), ranked(registry, points.EXECUTOR.name)
    return next((cast("type[ExecutorCard]", card).nodes for one, card in cards if one.name == named), "") or None


def _communicator(facts: Facts) -> dict[str, CommunicatorNeed]:
    parallel = facts.parallel
    groups = (parallel.tp, parallel.cp, parallel.dp, parallel.ep_size)
    invariant = facts.config.batch_invariant and max(groups) > 1  # stages add nothing up
    return {"": CommunicatorNeed(world_size=max(*groups, parallel.pp), batch_invariant=invariant, **facts.place)}


def _defined_once(facts: Facts, asks: Mapping[str, OpsNeed], registry: Registry) -> None:
    """Raise DuplicateDriverError where several drivers define one of the operations."""
    further = sorted(asks.keys() - set(OPERATIONS))
    cards = [(c, cast("type[OpsCard]", card)) for c, card in ranked(registry, points.OPS.name)[0]] if further else []
    for operation in further:
        definers = [candidate for candidate, card in cards if operation in card.defines]
        if len(definers) > 1:
            asked = f"choose who defines operation '{operation}' (name the driver by {points.OPS.option_flag})"
            raise duplicate(points.OPS.name, definers, asked)


TABLE: tuple[Row[Any, Any], ...] = (
    Row(points.OPS, _ops, together=(("pack_linear", "linear"), EXPERT_OPERATIONS, ADAPTING), found=_defined_once),
    Row(points.COMMUNICATOR, _communicator, _several_ranks),
    Row(points.EXECUTOR, lambda facts: {"": ExecutorNeed(parallel=facts.parallel)}),
    Row(
        points.NODES,
        lambda facts: {
            "": NodesNeed(
                num_cores=facts.config.data_parallel_size, parallel=facts.parallel, device=facts.platform.device
            )
        },
        found=_nodes_of_executor,
    ),
    Row(points.QUANTIZATION, quantization_needs, _has_layers, found=reads_stored),
    Row(
        points.EXPERTS,
        lambda facts: {
            "": ExpertsNeed(parallel=facts.parallel, batch_invariant=facts.config.batch_invariant, **facts.place)
        },
        _has_experts,
    ),
    Row(points.SCHEDULING_POLICY, lambda facts: {"": None}),
    Row(
        points.KV_CONNECTOR,
        lambda facts: {
            "": KVConnectorNeed(
                page_bytes=facts.layout.page_bytes,
                swap_space=facts.config.swap_space,
                parallel=facts.parallel,
                prefix_caching=facts.config.enable_prefix_caching and not facts.model.whole_prompts,
                **facts.place,
            )
        },
        _connects,
        found=_swap_tier,
    ),
    Row(
        points.LOGITS_PROCESSOR,
        lambda facts: dict.fromkeys(PARAMETERS, LogitsProcessorNeed(vocab_size=facts.model.vocab_size, **facts.place)),
    ),
    Row(
        points.ROUTER,
        lambda facts: {
            "": RouterNeed(
                num_ranks=facts.config.data_parallel_size, enable_prefix_caching=facts.config.enable_prefix_caching
            )
        },
        _several_cores,
    ),
    Row(points.GRAMMAR, lambda facts: dict.fromkeys(CONSTRAINTS)),
    Row(
        points.TOOL_PARSER,
        lambda facts: {"": ToolParserNeed(chat_template=facts.template(True), architecture=facts.model.architecture)},
    ),
    Row(
        points.REASONING_PARSER,
        lambda facts: {
            "": ReasoningParserNeed(chat_template=facts.template(False), architecture=facts.model.architecture)
        },
    ),
)
"""The points whose drivers the launcher itself asks for nothing more."""


def template_source(tokenizer: Selection[TokenizerCard], folder: str, with_tools: bool, given: str | None) -> str:
    """The source of the chat template, with tools or without; "" where there is none, or the card does not tell it.

    Args:
        tokenizer: the tokenizer's driver, which knows the chat template.
        folder: where its files lie.
        given: a template in place of the model's.
    """
    if given is not None:
        return given
    try:
        return tokenizer.card.chat_template(folder, with_tools)
    except TokenizerError:  # the tokenizer's body will say it: there, and not here, the files are needed
        return ""
