"""Point `grammar`: constraints on what a request may write (structured outputs).

A grammar driver turns a constraint into a *matcher*, which says after every token which tokens may come next. It works
in the engine core's process, on token ids and on the bytes that each id stands for; it sees neither text nor logits.
What it says travels to the workers as bit masks, and tokens that are masked are not drawn.

    compile      off the hot path: in threads of the core's, while the request waits and others run; what may run away
                 a driver does in processes of its own, which have limits and can be killed (`engine_kit.compiling`)
    fill_masks   once a step, for all constrained rows at once
    accept       once a step and row, with the tokens that came back

Steps are planned ahead: the forward pass of a step is launched before the tokens that its masks depend on are known,
and only its sampling waits (`StepPlan.masks_follow`, `Executor.sample`). A matcher therefore only ever hears of tokens
that are part of the output; those of a request that is preempted and computed again are not repeated.

Where a row has drafts, its matcher is led along them for the masks of their positions, by `accept`, and back to where
it stood, by `rollback`, before anything else is asked of it. That needs a card that says `rollback`: other drivers'
matchers get no drafts. What a constraint forces (`forced_bytes`) makes drafts, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Protocol

from engine.plugin import Card

if TYPE_CHECKING:
    import numpy as np

    from engine.interfaces.context import GrammarContext
    from engine.types.structured_outputs import StructuredOutputsParams


MAX_ROLLBACK = 64
"""The most tokens that a matcher is asked to take back, counted from the furthest place at which it has stood."""


class GrammarCard(Card):
    """Describes a grammar driver, and refuses what it cannot enforce. `unsupported` gets None."""

    constraints: ClassVar[frozenset[str]] = frozenset()
    """The fields of `StructuredOutputsParams` that it enforces. Requests that set another are refused by its name."""

    rollback: ClassVar[bool] = False
    """Its matchers have `Matcher.rollback` and `Matcher.forced_bytes`. Without it requests under its constraints are
    not drafted for, and do not jump forward."""

    @classmethod
    def verify(cls, constraint: StructuredOutputsParams) -> None:
        """Check a verified constraint of one of `constraints`. Called in the frontend, before the request is sent:
        what can be refused cheaply is refused here, the rest in `Grammar.compile`.

        Raises InvalidRequestError, which names the keyword that cannot be enforced: nothing is silently dropped.
        """


class Matcher(Protocol):
    """One request's place in its constraint. Used by one thread at a time."""

    def accept(self, tokens: Sequence[int]) -> int:
        """Tokens were added to the output. Returns how many of them the constraint allows, in order; the matcher then
        stands behind those. Fewer than all end the request with an error.

        Raises EngineError, with which the request ends: the matcher has found that it cannot go on, because its masks
        take too long, say. Nothing is asked of it any more.
        """

    def rollback(self, num_tokens: int) -> None:
        """Stand where it stood before the last tokens that were accepted: so many, at most `MAX_ROLLBACK`, and not more
        than there were. An end of sequence may be among them. Called where the card says `rollback`."""

    def forced_bytes(self) -> bytes:
        """What must come next, in whatever tokens: as far as there is no other way to go on, and the output cannot end.
        b"" where there is a choice, or where that is not known. Called where the card says `rollback`, perhaps once a
        step; it changes nothing. The core computes these bytes' tokens together, and checks them under their masks."""

    @property
    def finished(self) -> bool:
        """The output is complete and nothing but its end may follow: the request ends here, and no token is drawn for
        the end. A complete output that may also go on is not finished: there the mask allows the ends."""


class Grammar(Protocol):
    """A grammar driver at work, in the engine core's process. Built with a `GrammarContext`."""

    def __init__(self, context: GrammarContext) -> None: ...

    def compile(self, constraint: StructuredOutputsParams, end_token_ids: Sequence[int]) -> Matcher:
        """A matcher at the beginning of the output. Takes as long as it takes; called by several threads at once.

        Args:
            constraint: verified, by the card too.
            end_token_ids: ids that end the sequence; allowed where the output is complete. May be empty: then the
                request ends where the matcher is `finished`.

        Raises InvalidRequestError, which ends this request alone.
        """

    def fill_masks(self, matchers: Sequence[Matcher], rows: np.ndarray, out: np.ndarray) -> None:
        """Write which tokens may come next. On the hot path: a native driver lets go of the interpreter's lock.

        Args:
            matchers: m of this driver's, none twice.
            rows: int32 [m]; the row of `out` of each.
            out: int32 [rows, ceil(vocab_size / 32)]; bit t % 32 of word t // 32 says that token t is allowed. The rows
                named are written in full, others are left as they are; bits past the vocabulary are not read.
        """

    def close(self) -> None:
        """The engine shuts down: end what compiles, and the processes that the driver has started. `compile` may be
        under way, and raises. Idempotent; nothing else is asked afterwards."""
