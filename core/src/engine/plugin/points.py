"""The points: every kind of part that can be replaced, declared once.

From one declaration come the command-line flag, the config field, the row of `engine plugins`, the entry-point groups
that are read and the interface that a card is checked against. A point is declared by the work that brings its first
driver. Nothing is imported here: interfaces are named by string.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

Pick = Literal["one", "ordered", "in_turn", "per_kind", "by_architecture", "claims", "recognises", "many"]
"""How drivers of a point are picked.

- `one`: a single driver.
- `ordered`: a list; each operation goes to the first driver that offers it and fits (ops: settled at start;
  communicator: by asking the bodies, for each form of a collective).
- `in_turn`: several, in order of preference; each request goes to the first that serves its kind and takes it. Names
  stand for themselves alone; behind "auto" among them stand all others.
- `per_kind`: one driver for each kind of layer that the model has.
- `by_architecture`: the entry point's name is the architecture string of the model's config.json.
- `claims`: the one card whose `claims(name)` is true; two is an error.
- `recognises`: the first by priority whose card `recognises` the model, none where none does; `none` turns it off.
- `many`: all that are named, and one for each job that the point has.
"""

_UNNAMED: Mapping[Pick, str] = MappingProxyType(
    {
        "one": "to have one chosen",
        "ordered": "to have those chosen that are needed",
        "in_turn": "to have them chosen",
        "per_kind": "to have one chosen for each kind",
        "by_architecture": "to have the one that is called like the model's architecture",
        "claims": "to have the one that claims the model",
        "recognises": "to have one chosen where the model's chat template shows which",
        "many": "to have those alone that the requests' parameters need",
    }
)


@dataclass(frozen=True)
class Point:
    """One extension point.

    Attributes:
        name: the point's name; drivers register in the entry-point group `engine.<name>.v<major>`.
        interface: "module:Class" of the card interface that every driver's card subclasses.
        pick: how drivers are picked, see `Pick`.
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
    interface: str
    pick: Pick
    help: str
    majors: tuple[int, ...] = (0,)
    adapters: Mapping[int, str] = field(default_factory=lambda: MappingProxyType({}), hash=False)
    minor: int = 0
    additions: Mapping[int, str] = field(default_factory=lambda: MappingProxyType({}), hash=False)
    flag: str | None = None
    kinds: tuple[str, ...] = ()
    optional: bool = False

    @property
    def option_flag(self) -> str:
        """The flag as typed on the command line, e.g. "--load-format"."""
        return "--" + (self.flag or self.name).replace("_", "-")

    @property
    def unnamed(self) -> str:
        """What a user gets who names no driver, as the end of a remedy that says so, e.g. "to have one chosen"."""
        return "to do without" if self.optional else _UNNAMED[self.pick]

    @property
    def keyword(self) -> str:
        """The flag as a keyword of `LLM(...)` or a key of a config file, e.g. "load_format"."""
        return (self.flag or self.name).replace("-", "_")

    def group(self, major: int) -> str:
        """The entry-point group of one interface major."""
        return f"engine.{self.name}.v{major}"


def _declare(*points: Point) -> Mapping[str, Point]:
    return MappingProxyType({point.name: point for point in points})


POINTS: Mapping[str, Point] = _declare(
    Point(
        "platform",
        "engine.interfaces.platform:PlatformCard",
        "one",
        "the device: memory pools, dtypes, capture and replay, the worker that is started",
    ),
    Point(
        "ops",
        "engine.interfaces.ops:OpsCard",
        "ordered",
        "tensor operations; a comma-separated order of preference, resolved per operation",
    ),
    Point(
        "attention",
        "engine.interfaces.attention:AttentionCard",
        "per_kind",
        "attention over the paged KV cache; a driver for all the layer kinds it serves, or kind=driver,...",
        minor=1,
        kinds=("full", "sliding", "mla", "state", "cross", "encoder"),
    ),
    Point(
        "communicator",
        "engine.interfaces.communicator:CommunicatorCard",
        "ordered",
        "collectives between the ranks of a model; a comma-separated order, the first that accepts one takes it",
    ),
    Point(
        "executor",
        "engine.interfaces.executor:ExecutorCard",
        "one",
        "starts the workers, carries plans to them and merges their results",
    ),
    Point(
        "evictor",
        "engine.interfaces.evictor:EvictorCard",
        "one",
        "orders the cached KV pages that are given up first",
        minor=1,
        additions={1: "engine.interfaces.evictor_v0_0:adapt"},
    ),
    Point(
        "model",
        "engine.interfaces.model:ModelCard",
        "by_architecture",
        "the model's implementation, by the architecture string of its config.json",
        flag="model-impl",
    ),
    Point(
        "quantization",
        "engine.interfaces.quantization:QuantizationCard",
        "per_kind",
        "weights of fewer bits, quantised while they are loaded; a driver, or kind=driver,... (default: none)",
        kinds=("linear", "head"),
        optional=True,
    ),
    Point(
        "checkpoint",
        "engine.interfaces.checkpoint:CheckpointCard",
        "claims",
        "resolves a model's name to files and reads the tensors in them",
        flag="load-format",
    ),
    Point(
        "tokenizer",
        "engine.interfaces.tokenizer:TokenizerCard",
        "one",
        "text to tokens and back, and the chat template",
        flag="tokenizer-mode",
    ),
    Point(
        "scheduling_policy",
        "engine.interfaces.scheduling_policy:SchedulingPolicyCard",
        "one",
        "orders the waiting requests and picks whom to preempt",
        majors=(0, 1),
        adapters={0: "engine.interfaces.scheduling_policy_v0:adapt"},
    ),
    Point(
        "kv_connector",
        "engine.interfaces.kv_connector:KVConnectorCard",
        "ordered",
        "takes KV pages elsewhere and back; today the swap tier of preempted requests (see --swap-space)",
    ),
    Point(
        "drafter",
        "engine.interfaces.drafter:DrafterCard",
        "one",
        "proposes tokens that one step then checks all at once: speculative decoding (default: none)",
        minor=1,
        additions={1: "engine.interfaces.drafter_v0_0:adapt"},
        optional=True,
    ),
    Point(
        "logits_processor",
        "engine.interfaces.logits_processor:LogitsProcessorCard",
        "many",
        "edits of logits before a token is drawn; a comma-separated list of processors to add",
        flag="logits-processors",
    ),
    Point(
        "router",
        "engine.interfaces.router:RouterCard",
        "one",
        "which of several engine cores (--data-parallel-size) takes a request",
    ),
    Point(
        "grammar",
        "engine.interfaces.grammar:GrammarCard",
        "in_turn",
        "constraints on outputs (structured outputs); a comma-separated order, the first that enforces one takes it",
    ),
    Point(
        "tool_parser",
        "engine.interfaces.tool_parser:ToolParserCard",
        "recognises",
        "finds the calls of tools in a model's text; by the chat template where none is named, or none",
        flag="tool-call-parser",
    ),
    Point(
        "reasoning_parser",
        "engine.interfaces.reasoning_parser:ReasoningParserCard",
        "recognises",
        "divides a model's thoughts from its answer; by the chat template where none is named, or none",
    ),
)
"""Every point, in the order in which they are listed."""

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
