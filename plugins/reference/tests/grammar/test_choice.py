"""Grammar `choice` against its definition: a token may come next exactly where some way of going on ends in a text."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from engine.interfaces.context import GrammarContext
from engine.types.errors import InvalidRequestError
from engine.types.structured_outputs import StructuredOutputsParams
from engine_reference.grammar_choice import ChoiceBody, ChoiceGrammar


def grammar(vocabulary: Sequence[bytes | None], vocab_size: int | None = None) -> ChoiceBody:
    return ChoiceBody(GrammarContext(vocab_size=vocab_size or len(vocabulary), vocabulary=lambda: vocabulary))


def params(*texts: str) -> StructuredOutputsParams:
    return StructuredOutputsParams(choice=list(texts))


def allowed(driver: ChoiceBody, *matchers: object, vocab_size: int = 0) -> list[set[int]]:
    """What the masks say, written into rows in another order between rows that must stay."""
    size = vocab_size or driver._context.vocab_size
    out = np.full((2 * len(matchers), -(-size // 32)), -1, np.int32)
    rows = np.arange(len(matchers), dtype=np.int32)[::-1] * 2
    driver.fill_masks(matchers, rows, out)  # type: ignore[arg-type]
    assert (out[1::2] == -1).all()
    bits = np.unpackbits(out[rows].view(np.uint8), axis=1, bitorder="little")
    return [set(np.flatnonzero(row).tolist()) for row in bits]


def can_end(written: bytes, texts: list[bytes], pieces: list[bytes | None]) -> bool:
    """Whether tokens lead from here to a text. By trying all of them."""
    return written in texts or any(
        can_end(written + piece, texts, pieces)
        for piece in pieces
        if piece and any(text.startswith(written + piece) for text in texts)
    )


ALPHABET = "abé"
PIECES = st.one_of(
    st.none(),
    st.text(ALPHABET, min_size=1, max_size=3).map(str.encode),
    st.sampled_from([b"a", b"b", "é".encode()[:1], "é".encode()[1:]]),
)


@given(
    texts=st.lists(st.text(ALPHABET, min_size=1, max_size=5), min_size=1, max_size=4),
    pieces=st.lists(PIECES, min_size=1, max_size=40),
    beyond=st.integers(0, 3),
    ends=st.sampled_from([(), (0,), (2, 37)]),
    data=st.data(),
)
@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
def test_masks_are_exact(
    texts: list[str], pieces: list[bytes | None], beyond: int, ends: tuple[int, ...], data: st.DataObject
) -> None:
    size = max(len(pieces) - beyond, 1)
    for end in ends:
        if end < len(pieces):
            pieces[end] = None
    drawable, wanted = pieces[:size], [text.encode() for text in texts]
    driver = grammar(pieces, size)
    spelt = [text for text in wanted if can_end(b"", [text], drawable)]
    if len(spelt) < len(wanted):
        with pytest.raises(InvalidRequestError, match="cannot spell"):
            driver.compile(params(*texts), ends)
        assume(spelt)
        texts, wanted = [text.decode() for text in spelt], spelt
    matcher = driver.compile(params(*texts), ends)
    written = b""
    for _ in range(12):
        expected = {
            token
            for token, piece in enumerate(drawable)
            if piece and can_end(written + piece, [t for t in wanted if t.startswith(written + piece)], drawable)
        }
        assert matcher.finished == (not expected), "complete, and nothing can follow"
        if written in wanted:
            expected |= {end for end in ends if end < size}
        else:
            assert expected, "a mask is never empty"
        assert allowed(driver, matcher) == [expected]
        for token in {*range(size), size + 5} - expected:
            assert matcher.accept([token]) == 0
        if not expected:
            break
        token = data.draw(st.sampled_from(sorted(expected)))
        assert matcher.accept([token]) == 1
        if token in ends:
            assert matcher.finished and matcher.accept([token]) == 0
            break
        written += pieces[token] or b""
    else:
        raise AssertionError("no end")


def test_every_tokenisation_is_allowed() -> None:
    driver = grammar([b"y", b"e", b"s", b"ye", b"es", b"yes", b"yess", b"no", b" yes", b"", None])
    first = driver.compile(params("yes"), ())
    assert allowed(driver, first) == [{0, 3, 5}]
    assert first.accept([0, 4]) == 2 and first.finished
    second = driver.compile(params("yes"), ())
    assert second.accept([3, 1, 2]) == 1, "what is refused is not taken"
    assert allowed(driver, second) == [{2}]


def test_a_text_that_begins_another() -> None:
    driver = grammar([b"a", b"b", None])
    matcher = driver.compile(params("a", "ab"), (2,))
    matcher.accept([0])
    assert not matcher.finished and allowed(driver, matcher) == [{1, 2}]
    without_end = driver.compile(params("a", "ab"), ())
    without_end.accept([0])
    assert not without_end.finished and allowed(driver, without_end) == [{1}], "where no end can be drawn it goes on"


def test_several_matchers_at_once_and_several_ids_of_one_text() -> None:
    driver = grammar([b"a", b"b", b"a", *[None] * 60, b"b"])
    one, other = driver.compile(params("ab", "ba"), ()), driver.compile(params("ab", "ba"), ())
    other.accept([2])
    assert allowed(driver, one, other) == [{0, 1, 2, 63}, {1, 63}]


def test_the_vocabulary_is_read_once_by_whoever_comes_first() -> None:
    calls = []

    def vocabulary() -> list[bytes]:
        calls.append(threading.current_thread().name)
        return [b"a", b"b"]

    driver = ChoiceBody(GrammarContext(vocab_size=2, vocabulary=vocabulary))
    assert not calls, "not when the body is built"
    threads = [threading.Thread(target=driver.compile, args=(params("a" * n), ())) for n in range(1, 6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1


def test_the_card_names_what_it_enforces() -> None:
    assert ChoiceGrammar.constraints == {"choice"}
    assert ChoiceGrammar.unsupported(None) == []
