"""The cards of drafters: of one that returns probabilities, one that observes the target, one with a model."""

from __future__ import annotations

from engine.interfaces.drafter import DrafterCard, DrafterOptions


class PlainDrafter(DrafterCard):
    """Draws the next token by the one before it, from a fixed table of probabilities."""

    framework = "torch"
    body = "mutants_drafter:Plain"


class TreeDrafter(DrafterCard):
    """Drafts a tree of two branches from each token, by the token before."""

    framework = "torch"
    body = "mutants_drafter:Branching"

    @classmethod
    def branches(cls, options: DrafterOptions) -> int:
        return 2


class ObservingDrafter(DrafterCard):
    """Drafts by the target's hidden states."""

    framework = "torch"
    needs = frozenset({"hidden"})
    body = "mutants_drafter:LooksOn"


class ModelDrafter(DrafterCard):
    """Drafts with a model that reads the target's hidden states."""

    framework = "torch"
    needs = frozenset({"hidden", "models"})
    body = "mutants_drafter:WithModel"
