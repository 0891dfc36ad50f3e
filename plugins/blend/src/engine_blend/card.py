"""The card of `cacheblend`."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from engine.interfaces.evictor import EvictorCard

if TYPE_CHECKING:
    from engine.types.start import CoreStart


class CacheBlendOptions(BaseModel):
    """Options of `cacheblend`.

    Attributes:
        ratio: of a prompt's tokens that are reused in a step, how many are recomputed behind the check layer: those
            whose keys deviate most. 1 computes all of them, exactly; 0 none.
        separator: a text, or one special token, that stands between chunks; its tokens are always computed.
        check_layer: up to this one all tokens are computed, and by its keys those that deviate are told.
        shortest: tokens of a chunk that is worth reusing.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    ratio: float = Field(default=0.15, ge=0.0, le=1.0)
    separator: str = Field(default=" # # ", min_length=1)
    check_layer: int = Field(default=1, ge=0)
    shortest: int = Field(default=16, ge=1)


class CacheBlend(EvictorCard):
    """Least recently used first; reuses chunks of prompts in any order, and recomputes what deviates most of them."""

    priority = -20
    by_name = True  # what it answers is approximate
    requires_minor = 2
    reuses = True
    Options = CacheBlendOptions
    body = "engine_blend.chunks:Chunks"
    bodies: ClassVar[dict[str, str]] = {"worker": "engine_blend.blend:Blend"}

    @classmethod
    def conflicts(cls, start: CoreStart) -> list[str]:
        """A check layer that leaves no layer in which to save something."""
        (choice,) = (choice for choice in start.worker.choices if choice.point == "evictor")
        options, layers = CacheBlendOptions(**choice.options), start.worker.model.num_layers
        if options.check_layer >= layers - 1:
            return [f"behind check layer {options.check_layer} there is none of {layers} layers left to save work in"]
        return []
