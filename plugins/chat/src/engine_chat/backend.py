"""Who answers: an engine in this process, or a server."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

Message = dict[str, str]


class Piece(NamedTuple):
    """A part of an answer.

    Attributes:
        text: what is new.
        finish_reason: "stop", "length", ...; None where more comes.
        stop_reason: the stop text or stop token that ended it; None for the end of sequence.
    """

    text: str
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class Backend(Protocol):
    """Answers conversations, one at a time.

    Attributes:
        limited: answers have a length that somebody chose: they may end before the context is full.
    """

    limited: bool

    def answer(self, messages: Sequence[Message]) -> Iterator[Piece]:
        """The answer as it comes. Closing the iterator, or Ctrl-C, stops it.

        Raises:
            PromptTooLongError, KVCacheTooSmallError: the conversation does not fit.
            EngineDeadError: there will be no more answers.
            EngineError: this one failed.
            KeyboardInterrupt: Ctrl-C was pressed; the backend can be used again.
        """
        ...

    def close(self) -> None:
        """Stop, and free what is held. Idempotent."""
        ...
