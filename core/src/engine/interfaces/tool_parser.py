"""Point `tool_parser`: the calls of tools in what a model writes.

Models write calls as text, each family in a form of its own. A parser reads that text as it comes in and tells what is
content and what is a call. It works in the frontend, on text; it neither renders prompts (the chat template does) nor
runs anything.

Text arrives in pieces of any size, a character or a megabyte, so a parser is a state machine: it never looks at
text again that it has taken, and holds back only what it cannot tell yet (half a marker). What the pieces were makes
no difference to what is told all in all. Text that begins like a call and is none is content, to the last character.

`engine_kit.tool_text` has the parts from which such parsers are made; nobody has to use them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

from engine.plugin import Card

if TYPE_CHECKING:
    from engine.interfaces.context import FrontContext


@dataclass(frozen=True, kw_only=True)
class FunctionTool:
    """A function that a model may call, as a request offers it.

    Args:
        name: as the model calls it.
        description: what it does; may be empty.
        parameters: the JSON schema of its arguments, which are an object.
        strict: the arguments must follow the schema, by a constraint on what the model may write.
    """

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    strict: bool = False


@dataclass(frozen=True, kw_only=True)
class ToolParserNeed:
    """What the engine asks of a tool parser.

    Args:
        chat_template: the source of the model's chat template, the one for tools where it has several; "" for none.
        architecture: of the model, as its config.json names it.
    """

    chat_template: str = ""
    architecture: str = ""


class CallTag(NamedTuple):
    """How a model writes the call of one tool: `begin`, the arguments as JSON, `end`."""

    name: str
    begin: str
    end: str


class CallForm(NamedTuple):
    """How a model writes calls, for a grammar that makes it write some.

    Args:
        tags: one for each tool.
        separator: between two calls.
        before, after: the first and the last.
        trigger: the text with which every tag begins, and that stands nowhere else; "" where there is none.
    """

    tags: tuple[CallTag, ...]
    separator: str = ""
    before: str = ""
    after: str = ""
    trigger: str = ""


class ToolParserCard(Card):
    """Describes a form of calls. `unsupported` gets a `ToolParserNeed`; where the user names no parser, the first by
    priority that also `recognises` it is at work, and none where none does."""

    reads_special_tokens: ClassVar[bool] = False
    """What begins a call is a special token in some tokenizers: requests with tools then keep these in their text."""

    @classmethod
    def recognises(cls, need: ToolParserNeed) -> bool:
        """Whether the model writes calls in this form, as far as its chat template tells. Pure and cheap."""
        return False

    @classmethod
    def write(cls, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
        """What a model writes that calls these functions, (name, arguments), in this order: the form by example, for
        tests and people.

        Raises ValueError for calls that cannot be written in it.
        """
        raise NotImplementedError


class ToolCallDelta(NamedTuple):
    """News of a call. The first of a call has its name, the last is `complete`; all between them add to its arguments.

    Args:
        call: which one, counted from 0 in the order in which they begin. One call ends before the next begins.
        name: of the function, in the first; else "".
        call_id: in the first, where the model's form has ids; "" lets the server make one.
        arguments: more of the arguments' JSON text. All of a complete call together are a JSON object.
        complete: the arguments have ended.
    """

    call: int
    name: str = ""
    call_id: str = ""
    arguments: str = ""
    complete: bool = False


class BrokenCall(NamedTuple):
    """A call that was begun turns out to be none, or does not end. Nothing more comes of it; what follows is content.

    Args:
        call: as it was told.
        text: all text of which it was made, as the model wrote it: who has not shown the call shows this as content.
        untold: the end of that text of which no delta has told: who has shown the call shows this as content.
    """

    call: int
    text: str
    untold: str = ""


ToolEvent = str | ToolCallDelta | BrokenCall
"""What a parser tells, in the order of the text: content, or news of a call."""


class ToolStream(Protocol):
    """One answer's way through a parser."""

    def push(self, text: str) -> Sequence[ToolEvent]:
        """More of the text. Takes time in proportion to its length, whatever came before."""

    def finish(self) -> Sequence[ToolEvent]:
        """The text has ended: what was held back. Calls that are not complete are broken."""


class ToolParser(Protocol):
    """A parser at work, in the frontend. Built with a `FrontContext`. Called from one thread."""

    def __init__(self, context: FrontContext) -> None: ...

    def stream(self, tools: Sequence[FunctionTool]) -> ToolStream:
        """Begin with an answer to a request that offers these tools. Streams know nothing of each other.

        A name that is not among them is told like any other where markers make plain that it is a call; a form without
        markers takes the text for content.
        """

    def form(self, tools: Sequence[FunctionTool]) -> CallForm | None:
        """How calls of these tools are written, for grammars; None where that is no text around JSON arguments."""
