"""Grammars with one planted fault each, in the places of the reference driver and of one that serves more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from broken_schemas import SCHEMA_MUTANTS
from mutant_suites import suites_of
from plain_grammar import Plain
from plain_grammar_card import PlainGrammar

from engine_reference.grammar_choice import ChoiceBody, ChoiceMatcher
from engine_sdk.conformance import GrammarConformance

KEYWORDS = (
    "enum", "const", "type", "minimum", "maximum", "minLength", "maxLength", "pattern", "required",
    "additionalProperties", "properties", "items", "minItems", "maxItems", "anyOf", "$ref",
)  # fmt: skip
MORE_KEYWORDS = (
    "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "prefixItems", "uniqueItems", "contains", "minContains",
    "maxContains", "unevaluatedItems", "patternProperties", "propertyNames", "minProperties", "maxProperties",
    "dependentRequired", "dependentSchemas", "unevaluatedProperties", "oneOf", "allOf", "not", "if",
)  # fmt: skip


def dropping(keyword: str) -> type:
    """A driver that does not read one keyword of a schema."""
    name = f"Drops{keyword.strip('$')[0].upper()}{keyword.strip('$')[1:]}"
    words = {"__doc__": f"dropped grammar keyword: `{keyword}` is not enforced", "__module__": __name__}
    return type(name, (Plain,), {**words, "dropped": frozenset({keyword})})


class OneRepeatLess(Plain):
    """a counted repetition of a regular expression may come once less"""

    def matches(self, pattern: str) -> Any:
        return super().matches(pattern.replace("{2,4}", "{1,4}"))


class FirstBranch(Plain):
    """only the first branch of an alternative is taken"""

    def matches(self, pattern: str) -> Any:
        return super().matches(pattern.replace("yes|no", "yes"))


class ArraysAreObjects(Plain):
    """any JSON is taken for an object"""

    def compile(self, constraint: Any, end_token_ids: Sequence[int]) -> Any:
        if constraint.json_object:
            constraint = type(constraint)(choice=["{}", '{"a":1}', "[]"])
        return super().compile(constraint, end_token_ids)


class RefusesWithoutName(Plain):
    """what is not enforced is refused without naming it"""

    def compile(self, constraint: Any, end_token_ids: Sequence[int]) -> Any:
        from engine.types.errors import InvalidRequestError

        if constraint.json is not None:
            raise InvalidRequestError("use this", "it is not possible")
        return super().compile(constraint, end_token_ids)


class EveryToken(ChoiceBody):
    """masks allow every token"""

    def fill_masks(self, matchers: Any, rows: np.ndarray, out: np.ndarray) -> None:
        out[rows] = -1


class NoEnd(ChoiceBody):
    """a text that another one continues may not end"""

    def compile(self, constraint: Any, end_token_ids: Sequence[int]) -> Any:
        return super().compile(constraint, ())


class EndsAnywhere(ChoiceBody):
    """the end may follow anywhere"""

    def fill_masks(self, matchers: Any, rows: np.ndarray, out: np.ndarray) -> None:
        super().fill_masks(matchers, rows, out)
        out[rows, 8] |= 1


class OneSpelling(ChoiceBody):
    """tokens of several bytes are left out of the masks"""

    def fill_masks(self, matchers: Any, rows: np.ndarray, out: np.ndarray) -> None:
        super().fill_masks(matchers, rows, out)
        out[rows, 8] &= 0b11
        out[rows, 9:] = 0


class RowsInOrder(ChoiceBody):
    """masks are written to the first rows, whatever rows are named"""

    def fill_masks(self, matchers: Any, rows: np.ndarray, out: np.ndarray) -> None:
        super().fill_masks(matchers, np.arange(len(rows)), out)


class ClearsOthers(ChoiceBody):
    """rows that are not named are cleared"""

    def fill_masks(self, matchers: Any, rows: np.ndarray, out: np.ndarray) -> None:
        out[:] = 0
        super().fill_masks(matchers, rows, out)


class OnlyAdds(ChoiceBody):
    """bits are set, and none is cleared"""

    def fill_masks(self, matchers: Any, rows: np.ndarray, out: np.ndarray) -> None:
        before = out[rows].copy()
        super().fill_masks(matchers, rows, out)
        out[rows] |= before


class ReadsEarly(ChoiceBody):
    """the vocabulary is read when the body is built"""

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        context.vocabulary()


class LosesTheLast(ChoiceBody):
    """the last text of a choice is forgotten"""

    def compile(self, constraint: Any, end_token_ids: Sequence[int]) -> Any:
        texts = constraint.choice
        return super().compile(type(constraint)(choice=texts[:-1] or texts), end_token_ids)


class WithMatcher(ChoiceBody):
    """The base of those whose matchers are broken."""

    matcher: type = ChoiceMatcher

    def compile(self, constraint: Any, end_token_ids: Sequence[int]) -> Any:
        made = super().compile(constraint, end_token_ids)
        return self.matcher(made.node, made._ends)


class Lenient(ChoiceMatcher):
    """Takes everything, and goes on where it can."""

    __slots__ = ()

    def accept(self, tokens: Sequence[int]) -> int:
        for token in tokens:
            super().accept([token])
        return len(tokens)


class AllOrNothing(ChoiceMatcher):
    """Goes on behind a token that is not allowed."""

    __slots__ = ()

    def accept(self, tokens: Sequence[int]) -> int:
        count = super().accept(tokens)
        if count < len(tokens):
            super().accept(tokens[count + 1 :])
        return count


class NeverFinished(ChoiceMatcher):
    """Waits for an end that nobody may write."""

    __slots__ = ()
    finished = False


class EarlyFinished(ChoiceMatcher):
    """Finished where a text is complete, though it may go on."""

    __slots__ = ()

    @property
    def finished(self) -> bool:
        return self._ended or self.node.complete


class StaysEnded(ChoiceMatcher):
    """Goes back, and remains at the end."""

    __slots__ = ()

    def rollback(self, num_tokens: int) -> None:
        ended = self._ended
        super().rollback(num_tokens)
        self._ended = ended


class OneShort(ChoiceMatcher):
    """Goes back one token less, where there are several."""

    __slots__ = ()

    def rollback(self, num_tokens: int) -> None:
        super().rollback(max(1, num_tokens - 1))


class ShortMemory(ChoiceMatcher):
    """Remembers 32 tokens."""

    __slots__ = ()

    def rollback(self, num_tokens: int) -> None:
        super().rollback(min(num_tokens, 32))


class Forgets(ChoiceMatcher):
    """Goes back to the beginning."""

    __slots__ = ()

    def rollback(self, num_tokens: int) -> None:
        super().rollback(len(self._path))


class Guesses(ChoiceMatcher):
    """Takes the first way for the only one."""

    __slots__ = ()

    def forced_bytes(self) -> bytes:
        return super().forced_bytes() or bytes(list(self.node.children)[:1])


class Hurries(ChoiceMatcher):
    """Goes on where the output may end."""

    __slots__ = ()

    def forced_bytes(self) -> bytes:
        forced, node = bytearray(), self.node
        while len(node.children) == 1:
            ((byte, node),) = node.children.items()
            forced.append(byte)
        return bytes(forced)


class Moves(ChoiceMatcher):
    """Stands behind what it was asked for."""

    __slots__ = ()

    def forced_bytes(self) -> bytes:
        forced = super().forced_bytes()
        for byte in forced:
            self.node = self.node.children[byte]
        return forced


class AcceptsAnything(WithMatcher):
    """matchers accept what masks forbid"""

    matcher = Lenient


class LeavesTraces(WithMatcher):
    """tokens behind one that is not allowed are taken all the same"""

    matcher = AllOrNothing


class NotFinished(WithMatcher):
    """a complete output that nothing may follow is not finished"""

    matcher = NeverFinished


class FinishedTooEarly(WithMatcher):
    """a complete output that may also go on is finished"""

    matcher = EarlyFinished


class EndsForGood(WithMatcher):
    """a rollback over the end leaves the output ended"""

    matcher = StaysEnded


class RollsBackLess(WithMatcher):
    """a rollback of several tokens leaves one of them"""

    matcher = OneShort


class RollsBackNear(WithMatcher):
    """no more than 32 tokens are taken back"""

    matcher = ShortMemory


class RollsBackAll(WithMatcher):
    """a rollback leads to the beginning"""

    matcher = Forgets


class ForcesTheFirst(WithMatcher):
    """of several ways the first is said to be forced"""

    matcher = Guesses


class ForcesPastEnds(WithMatcher):
    """bytes behind a complete output are said to be forced"""

    matcher = Hurries


class ForcingMoves(WithMatcher):
    """what is forced is taken as written when it is asked for"""

    matcher = Moves


class ClosesOnce(ChoiceBody):
    """what is closed is closed a second time, which fails"""

    def close(self) -> None:
        del self._tree


PLAIN_MUTANTS = [
    *map(dropping, (*KEYWORDS, *MORE_KEYWORDS)), *SCHEMA_MUTANTS, OneRepeatLess, FirstBranch, ArraysAreObjects,
    RefusesWithoutName,
]  # fmt: skip
CHOICE_MUTANTS = [
    EveryToken, NoEnd, EndsAnywhere, OneSpelling, RowsInOrder, ClearsOthers, OnlyAdds, ReadsEarly, LosesTheLast,
    AcceptsAnything, LeavesTraces, NotFinished, FinishedTooEarly, EndsForGood, RollsBackLess, RollsBackNear,
    RollsBackAll, ForcesTheFirst, ForcesPastEnds, ForcingMoves, ClosesOnce,
]  # fmt: skip
MUTANTS = [*PLAIN_MUTANTS, *CHOICE_MUTANTS]

globals().update(suites_of(GrammarConformance, PlainGrammar, PLAIN_MUTANTS))
globals().update(suites_of(GrammarConformance, "choice", CHOICE_MUTANTS))


class TestUnbroken(GrammarConformance):
    card = PlainGrammar
