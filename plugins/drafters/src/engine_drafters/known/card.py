"""The card of a drafter that knows the answers, for measurements.

`engine bench speculation` uses it."""

from __future__ import annotations

from pydantic import Field

from engine.interfaces.drafter import DrafterCard, DrafterOptions


class KnownOptions(DrafterOptions):
    """Options of `known`.

    Args:
        answers: a JSON file: a list of [number of the prompt's tokens, ids of prompt and answer].
        right: the probability that a draft is right.
        seed: of which are.
    """

    answers: str = ""
    right: float = Field(default=0.8, ge=0, le=1)
    seed: int = Field(default=0, ge=0)


class KnownDrafter(DrafterCard):
    """Copies answers that were recorded before, with mistakes: what would a drafter that is right so often bring?"""

    priority = -100
    Options = KnownOptions
    body = "engine_drafters.known.drafter:KnownDrafterBody"
