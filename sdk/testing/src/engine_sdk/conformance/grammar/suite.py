"""The suite of point `grammar`."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import numpy as np
import pytest

from engine.interfaces.context import GrammarContext
from engine.interfaces.grammar import MAX_ROLLBACK, Grammar, GrammarCard, Matcher
from engine.types.errors import InvalidRequestError
from engine.types.structured_outputs import KINDS, StructuredOutputsParams
from engine_sdk.conformance.base import Conformance, not_served
from engine_sdk.conformance.grammar.cases import CASES, END, VOCAB_SIZE, GrammarCase, vocabulary
from engine_sdk.conformance.grammar.parts import HELD
from engine_sdk.conformance.grammar.spellings import spellings, usual
from engine_sdk.conformance.grammar.walk import named, taken
from engine_sdk.conformance.timing import median_seconds

WORDS = -(-VOCAB_SIZE // 32)
PIECES = vocabulary()
SPELLINGS = ("bytes", "longest", "random")

each_case = pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])

each_keyword = pytest.mark.parametrize("keyword", HELD)


class GrammarConformance(Conformance):
    """What fits can be written, in every spelling; what does not fit cannot; masks and matchers say the same."""

    point = "grammar"
    protocol = "Grammar"

    @classmethod
    def needs(cls) -> Sequence[None]:
        return [None]

    @classmethod
    def make(cls, pieces: Callable[[], Sequence[bytes | None]] = vocabulary) -> Grammar:
        """A body over a vocabulary of bytes and some longer pieces."""
        options = cls.subject().options
        return cls.body()(GrammarContext(vocab_size=VOCAB_SIZE, vocabulary=pieces, options=options))  # type: ignore[no-any-return]

    @classmethod
    def grammar(cls, case: GrammarCase) -> Grammar:
        """The body, made once, for a constraint that it takes; skipped for one that it refuses by name."""
        card = cast("type[GrammarCard]", cls.subject().card)
        if case.kind not in card.constraints:
            not_served(f"structured_outputs.{case.kind} is not among the card's constraints")
        grammar: Grammar = cls.once("grammar", cls.make)
        try:
            case.constraint.verify()
            card.verify(case.constraint)
            grammar.compile(case.constraint, (END,))
        except InvalidRequestError as error:
            assert case.keyword in str(error), f"it refuses {case.keyword!r} without naming it: {error}"
            not_served(str(error))
        return grammar

    # -- what can be written -----------------------------------------------------------------------------------------
    @each_case
    def test_what_fits_can_be_written(self, case: GrammarCase) -> None:
        """Byte by byte, in longest pieces, in any: each token is in the mask and accepted, and the end may follow."""
        grammar = self.grammar(case)
        for spelling in SPELLINGS:
            for texts in case.fits:
                assert any(_written(grammar, case.constraint, text, spelling) for text in texts), (
                    f"{texts[0]!r}: {spelling}"
                )

    @each_case
    def test_nothing_else_can_be_written(self, case: GrammarCase) -> None:
        """Somewhere on the way a token is not in the mask, or the end may not follow."""
        grammar = self.grammar(case)
        for text in case.others:
            for spelling in SPELLINGS:
                assert not _written(grammar, case.constraint, text, spelling), f"{text!r} can be written: {spelling}"

    @each_case
    def test_whatever_is_written_fits(self, case: GrammarCase) -> None:
        """Random walks through the masks: where one ends its text fits, and no mask is empty before."""
        grammar, ended = self.grammar(case), 0
        for seed in range(25):
            random, matcher = np.random.default_rng([seed, 1]), grammar.compile(case.constraint, (END,))
            tokens: list[int] = []
            while not matcher.finished and len(tokens) < 150:
                allowed, behind = _mask(grammar, matcher), _text(tokens)
                assert allowed, f"nothing may follow {behind!r}, which is not finished"
                assert all(token == END or (token < len(PIECES) and PIECES[token]) for token in allowed), allowed
                token = END if END in allowed and random.random() < 0.3 else int(random.choice(sorted(allowed)))
                assert matcher.accept([token]) == 1, f"{token} is in the mask behind {behind!r}, and not accepted"
                if token == END:
                    break
                tokens.append(token)
            else:
                if not matcher.finished:
                    continue
            ended += 1
            assert case.check(_text(tokens)), f"{_text(tokens)!r} was written, and does not fit"
        assert ended, "no walk came to an end"

    @each_keyword
    def test_schemas_hold(self, keyword: str) -> None:
        """Keyword by keyword: an invalid instance can be written in no spelling, a valid one in a usual one; or the
        schema is refused, and the refusal names a keyword."""
        card = cast("type[GrammarCard]", self.subject().card)
        if "json" not in card.constraints:
            not_served("structured_outputs.json is not among the card's constraints")
        grammar: Grammar = self.once("grammar", self.make)
        faults: list[str] = []
        refusals: list[InvalidRequestError] = []
        for held in HELD[keyword]:
            try:
                constraint = StructuredOutputsParams(json=json.dumps(held.schema))
                walk = taken(card, grammar, constraint)
            except InvalidRequestError as error:
                refusals.append(error)
                if not named(error, held.schema):
                    faults.append(f"{held.schema}: the refusal names no keyword: {error}")
                continue
            for instance in held.valid:
                if not any(walk.writes(text) for text in usual(instance)):
                    faults.append(f"{held.schema}: {usual(instance)[0]} is valid, and cannot be written")
            for texts in (*map(spellings, held.invalid), *([text] for text in held.broken)):
                if (written := next((text for text in texts if walk.writes(text)), None)) is not None:
                    faults.append(f"{held.schema}: {written!r} is invalid, and can be written")
        assert not faults, f"{len(faults)} faults:\n" + "\n".join(faults)
        if len(refusals) == len(HELD[keyword]):
            not_served(str(refusals[0]))

    # -- matchers ----------------------------------------------------------------------------------------------------
    @each_case
    def test_masks_and_matchers_agree(self, case: GrammarCase) -> None:
        """At every place of a text: what is in the mask is accepted, what is not is not."""
        grammar, random = self.grammar(case), np.random.default_rng(0)
        tokens = _spelled(_first_written(grammar, case), "bytes")
        for place in range(len(tokens) + 1):
            matcher = _behind(grammar, case, tokens[:place])
            if matcher.finished:
                break
            allowed = _mask(grammar, matcher)
            some = {
                *random.integers(0, len(PIECES), 6).tolist(),
                *list(allowed)[:4],
                END,
                257,
                *tokens[place : place + 1],
            }
            for token in some:
                accepted = _behind(grammar, case, tokens[:place]).accept([token])
                assert accepted == (token in allowed), f"token {token} behind {_text(tokens[:place])!r}"

    @each_case
    def test_accept_stops_where_it_must(self, case: GrammarCase) -> None:
        """Of several tokens it takes those before the first that is not allowed, and stands behind them: the rest has
        left no trace."""
        grammar = self.grammar(case)
        tokens = _spelled(_first_written(grammar, case), "bytes")
        for place in range(len(tokens)):
            matcher = _behind(grammar, case, [])
            assert matcher.accept([*tokens[:place], 257, *tokens[place:]]) == place
            assert _mask(grammar, matcher) == _mask(grammar, _behind(grammar, case, tokens[:place]))
            assert matcher.accept(tokens[place:]) == len(tokens) - place

    @each_case
    def test_without_ends(self, case: GrammarCase) -> None:
        """A model that has no token to end with: no mask has one, and what nothing may follow is finished."""
        grammar = self.grammar(case)
        matcher = grammar.compile(case.constraint, ())
        for token in _spelled(_first_written(grammar, case), "bytes"):
            allowed = _mask(grammar, matcher)
            assert END not in allowed and token in allowed
            assert matcher.accept([token]) == 1
        assert matcher.finished or _mask(grammar, matcher), "nothing may follow, and it is not finished"

    # -- back --------------------------------------------------------------------------------------------------------
    @classmethod
    def _can_roll_back(cls) -> None:
        if not cast("type[GrammarCard]", cls.subject().card).rollback:
            not_served("the card does not say `rollback`: rows under its constraints get no drafts")

    @each_case
    def test_rollback(self, case: GrammarCase) -> None:
        """Random walks to and fro, over ends too: a matcher that was led back says what one says that has never been
        elsewhere."""
        self._can_roll_back()
        grammar = self.grammar(case)
        for seed in range(4):
            random, matcher = np.random.default_rng([seed, 2]), grammar.compile(case.constraint, (END,))
            tokens: list[int] = []
            for _ in range(20):
                for _ in range(int(random.integers(0, 6))):
                    if matcher.finished:
                        break
                    allowed = sorted(_mask(grammar, matcher))
                    token = END if END in allowed and random.random() < 0.4 else int(random.choice(allowed))
                    assert matcher.accept([token, 257]) == 1
                    tokens.append(token)
                back = int(random.integers(0, min(len(tokens), 5) + 1))
                if back:
                    matcher.rollback(back)
                    del tokens[-back:]
                fresh = _behind(grammar, case, tokens)
                assert matcher.finished == fresh.finished, f"finished behind {tokens}, {back} tokens back"
                if not fresh.finished:
                    assert _mask(grammar, matcher) == _mask(grammar, fresh), f"behind {tokens}, {back} tokens back"

    def test_rollback_far(self) -> None:
        """As many tokens as may be asked for, at once, again and again."""
        self._can_roll_back()
        length = MAX_ROLLBACK + 16
        text = "a" * length
        card, grammar = cast("type[GrammarCard]", self.subject().card), self.make()
        kind = {"choice": [text]} if "choice" in card.constraints else {"regex": f"a{{{length}}}"}
        if not kind.keys() <= card.constraints:
            not_served("neither structured_outputs.choice nor structured_outputs.regex is among the card's constraints")
        matcher = grammar.compile(StructuredOutputsParams(**kind), (END,))
        first, tokens = _mask(grammar, matcher), [ord("a")] * (length - 1)
        assert matcher.accept(tokens) == length - 1
        last = _mask(grammar, matcher)
        assert last == {token for token in first if PIECES[token] == b"a"}
        for _ in range(3):
            matcher.rollback(MAX_ROLLBACK)
            assert _mask(grammar, matcher) == first
            assert matcher.accept(tokens[:MAX_ROLLBACK]) == MAX_ROLLBACK and _mask(grammar, matcher) == last

    @each_case
    def test_forced_bytes(self, case: GrammarCase) -> None:
        """They are forced: at each of these bytes no mask has another way, nor an end. Asking changes nothing."""
        self._can_roll_back()
        grammar = self.grammar(case)
        for seed in range(3):
            random, matcher = np.random.default_rng([seed, 3]), grammar.compile(case.constraint, (END,))
            tokens: list[int] = []
            while not matcher.finished and len(tokens) < 20:
                allowed = _mask(grammar, matcher)
                forced = matcher.forced_bytes()
                assert isinstance(forced, bytes) and not matcher.finished and _mask(grammar, matcher) == allowed
                there = _behind(grammar, case, tokens)
                for place, byte in enumerate(forced):
                    ways = {END if token == END else (PIECES[token] or b"?")[0] for token in _mask(grammar, there)}
                    assert ways == {byte}, f"{forced!r} behind {_text(tokens)!r}: not forced from byte {place} on"
                    assert there.accept([byte]) == 1
                    if there.finished:
                        assert place == len(forced) - 1, f"{forced!r} behind {_text(tokens)!r} goes beyond the end"
                tokens.append(int(random.choice(sorted(allowed))))
                assert matcher.accept([tokens[-1]]) == 1
            if matcher.finished:
                assert matcher.forced_bytes() == b"", "something is forced behind the end"

    # -- masks -------------------------------------------------------------------------------------------------------
    @each_case
    def test_rows_of_masks(self, case: GrammarCase) -> None:
        """Each matcher's mask goes to its own row; the rows of others are left as they are."""
        grammar = self.grammar(case)
        tokens = _spelled(_first_written(grammar, case), "bytes")
        places = [place for place in range(len(tokens)) if not _behind(grammar, case, tokens[:place]).finished][:4]
        matchers = [_behind(grammar, case, tokens[:place]) for place in places]
        rows = np.array([5, 0, 3, 6][: len(matchers)], np.int32)
        out = np.full((7, WORDS), 0x5A5A5A5A, np.int32)
        grammar.fill_masks(matchers, rows, out)
        for row, matcher in zip(rows.tolist(), matchers, strict=True):
            assert _bits(out[row]) == _mask(grammar, matcher)
        untouched = [row for row in range(7) if row not in rows]
        assert (out[untouched] == 0x5A5A5A5A).all(), "a row of nobody's was written"

    def test_compiled_by_several_threads(self) -> None:
        """As the core does: what comes out is what one thread gets."""
        card = cast("type[GrammarCard]", self.subject().card)
        cases = [case for case in CASES if case.kind in card.constraints]
        grammar = self.make()

        def first_mask(case: GrammarCase) -> set[int] | None:
            try:
                return _mask(grammar, grammar.compile(case.constraint, (END,)))
            except InvalidRequestError:
                return None

        with ThreadPoolExecutor(6) as threads:
            found = list(threads.map(first_mask, cases * 6))
        assert found == [first_mask(case) for case in cases] * 6

    # -- what is refused ---------------------------------------------------------------------------------------------
    def test_constraints_are_known(self) -> None:
        """The card names fields of `StructuredOutputsParams`."""
        card = cast("type[GrammarCard]", self.subject().card)
        assert card.constraints and card.constraints <= set(KINDS), card.constraints - set(KINDS)

    def test_the_vocabulary_is_read_late(self) -> None:
        """Not when the body is built: it takes a while, and the engine is not up yet."""
        asked = []

        def pieces() -> Sequence[bytes | None]:
            asked.append(1)
            return vocabulary()

        self.make(pieces)
        assert not asked, "building the body reads the vocabulary"

    def test_what_the_vocabulary_cannot_spell(self) -> None:
        """It ends that request alone, with a typed error."""
        card = cast("type[GrammarCard]", self.subject().card)
        if "choice" not in card.constraints:
            not_served("structured_outputs.choice is not among the card's constraints")
        grammar = self.make(lambda: [b"a", b"b", None])
        with pytest.raises(InvalidRequestError):
            grammar.compile(StructuredOutputsParams(choice=["ab", "xyz"]), (2,))
        assert _mask(grammar, grammar.compile(StructuredOutputsParams(choice=["ab"]), (2,))) == {0}

    @classmethod
    def figure(cls) -> str | None:
        """What a step's masks cost."""
        card, grammar = cast("type[GrammarCard]", cls.subject().card), cls.make()
        case: Any = next(case for case in CASES if case.kind in card.constraints)
        matchers = [grammar.compile(case.constraint, (END,)) for _ in range(64)]
        rows, out = np.arange(64, dtype=np.int32), np.zeros((64, WORDS), np.int32)
        seconds = median_seconds(lambda: grammar.fill_masks(matchers, rows, out))
        return f"masks of 64 rows of {VOCAB_SIZE} ids, {case.name}: {seconds * 1e6:,.0f} us"

    # -- the end -----------------------------------------------------------------------------------------------------
    def test_it_can_be_closed(self) -> None:
        """Twice, also where it was never asked for anything, and where its matchers are still about."""
        unused = self.make()
        unused.close()
        unused.close()
        grammar = self.make()
        case = next(case for case in CASES if case.kind in cast("type[GrammarCard]", self.subject().card).constraints)
        matcher = grammar.compile(case.constraint, (END,))
        grammar.close()
        grammar.close()
        del matcher


# -- walking ---------------------------------------------------------------------------------------------------------
def _bits(row: np.ndarray) -> set[int]:
    bits = np.unpackbits(row.view(np.uint8), bitorder="little")[:VOCAB_SIZE]
    return set(np.flatnonzero(bits).tolist())


def _mask(grammar: Grammar, matcher: Matcher) -> set[int]:
    """The ids that may come next."""
    out = np.full((1, WORDS), -1, np.int32)
    grammar.fill_masks([matcher], np.zeros(1, np.int32), out)
    return _bits(out[0])


def _behind(grammar: Grammar, case: GrammarCase, tokens: Sequence[int]) -> Matcher:
    """A new matcher behind these tokens."""
    matcher = grammar.compile(case.constraint, (END,))
    assert matcher.accept(tokens) == len(tokens), f"{_text(tokens)!r} is not accepted in one go"
    return matcher


def _text(tokens: Sequence[int]) -> str:
    return b"".join(PIECES[token] or b"" for token in tokens).decode(errors="replace")


def _spelled(text: str, spelling: str) -> list[int]:
    """One of the ways to write a text in tokens."""
    left, tokens, random = text.encode(), [], np.random.default_rng(len(text))
    while left:
        fitting = [token for token, piece in enumerate(PIECES) if piece and left.startswith(piece)]
        if spelling == "bytes":
            token = left[0]
        elif spelling == "longest":
            token = max(fitting, key=lambda token: len(PIECES[token] or b""))
        else:
            token = int(random.choice(fitting))
        tokens.append(token)
        left = left[len(PIECES[token] or b"") :]
    return tokens


def _written(grammar: Grammar, constraint: StructuredOutputsParams, text: str, spelling: str) -> bool:
    """Whether a text can be written, and be the whole output."""
    matcher = grammar.compile(constraint, (END,))
    for token in _spelled(text, spelling):
        if matcher.finished or token not in _mask(grammar, matcher):
            return False
        assert matcher.accept([token]) == 1, f"token {token} of {text!r} is in the mask, and is not accepted"
    if matcher.finished:
        return True
    return END in _mask(grammar, matcher) and matcher.accept([END]) == 1 and matcher.finished


def _first_written(grammar: Grammar, case: GrammarCase) -> str:
    """A text that fits, in a spelling of JSON that the driver writes."""
    longest = max(case.fits, key=lambda texts: len(texts[0]))
    for text in longest:
        if _written(grammar, case.constraint, text, "bytes"):
            return text
    pytest.fail(f"{longest[0]!r} cannot be written")
