"""The card of the n-gram drafter."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from engine.interfaces.drafter import DrafterCard, DrafterOptions


class NgramOptions(DrafterOptions):
    """Options of `ngram`.

    Args:
        min_match: the shortest suffix that is looked for, in tokens.
        max_match: the longest.
    """

    min_match: int = Field(default=2, ge=1, le=32)
    max_match: int = Field(default=4, ge=1, le=32)

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min_match > self.max_match:
            raise ValueError(f"min_match {self.min_match} is above max_match {self.max_match}")
        return self


class NgramDrafter(DrafterCard):
    """Prompt lookup: no model, and no memory beside the tokens, which may be torch's or numpy's."""

    priority = 0
    Options = NgramOptions
    body = "engine_reference.drafter_ngram.ngram:NgramDrafterBody"
