"""Normalised schemas against a validator: they accept what the schemas that they are made of accept."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.types.errors import InvalidRequestError
from engine.types.structured_outputs import StructuredOutputsParams
from engine_kit.schemas.normal import in_normal_form, in_words_of, normal, normalised
from engine_kit.schemas.places import places
from engine_kit.schemas.reading import MAX_WORK, Reading

NAMES = ("a", "b", "ab")
TYPES = ("null", "boolean", "number", "integer", "string", "array", "object")
INSTANCES: list[Any] = [
    None, True, False, 0, 1, -1, 2, 3, 6, 1.5, -2.5, 10, "", "a", "b", "ab", "aab", "x\ny", "é", [], [1], ["a"], [1, 2],
    [1, "a"], [None, 3, "b"], [[]], [[1], 2], [1, 1], {}, {"a": 1}, {"b": 1}, {"a": "a"}, {"ab": 2}, {"a": 1, "b": 2},
    {"a": "b", "ab": None}, {"b": {}, "c": 1}, {"a": {"a": 1}}, {"a": {"a": {"b": 3}}}, {"c": []},
    {"a": 1, "b": 1, "ab": 1},
]  # fmt: skip
WORKED_OUT = {"oneOf", "if", "then", "else", "dependentRequired", "dependentSchemas", "unevaluatedItems", "format"}
numbers = st.sampled_from([-2, -1, 0, 1, 1.5, 2, 3])
counts = st.integers(0, 2)
constants = st.sampled_from(INSTANCES)


def schemas(depth: int) -> st.SearchStrategy[Any]:
    below = schemas(depth - 1) if depth else st.booleans()
    ref = st.sampled_from(["#", "#/$defs/d", "#/$defs/e"])
    keywords = {
        "type": st.sampled_from(TYPES) | st.lists(st.sampled_from(TYPES), min_size=1, max_size=3, unique=True),
        "enum": st.lists(constants, min_size=1, max_size=3), "const": constants,
        "minimum": numbers, "exclusiveMinimum": numbers, "maximum": numbers, "exclusiveMaximum": numbers,
        "multipleOf": st.sampled_from([0.5, 1, 1.5, 2, 3]), "minLength": counts, "maxLength": counts,
        "pattern": st.sampled_from(["^a", "b$", "^a*$", ".", "^(a|b)b?$", "é"]),
        "items": below, "prefixItems": st.lists(below, min_size=1, max_size=2), "minItems": counts, "maxItems": counts,
        "contains": below, "minContains": counts, "uniqueItems": st.booleans(), "unevaluatedItems": below,
        "properties": st.dictionaries(st.sampled_from(NAMES), below, max_size=2),
        "required": st.lists(st.sampled_from(NAMES), max_size=2, unique=True), "additionalProperties": below,
        "patternProperties": st.dictionaries(st.sampled_from(["^a", "b"]), below, max_size=1),
        "propertyNames": below, "minProperties": counts, "maxProperties": counts, "unevaluatedProperties": below,
        "dependentRequired": st.dictionaries(st.sampled_from(NAMES), st.just(["b"]), max_size=1),
        "dependentSchemas": st.dictionaries(st.sampled_from(NAMES), below, max_size=1),
        "anyOf": st.lists(below, min_size=1, max_size=3), "oneOf": st.lists(below, min_size=1, max_size=3),
        "allOf": st.lists(below, min_size=1, max_size=2), "not": below, "if": below, "then": below, "else": below,
        "$ref": ref,
    }  # fmt: skip
    chosen = st.lists(st.sampled_from(sorted(keywords)), min_size=1, max_size=3, unique=True)
    return st.booleans() | chosen.flatmap(lambda keys: st.fixed_dictionaries({key: keywords[key] for key in keys}))


whole = st.builds(
    lambda schema, d, e: {**schema, "$defs": {"d": d, "e": e}} if isinstance(schema, dict) else schema,
    schemas(2), schemas(1), schemas(0),
)  # fmt: skip


def accepted(schema: Any) -> list[bool]:
    validator = jsonschema.Draft202012Validator(schema)
    return [validator.is_valid(instance) for instance in INSTANCES]


def check_same(schema: Any) -> None:
    """Normalised it accepts the same instances, and so it does when that is normalised again."""
    try:
        found = normal(schema)
    except InvalidRequestError as error:
        if "nothing fits the schema" in str(error):
            assert not any(accepted(schema))
        return
    try:
        expected = accepted(schema)
    except RecursionError:  # the validator's own, where a schema refers to itself
        return
    assert accepted(found) == expected, found
    assert accepted(normal(found)) == expected
    for place in places(found):
        assert not set(place.asking) & WORKED_OUT, found
        assert isinstance(place.schema.get("type", ""), str), found


@settings(max_examples=80, deadline=None)
@given(whole)
def test_what_is_accepted_stays(schema: Any) -> None:
    check_same(schema)


OTHERS = [{"type": kind} for kind in ("null", "boolean", "number", "string", "array", "object")]


def but(kind: str, *written: Any) -> dict[str, Any]:
    """Any type, and this one as `written`."""
    return {"anyOf": [part for t in OTHERS for part in (written if t["type"] == kind else [t])]}


@pytest.mark.parametrize(
    ("schema", "found"),
    [
        ({}, True),
        ({"title": "T", "x-of-ours": 1, "contentEncoding": "base64", "contentSchema": {"type": "null"}}, True),
        ({"maxItems": 2}, but("array", {"type": "array", "maxItems": 2})),
        ({"minProperties": 1}, but("object", {"type": "object", "minProperties": 1})),
        (
            {"type": ["string", "null"], "minLength": 1},
            {"anyOf": [{"type": "string", "minLength": 1}, {"type": "null"}]},
        ),
        ({"type": "integer", "minimum": 2.5, "exclusiveMaximum": 7}, {"type": "integer", "minimum": 3, "maximum": 6}),
        ({"type": "number", "multipleOf": 3}, {"type": "integer", "multipleOf": 3}),
        ({"type": "string", "enum": ["a", 1, "b"]}, {"enum": ["a", "b"]}),
        (
            {"allOf": [{"type": "integer"}, {"minimum": 3}, {"maximum": 5}]},
            {"type": "integer", "minimum": 3, "maximum": 5},
        ),
        ({"$ref": "#/$defs/a", "maxLength": 5, "$defs": {"a": {"type": "string"}}}, {"type": "string", "maxLength": 5}),
        ({"oneOf": [{"type": "integer"}, {"type": "null"}]}, {"anyOf": [{"type": "integer"}, {"type": "null"}]}),
        (
            {"not": {"type": ["object", "array", "number"]}},
            {"anyOf": [{"type": t} for t in ("null", "boolean", "string")]},
        ),
        ({"type": "integer", "not": {"minimum": 4}}, {"type": "integer", "maximum": 3}),
        ({"type": "array", "contains": True}, {"type": "array", "minItems": 1}),
        ({"type": "array", "items": False}, {"type": "array", "maxItems": 0}),
        (
            {"type": "object", "propertyNames": {"pattern": "^a"}, "additionalProperties": {"type": "null"}},
            {"type": "object", "patternProperties": {"^a[\\s\\S]*$": {"type": "null"}}, "additionalProperties": False},
        ),
        (
            {"type": "object", "properties": {"a": {"type": "null"}}, "unevaluatedProperties": False},
            {"type": "object", "properties": {"a": {"type": "null"}}, "additionalProperties": False},
        ),
        ({"anyOf": [{"type": "null"}, {}]}, True),
        ({"$dynamicRef": "#a", "$defs": {"x": {"$dynamicAnchor": "a", "type": "null"}}}, {"type": "null"}),
        ({"$id": "urn:a:b", "$ref": "urn:a:b#/$defs/x", "$defs": {"x": {"type": "null"}}}, {"type": "null"}),
    ],
)
def test_how_it_is_written(schema: Any, found: Any) -> None:
    assert json.dumps(normal(schema)) == json.dumps(found)
    if not any("$ref" in key or "dynamic" in key for key in schema):
        check_same(schema)


def test_references_that_come_back_stay() -> None:
    tree = {
        "type": "object",
        "properties": {"next": {"anyOf": [{"type": "null"}, {"$ref": "#"}]}},
        "required": ["next"],
    }
    found = normal(tree)
    (name,) = found["$defs"]
    assert found["$ref"] == f"#/$defs/{name}"
    validator = jsonschema.Draft202012Validator(found)
    assert validator.is_valid({"next": {"next": None}}) and not validator.is_valid({"next": {"next": 1}})


def test_properties_keep_their_order() -> None:
    base = {"type": "object", "properties": {"a": {}}}
    own = {"properties": {"b": {}, "c": {}}, "required": ["c", "d"]}
    assert list(normal({"allOf": [base], **own})["properties"]) == ["a", "b", "c", "d"]
    assert list(normal({**own, "allOf": [base]})["properties"]) == ["b", "c", "a", "d"]


@pytest.mark.parametrize(
    ("keyword", "schema"),
    [
        ("minimun", {"type": "integer", "minimun": 1}),
        ("format", {"format": "iri"}),
        ("format", {"type": "integer", "format": "nonsense"}),
        ("pattern", {"pattern": "(?=a)"}),
        ("patternProperties", {"patternProperties": {"a(": {}}}),
        ("minLength", {"type": "string", "minLength": 4, "maxLength": 3}),
        ("not", {"not": {}}),
        ("allOf", {"allOf": [{"type": "string"}, {"type": "null"}]}),
        ("$ref", {"$ref": "#/$defs/a"}),
        ("$ref", {"$ref": "http://example.com/schema"}),
        ("$ref", {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}),
        ("$ref", {"anyOf": [{"$ref": "#"}, {"type": "null"}]}),
        ("minLength", {"minLength": -1}),
        ("items", {"items": [{"type": "null"}]}),
        ("enum", {"enum": []}),
        ("unevaluatedItems", {"contains": {"type": "null"}, "unevaluatedItems": False}),
    ],
)
def test_what_is_refused_is_named(keyword: str, schema: Any) -> None:
    with pytest.raises(InvalidRequestError) as found:
        normal(schema)
    assert str(found.value).startswith(f"structured_outputs.json='{keyword}' in the schema")


TEXT = {"type": "string"}
GREEDY: dict[str, Any] = {
    "products": {"allOf": [{"anyOf": [{"required": [f"a{i}"]}, {"required": [f"b{i}"]}]} for i in range(20)]},
    "one of many": {"oneOf": [{"properties": {f"k{i}": TEXT}} for i in range(60)]},
    "names by patterns": {
        "properties": {f"p{i}": TEXT for i in range(3000)},
        "patternProperties": {f"^x{i}(a|b)*c": TEXT for i in range(200)},
    },
    "a pattern": {"enum": ["a" * 50_000], "pattern": "^((((a*)*)*)*)*b$"},
    "dependents": {"dependentRequired": {f"a{i}": [f"b{i}"] for i in range(30)}},
    "a chain": {"$ref": "#/$defs/0", "$defs": {f"{i}": {"$ref": f"#/$defs/{i + 1}"} for i in range(5000)}},
}  # fmt: skip


@pytest.mark.parametrize("name", GREEDY)
def test_what_multiplies_is_given_up(name: str) -> None:
    """By counting what is done, not by a clock."""
    with pytest.raises(InvalidRequestError):
        normal(GREEDY[name])


def test_a_large_union_told_apart_by_a_tag_is_no_work() -> None:
    tagged = [{"type": "object", "properties": {"k": {"const": f"v{i}"}}, "required": ["k"]} for i in range(120)]
    assert len(normal({"oneOf": tagged})["anyOf"]) == 120
    reading = Reading({"oneOf": tagged})
    reading.of(True, "")
    assert reading._work < MAX_WORK / 5


def test_constraints() -> None:
    """A schema given as text, those within a structural tag, and regular expressions; what is the same is made once."""
    given = StructuredOutputsParams(json='{"maxItems": 0, "type": "array"}')
    with in_normal_form(given) as first, in_normal_form(given) as second:
        assert first is second and first.json == {"type": "array", "maxItems": 0}
    with in_normal_form(StructuredOutputsParams(json='{"type": "integer", "maximum": 1e30}')) as huge:
        assert huge.json == {"type": "integer", "maximum": 10**30}
    content = {"type": "json_schema", "json_schema": {"allOf": [{"type": "null"}]}}
    tag = {"type": "structural_tag", "format": {"type": "tag", "begin": "<", "content": content, "end": ">"}}
    found = normalised(StructuredOutputsParams(structural_tag=json.dumps(tag))).schema
    assert found["format"]["content"]["json_schema"] == {"type": "null"}
    assert normalised(StructuredOutputsParams(regex="a|b$")).regex == "^(?:a|b)$"
    assert normalised(StructuredOutputsParams(regex="(?i)a")).regex == "(?i)a", "a driver may know what it is"
    assert normalised(StructuredOutputsParams(json=True)).schema is True  # type: ignore[arg-type]


def test_a_drivers_error_speaks_of_what_was_sent() -> None:
    sent = StructuredOutputsParams(json={"contains": {"type": "null"}})
    normal_one = normalised(sent)
    error = InvalidRequestError("structured_outputs.json='contains' in the schema at /anyOf/4", "it cannot")
    assert in_words_of(sent, normal_one, error).asked == "structured_outputs.json='contains' in the schema"
    other = StructuredOutputsParams(json={"oneOf": [{"format": "date"}, {}]})
    error = InvalidRequestError("structured_outputs.json='not' in the schema at /anyOf/4", "it cannot")
    assert str(in_words_of(other, normalised(other), error)) == (
        "structured_outputs.json='oneOf' in the schema; it comes to 'not': it cannot"
    )
    error = InvalidRequestError("structured_outputs.json='pattern' in the schema", "it cannot")
    assert "='format' in the schema; it comes to 'pattern'" in str(in_words_of(other, normalised(other), error))
    error = InvalidRequestError(normal_one.asked, "it is too large")
    assert in_words_of(sent, normal_one, error).asked == sent.asked
    with pytest.raises(InvalidRequestError, match="it is too large") as caught, in_normal_form(sent) as normal_one:
        raise error
    assert caught.value.asked == sent.asked
    with (
        pytest.raises(InvalidRequestError, match="'minimun'"),
        in_normal_form(StructuredOutputsParams(json={"minimun": 3})),
    ):
        raise AssertionError("it is not normalised")
