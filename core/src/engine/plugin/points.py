"""The points: every kind of part that can be replaced, declared once.

From one declaration come the command-line flag, the config field, the row of `engine plugins`, the entry-point groups
that are read and the interface that a card is checked against. A point is declared by the work that brings its first
driver. Nothing is imported here: interfaces are named by string.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

if TYPE_CHECKING:
    from engine.interfaces.adapter import AdapterCard, AdapterNeed
    from engine.interfaces.attention import AttentionCard, AttentionNeed
    from engine.interfaces.checkpoint import CheckpointCard
    from engine.interfaces.communicator import CommunicatorCard, CommunicatorNeed
    from engine.interfaces.drafter import DrafterCard, DrafterNeed
    from engine.interfaces.evictor import EvictorCard
    from engine.interfaces.executor import ExecutorCard, ExecutorNeed
    from engine.interfaces.experts import ExpertsCard, ExpertsNeed
    from engine.interfaces.grammar import GrammarCard
    from engine.interfaces.kv_connector import KVConnectorCard, KVConnectorNeed
    from engine.interfaces.logits_processor import LogitsProcessorCard, LogitsProcessorNeed
    from engine.interfaces.model import ModelCard, ModelNeed
    from engine.interfaces.nodes import NodesCard, NodesNeed
    from engine.interfaces.ops import OpsCard, OpsNeed
    from engine.interfaces.platform import PlatformCard, PlatformNeed
    from engine.interfaces.quantization import QuantizationCard, QuantizationNeed
    from engine.interfaces.reasoning_parser import ReasoningParserCard, ReasoningParserNeed
    from engine.interfaces.router import RouterCard, RouterNeed
    from engine.interfaces.scheduling_policy import SchedulingPolicyCard
    from engine.interfaces.tokenizer import TokenizerCard, TokenizerNeed
    from engine.interfaces.tool_parser import ToolParserCard, ToolParserNeed
    from engine.plugin.card import Card

CardT = TypeVar("CardT", bound="Card")
"""The card interface of a point."""
NeedT = TypeVar("NeedT")
"""What a point's cards are asked."""

PickName = Literal[
    "one", "ordered", "all", "in_turn", "in_order", "per_kind", "by_architecture", "claims", "recognises", "many"
]


@dataclass(frozen=True)
class Pick:
    """One way of picking drivers: what `choose`, which walks the cards alike for all of them, does differently.

    The walk goes through what is asked for (kinds of layer, operations, kinds of request, or one thing without a name)
    and asks the cards in their order: those that were named, then the others by priority.

    Attributes:
        unnamed: what a user gets who names no driver, as the end of a remedy that says so.
        serves: the card's attribute that holds which of the kinds it serves; "" where each card serves all there are.
        lacks: what is said of a card that does not serve what is asked, with {served} and {asked}.
        question: the card's method that has to answer True beside, unless the driver was named; "" for none.
        denies: what is said where it answers False, with {need}.
        found_by: what decides before the priority, or in its place, as a reason why a driver is chosen.
        takes: of the drivers that fit, the "first", "all", or the "only" one: two are an error.
        several: whether a user may name several, with commas between them.
        helped: whether those that nobody named serve what the named ones do not.
        tolerant: whether a named driver may be unfit for some of what it serves.
        required: whether it is an error that nobody fits.
        namesakes: whether drivers of one name by several distributions stand beside each other: the one that fits and
            has the highest priority is taken.
    """

    unnamed: str
    serves: str = ""
    lacks: str = ""
    question: str = ""
    denies: str = ""
    found_by: str = ""
    takes: Literal["first", "all", "only"] = "first"
    several: bool = False
    helped: bool = False
    tolerant: bool = False
    required: bool = True
    namesakes: bool = False

    def served(self, card: type[Card], kinds: Iterable[str]) -> list[str]:
        """Those of the kinds that a card serves; "" is what each card does."""
        return [kind for kind in kinds if not (self.serves and kind) or kind in getattr(card, self.serves)]

    def offer(self, card: type[Card]) -> str:
        """All that a card serves, as people read it."""
        return ", ".join(sorted(getattr(card, self.serves))) or "none"


PICKS: Mapping[PickName, Pick] = MappingProxyType(
    {
        # A single driver.
        "one": Pick("to have one chosen"),
        # Each operation goes to the first driver that offers it and fits.
        "ordered": Pick(
            "to have those chosen that are needed",
            serves="operations",
            lacks="it does not offer {asked}",
            several=True,
            helped=True,
            tolerant=True,
        ),
        # Every driver that fits; who does a piece of work is settled by asking their bodies in this order.
        "all": Pick("to have those chosen that are needed", takes="all", several=True, helped=True),
        # Each request goes to the first that serves its kind and takes it. Names stand for themselves alone; behind
        # "auto" among them stand all others.
        "in_turn": Pick(
            "to have them chosen", serves="constraints", lacks="it serves none of {asked}", takes="all", several=True
        ),
        # All that are named, and nobody else; who does a piece of work is settled by this order.
        "in_order": Pick("to have one chosen where there is one thing to do", takes="all", several=True),
        # One driver for each kind of layer that the model has: a name binds the kinds that it serves, "kind=driver,..."
        # is exact.
        "per_kind": Pick(
            "to have one chosen for each kind",
            serves="kinds",
            lacks="it serves layers of kind {served}, not {asked}",
            helped=True,
        ),
        # The entry point's name is the architecture string of the model's config.json, or `ANY_ARCHITECTURE`: those are
        # asked where no driver of the architecture's own name fits.
        "by_architecture": Pick(
            "to have the one that is called like the model's architecture",
            found_by="it has the model's architecture",
            namesakes=True,
        ),
        # The one card whose `claims(name)` is true.
        "claims": Pick(
            "to have the one that claims the model",
            question="claims",
            denies="does not claim {need!r}",
            found_by="it claims the model",
            takes="only",
        ),
        # The first whose card `recognises` the model, none where none does; "none" turns it off.
        "recognises": Pick(
            "to have one chosen where the model's chat template shows which",
            question="recognises",
            denies="the model's chat template has nothing of its form",
            found_by="it recognises the model's chat template",
            required=False,
        ),
        # All that are named, and one for each job that the point has.
        "many": Pick(
            "to have those alone that the requests' parameters need",
            serves="parameters",
            several=True,
            helped=True,
            required=False,
        ),
    }
)
"""How drivers of a point are picked."""


@dataclass(frozen=True)
class Point(Generic[CardT, NeedT]):
    """One extension point.

    Attributes:
        name: the point's name; drivers register in the entry-point group `engine.<name>.v<major>`.
        card: the class in `engine.interfaces.<name>` that every driver's card subclasses.
        pick: how drivers are picked, see `PICKS`.
        help: one line for `--help`, the docs and `engine plugins`.
        majors: the interface majors that this core serves, ascending; its own code speaks the last.
        adapters: for each older one "module:function", which makes of a body of that major one of the next.
        minor: the interface's minor version; a card whose `requires_minor` is higher is refused.
        additions: for each minor version that changed what bodies are called with, "module:function", which makes of a
            body of the minor before one of this. Used for cards whose `requires_minor` is lower.
        flag: the command-line flag without dashes in front, where it is not the point's name.
        kinds: for `per_kind`, the kinds of layer that can be bound.
        optional: no driver is used unless the user names one; for `one`, and for `per_kind`, where a kind that no
            driver is named for has none.
    """

    name: str
    card: str
    pick: PickName
    help: str
    majors: tuple[int, ...] = (0,)
    adapters: Mapping[int, str] = field(default_factory=dict, hash=False)
    minor: int = 0
    additions: Mapping[int, str] = field(default_factory=dict, hash=False)
    flag: str | None = None
    kinds: tuple[str, ...] = ()
    optional: bool = False

    @property
    def interface(self) -> str:
        """ "module:Class" of the card."""
        return f"engine.interfaces.{self.name}:{self.card}"

    @property
    def option_flag(self) -> str:
        """The flag as typed on the command line, e.g. "--load-format"."""
        return "--" + (self.flag or self.name).replace("_", "-")

    @property
    def unnamed(self) -> str:
        """What a user gets who names no driver, as the end of a remedy that says so, e.g. "to have one chosen"."""
        return "to do without" if self.optional else PICKS[self.pick].unnamed

    @property
    def keyword(self) -> str:
        """The flag as a keyword of `LLM(...)` or a key of a config file, e.g. "load_format"."""
        return (self.flag or self.name).replace("-", "_")

    def group(self, major: int) -> str:
        """The entry-point group of one interface major."""
        return f"engine.{self.name}.v{major}"


PLATFORM: Point[PlatformCard, PlatformNeed] = Point(
    "platform",
    "PlatformCard",
    "one",
    "the device: memory pools, dtypes, capture and replay, the worker that is started",
    minor=7,
    additions={7: "engine.interfaces.step:without_whole_steps"},
)
OPS: Point[OpsCard, OpsNeed] = Point(
    "ops", "OpsCard", "ordered", "tensor operations; a comma-separated order, resolved per operation", minor=3
)
ATTENTION: Point[AttentionCard, tuple[AttentionNeed, ...]] = Point(
    "attention",
    "AttentionCard",
    "per_kind",
    "attention over the paged KV cache; a driver for all the layer kinds it serves, or kind=driver,...",
    minor=9,
    kinds=("full", "sliding", "mla", "state", "cross", "encoder"),
)
COMMUNICATOR: Point[CommunicatorCard, CommunicatorNeed] = Point(
    "communicator",
    "CommunicatorCard",
    "all",
    "collectives between the ranks of a model; a comma-separated order, the first that accepts one takes it",
    minor=2,
)
EXECUTOR: Point[ExecutorCard, ExecutorNeed] = Point(
    "executor", "ExecutorCard", "one", "starts the workers, carries plans to them and merges their results", minor=3
)
NODES: Point[NodesCard, NodesNeed] = Point(
    "nodes", "NodesCard", "one", "the machines on which cores and workers run, and how they are started there"
)
EVICTOR: Point[EvictorCard, None] = Point(
    "evictor", "EvictorCard", "one", "orders the cached KV pages that are given up first", minor=3
)
MODEL: Point[ModelCard, ModelNeed] = Point(
    "model",
    "ModelCard",
    "by_architecture",
    "the model's implementation, by the architecture string of its config.json",
    flag="model-impl",
    minor=5,
)
QUANTIZATION: Point[QuantizationCard, QuantizationNeed] = Point(
    "quantization",
    "QuantizationCard",
    "per_kind",
    "weights of fewer bits; a driver, or kind=driver,... (default: the one that reads what is stored so, else none)",
    kinds=("linear", "head", "expert", "embedding"),
    optional=True,
    minor=4,
)
EXPERTS: Point[ExpertsCard, ExpertsNeed] = Point(
    "experts", "ExpertsCard", "one", "which rank holds which experts", minor=1
)
ADAPTER: Point[AdapterCard, AdapterNeed] = Point(
    "adapter",
    "AdapterCard",
    "one",
    "changes of weights that requests ask for: LoRA (default: none)",
    optional=True,
    minor=2,
)
CHECKPOINT: Point[CheckpointCard, str] = Point(
    "checkpoint",
    "CheckpointCard",
    "claims",
    "resolves a model's name to files and reads the tensors in them",
    flag="load-format",
    minor=1,
)
TOKENIZER: Point[TokenizerCard, TokenizerNeed] = Point(
    "tokenizer", "TokenizerCard", "one", "text to tokens and back; the chat template", flag="tokenizer-mode", minor=1
)
SCHEDULING_POLICY: Point[SchedulingPolicyCard, None] = Point(
    "scheduling_policy", "SchedulingPolicyCard", "one", "orders waiting requests and picks whom to preempt", majors=(1,)
)
KV_CONNECTOR: Point[KVConnectorCard, KVConnectorNeed] = Point(
    "kv_connector",
    "KVConnectorCard",
    "in_order",
    "takes KV elsewhere and back: stores, other engines, preempted requests (--swap-space); first hit loads, all save",
    majors=(1,),
    minor=4,
)
DRAFTER: Point[DrafterCard, DrafterNeed] = Point(
    "drafter",
    "DrafterCard",
    "one",
    "proposes tokens that one step then checks all at once: speculative decoding (default: none)",
    majors=(1,),
    minor=2,
    optional=True,
)
LOGITS_PROCESSOR: Point[LogitsProcessorCard, LogitsProcessorNeed] = Point(
    "logits_processor",
    "LogitsProcessorCard",
    "many",
    "edits of logits before a token is drawn; a comma-separated list of processors to add",
    flag="logits-processors",
)
ROUTER: Point[RouterCard, RouterNeed] = Point(
    "router", "RouterCard", "one", "which of several engine cores (--data-parallel-size) takes a request"
)
GRAMMAR: Point[GrammarCard, None] = Point(
    "grammar",
    "GrammarCard",
    "in_turn",
    "constraints on outputs (structured outputs); a comma-separated order, the first that enforces one takes it",
    minor=1,
)
TOOL_PARSER: Point[ToolParserCard, ToolParserNeed] = Point(
    "tool_parser",
    "ToolParserCard",
    "recognises",
    "finds the calls of tools in a model's text; by the chat template where none is named, or none",
    flag="tool-call-parser",
)
REASONING_PARSER: Point[ReasoningParserCard, ReasoningParserNeed] = Point(
    "reasoning_parser",
    "ReasoningParserCard",
    "recognises",
    "divides a model's thoughts from its answer; by the chat template where none is named, or none",
)

_IN_ORDER: tuple[Point[Any, Any], ...] = (
    *(PLATFORM, OPS, ATTENTION, COMMUNICATOR, EXECUTOR, NODES, EVICTOR, MODEL, QUANTIZATION, EXPERTS, ADAPTER),
    *(CHECKPOINT, TOKENIZER, SCHEDULING_POLICY, KV_CONNECTOR, DRAFTER, LOGITS_PROCESSOR, ROUTER, GRAMMAR, TOOL_PARSER),
    REASONING_PARSER,
)
POINTS: Mapping[str, Point[Any, Any]] = MappingProxyType({point.name: point for point in _IN_ORDER})
"""Every point, in the order in which they are listed."""

ANY_ARCHITECTURE = "*"
"""The name of a model's driver that may serve architectures which it does not name."""

NONE = "none"
"""What a user names who wants no driver, of a point whose pick is `recognises`."""

HOOKS = "hooks"
"""What hook plugins go by where points go by their names: groups `engine.hooks.<process>.v0`, `--hooks.NAME.OPTION`."""

HOOK_PROCESSES: tuple[str, ...] = ("frontend", "core", "worker")
"""The process kinds with hooks of their own: entry-point groups `engine.hooks.<process>.v0`."""

HOOK_MAJORS: tuple[int, ...] = (0,)
COMMAND_MAJORS: tuple[int, ...] = (0,)

CLIENT = "client"
"""Group `engine.client.v0`: what makes one of several engine cores, see `engine.interfaces.client`. No point: nothing
is chosen, the one that is installed is used."""
