"""Point `reasoning_parser`: where a model's thoughts end and its answer begins.

A parser reads what the model writes as it comes in, under the same terms as a tool parser (`engine.interfaces
.tool_parser`): pieces of any size, text that was taken is not looked at again, nothing is lost. Tool parsers see only
the answer, not the thoughts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol

from engine.plugin import Card

if TYPE_CHECKING:
    from engine.interfaces.context import FrontContext


@dataclass(frozen=True, kw_only=True)
class ReasoningParserNeed:
    """What the engine asks of a reasoning parser.

    Args:
        chat_template: the source of the model's chat template; "" for none.
        architecture: of the model, as its config.json names it.
    """

    chat_template: str = ""
    architecture: str = ""


class ReasoningParserCard(Card):
    """Describes how a model marks its thoughts. `unsupported` gets a `ReasoningParserNeed`; where the user names no
    parser, the first by priority that also `recognises` it is at work, and none where none does."""

    begin: ClassVar[str] = ""
    """The text before the thoughts; the prompt may end in it, or the model writes it."""
    end: ClassVar[str] = ""
    """The text that ends them: from there on constraints on the answer hold."""

    @classmethod
    def recognises(cls, need: ReasoningParserNeed) -> bool:
        """Whether the model marks thoughts so, as far as its chat template tells. Pure and cheap."""
        return False


class ReasoningDelta(NamedTuple):
    """More of the thoughts, and more of the answer. Once there is an answer, no more thoughts come."""

    reasoning: str = ""
    content: str = ""


class ReasoningStream(Protocol):
    """One answer's way through a parser."""

    @property
    def thinking(self) -> bool:
        """Whether, as far as is known, what comes next belongs to the thoughts."""

    def push(self, text: str) -> ReasoningDelta:
        """More of the text. Takes time in proportion to its length, whatever came before."""

    def finish(self) -> ReasoningDelta:
        """The text has ended: what was held back."""


class ReasoningParser(Protocol):
    """A parser at work, in the frontend. Built with a `FrontContext`. Called from one thread."""

    def __init__(self, context: FrontContext) -> None: ...

    def stream(self, prompt: str) -> ReasoningStream:
        """Begin with an answer.

        Args:
            prompt: the end of the rendered prompt, at least a thousand characters of it where it is as long: templates
                open, or close, the thoughts there.
        """
