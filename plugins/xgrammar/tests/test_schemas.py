"""What XGrammar lets through against a validator: each schema is refused by the keyword, or holds."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import numpy as np
import pytest

from engine.interfaces.context import GrammarContext
from engine.interfaces.json_normal import normalised
from engine.types.errors import InvalidRequestError
from engine.types.structured_outputs import StructuredOutputsParams
from engine_xgrammar.body import XGrammar
from engine_xgrammar.card import XGrammarCard, XGrammarOptions

END = 256
PIECES = [*(bytes([byte]) for byte in range(256)), None]
# Likelier than others, so that a random text comes to an end; and hardly ever white space.
WEIGHTS = np.where(np.arange(257) > 126, 0.02, 1.0)
WEIGHTS[:32] = WEIGHTS[32] = WEIGHTS[92] = 0.03
WEIGHTS[[34, 93, 125]] = 30
WEIGHTS[END] = 20


@pytest.fixture(scope="module")
def grammar() -> XGrammar:
    options = XGrammarOptions(max_whitespace=4)
    return XGrammar(GrammarContext(vocab_size=257, vocabulary=lambda: PIECES, options=options))


def obj(required: str = "", **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


INT, STR, BOOL = {"type": "integer"}, {"type": "string"}, {"type": "boolean"}
HELD: dict[str, Any] = {
    "anything": {},
    "any object": {"type": "object"},
    "any array": {"type": "array"},
    "types": {"type": ["string", "null"], "minLength": 2, "maxLength": 3},
    "types with keywords": {"type": ["integer", "string"], "minimum": 5, "maxLength": 2},
    "integers": {"type": "integer", "exclusiveMinimum": -20, "maximum": 33},
    "integers from": {"type": "integer", "minimum": 100},
    "numbers": {"type": "number", "minimum": -2.5, "exclusiveMaximum": 3.25},
    "small numbers": {"type": "number", "exclusiveMinimum": 0, "maximum": 0.01},
    "multiples": {"type": "integer", "multipleOf": 7, "minimum": 10, "maximum": 30},
    "lengths": {"type": "string", "minLength": 2, "maxLength": 4},
    "pattern": {"type": "string", "pattern": "^[a-c]{2}(x|yy)?$"},
    "pattern, not at its ends": {"type": "string", "pattern": "a+b"},
    "class and lengths": {"type": "string", "pattern": "^[a-c]+$", "maxLength": 3},
    "counted class and lengths": {"type": "string", "pattern": "^\\w{2,9}$", "minLength": 3, "maxLength": 4},
    "escaped class and length": {"type": "string", "pattern": "^[\\]a]*$", "minLength": 2},
    "class and length by a name of ours": obj("enum", enum={"type": "string", "pattern": "^[a-c]+$", "maxLength": 2})
    | {"required": ["enum"]},
    "pattern of classes": {"type": "string", "pattern": "^\\w\\d\\s.[^a]\\S$"},
    "pattern of escapes": {"type": "string", "pattern": "^\\.\\/\\-\\u0041\\x42$"},
    **{f"format {name}": {"type": "string", "format": name} for name in ("email", "uuid", "ipv6", "hostname", "uri")},
    "enum": {"enum": ["a", 1, None, 1.5, {"b": [True, 'é"\n']}]},
    "enum of a type": {"type": "string", "enum": ["a", "bb"]},
    "const": {"const": {"a": [1, {"b": 2}]}},
    "required and not": obj("a", a=INT, b=STR, c=BOOL),
    "nested": obj("ab", a=obj("x", x=INT), b={"type": "array", "items": obj("y", y=BOOL)}),
    "odd names": obj('é"', **{"é": INT, '"': INT}),
    "values of one kind": {"type": "object", "additionalProperties": INT},
    "further values": {"type": "object", "properties": {"a": STR}, "required": ["a"], "additionalProperties": INT},
    "names by pattern": {"type": "object", "propertyNames": {"pattern": "^[ab]$"}, "additionalProperties": INT},
    "values by names": {"type": "object", "patternProperties": {"^x[a-z]$": INT}, "additionalProperties": False},
    "at least": {**obj("b", a=INT, b=INT, c=INT), "minProperties": 2},
    "at most": {**obj("", a=INT, b=INT, c=INT), "maxProperties": 1},
    "arrays": {"type": "array", "items": BOOL, "minItems": 1, "maxItems": 3},
    "tuples": {"type": "array", "prefixItems": [INT, BOOL], "minItems": 2, "items": False},
    "tuples and more": {"type": "array", "prefixItems": [INT], "items": BOOL, "minItems": 1, "maxItems": 3},
    "any of": {"anyOf": [INT, obj("a", a=INT)]},
    "one of types": {"oneOf": [INT, STR, {"type": "null"}]},
    "one of constants": {"oneOf": [obj("kv", k={"const": "a"}, v=INT), obj("kv", k={"const": "b"}, v=STR)]},
    "all of one": {"allOf": [{"type": "integer", "minimum": 3, "maximum": 5}]},
    "references": {**obj("ab", a={"$ref": "#/$defs/i"}, b={"$ref": "#/properties/a"}), "$defs": {"i": INT}},
    "recursion": {**obj("vn", v=INT, n={"anyOf": [{"type": "null"}, {"$ref": "#"}]})},
    "descriptions": {"title": "T", "description": "d", "default": 3, "examples": [4], "x-of-ours": 1, **INT},
}
REFUSED: dict[str, tuple[str, Any]] = {
    "a keyword without its type": ("minimum", {"minimum": 3}),
    "steps of numbers": ("multipleOf", {"type": "number", "multipleOf": 0.5}),
    "large steps": ("multipleOf", {"type": "integer", "multipleOf": 5000}),
    "halves of integers": ("minimum", {"type": "integer", "minimum": 2.5}),
    "pattern and length": ("maxLength", {"type": "string", "pattern": "^(a|bb)*$", "maxLength": 3}),
    "open pattern and length": ("maxLength", {"type": "string", "pattern": "a*", "maxLength": 3}),
    "nothing left": ("minLength", {"type": "string", "pattern": "^[ab]{2}$", "minLength": 3}),
    "format and length": ("minLength", {"type": "string", "format": "date", "minLength": 3}),
    "unknown format": ("format", {"type": "string", "format": "iri"}),
    "unequal lengths": ("minLength", {"type": "string", "minLength": 4, "maxLength": 3}),
    "enum and length": ("minLength", {"enum": ["a", "bbb"], "minLength": 2}),
    "enum of another type": ("enum", {"type": "string", "enum": ["a", 1]}),
    "no enum": ("enum", {"enum": []}),
    "const of another type": ("const", {"type": "string", "const": 1}),
    "beside a reference": ("minLength", {"$ref": "#/$defs/a", "minLength": 3, "$defs": {"a": STR}}),
    "nothing there": ("$ref", {"$ref": "#/$defs/zz"}),
    "elsewhere": ("$ref", {"$ref": "http://example.com/schema"}),
    "round in a circle": ("$ref", {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}),
    "beside any of": ("type", {**obj("a", a=INT), "anyOf": [{"required": ["b"]}]}),
    "one of that overlap": ("oneOf", {"oneOf": [INT, {"type": "number"}]}),
    "all of two": ("allOf", {"allOf": [INT, {"type": "integer", "maximum": 3}]}),
    "not": ("not", {"type": "integer", "not": {"const": 1}}),
    "if": ("if", {"type": "integer", "if": {"minimum": 3}, "then": {"maximum": 4}}),
    "required, and nowhere": ("required", {"type": "object", "properties": {"a": INT}, "required": ["z"]}),
    "two patterns": ("patternProperties", {"type": "object", "patternProperties": {"^x": INT, "y$": STR}}),
    "names and properties": ("propertyNames", {**obj("", zz=INT), "propertyNames": {"pattern": "^a$"}}),
    "at least, of free names": ("minProperties", {"type": "object", "minProperties": 2}),
    "unique": ("uniqueItems", {"type": "array", "items": INT, "uniqueItems": True}),
    "contains": ("contains", {"type": "array", "contains": INT}),
    "old tuples": ("items", {"type": "array", "items": [INT]}),
    "dependent": ("dependentRequired", {**obj("", a=INT, b=INT), "dependentRequired": {"a": ["b"]}}),
    "unevaluated": ("unevaluatedProperties", {"type": "object", "unevaluatedProperties": BOOL}),
    "unknown type": ("type", {"type": "strin"}),
    "unknown keyword": ("minimun", {"type": "integer", "minimun": 1}),
    "nullable": ("nullable", {"type": "string", "nullable": True}),
    "deep inside": ("uniqueItems", obj("a", a={"type": "array", "items": {"type": "array", "uniqueItems": True}})),
    "in a definition": ("not", {"type": "integer", "$defs": {"a": {"not": {}}}}),
    **{
        f"pattern {pattern}": ("pattern", {"type": "string", "pattern": pattern})
        for pattern in (
            '^"$', "^\\\\$", "^\\n$", "^a\nb$", "^(?=a)b$", "^(?<x>a)$", "^a^b$", "^(a|b$)c$", "^a|b$", "\\Aa\\Z",
            "\\ba", "^[\"a]$", "^\\u0022$", "^\\x00$", "(", "a{1000}{1000}", "[a", "a{,3}", "(?i)a", "\\p{L}", "a)",
        )
    },
}  # fmt: skip


def written(grammar: XGrammar, matcher: Any, random: np.random.Generator) -> str | None:
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
def test_whatever_is_written_is_valid(grammar: XGrammar, name: str) -> None:
    schema = HELD[name]
    constraint = StructuredOutputsParams(json=schema)
    constraint.verify()
    constraint = normalised(constraint)
    XGrammarCard.verify(constraint)
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
    with pytest.raises(InvalidRequestError, match=rf"^structured_outputs.json=.*'{keyword.replace('$', '[$]')}'"):
        XGrammarCard.verify(normalised(constraint))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"regex": "(?=a)b"}, "lookarounds"),
        ({"regex": "a^b"}, "anchor '\\^'"),
        ({"regex": "(((a{0,200}){0,200}){0,200})"}, "more than 4096 times"),
        ({"regex": "a\\Z"}, "escape"),
        ({"choice": ["a\x00"]}, "null character"),
        ({"structural_tag": '{"format":{"type":"json_schema","json_schema":{"not":{}}}}'}, "'not'"),
        ({"structural_tag": '{"format":{"type":"regex","pattern":"(?=a)"}}'}, "lookarounds"),
    ],
)  # fmt: skip
def test_what_else_is_refused_before_it_is_compiled(value: dict[str, Any], message: str) -> None:
    constraint = StructuredOutputsParams(**value)
    constraint.verify()
    with pytest.raises(InvalidRequestError, match=message):
        XGrammarCard.verify(normalised(constraint))


@pytest.mark.parametrize(
    "pattern",
    ["^[\\w.%+-]+@[a-z]{2,}$", "a\\$", "a\\\\$", "^\\^a$", '[^"]x', "[]a]", "\\d{3}-\\d{4}"],
)
def test_usual_patterns_are_taken(grammar: XGrammar, pattern: str) -> None:
    constraint = StructuredOutputsParams(regex=pattern)
    XGrammarCard.verify(constraint)
    if pattern != "[]a]":
        grammar.compile(constraint, (END,))


def test_an_object_has_no_name_twice(grammar: XGrammar) -> None:
    """A second value of another kind would be the one that counts."""
    matcher = grammar.compile(StructuredOutputsParams(json=HELD["further values"]), (END,))
    text = b'{"a":"x","a":'
    assert matcher.accept(list(text)) == len(text) - 2
