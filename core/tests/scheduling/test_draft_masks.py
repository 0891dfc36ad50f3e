"""Masks along drafts, against matchers that were made anew behind each draft."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from masking import driver_of

from engine.interfaces.context import GrammarContext
from engine.interfaces.grammar import MAX_ROLLBACK
from engine.scheduling.matchers import DraftedRow, RequestMatcher, draft_masks, fill_masks
from engine.types.errors import InvalidRequestError
from engine.types.structured_outputs import StructuredOutputsParams
from engine_reference.grammar_choice import ChoiceBody

PIECES = [bytes([byte]) for byte in b"abcdef"] + [b"ab", b"cd", None]
END, SIZE = 8, 9
TEXTS = ["abcdef", "abab", "cdcd", "a", "fedcba"]
GRAMMAR = ChoiceBody(GrammarContext(vocab_size=SIZE, vocabulary=lambda: PIECES))


DRIVER = driver_of(GRAMMAR)


def behind(tokens: list[int], start: list[int] | None) -> RequestMatcher:
    matcher = RequestMatcher(GRAMMAR.compile(StructuredOutputsParams(choice=TEXTS), (END,)), DRIVER, start)
    assert matcher.accept(tokens) == len(tokens)
    return matcher


def mask(matcher: RequestMatcher) -> int:
    bits = np.zeros((1, 1), np.int32)
    fill_masks([matcher], np.zeros(1, np.int32), bits)
    return int(bits[0, 0])


def walk(rng: random.Random, start: list[int] | None, length: int) -> list[int]:
    """Tokens that a request may have drawn."""
    tokens: list[int] = []
    matcher = behind([], start)
    while len(tokens) < length and not matcher.finished:
        allowed = [t for t in range(END) if mask(matcher) >> t & 1]
        if not allowed:
            break
        token = rng.choice([*allowed, *(start or [])])
        if matcher.accept([token]) == 1:
            tokens.append(token)
    return tokens


@pytest.mark.parametrize("seed", range(150))
def test_each_place_has_the_mask_of_a_matcher_that_came_there_as_output(seed: int) -> None:
    rng = random.Random(seed)
    rows, known = [], []
    for _ in range(rng.randint(1, 5)):
        start = rng.choice([None, None, [2], [2, 3], [2, 2]])
        tokens = walk(rng, start, rng.randint(0, 6))
        while tokens and behind(tokens, start).finished:
            tokens.pop()
        matcher = behind(tokens, start)
        more = walk(rng, start, 20)[len(tokens) :] if rng.random() < 0.3 else []
        drafts = [*more, *(rng.randrange(SIZE) for _ in range(rng.randint(0, 6)))][: rng.randint(0, 8)]
        stops = frozenset({END, *([rng.randrange(SIZE)] if rng.random() < 0.2 else [])})
        rows.append(DraftedRow(matcher, drafts, stops))
        known.append((tokens, start))
    counts, masks = draft_masks(rows, 1)
    assert masks.dtype == np.int32 and len(masks) == counts.sum()
    bits = iter(masks[:, 0].tolist())
    for (tokens, start), row, count in zip(known, rows, counts.tolist(), strict=True):
        for place in range(count):
            assert next(bits) == mask(behind([*tokens, *row.drafts[:place]], start))
        # It ends where no draw counts, and nowhere else.
        if count <= len(row.drafts):
            there, draft = behind([*tokens, *row.drafts[: count - 1]], start), row.drafts[count - 1]
            assert draft in row.stops or there.accept([draft]) == 0 or there.finished
        # Nothing is left of the way.
        fresh = behind(tokens, start)
        assert mask(row.matcher) == mask(fresh) and row.matcher.finished == fresh.finished
        for token in walk(rng, None, 3):
            assert row.matcher.accept([token]) == fresh.accept([token])


def test_a_matcher_that_gives_up_on_the_way() -> None:
    class Weak(type(behind([], None).matcher)):  # type: ignore[misc]
        def accept(self, tokens: Any) -> int:
            if tokens == [1]:
                raise InvalidRequestError("go on", "it is too hard")
            return int(super().accept(tokens))

        def rollback(self, num_tokens: int) -> None:
            raise AssertionError("it has no place to go back to")

    strong, made = behind([], None), behind([], None).matcher
    weak = RequestMatcher(Weak(made.node, made._ends), DRIVER)  # type: ignore[attr-defined]
    rows = [DraftedRow(matcher, [0, 1, 2], frozenset()) for matcher in (weak, strong)]
    counts, _ = draft_masks(rows, 1)
    assert counts.tolist() == [2, 4]
    assert mask(strong) == mask(behind([], None))


@pytest.mark.parametrize("start", [[2], [2, 3], [2, 2, 2], [2, 3, 2]])
@pytest.mark.parametrize("seed", range(20))
def test_a_deferred_constraint_rolls_back_over_its_beginning(start: list[int], seed: int) -> None:
    rng = random.Random(seed)
    matcher, tokens = behind([], start), []
    for _ in range(60):
        for token in rng.choices([2, 2, 3, 3, *range(END)], k=rng.randint(0, 9)):
            if matcher.accept([token]):
                tokens.append(token)
        back = rng.randint(0, min(len(tokens), rng.choice([3, MAX_ROLLBACK])))
        if back:
            matcher.rollback(back)
            del tokens[-back:]
        fresh = behind(tokens, start)
        assert (matcher.started, matcher.finished, mask(matcher)) == (fresh.started, fresh.finished, mask(fresh))
