"""What XGrammar lets through against a validator: each schema is refused by the keyword, or holds."""

from __future__ import annotations

import itertools
import json
import os
import re
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine.interfaces.context import GrammarContext
from engine.types.errors import InvalidRequestError
from engine.types.structured_outputs import StructuredOutputsParams
from engine_kit.schemas.normal import normalised
from engine_xgrammar.body import XGrammar
from engine_xgrammar.card import XGrammarCard, XGrammarOptions
from engine_xgrammar.mending import mended
from engine_xgrammar.warnings import listening

END = 256
PIECES = [*(bytes([byte]) for byte in range(256)), None]
# Likelier than others, so that a random text comes to an end; and hardly ever white space.
WEIGHTS = np.where(np.arange(257) > 126, 0.02, 1.0)
WEIGHTS[:32] = WEIGHTS[32] = WEIGHTS[92] = 0.03
WEIGHTS[[34, 93, 125]] = 30
WEIGHTS[END] = 20


@pytest.fixture(scope="module")
def grammar() -> XGrammar:
    options = XGrammarOptions(max_whitespace=4, compile_processes=0)
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
    "pattern, not at its ends": {"type": "string", "pattern": "^a+b|c$"},
    "class and lengths": {"type": "string", "pattern": "^[a-c]+$", "maxLength": 3},
    "counted class and lengths": {"type": "string", "pattern": "^\\w{2,9}$", "minLength": 3, "maxLength": 4},
    "escaped class and length": {"type": "string", "pattern": "^[\\]a]*$", "minLength": 2},
    "class and length by a name of ours": obj("enum", enum={"type": "string", "pattern": "^[a-c]+$", "maxLength": 2})
    | {"required": ["enum"]},
    "pattern of classes": {"type": "string", "pattern": "^\\w\\d .[^a]\\D$"},
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
    "patterns that JSON escapes": {"type": "string", "pattern": '^["\\\\\n]{2}[!-~]$'},
    "an optional part that begins with a repetition": {"type": "string", "pattern": "^(?:a*b)?c$"},
    "either end": {"type": "string", "pattern": "^a|b$"},
    "lists without a type": {"maxItems": 1},
    "objects without a type": {"maxProperties": 1},
    "names of anything": {"propertyNames": {"pattern": "^a+$"}},
    "any tuples": {"type": "array", "prefixItems": [True, INT], "minItems": 3},
    "halves of integers": {"type": "integer", "minimum": 2.5},
    "enum and length": {"enum": ["a", "bbb"], "minLength": 2},
    "enum of another type": {"type": "string", "enum": ["a", 1]},
    "beside a reference": {"$ref": "#/$defs/a", "minLength": 3, "$defs": {"a": STR}},
    "one of that meet": {"oneOf": [{"type": "string", "maxLength": 3}, {"type": "string", "minLength": 2}]},
    "all of two": {"allOf": [INT, {"type": "integer", "maximum": 3}]},
    "not": {"type": "integer", "not": {"const": 1}},
    "if": {"type": "integer", "if": {"minimum": 3}, "then": {"maximum": 4}},
    "required, and nowhere": {"type": "object", "properties": {"a": INT}, "required": ["z"]},
    "dependent": {**obj("", a=INT, b=INT), "dependentRequired": {"a": ["b"]}},
    "unevaluated": {"type": "object", "unevaluatedProperties": BOOL},
    "a keyword without its type": {"minimum": 3},
    "names and properties": {**obj("", zz=INT), "propertyNames": {"pattern": "^a$"}},
    "in a definition": {"type": "integer", "$defs": {"a": {"not": {}}}},
    "descriptions": {"title": "T", "description": "d", "default": 3, "examples": [4], "x-of-ours": 1, **INT},
}
REFUSED: dict[str, tuple[str, Any]] = {
    "steps of numbers": ("multipleOf", {"type": "number", "multipleOf": 0.5}),
    "large steps": ("multipleOf", {"type": "integer", "multipleOf": 5000}),
    "pattern and length": ("maxLength", {"type": "string", "pattern": "^(a|bb)*$", "maxLength": 3}),
    "open pattern and length": ("maxLength", {"type": "string", "pattern": "a*", "maxLength": 3}),
    "nothing left": ("minLength", {"type": "string", "pattern": "^[ab]{2}$", "minLength": 3}),
    "format and length": ("minLength", {"type": "string", "format": "date", "minLength": 3}),
    "unknown format": ("format", {"type": "string", "format": "iri"}),
    "unequal lengths": ("minLength", {"type": "string", "minLength": 4, "maxLength": 3}),
    "no enum": ("enum", {"enum": []}),
    "const of another type": ("const", {"type": "string", "const": 1}),
    "steps in a wide range": ("multipleOf", {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 5000}),
    "steps from": ("multipleOf", {"type": "integer", "multipleOf": 5, "minimum": 0}),
    "forbidden names": ("properties", {"type": "object", "properties": {"a": False}, "additionalProperties": INT}),
    "odd names beside others": ("additionalProperties", {**obj("", é=INT), "additionalProperties": BOOL}),
    "two patterns at once": ("allOf", {"allOf": [{"type": "string", "pattern": "a"}, {"pattern": "b"}]}),
    "nothing there": ("$ref", {"$ref": "#/$defs/zz"}),
    "elsewhere": ("$ref", {"$ref": "http://example.com/schema"}),
    "round in a circle": ("$ref", {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}),
    "one of that overlap": ("not", {"oneOf": [INT, {"type": "number"}]}),
    "beside any of": ("properties", {**obj("a", a=INT), "anyOf": [{"required": ["b"]}]}),
    "two patterns": ("patternProperties", {"type": "object", "patternProperties": {"^x": INT, "y$": STR}}),
    "at least, of free names": ("minProperties", {"type": "object", "minProperties": 2}),
    "unique": ("uniqueItems", {"type": "array", "items": INT, "uniqueItems": True}),
    "contains": ("contains", {"type": "array", "contains": INT}),
    "old tuples": ("items", {"type": "array", "items": [INT]}),
    "unknown type": ("type", {"type": "strin"}),
    "unknown keyword": ("minimun", {"type": "integer", "minimun": 1}),
    "nullable": ("nullable", {"type": "string", "nullable": True}),
    "deep inside": ("uniqueItems", obj("a", a={"type": "array", "items": {"type": "array", "uniqueItems": True}})),
    **{
        f"pattern {pattern}": ("pattern", {"type": "string", "pattern": pattern})
        for pattern in (
            "^(?=a)b$", "^(?<x>a)$", "^a^b$", "^(a|b$)c$", "\\Aa\\Z",
            "\\ba", "^\\x00$", "(", "a{1000}{1000}", "[a", "a{,3}", "(?i)a", "\\p{L}", "a)",
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
        ({"regex": "a^b"}, "an anchor within"),
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
    ["^[\\w.%+-]+@[a-z]{2,}$", "a\\$", "a\\\\$", "^\\^a$", '[^"]x', "\\d{3}-\\d{4}"],
)
def test_usual_patterns_are_taken(grammar: XGrammar, pattern: str) -> None:
    constraint = StructuredOutputsParams(regex=pattern)
    XGrammarCard.verify(constraint)
    grammar.compile(constraint, (END,))


def test_an_object_has_no_name_twice(grammar: XGrammar) -> None:
    """A second value of another kind would be the one that counts."""
    matcher = grammar.compile(StructuredOutputsParams(json=HELD["further values"]), (END,))
    text = b'{"a":"x","a":'
    assert matcher.accept(list(text)) == len(text) - 2


def accepts(grammar: XGrammar, text: str, **constraint: Any) -> bool:
    matcher = grammar.compile(normalised(StructuredOutputsParams(**constraint)), (END,))
    tokens = list(text.encode())
    return matcher.accept(tokens) == len(tokens) and (matcher.finished or matcher.accept([END]) == 1)


@pytest.mark.parametrize(
    ("schema", "fits", "others"),
    [
        (
            True,
            ['"\\ud83d\\ude00"', '"\\u00e9"', "1e+99", "-2.5E-7"],
            ['"\\ud800"', '"\\udc00\\ud83d"', "1e100", "4e+78354047452"],
        ),
        ({"type": "number"}, ["1e5"], ["1e100"]),
        (HELD["further values"], ['{"a":"x","b":1}'], ['{"a":"x","\\u0061":1}', '{"a":"x","a":1}']),
        ({"type": "string", "pattern": "^.$"}, ['"a"', '"\\""', '"\\\\"'], ['"\\n"', '"ab"', '"""', '"\\"']),
        ({"type": "string", "pattern": "^\\n$"}, ['"\\n"'], ['"\n"', '"n"']),
    ],
)
def test_spellings(grammar: XGrammar, schema: Any, fits: list[str], others: list[str]) -> None:
    """What the library's own rules let through, and what every reader of JSON takes for something else."""
    given = schema if isinstance(schema, dict) else "true"
    assert all(accepts(grammar, text, json=given) for text in fits)
    assert not any(accepts(grammar, text, json=given) for text in others)


@pytest.mark.parametrize(
    "constraint",
    [
        {"json": "true"},
        {"json": {"type": "string", "maxLength": 3}},
        {"json": {"type": "string", "pattern": "^[^a]*$"}},
        {"json": {"type": "string", "pattern": "^[\\ue000-\\uf000b-\\uffff]*$"}},
        {"json": {"type": "object", "properties": {"a": INT}, "additionalProperties": BOOL}},
        {"regex": '"[^a]*"'},
        {"grammar": 'root ::= "\\"" [^a]* "\\""'},
    ],
)
def test_whatever_is_written_is_utf_8(grammar: XGrammar, constraint: dict[str, Any]) -> None:
    """Half a surrogate pair is none, not in any bytes."""
    matcher = grammar.compile(normalised(StructuredOutputsParams(**constraint)), (END,))
    start = list(b'{"') if "properties" in str(constraint) else list(b'"')
    assert matcher.accept(start) == len(start) and matcher.accept([0xED, 0x9F, 0xBF]) == 3
    assert matcher.accept([0xED, 0xA0, 0x80]) == 1


def test_the_same_in_a_structural_tag(grammar: XGrammar) -> None:
    parts = [
        {"type": "json_schema", "json_schema": {"type": "string", "pattern": "^(?:a*b)?c$"}},
        {"type": "regex", "pattern": "(?:a*b)?c"},
        {"type": "json_schema", "json_schema": {"type": "number"}},
    ]
    tag = json.dumps({"type": "structural_tag", "format": {"type": "sequence", "elements": parts}})
    assert accepts(grammar, '"aabc"c1e5', structural_tag=tag) and accepts(grammar, '"c"abc1', structural_tag=tag)
    for text in ('"ac"c1', '"c"ac1', '"c"c1e100'):
        assert not accepts(grammar, text, structural_tag=tag), text


ATOMS = st.sampled_from(["a", "b", "c", "[ab]", "[^a]", "."])
PATTERNS = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.builds("{}{}".format, inner, inner),
        st.builds("(?:{}|{})".format, inner, inner),
        st.builds("(?:{}){}".format, inner, st.sampled_from(["*", "+", "?", "{2}", "{1,2}", "{0,1}"])),
    ),
    max_leaves=5,
)
TEXTS = ["".join(text) for size in range(5) for text in itertools.product("abc", repeat=size)]


@settings(max_examples=25, deadline=None)
@given(PATTERNS)
@example("(?:a*b)?c")
@example("(?:ab*)?c")
def test_patterns_match_what_they_match(grammar: XGrammar, pattern: str) -> None:
    searched = re.compile(pattern)
    for constraint, quote in (
        ({"regex": pattern}, ""),
        ({"json": {"type": "string", "pattern": f"^(?:{pattern})$"}}, '"'),
    ):
        for text in TEXTS:
            found = accepts(grammar, f"{quote}{text}{quote}", **constraint)
            assert found == (searched.fullmatch(text) is not None), (constraint, text)


def test_what_the_library_warns_of_is_refused(grammar: XGrammar) -> None:
    """Whatever the card knows of it."""
    wide = StructuredOutputsParams(json={"type": "integer", "multipleOf": 5, "minimum": 0})
    with pytest.raises(InvalidRequestError, match="ignoring multipleOf"):
        grammar.compile(wide, (END,))


def test_constants_that_look_like_rules(grammar: XGrammar) -> None:
    texts = ["([eE] [+-])", "json_string=true", 'Regex("^of_rule_0$", json_string=true)', "basic_escape ::= [^a]", "[^"]
    for text in texts:
        assert accepts(grammar, json.dumps(text), json={"enum": [text, "other"]}), text
        assert not accepts(grammar, json.dumps(text + "a"), json={"enum": [text, "other"]}), text


def test_only_its_warnings_are_kept(capfd: pytest.CaptureFixture[str]) -> None:
    with listening() as warnings:
        os.write(2, b"[01:02:03] /a/b/some.cc:12: Warning: this is ignored\nsomebody else\n")
    assert warnings == ["this is ignored"]
    assert capfd.readouterr().err == "somebody else\n"


def test_rules_that_are_not_known_are_no_rules() -> None:
    """Another version of the library may write others."""
    with pytest.raises(ValueError, match="not known here"):
        mended('basic_escape ::= (["u"] [0-9]{4})\n', [])


@pytest.mark.parametrize("text", ["root ::= root", "root ::= a\na ::= root", 'root ::= "a" b\nb ::= b'])
def test_grammars_that_lead_nowhere(grammar: XGrammar, text: str) -> None:
    with pytest.raises(InvalidRequestError, match="nothing may follow"):
        grammar.compile(StructuredOutputsParams(grammar=text), (END,))
