"""Point `tokenizer`: text to ids, ids to text, messages to a prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from engine.plugin import Card

if TYPE_CHECKING:
    from engine.interfaces.context import FrontContext


@dataclass(frozen=True, kw_only=True)
class TokenizerNeed:
    """What the engine asks of a tokenizer.

    Args:
        folder: where its files lie.
    """

    folder: str


class TokenizerCard(Card):
    """Describes a kind of tokenizer. `unsupported(need)` gets a `TokenizerNeed`."""

    @classmethod
    def chat_template(cls, folder: str, with_tools: bool) -> str:
        """The source of the chat template that renders conversations, with tools or without; "" where there is none.
        By it parsers of tool calls and of reasoning recognise a model. Raises TokenizerError for broken files."""
        return ""


class TextStream(Protocol):
    """One sequence's text as its ids come in: together what `Tokenizer.decode` makes of them all at once."""

    def push(self, ids: Sequence[int]) -> str:
        """The text that these ids complete: never half a UTF-8 character, which is held back until it is whole."""

    def flush(self) -> str:
        """What is still held back, at the end of the sequence (an unfinished character as U+FFFD)."""


class Tokenizer(Protocol):
    """A tokenizer at work, in the frontend. Built with a `FrontContext`. Safe to call from several threads."""

    def __init__(self, context: FrontContext) -> None: ...

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The end-of-sequence ids that the tokenizer's own files name; may be empty."""

    @property
    def longest_token(self) -> int | None:
        """The most characters of a text that one id stands for: a text of n characters has at least
        n / longest_token ids, so that one that cannot fit is refused before it is tokenised. None where there is no
        such number; so it is where the property is missing."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Text to ids; with `add_special_tokens`, those that the tokenizer puts around a text (BOS).

        A special token that is written in the text becomes its id, as chat templates write them. Long texts are
        tokenised in threads: whatever keeps the interpreter meanwhile stops all else that the server does.

        Raises TokenizerError for text that is no Unicode (half a surrogate pair).
        """

    def encode_pair(self, first: str, second: str) -> tuple[list[int], int | None]:
        """Two texts as one sequence, with the special tokens that the tokenizer puts around and between a pair.

        Returns the ids, and the place of the first that has token type 1; None where all have type 0.
        """

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Ids to text, all at once. Ids that the tokenizer does not know add nothing: models may have more."""

    def token(self, token_id: int) -> str:
        """One id's text alone, for logprobs; incomplete characters as U+FFFD."""

    def vocabulary(self) -> Sequence[bytes | None]:
        """[vocab_size]; the bytes that each id adds to a text that has begun. None: an id that adds none, as special
        ids do, or that the tokenizer does not know. Slow; called once, for grammars.

        Raises TokenizerError where tokens do not stand for bytes: what one adds depends on its neighbours.
        """

    def stream(self, skip_special_tokens: bool = True, prompt_token_ids: Sequence[int] = ()) -> TextStream:
        """Begin an incremental decode. The prompt's last ids may be needed to decide about a leading space."""

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        template: str | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Messages to a prompt by the chat template, in a sandbox. The template writes all special tokens itself.

        Args:
            messages: as OpenAI's clients send them: content may be a list of text parts, the arguments of a call the
                text of an object. `engine_kit.chat_messages` makes of them what templates read.
            tools: JSON schemas of functions, for templates that show them.
            add_generation_prompt: end the prompt with the beginning of the assistant's turn.
            template: the source of one, or the name of one of the model's; None takes the model's default.
            variables: further ones that the template sees.

        Raises:
            InvalidRequestError: these are no messages, they hold more than text, or a variable has the name of what is
                made from the request.
            TokenizerError: there is no template, or it refuses the messages.
        """
