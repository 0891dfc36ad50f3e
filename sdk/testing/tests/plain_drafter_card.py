"""The card of a drafter that returns probabilities."""

from __future__ import annotations

from engine.interfaces.drafter import DrafterCard


class PlainDrafter(DrafterCard):
    """Draws the next token by the one before it, from a fixed table of probabilities."""

    framework = "torch"
    body = "mutants_drafter:Plain"
