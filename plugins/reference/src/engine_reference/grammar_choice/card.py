"""The card of grammar `choice`."""

from __future__ import annotations

from engine.interfaces.grammar import GrammarCard


class ChoiceGrammar(GrammarCard):
    """The output is one of some texts: `structured_outputs.choice`, and nothing else."""

    priority = -100  # a driver that enforces more is taken where one is installed
    rollback = True
    constraints = frozenset({"choice"})
    body = "engine_reference.grammar_choice.body:Choice"
