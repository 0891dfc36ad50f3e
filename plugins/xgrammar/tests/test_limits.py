"""Constraints that would hold everybody up."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from engine.interfaces.context import GrammarContext
from engine.types.errors import InvalidRequestError
from engine.types.structured_outputs import StructuredOutputsParams
from engine_xgrammar.body import XGrammar
from engine_xgrammar.card import XGrammarOptions
from engine_xgrammar.matcher import SLOW_SECONDS, STRIKES
from engine_xgrammar.tags import with_whitespace

WORDS = [a + b for a in "abcdefghijklmnopqrstuvwxyz" for b in "abcdefghijklmnopqrstuvwxyz0123456789"]
PIECES: list[bytes | None] = [*(bytes([byte]) for byte in range(256)), None, *(word.encode() for word in WORDS)]
SIZE, END = len(PIECES), 256


def make(**options: Any) -> XGrammar:
    given = XGrammarOptions(**{"compile_processes": 0, **options})
    return XGrammar(GrammarContext(vocab_size=SIZE, vocabulary=lambda: PIECES, options=given))


def test_in_a_process_with_limits() -> None:
    """What compiles gives the same masks as here; what takes too much memory or time ends its request alone."""
    grammar, plain = make(compile_processes=1, compile_memory=512, compile_timeout=20.0), make()
    try:
        good = StructuredOutputsParams(json={"type": "object", "properties": {"a": {"type": "integer"}}})
        wide = {"type": "object", "properties": {f"k{i}": {"type": "string"} for i in range(499)}}
        rows = np.zeros((2, -(-SIZE // 32)), np.int32)
        for place, driver in enumerate((grammar, plain)):
            matcher = driver.compile(good, (END,))
            assert matcher.accept(list(b'{"a":')) == 5
            driver.fill_masks([matcher], np.array([place], np.int32), rows)
        assert rows[0].any() and (rows[0] == rows[1]).all()
        with pytest.raises(InvalidRequestError, match="structured_outputs.json=.*more than the 512 MiB"):
            grammar.compile(StructuredOutputsParams(json=wide), (END,))
        with pytest.raises(InvalidRequestError, match="structured_outputs.grammar=.*EBNF parser error"):
            grammar.compile(StructuredOutputsParams(grammar="root ::= "), (END,))
        assert grammar.compile(StructuredOutputsParams(regex="a+"), (END,)).accept([97]) == 1
    finally:
        grammar.close()


def test_what_is_too_slow_is_refused() -> None:
    slow = StructuredOutputsParams(grammar="root ::= a{0,300} a{0,300}\na ::= b{0,300}\nb ::= [a-z]{0,300}")
    with pytest.raises(InvalidRequestError, match=r"structured_outputs.grammar=.*a mask under it takes more"):
        make().compile(slow, (END,))


def test_what_is_too_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine_xgrammar.compiler.MAX_COMPILED", 100_000)
    large = StructuredOutputsParams(json={"enum": ["x" * i for i in range(200)]})
    with pytest.raises(InvalidRequestError, match=r"structured_outputs.json=.*compiled it has"):
        make().compile(large, (END,))


def test_what_gets_slow_later_ends_its_request() -> None:
    grammar = make()
    matcher: Any = grammar.compile(StructuredOutputsParams(regex="[a-z]*"), (END,))
    other = grammar.compile(StructuredOutputsParams(regex="[a-z]*"), (END,))
    for _ in range(STRIKES):
        assert matcher.accept([97]) == 1
        matcher.took(2 * SLOW_SECONDS)
    with pytest.raises(InvalidRequestError, match="all other requests had to wait"):
        matcher.accept([97])
    out = np.zeros((2, -(-SIZE // 32)), np.int32)
    grammar.fill_masks([matcher, other], np.array([0, 1], np.int32), out)
    assert (out[0] == -1).all(), "something has to be drawn, which then ends it"
    assert other.accept([97]) == 1


def test_the_cache_holds_so_many_bytes() -> None:
    grammar = make(cache_size=1)
    for i in range(60):
        grammar.compile(StructuredOutputsParams(json={"enum": [f"{i}" * 60, f"{i}x" * 60]}), (END,))
    assert grammar._work is not None and 0 < grammar._work._cache.size <= 1 << 20


def test_a_text_and_a_mapping_are_the_same() -> None:
    grammar, schema = make(), {"type": "boolean"}
    grammar.compile(StructuredOutputsParams(json=schema), (END,))
    size = grammar._work._cache.size  # type: ignore[union-attr]
    grammar.compile(StructuredOutputsParams(json=json.dumps(schema, indent=2)), (END,))
    assert grammar._work._cache.size == size > 0  # type: ignore[union-attr]


def test_white_space_in_structural_tags_is_bounded() -> None:
    """In every JSON part that has no bound of its own."""
    part = {"type": "json_schema", "json_schema": {"type": "json_schema"}}
    inner = {"type": "tag", "content": {**part, "max_whitespace_cnt": 3}}
    tag = {"format": {"type": "sequence", "elements": [part, inner]}}
    bounded = with_whitespace(tag, 16)["format"]["elements"]
    assert bounded[0] == {**part, "max_whitespace_cnt": 16} and bounded[1]["content"]["max_whitespace_cnt"] == 3
    assert with_whitespace(tag, 0)["format"]["elements"][0]["max_whitespace_cnt"] == 1
