"""The card of the suffix drafter."""

from __future__ import annotations

from pydantic import Field, model_validator

from engine.interfaces.drafter import DrafterCard, DrafterOptions


class SuffixOptions(DrafterOptions):
    """Options of `suffix`.

    Args:
        max_tokens: of finished answers that are remembered, of all `cache_salt`s together; 0: none. A token takes about
            half a kilobyte on the host, in each rank.
        max_own_tokens: of each running request, the newest ones, in which its own text is looked for. They take
            as much each.
        max_depth: the longest piece of text that is compared, in tokens.
        min_match: the shortest.
        max_factor: at most so many drafts for each token of the match: who remembers little says little.
        min_probability: drafts end where the chance that all of them are right, by how often each followed the text
            before it, falls below this.
    """

    max_tokens: int = Field(default=65_536, ge=0)
    max_own_tokens: int = Field(default=16_384, ge=2)
    max_depth: int = Field(default=24, ge=1, le=256)
    min_match: int = Field(default=1, ge=1, le=256)
    max_factor: float = Field(default=2.0, gt=0)
    min_probability: float = Field(default=0.1, ge=0, le=1)

    @model_validator(mode="after")
    def _check(self) -> SuffixOptions:
        if self.min_match > self.max_depth:
            raise ValueError(f"min_match {self.min_match} is above max_depth {self.max_depth}")
        return self


class SuffixDrafter(DrafterCard):
    """Suffix decoding: no model, and a memory of what was answered before."""

    priority = 0
    Options = SuffixOptions
    body = "engine_drafters.suffix.drafter:SuffixDrafterBody"
