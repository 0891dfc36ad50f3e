"""The card of a grammar that serves more kinds of constraint than the reference driver."""

from __future__ import annotations

from engine.interfaces.grammar import GrammarCard


class PlainGrammar(GrammarCard):
    """Lists every text that fits, up to a few repetitions, and allows these."""

    constraints = frozenset({"choice", "regex", "json", "json_object"})
    rollback = True
    body = "plain_grammar:Plain"
