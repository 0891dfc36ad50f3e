"""The card of a drafter that makes all drafts in one pass; see `one_pass`."""

from __future__ import annotations

from engine.interfaces.drafter import DrafterOptions
from engine.types.model import ModelDescription
from engine_drafters.eagle.card import EagleDrafter


class OnePass(EagleDrafter):
    """EAGLE's and EAGLE-2's heads, asked once."""

    needs = frozenset({"hidden", "models"})
    body = "one_pass:OnePassBody"

    @classmethod
    def streams(cls, target: ModelDescription, options: DrafterOptions) -> tuple[int, ...]:
        return ()
