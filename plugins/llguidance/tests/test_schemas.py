"""What LLGuidance lets through against a validator, and what it gives up on."""

from __future__ import annotations

import json
import time
from typing import Any

import jsonschema
import numpy as np
import pytest

from engine.interfaces.context import GrammarContext
from engine.types.errors import InvalidRequestError
from engine.types.structured_outputs import StructuredOutputsParams
from engine_kit.schemas.normal import normalised
from engine_llguidance.body import LLGuidance
from engine_llguidance.card import LLGuidanceCard, LLGuidanceOptions

END = 256
PIECES = [*(bytes([byte]) for byte in range(256)), None]
# Likelier than others, so that a random text comes to an end; and hardly ever white space.
WEIGHTS = np.where(np.arange(257) > 126, 0.02, 1.0)
WEIGHTS[:32] = WEIGHTS[32] = WEIGHTS[92] = 0.03
WEIGHTS[[34, 93, 125]] = 30
WEIGHTS[END] = 20


def make(**options: Any) -> LLGuidance:
    given = LLGuidanceOptions(max_whitespace=4, **options)
    return LLGuidance(GrammarContext(vocab_size=257, vocabulary=lambda: PIECES, options=given))


def obj(required: str = "", **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


INT, STR, BOOL = {"type": "integer"}, {"type": "string"}, {"type": "boolean"}
HELD: dict[str, Any] = {
    "anything": {},
    "any object": {"type": "object"},
    "types with keywords": {"type": ["integer", "string"], "minimum": 5, "maxLength": 2},
    "integers": {"type": "integer", "exclusiveMinimum": -20, "maximum": 33},
    "numbers": {"type": "number", "minimum": -2.5, "exclusiveMaximum": 3.25},
    "multiples": {"type": "integer", "multipleOf": 7, "minimum": 10, "maximum": 30},
    "lengths": {"type": "string", "minLength": 2, "maxLength": 4},
    "pattern": {"type": "string", "pattern": "^[a-c]{2}(x|yy)?$"},
    "open pattern": {"type": "string", "pattern": "a+b", "maxLength": 20},
    "pattern of what JSON escapes": {"type": "string", "pattern": '^["\\\\\\n]{2}$'},
    "pattern and length": {"type": "string", "pattern": "^(a|bb)*$", "minLength": 2, "maxLength": 5},
    **{f"format {name}": {"type": "string", "format": name} for name in ("uuid", "ipv6", "date")},
    "enum": {"enum": ["a", 1, None, {"b": [True, 'é"\n']}]},
    "enum of a type": {"type": "string", "enum": ["a", 1]},
    "const": {"const": {"a": [1, {"b": 2}]}},
    "required and not": obj("a", a=INT, b=STR, c=BOOL),
    "further values": {"type": "object", "properties": {"a": STR}, "required": ["a"], "additionalProperties": INT},
    "required, and nowhere": {"type": "object", "properties": {"a": INT}, "required": ["z"]},
    "arrays": {"type": "array", "items": BOOL, "minItems": 1, "maxItems": 3},
    "tuples": {"type": "array", "prefixItems": [INT, BOOL], "minItems": 2, "items": False},
    "any of beside": {**obj("a", a=INT, b=INT), "anyOf": [{"required": ["b"]}, {"properties": {"a": {"maximum": 3}}}]},
    "all of": {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 5}]},
    "one of types": {"oneOf": [INT, STR, {"type": "null"}]},
    "beside a reference": {"$ref": "#/$defs/a", "minLength": 3, "$defs": {"a": {"type": "string", "maxLength": 5}}},
    "steps from": {"type": "integer", "multipleOf": 5, "minimum": 0},
    "if": {"type": "integer", "if": {"minimum": 3}, "then": {"maximum": 4}},
    "dependent": {**obj("", a=INT, b=INT), "dependentRequired": {"a": ["b"]}},
    "unevaluated": {"type": "object", "unevaluatedProperties": BOOL},
    "one of that meet": {"oneOf": [{"type": "string", "maxLength": 3}, {"type": "string", "minLength": 2}]},
    "odd names beside others": {**obj("", é=INT), "additionalProperties": BOOL},
    "lists without a type": {"maxItems": 1},
    "objects without a type": {"maxProperties": 1},
    "names of anything": {"propertyNames": {"pattern": "^a+$"}},
    "either end": {"type": "string", "pattern": "^a|b$", "maxLength": 20},
    "recursion": obj("vn", v=INT, n={"anyOf": [{"type": "null"}, {"$ref": "#"}]}),
}


@pytest.fixture(scope="module")
def grammar() -> LLGuidance:
    return make()


def written(grammar: LLGuidance, matcher: Any, random: np.random.Generator) -> str | None:
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
def test_whatever_is_written_is_valid(grammar: LLGuidance, name: str) -> None:
    schema = HELD[name]
    constraint = StructuredOutputsParams(json=schema)
    constraint.verify()
    constraint = normalised(constraint)
    LLGuidanceCard.verify(constraint)
    validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())
    ended = 0
    for seed in range(40):
        text = written(grammar, grammar.compile(constraint, (END,)), np.random.default_rng(seed))
        if text is not None:
            ended += 1
            validator.validate(json.loads(text))
    assert ended > 3


@pytest.mark.parametrize(
    ("keyword", "schema"),
    [
        ("uniqueItems", {"type": "array", "items": INT, "uniqueItems": True}),
        ("contains", {"type": "array", "contains": INT}),
        ("format", {"type": "string", "format": "nonsense"}),
        ("strin", {"type": "strin"}),
        ("zz", {"$ref": "#/$defs/zz"}),
        ("uniqueItems", {"type": "array", "uniqueItems": True, "x-guidance": {"lenient": True}}),
        ("uniqueItems", {"type": "array", "items": {"uniqueItems": True, "x-guidance": {"lenient": True}}}),
        ("lookarounds", {"type": "string", "pattern": "^(?=a)b$"}),
        ("minProperties", {"type": "object", "minProperties": 2}),
        ("maxProperties", {"type": "object", "properties": {"a": INT}, "maxProperties": 1}),
        ("multipleOf", {"type": "integer", "multipleOf": 1000003}),
        ("multipleOf", {"type": "number", "multipleOf": 0.123456789}),
        ("maximum", {"type": "integer", "maximum": 1e30}),
        ("const", {"const": "a\x00b"}),
        ("enum", {"enum": ["a", "b\x7f"]}),
        ("pattern", {"type": "string", "pattern": "^a\\x01b$"}),
        ("patternProperties", {"type": "object", "patternProperties": {"a": INT, "b": BOOL}}),
    ],
)
def test_what_would_not_hold_is_refused_by_its_name(grammar: LLGuidance, keyword: str, schema: Any) -> None:
    constraint = StructuredOutputsParams(json=schema)
    constraint.verify()
    with pytest.raises(InvalidRequestError, match=keyword) as found:
        constraint = normalised(constraint)
        LLGuidanceCard.verify(constraint)
        grammar.compile(constraint, (END,))
    assert len(str(found.value)) < 500


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"regex": "a/b\\/c\n\\n[/]$"}, "a/b/c\n\n/"),
        ({"regex": "^\\^a\\$$"}, "^a$"),
        ({"grammar": 'root ::= "a" b\nb ::= [x-z]+'}, "axyz"),
        ({"grammar": 'start: "a" B\nB: /[x-z]+/'}, "axyz"),
        ({"json": True}, "[1]"),
        ({"choice": ['a"\\\n/', "b"]}, 'a"\\\n/'),
    ],
)
def test_notations(grammar: LLGuidance, value: dict[str, Any], text: str) -> None:
    constraint = StructuredOutputsParams(**({"json": "true"} if value == {"json": True} else value))
    constraint.verify()
    matcher = grammar.compile(constraint, (END,))
    tokens = list(text.encode())
    assert matcher.accept(tokens) == len(tokens)
    assert matcher.finished or matcher.accept([END]) == 1


@pytest.mark.parametrize(
    "value",
    [
        {"regex": "("},
        {"regex": "a\\1"},
        {"grammar": "root ::= ("},
        {"grammar": "start: B"},
        {"grammar": "root ::= root"},
        {"grammar": "start: a\na: start"},
    ],
)
def test_what_cannot_be_read(grammar: LLGuidance, value: dict[str, Any]) -> None:
    (kind,) = value
    with pytest.raises(InvalidRequestError, match=f"structured_outputs.{kind}="):
        grammar.compile(StructuredOutputsParams(**value), (END,))


RUNAWAY: dict[str, dict[str, Any]] = {
    "repetitions": {"regex": "(([a-z]{0,200}){0,200}){0,200}"},
    "ambiguous": {"grammar": 'start: start start | "a" | ""'},
    "exponential": {"grammar": "start: a0\n" + "".join(f"a{i}: a{i + 1} a{i + 1}\n" for i in range(30)) + 'a30: "a"'},
    "patterns at once": {"json": {"allOf": [{"type": "string", "pattern": f".*{c}.*"} for c in "abcdefghijkl"]}},
    "wide": {"json": {"type": "object", "properties": {f"k{i}": {"type": "string"} for i in range(2000)}}},
    "long": {"json": {"type": "array", "items": STR, "minItems": 100000}},
}


@pytest.mark.parametrize("name", RUNAWAY)
def test_what_runs_away_is_given_up_soon(name: str) -> None:
    """Of processor time: nothing takes seconds, neither compiling, nor a mask or a token of 200."""
    grammar, row = make(), np.zeros((1, 9), np.int32)
    slowest, random = 0.0, np.random.default_rng(0)
    began = time.thread_time()
    try:
        matcher = grammar.compile(StructuredOutputsParams(**RUNAWAY[name]), (END,))
        assert time.thread_time() - began < 5
        for _ in range(200):
            began = time.thread_time()
            grammar.fill_masks([matcher], np.zeros(1, np.int32), row)
            allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8)[0], bitorder="little")[:256])
            if matcher.finished or not allowed.size:
                break
            matcher.accept([int(random.choice(allowed))])
            slowest = max(slowest, time.thread_time() - began)
    except InvalidRequestError as error:
        assert "LLGuidance" in str(error)
    assert slowest < 1


def test_the_cache_holds_so_many_bytes() -> None:
    grammar = make(cache_size=1)
    for i in range(400):
        grammar.compile(StructuredOutputsParams(choice=[f"{i}"]), (END,))
    assert 0 < grammar._cache.size <= 1 << 20


@pytest.mark.parametrize(
    ("schema", "fits", "others"),
    [
        ({}, ['"a"', "1", "-0.5", "[1]", '{"a":[null]}'], ['"\\ud800"', "1e5", "[4e+78354047452]", '{"a":1e999}']),
        ({"type": "number"}, ["12345678901234567890123", "-0.001"], ["1e5", "1e999"]),
        ({"type": "number", "exclusiveMaximum": 3}, ["2.999"], ["3", "-1e5"]),
        (HELD["further values"], ['{"a":"x","b":1}'], ['{"a":"x","\\u0061":1}', '{"\\u0061":1,"a":"x"}']),
        (HELD["odd names beside others"], ['{"é":1}'], ['{"\\u00e9":true}', '{"é":true}', '{"é":1,"é":true}']),
    ],
)
def test_spellings(grammar: LLGuidance, schema: Any, fits: list[str], others: list[str]) -> None:
    """A character has one, and a number no exponent."""
    constraint = normalised(StructuredOutputsParams(json=schema))

    def accepts(text: str) -> bool:
        matcher, tokens = grammar.compile(constraint, (END,)), list(text.encode())
        return matcher.accept(tokens) == len(tokens) and (matcher.finished or matcher.accept([END]) == 1)

    assert all(map(accepts, fits)) and not any(map(accepts, others))
