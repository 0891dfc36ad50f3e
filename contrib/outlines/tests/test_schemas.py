"""What Outlines lets through against a validator; what is refused, and what grows too large."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import numpy as np
import pytest

from engine.interfaces.context import GrammarContext
from engine.types.errors import InvalidRequestError
from engine.types.structured_outputs import StructuredOutputsParams
from engine_kit.schemas.normal import normalised
from engine_outlines.body import Outlines
from engine_outlines.card import OutlinesCard, OutlinesOptions

END = 256
PIECES = [*(bytes([byte]) for byte in range(256)), None]
# Likelier than others, so that a random text comes to an end; and hardly ever white space.
WEIGHTS = np.where(np.arange(257) > 126, 0.02, 1.0)
WEIGHTS[:32] = WEIGHTS[32] = WEIGHTS[92] = 0.03
WEIGHTS[[34, 93, 125]] = 30
WEIGHTS[END] = 20


def make(**options: Any) -> Outlines:
    given = OutlinesOptions(**{"max_whitespace": 2, "compile_processes": 0, **options})
    return Outlines(GrammarContext(vocab_size=257, vocabulary=lambda: PIECES, options=given))


def obj(required: str = "", **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


INT, STR, BOOL = {"type": "integer"}, {"type": "string"}, {"type": "boolean"}
HELD: dict[str, Any] = {
    "integer": INT,
    "string": STR,
    "number": {"type": "number"},
    "null": {"type": "null"},
    "lengths": {"type": "string", "minLength": 2, "maxLength": 4},
    "pattern": {"type": "string", "pattern": "^[a-c]{2}(xy)?$"},
    **{f"format {name}": {"type": "string", "format": name} for name in ("uuid", "date", "ipv4")},
    "enum": {"enum": ["a", 1, None, True, 'é"\n\\']},
    "const": {"const": "ab"},
    "required": obj("ab", a=INT, b=BOOL),
    "required and not": obj("a", a=INT, b=STR, c=BOOL),
    "none required": obj("", a=INT, b=BOOL),
    "nested": obj("ab", a=obj("x", x=INT), b={"type": "array", "items": obj("y", y=BOOL), "maxItems": 2}),
    "odd names": {**obj("", **{"é": INT, "c.d": INT}), "required": ["é", "c.d"]},
    "arrays": {"type": "array", "items": BOOL, "minItems": 1, "maxItems": 3},
    "array of any length": {"type": "array", "items": BOOL},
    "any of": {"anyOf": [INT, obj("a", a=INT)]},
    "one of types": {"oneOf": [INT, STR, {"type": "null"}]},
    "types": {"type": ["string", "null"]},
    "all of": {"allOf": [INT]},
    "beside any of": {"type": "integer", "anyOf": [INT]},
    "one of that overlap": {"oneOf": [{"type": "string"}, {"type": ["string", "null"]}]},
    "alternatives": {"type": "string", "pattern": "^(a|b\\.c|x)$"},
    "references": {**obj("ab", a={"$ref": "#/$defs/i"}, b={"$ref": "#/$defs/i"}), "$defs": {"i": BOOL}},
}
REFUSED: dict[str, tuple[str, Any]] = {
    "anything": ("type", {}),
    "any object": ("type", {"type": "object"}),
    "any array": ("type", {"type": "array"}),
    "bounds": ("minimum", {"type": "integer", "minimum": 3}),
    "multiples": ("multipleOf", {"type": "integer", "multipleOf": 3}),
    "format": ("format", {"type": "string", "format": "iri"}),
    "format of any character": ("pattern", {"type": "string", "format": "json-pointer"}),
    "pattern and length": ("maxLength", {"type": "string", "pattern": "^a*$", "maxLength": 3}),
    "open pattern": ("pattern", {"type": "string", "pattern": "a"}),
    "pattern of what JSON escapes": ("pattern", {"type": "string", "pattern": '^"$'}),
    "pattern of a negation": ("pattern", {"type": "string", "pattern": "^[^a]$"}),
    "pattern of anything": ("pattern", {"type": "string", "pattern": "^.$"}),
    "recursion": ("$ref", obj("vn", v=INT, n={"anyOf": [{"type": "null"}, {"$ref": "#"}]})),
    "recursion by two": (
        "$ref",
        {"$ref": "#/$defs/a", "$defs": {"a": obj("", b={"$ref": "#/$defs/b"}), "b": obj("", a={"$ref": "#/$defs/a"})}},
    ),
    "free names": ("additionalProperties", {**obj("a", a=INT), "additionalProperties": INT}),
    "unique": ("uniqueItems", {"type": "array", "items": INT, "uniqueItems": True}),
    "tuples": ("prefixItems", {"type": "array", "prefixItems": [INT]}),
    "required, and nowhere": ("properties", {"type": "object", "properties": {"a": INT}, "required": ["z"]}),
    "a name with escapes": ("properties", obj("", **{'a"b': INT})),
    "an enum of objects": ("const", {"enum": [{}]}),
    "what spans a quotation mark": ("pattern", {"type": "string", "pattern": "^[!-~]$"}),
}


@pytest.fixture(scope="module")
def grammar() -> Outlines:
    return make()


def written(grammar: Outlines, matcher: Any, random: np.random.Generator) -> str | None:
    """A random text that ends; None for one that does not."""
    row, text = np.zeros((1, 9), np.int32), bytearray()
    for _ in range(300):
        if matcher.finished:
            break
        grammar.fill_masks([matcher], np.zeros(1, np.int32), row)
        allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8)[0], bitorder="little")[:257])
        assert allowed.size, bytes(text)
        weights = WEIGHTS[allowed]
        token = int(random.choice(allowed, p=weights / weights.sum()))
        assert matcher.accept([token]) == 1
        if token == END:
            break
        text.append(token)
    else:
        return None
    return text.decode()


@pytest.mark.parametrize("name", HELD)
def test_whatever_is_written_is_valid(grammar: Outlines, name: str) -> None:
    schema = HELD[name]
    constraint = StructuredOutputsParams(json=schema)
    constraint.verify()
    constraint = normalised(constraint)
    OutlinesCard.verify(constraint)
    validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())
    ended = 0
    for seed in range(40):
        text = written(grammar, grammar.compile(constraint, (END,)), np.random.default_rng(seed))
        if text is not None:
            ended += 1
            validator.validate(json.loads(text))
    assert ended > 3


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_not_hold_is_refused_by_its_name(name: str) -> None:
    keyword, schema = REFUSED[name]
    constraint = StructuredOutputsParams(json=schema)
    constraint.verify()
    with pytest.raises(InvalidRequestError, match=rf"^structured_outputs.json='{keyword.replace('$', '[$]')}'"):
        OutlinesCard.verify(normalised(constraint))


@pytest.mark.parametrize(
    ("pattern", "text"),
    [("a|ab", "ab"), ("(a|ab)c?", "abc"), ("a(bc)?", "abc"), ("é{1,3}", "éé"), ("^a\\$$", "a$"), ("[^a]+", "bé")],
)
def test_no_text_is_left_out(grammar: Outlines, pattern: str, text: str) -> None:
    """The library alone stops at the first place where a text might end."""
    matcher = grammar.compile(StructuredOutputsParams(regex=pattern), (END,))
    tokens = list(text.encode())
    assert matcher.accept(tokens) == len(tokens)
    assert matcher.finished or matcher.accept([END]) == 1


def test_the_mark_cannot_be_written(grammar: Outlines) -> None:
    matcher = grammar.compile(StructuredOutputsParams(regex=".+"), (END,))
    assert matcher.accept([97]) == 1 and not matcher.finished
    assert matcher.accept(list("\U0010ffff".encode())) == 0
    assert matcher.accept([END]) == 1


@pytest.mark.parametrize("pattern", ["(", "a{2}\\1", "(?=a)b"])
def test_what_cannot_be_read(grammar: Outlines, pattern: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"structured_outputs.regex=.*cannot compile it"):
        grammar.compile(StructuredOutputsParams(regex=pattern), (END,))


def test_in_a_process_with_limits() -> None:
    """An automaton with 2^22 states takes its memory or its time, and its request alone ends."""
    grammar = make(compile_processes=2, compile_memory=256, compile_timeout=5.0)
    try:
        with pytest.raises(InvalidRequestError, match=r"structured_outputs.regex=.*(MiB|longer than)"):
            grammar.compile(StructuredOutputsParams(regex="(a|b)*a(a|b){22}c"), (END,))
        matcher = grammar.compile(StructuredOutputsParams(regex="[0-9]{2}"), (END,))
        assert matcher.accept([48, 49]) == 2 and matcher.finished
    finally:
        grammar.close()
