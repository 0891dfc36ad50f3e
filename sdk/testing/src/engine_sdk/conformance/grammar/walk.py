"""Whole texts under a constraint: whether they can be written, and what a refusal names."""

from __future__ import annotations

import re
from typing import Any

from engine.interfaces.grammar import MAX_ROLLBACK, Grammar, GrammarCard, Matcher
from engine.types.errors import InvalidRequestError
from engine.types.structured_outputs import StructuredOutputsParams
from engine_kit.schemas.places import KEYWORDS_OF
from engine_sdk.conformance.grammar.cases import END

ASKING = frozenset().union(*KEYWORDS_OF.values()) | {
    "type", "enum", "const", "$ref", "$dynamicRef", "$anchor", "$dynamicAnchor", "$id", "allOf", "anyOf", "oneOf",
    "not", "if", "then", "else", "dependencies",
}  # fmt: skip
"""Keywords that a refusal may name."""
_NAMED = re.compile(r"structured_outputs\.json='([^']+)' in the schema")


class Walk:
    """Texts under one constraint, one after the other, byte by byte.

    Args:
        grammar: the driver.
        constraint: as a driver is handed it.
        rollback: the card says `rollback`: the matcher is led back to the beginning, where it is not too far. Else, and
            where it is, a new one is compiled.

    Raises InvalidRequestError where the driver refuses the constraint.
    """

    def __init__(self, grammar: Grammar, constraint: StructuredOutputsParams, rollback: bool) -> None:
        self._grammar = grammar
        self._constraint = constraint
        self._rollback = rollback
        self._matcher: Matcher | None = self._compiled()

    def writes(self, text: str) -> bool:
        """Whether a text can be written, and be the whole output."""
        matcher, data = self._matcher or self._compiled(), list(text.encode())
        self._matcher = None
        try:
            taken = matcher.accept(data)
            whole = taken == len(data) and matcher.finished
            if taken == len(data) and not whole:
                whole = matcher.accept([END]) == 1
                taken += whole
        except InvalidRequestError:  # it gives up
            return False
        if self._rollback and taken <= MAX_ROLLBACK:
            matcher.rollback(taken)
            self._matcher = matcher
        return whole

    def _compiled(self) -> Matcher:
        return self._grammar.compile(self._constraint, (END,))


def taken(card: type[GrammarCard], grammar: Grammar, constraint: StructuredOutputsParams) -> Walk:
    """Texts under a constraint. Raises InvalidRequestError where the driver refuses it."""
    card.verify(constraint)
    return Walk(grammar, constraint, card.rollback)


def named(error: InvalidRequestError, schema: Any) -> str:
    """The keyword that the refusal of a schema names, "false" for a schema that says that alone; "" where it names
    none: then its user cannot tell what to change. Where several drivers refuse it is the first one's."""
    if schema is False:
        return "false"
    if found := _NAMED.search(error.asked) or _NAMED.search(error.found):
        return found[1]
    said = error.found.partition("{")[0]  # what follows quotes the schema itself
    return next((word for word in re.findall(r"""["']([$\w]+)["']""", said) if word in ASKING), "")
