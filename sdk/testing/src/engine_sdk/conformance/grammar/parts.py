"""Schemas of arrays, of objects and of several schemas at once, each with instances that are valid and that are not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from engine_sdk.conformance.grammar.values import VALUES, Held, text, whole

INT, STR, BOOL = whole(), text(), {"type": "boolean"}


def array(**keywords: Any) -> dict[str, Any]:
    """A schema of arrays."""
    return {"type": "array", **keywords}


def obj(properties: Mapping[str, Any] | None = None, **keywords: Any) -> dict[str, Any]:
    """A schema of objects."""
    return {"type": "object", **({} if properties is None else {"properties": dict(properties)}), **keywords}


def closed(properties: Mapping[str, Any], **keywords: Any) -> dict[str, Any]:
    """A schema of objects that have these properties and no others."""
    return obj(properties, additionalProperties=False, **keywords)


_TAGGED = [
    closed({"k": {"const": "a"}, "v": INT}, required=["k", "v"]),
    closed({"k": {"const": "b"}, "v": STR}, required=["k", "v"]),
]
_TREE = closed({"v": INT, "more": array(items={"$ref": "#"})}, required=["v"])
_LIST = {
    "$defs": {"n": closed({"v": INT, "n": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/n"}]}}, required=["v", "n"])}
}

PARTS: Mapping[str, Sequence[Held]] = MappingProxyType({
    # -- arrays
    "items": (
        Held(array(items=INT), [[], [1], [1, 2, 3]], [["1"], [1, "2"], [1.5], [None], {}]),
        Held(array(items={"enum": ["a", "b"]}), [["a", "b", "a"]], [["c"], ["a", 1]]),
        Held(array(items=array(items=BOOL)), [[[True], []]], [[1], [[1]], [True]]),
        Held(array(items=False), [[]], [[1], [None], [[]]]),
        Held({"items": INT}, [[1], []], [["a"], [1, None]]),
        Held(array(prefixItems=[INT], items=STR), [[1], [1, "a", "b"], []], [["a"], [1, 2], [1, "a", 3]]),
    ),
    "prefixItems": (
        Held(array(prefixItems=[INT, STR], items=False), [[1, "a"], [1], []], [["a"], [1, 2], [1, "a", 3]]),
        Held(array(prefixItems=[INT, STR], items=False, minItems=2), [[1, "a"]], [[1], [], [1, "a", None]]),
        Held(array(prefixItems=[INT, STR]), [[1, "a"]], [["a"], [1, 2]]),
        Held({"prefixItems": [INT]}, [[1]], [["a"], [None, 1]]),
    ),
    "minItems": (
        Held(array(minItems=1), [[1], ["a", None]], [[], {}]),
        Held(array(items=INT, minItems=2, maxItems=3), [[1, 2], [1, 2, 3]], [[1], [], [1, 2, 3, 4], [1, "a"]]),
        Held({"minItems": 1}, [[1], [1, "a"]], [[]]),
        Held(closed({"a": {"minItems": 2}}), [{"a": [1, 2]}, {}], [{"a": [1]}, {"a": []}]),
    ),
    "maxItems": (
        Held(array(maxItems=2), [[], [1, "a"]], [[1, 2, 3], [None, None, None, None]]),
        Held(array(maxItems=0), [[]], [[1], [[]]]),
        Held({"maxItems": 2}, [[], [1, 2]], [[1, 2, 3]]),
        Held({"anyOf": [{"maxItems": 1}, {"minItems": 3}]}, [[1], [1, 2, 3]], [[1, 2]]),
        Held({"allOf": [{"maxItems": 2}]}, [[1, 2]], [[1, 2, 3]]),
        Held({"$ref": "#/$defs/d", "$defs": {"d": {"maxItems": 2}}}, [[1, 2]], [[1, 2, 3]]),
        Held(closed({"a": {"maxItems": 1}}), [{"a": [1]}, {"a": []}], [{"a": [1, 2]}]),
        Held(array(items={"maxItems": 1}), [[[1], []]], [[[1, 2]]]),
    ),
    "uniqueItems": (
        Held(array(uniqueItems=True), [[], [1, 2], [1, "1", True]],
             [[1, 1], ["a", "a"], [[], []], [{"a": 1}, {"a": 1}]]),
        Held(array(items=BOOL, uniqueItems=True), [[True, False]], [[True, True], [1]]),
        Held(array(uniqueItems=False), [[1, 1]], [{}]),
    ),
    "contains": (
        Held(array(contains=INT), [[1], ["a", 1], [1, "a"]], [[], ["a"], [None, 1.5]]),
        Held(array(contains={"const": 5}, items=INT), [[5], [1, 5, 2]], [[], [1], [5, "a"]]),
        Held({"contains": {"const": 5}}, [[5]], [[], [4]]),
    ),
    "minContains": (
        Held(array(contains=INT, minContains=2), [[1, 2], [1, "a", 2]], [[1], [1, "a"], []]),
        Held(array(contains=INT, minContains=0), [[], ["a"]], [{}]),
    ),
    "maxContains": (Held(array(contains=INT, maxContains=1), [[1], ["a", 1]], [[1, 2], ["a"], []]),),
    "unevaluatedItems": (
        Held(array(prefixItems=[INT], unevaluatedItems=False), [[1], []], [[1, 2], ["a"]]),
        Held(array(unevaluatedItems=STR), [["a"], []], [[1], ["a", 2]]),
        Held(array(allOf=[{"prefixItems": [INT]}], unevaluatedItems=False), [[1]], [[1, 2]]),
    ),
    # -- objects
    "properties": (
        Held(obj({"a": INT, "b": STR}), [{}, {"a": 1}, {"a": 1, "b": "x"}],
             [{"a": "x"}, {"b": 1}, {"a": 1, "b": 2}]),
        Held(closed({"a": BOOL, "c": {"enum": ["x"]}}), [{"a": True, "c": "x"}, {}], [{"a": 1}, {"c": "z"}, {"b": 1}]),
        Held({"properties": {"foo": INT}}, [{"foo": 1}],
             [{"foo": "x"}, {"foo": None}, {"bar": 1, "foo": []}]),
        Held(obj({"foo": INT}, additionalProperties=STR), [{"foo": 1, "x": "y"}, {}],
             [{"foo": "x"}, {"x": 1}, {"foo": 1, "x": 2}],
             ['{"foo":1,"foo":"x"}', '{"foo":1,"\\u0066oo":"x"}', '{"\\u0066oo":"x"}', '{"x":"y","fo\\u006f":"x"}']),
        Held(obj({"a": True, "b": False}), [{"a": 1}, {}], [{"b": 1}, {"a": 1, "b": None}]),
        Held(obj({"a": obj({"foo": INT})}), [{"a": {"foo": 1}}], [{"a": {"foo": "x"}}, {"a": 1}]),
        Held(array(items={"properties": {"foo": INT}}), [[{"foo": 1}, {}]],
             [[{"foo": "x"}], [{"foo": 1}, {"foo": "y"}]]),
    ),
    "names of properties": (
        Held(obj({"é": INT, '"': INT}, additionalProperties=STR),
             [{"é": 1}, {"é": 1, '"': 2, "x": "y"}], [{"é": "x"}, {'"': "x"}, {"x": 1}, {"é": 1, '"': "x"}],
             ['{"é":1,"é":"x"}', '{"é":1,"\\u00e9":"x"}', '{"\\"":1,"\\"":"x"}', '{"\\"":1,"\\u0022":"x"}',
              '{"é":1,"\\"":2,"é":"x"}']),
        Held(obj({"é": INT}), [{"é": 1}], [{"é": "x"}, {"e": 1, "é": None}],
             ['{"é":1,"é":"x"}', '{"é":1,"\\u00E9":null}']),
        Held(obj({"日本": INT, "😀": INT}, additionalProperties=BOOL), [{"日本": 1, "😀": 2, "日": True}],
             [{"日本": True}, {"😀": True}, {"日": 1}],
             ['{"😀":1,"\\ud83d\\ude00":true}', '{"日本":1,"日\\u672c":true}']),
        Held(closed({"a\\b": INT, "c/d": INT, "e\nf": INT, "": INT, " ": INT, "\x01": INT}),
             [{"a\\b": 1, "c/d": 2, "e\nf": 3}, {"": 4, " ": 5}, {"\x01": 6}],
              [{"a\\b": "x"}, {"c/d": "x"}, {"": "x"}, {"ab": 1}]),
        Held(obj({"a\\b": INT, "c/d": INT, "e\nf": INT}, additionalProperties=STR),
             [{"a\\b": 1, "c/d": 2, "e\nf": 3}], [{"a\\b": "x"}, {"c/d": "x"}, {"e\nf": "x"}],
             ['{"c\\/d":"x"}', '{"c/d":1,"c\\/d":"x"}', '{"e\\u000Af":"x"}', '{"a\\u005cb":"x"}']),
        Held(obj({"a.b": INT, "a|b": INT, "(": INT, "[x]": INT, "a*": INT}, additionalProperties=STR),
             [{"a.b": 1, "(": 1}, {"axb": "y", "a": "y"}],
              [{"a.b": "x"}, {"a|b": "x"}, {"(": "x"}, {"a*": "x"}, {"axb": 1}]),
        Held(obj({"ab": INT, "abc": INT, "b": INT}, additionalProperties=STR),
             [{"ab": 1, "abc": 2, "b": 3}, {"a": "x", "abcd": "y"}],
              [{"ab": "x"}, {"abc": "x"}, {"a": 1}, {"abcd": 1}]),
        Held(obj({"__proto__": INT, "constructor": INT, "length": INT, "enum": INT, "$ref": STR}),
             [{"__proto__": 1, "$ref": "x"}], [{"__proto__": "x"}, {"length": None}, {"enum": "x"}, {"$ref": 1}]),
        Held(obj({"a": INT}, additionalProperties=False, required=["a"]), [{"a": 1}], [{}, {"b": 1}],
             ['{"a":1,"a":2,"b":3}', '{"A":1}']),
    ),
    "required": (
        Held(closed({"a": INT, "b": INT}, required=["a"]), [{"a": 1}, {"a": 1, "b": 2}], [{}, {"b": 1}, {"a": "x"}],
             ['{"b":1,"b":2}', '{"b":1,"\\u0062":2}']),
        Held(obj({"a": INT, "z": True}, required=["a", "z"]), [{"a": 1, "z": None}], [{"a": 1}, {"z": 1}, {}],
             ['{"a":1,"a":1}']),
        Held(obj(required=["x"]), [{"x": 1}], [{}, {"y": 1}]),
        Held({"required": ["a"]}, [{"a": 1}], [{}, {"b": 1}]),
        Held(obj({"a": INT, "é": INT}, required=["é"], additionalProperties=STR), [{"é": 1}, {"a": 1, "é": 2}],
             [{"a": 1}, {"é": "x"}, {}]),
        Held(obj({"a": INT, "b": INT, "c": INT}, required=["b"]), [{"b": 1}, {"a": 1, "b": 2, "c": 3}],
             [{"a": 1, "c": 2}, {}]),
    ),
    "additionalProperties": (
        Held(closed({"a": INT}), [{}, {"a": 1}], [{"b": 1}, {"a": 1, "b": 1}, {"é": 1}, {"A": 1}]),
        Held(obj(additionalProperties=INT), [{}, {"x": 1, "é": 2}], [{"x": "y"}, {"x": 1, "y": None}]),
        Held({"additionalProperties": INT}, [{"x": 1}], [{"x": "y"}]),
        Held({"additionalProperties": False}, [{}], [{"x": "y"}]),
        Held(obj({"a": INT}, additionalProperties=STR, required=["a"]), [{"a": 1}, {"a": 1, "b": "x"}],
             [{"a": 1, "b": 2}, {"a": "x"}, {"b": "x"}],
             ['{"a":1,"a":"x"}', '{"a":1,"b":"x","a":"y"}', '{"a":1,"\\u0061":"x"}']),
        Held(obj({"a": BOOL}, additionalProperties=obj({"n": INT}, required=["n"])), [{"b": {"n": 1}}],
             [{"b": {}}, {"b": 1}, {"a": {"n": 1}}]),
    ),
    "patternProperties": (
        Held(obj(patternProperties={"^x": INT}, additionalProperties=False), [{}, {"x": 1, "xy": 2}],
             [{"x": "a"}, {"y": 1}, {"yx": 1}]),
        Held(obj(patternProperties={"^x": INT}), [{"x": 1}], [{"x": "a"}, {"xy": None}]),
        Held({"patternProperties": {"x": INT}}, [{"x": 1}], [{"x": "a"}, {"axb": "a"}]),
        Held(obj({"xa": STR}, patternProperties={"^x": {"minLength": 2}}), [{"xa": "ab"}, {"xb": 3}],
             [{"xa": "a"}, {"xb": "b"}, {"xa": 1}]),
        Held(obj({"a": INT}, patternProperties={"^x": BOOL}, additionalProperties=STR),
             [{"a": 1, "x1": True, "b": "c"}], [{"x1": "c"}, {"a": "c"}, {"b": True}],
              ['{"x1":true,"\\u00781":"c"}', '{"\\u0078":"c"}']),
        Held(obj(patternProperties={"^a": INT, "b$": {"minimum": 5}}), [{"a": 1, "b": 6, "ab": 7}],
             [{"ab": 1}, {"b": 1}, {"a": "x"}]),
        Held(obj(patternProperties={"^é+$": INT}, additionalProperties=STR), [{"éé": 1, "e": "x"}],
             [{"é": "x"}, {"e": 1}]),
        Held({"anyOf": [{"patternProperties": {"^x": INT}}]}, [{"x": 1}], [{"x": "a"}]),
        Held(closed({"o": {"patternProperties": {"^x": INT}}}), [{"o": {"x": 1}}], [{"o": {"x": "a"}}]),
    ),
    "propertyNames": (
        Held(obj(propertyNames={"pattern": "^[ab]+$"}), [{}, {"ab": 1, "b": None}],
             [{"c": 1}, {"": 1}, {"ab": 1, "abc": 2}]),
        Held(obj(propertyNames={"pattern": "^[ab]$"}, additionalProperties=INT), [{"a": 1, "b": 2}],
             [{"a": "x"}, {"ab": 1}]),
        Held(obj(propertyNames={"maxLength": 2}), [{"ab": 1, "é日": 2}], [{"abc": 1}]),
        Held(obj(propertyNames={"enum": ["a", "é"]}), [{"a": 1, "é": 2}], [{"b": 1}, {"e": 1}]),
        Held(obj(propertyNames=False), [{}], [{"a": 1}, {"": 1}]),
        Held({"propertyNames": {"pattern": "^a+$"}}, [{"aa": 1}], [{"b": 1}, {"aA": 1}]),
        Held(obj({"a": INT, "ab": INT}, propertyNames={"maxLength": 1}), [{"a": 1}],
             [{"ab": 1}, {"a": "x"}, {"cd": 1}]),
        Held({"$ref": "#/$defs/d", "$defs": {"d": {"propertyNames": {"maxLength": 1}}}}, [{"a": 1}], [{"ab": 1}]),
    ),
    "minProperties": (
        Held(obj(minProperties=1), [{"a": 1}], [{}, []]),
        Held(obj(minProperties=2), [{"a": 1, "b": 2}, {"x": 1, "y": 2, "z": 3}], [{"a": 1}, {}],
             ['{"a":1,"a":2}', '{"a":1,"a":2,"a":3}', '{"a":1,"\\u0061":2}']),
        Held(closed({"a": INT, "b": INT, "c": INT}, minProperties=2), [{"a": 1, "b": 2}, {"b": 1, "c": 2}],
             [{"b": 1}, {}, {"a": 1, "d": 2}],
             ['{"b":1,"b":2}', '{"a":1,"\\u0061":2}']),
        Held(obj({"a": INT}, minProperties=2, additionalProperties=INT), [{"a": 1, "b": 2}], [{"a": 1}, {"b": 1}],
             ['{"a":1,"a":2}', '{"b":1,"b":1}']),
        Held({"minProperties": 1}, [{"a": 1}], [{}]),
        Held(obj(additionalProperties=INT, propertyNames={"pattern": "^[ab]$"}, minProperties=2), [{"a": 1, "b": 2}],
             [{"a": 1}], ['{"a":1,"a":2}']),
        Held(obj(patternProperties={"^x": INT}, additionalProperties=False, minProperties=2), [{"x": 1, "xy": 2}],
             [{"x": 1}], ['{"x":1,"x":2}']),
    ),
    "maxProperties": (
        Held(obj(maxProperties=2), [{}, {"a": 1, "b": 2}], [{"a": 1, "b": 2, "c": 3}]),
        Held(obj(maxProperties=0), [{}], [{"a": 1}, {"": None}]),
        Held(closed({"a": INT, "b": INT}, maxProperties=1), [{"a": 1}, {"b": 1}, {}], [{"a": 1, "b": 2}]),
        Held({"maxProperties": 1}, [{"a": 1}, {}], [{"a": 1, "b": 2}]),
        Held({"maxProperties": 0}, [{}], [{"a": 1}]),
        Held({"anyOf": [{"maxProperties": 1}, STR]}, [{"a": 1}, "a"], [{"a": 1, "b": 2}]),
        Held(array(items={"maxProperties": 1}), [[{"a": 1}, {}]], [[{"a": 1, "b": 2}]]),
    ),
    "dependentRequired": (
        Held(closed({"a": INT, "b": INT}, dependentRequired={"a": ["b"]}), [{"a": 1, "b": 2}, {"b": 1}, {}],
             [{"a": 1}]),
        Held({"dependentRequired": {"a": ["b"]}}, [{"a": 1, "b": 2}], [{"a": 1}, {"a": 1, "c": 2}]),
    ),
    "dependentSchemas": (
        Held(obj({"a": INT, "b": True}, dependentSchemas={"a": {"properties": {"b": INT}}}),
             [{"a": 1, "b": 2}, {"b": "x"}], [{"a": 1, "b": "x"}]),
    ),
    "unevaluatedProperties": (
        Held(obj({"a": INT}, unevaluatedProperties=False), [{"a": 1}, {}], [{"b": 1}, {"a": 1, "b": 2}]),
        Held(obj(unevaluatedProperties=INT), [{"a": 1}], [{"a": "x"}]),
        Held(obj({"a": INT}, allOf=[{"properties": {"b": INT}}], unevaluatedProperties=False), [{"a": 1, "b": 2}],
             [{"c": 1}, {"a": 1, "c": 2}]),
    ),
    # -- several schemas
    "anyOf": (
        Held({"anyOf": [{"enum": ["a"]}, BOOL]}, ["a", True], ["b", 1, None]),
        Held({"anyOf": [INT, closed({"a": INT}, required=["a"])]}, [1, {"a": 1}], ["a", {}, {"a": "x"}, {"b": 1}]),
        Held(obj({"a": INT, "b": INT}, anyOf=[{"required": ["a"]}, {"required": ["b"]}]),
             [{"a": 1}, {"b": 1}, {"a": 1, "b": 2}], [{}, {"c": 1}, {"a": "x"}]),
        Held(text(anyOf=[{"minLength": 3}, {"pattern": "^a"}]), ["a", "bcd"], ["b", "", 1]),
        Held(whole(minimum=0, anyOf=[{"maximum": 3}, {"multipleOf": 5}]), [0, 3, 10], [4, -5, 7, "a"]),
        Held({"anyOf": [True, False]}, [1, "a", {}], []),
        Held({"anyOf": [False, INT]}, [1], ["a", None]),
        Held({"anyOf": [{"properties": {"foo": INT}, "required": ["foo"]},
             {"properties": {"bar": STR}, "required": ["bar"]}]},
             [{"foo": 1}, {"bar": "x"}], [{"foo": "x"}, {"bar": 1}, {"foo": "x", "bar": 1}, {}]),
        Held({"anyOf": [{"minimum": 5}, STR]}, [5, "a"], [4]),
    ),
    "oneOf": (
        Held({"oneOf": [INT, STR, {"type": "null"}]}, [1, "a", None], [1.5, [], True]),
        Held({"oneOf": _TAGGED}, [{"k": "a", "v": 1}, {"k": "b", "v": "x"}],
             [{"k": "a", "v": "x"}, {"k": "b", "v": 1}, {"k": "c", "v": 1}, {}]),
        Held({"oneOf": [INT, whole(minimum=3)]}, [2, -1], [3, 10, "a"]),
        Held({"oneOf": [{"type": "number"}, INT]}, [1.5], [1, "a"], ["1.0", "10e-1"]),
        Held(obj({"a": INT, "b": INT}, oneOf=[{"required": ["a"]}, {"required": ["b"]}]), [{"a": 1}, {"b": 1}],
             [{}, {"a": 1, "b": 2}]),
        Held({"oneOf": [{"minLength": 2}, {"maxLength": 3}]}, ["a", "abcd"], ["ab", "abc", 1]),
        Held({"oneOf": [True, False]}, [1, {}], []),
        Held({"oneOf": [True, True]}, [], [1, "a", {}]),
    ),
    "allOf": (
        Held({"allOf": [whole(minimum=3, maximum=5)]}, [3, 5], [2, 6, "a"]),
        Held({"allOf": [INT, {"minimum": 3}]}, [3, 10], [2, "a", 3.5]),
        Held({"allOf": [whole(minimum=3, multipleOf=2), {"maximum": 8}]}, [4, 8], [3, 2, 10, 5]),
        Held({"allOf": [obj({"a": INT}, required=["a"]), obj({"b": STR}, required=["b"])]},
             [{"a": 1, "b": "x"}], [{"a": 1}, {"b": "x"}, {"a": 1, "b": 2}, {"a": "x", "b": "x"}]),
        Held(obj({"a": INT}, allOf=[{"properties": {"b": STR}}, {"required": ["b"]}]), [{"a": 1, "b": "x"}],
             [{"a": 1}, {"b": 1}, {"a": "x", "b": "x"}]),
        Held(obj({"a": INT}, allOf=[{"properties": {"a": {"maximum": 3}}}]), [{"a": 3}, {}], [{"a": 4}, {"a": "x"}]),
        Held({"allOf": [text(minLength=2), {"maxLength": 3}, {"pattern": "^a"}]}, ["ab", "abc"], ["a", "abcd", "bc"]),
        Held({"allOf": [STR, INT]}, [], ["a", 1]),
        Held({"allOf": [True, False]}, [], [1, "a"]),
        Held({"allOf": [{"enum": ["a", "b", 1]}, {"enum": ["b", 1, "c"]}, STR]}, ["b"], ["a", "c", 1]),
        Held({"allOf": [array(items=INT), {"maxItems": 2}]}, [[1, 2]], [[1, 2, 3], ["a"]]),
        Held({"allOf": [closed({"a": INT}), obj({"b": INT})]}, [{"a": 1}, {}], [{"b": 1}, {"a": "x"}]),
        Held({"allOf": [{"anyOf": [INT, STR]}, {"anyOf": [STR, BOOL]}]}, ["a"], [1, True]),
    ),
    "not": (
        Held({"not": INT}, ["a", 1.5, None], [1, 0]),
        Held(text(**{"not": {"const": "a"}}), ["b", "", "aa"], ["a", 1]),
        Held(obj({"a": {"not": {}}, "b": INT}), [{}, {"b": 1}], [{"a": 1}, {"a": None}]),
        Held({"not": {}}, [], [1, "a", {}]),
    ),
    "if": (
        Held({"if": {"const": 1}, "then": INT, "else": STR}, [1, "a"], [2, None]),
        Held(obj({"a": BOOL, "b": True}, required=["a"], **{
            "if": {"properties": {"a": {"const": True}}}, "then": {"required": ["b"]}}),
            [{"a": True, "b": 1}, {"a": False}], [{"a": True}, {}]),
        Held({"then": INT}, [1], []),
        Held({"if": INT}, [1], []),
    ),
    "$ref": (
        Held(closed({"p": {"$ref": "#/$defs/d"}}, required=["p"], **{"$defs": {"d": {"enum": [1, 2]}}}), [{"p": 2}],
             [{"p": 3}, {}, {"p": "1"}]),
        Held(closed({"a": INT, "b": {"$ref": "#/properties/a"}}), [{"a": 1, "b": 2}], [{"b": "x"}, {"a": None}]),
        Held({"$ref": "#/$defs/a~1b", "$defs": {"a/b": INT}}, [1], ["a", None]),
        Held({"$ref": "#/$defs/a~0b", "$defs": {"a~b": INT}}, [1], ["a", None]),
        Held({"$ref": "#/$defs/a%25b", "$defs": {"a%b": INT}}, [1], ["a", None]),
        Held({"$ref": "#/$defs/a%22b", "$defs": {'a"b': INT}}, [1], ["a", None]),
        Held({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": INT}}, [1], ["a"]),
        Held({"$ref": "#/$defs/a", "maximum": 3, "$defs": {"a": INT}}, [3], [4, "a"]),
        Held({"$ref": "#/$defs/a", "maxItems": 2, "$defs": {"a": {"type": "array"}}}, [[1, 2]], [[1, 2, 3], 1]),
        Held({"$ref": "#/$defs/a", "properties": {"b": INT}, "$defs": {"a": {"properties": {"a": INT}}}},
             [{"a": 1, "b": 2}], [{"a": "x"}, {"b": "x"}]),
        Held({"$ref": "#/$defs/t", "$defs": {"t": True}}, [1, {}], []),
        Held({"$ref": "#/$defs/f", "$defs": {"f": False}}, [], [1, {}]),
        Held(_TREE, [{"v": 1}, {"v": 1, "more": [{"v": 2, "more": []}]}],
             [{"v": "x"}, {"v": 1, "more": [{}]}, {"v": 1, "more": [{"v": 2, "more": [{"v": "x"}]}]}]),
        Held({"$ref": "#/$defs/n", **_LIST}, [{"v": 1, "n": None}, {"v": 1, "n": {"v": 2, "n": None}}],
             [{"v": 1}, {"v": 1, "n": {"v": "x", "n": None}}, {"v": 1, "n": 2}]),
        Held({"properties": {"$ref": INT}}, [{"$ref": 1}], [{"$ref": "#/a"}]),
        Held({"$ref": "#a", "$defs": {"d": {"$anchor": "a", "type": "integer"}}}, [1], ["a", None]),
        Held({"$dynamicRef": "#a", "$defs": {"d": {"$dynamicAnchor": "a", "type": "integer"}}}, [1], ["a", None]),
        Held({"$id": "http://example.com/r", "$ref": "d", "$defs": {"x": {"$id": "d", "type": "integer"}}}, [1],
             ["a", None]),
        Held({"$ref": "https://json-schema.org/draft/2020-12/schema"}, [{"type": "object"}],
             [{"type": 1}, {"minLength": -1}]),
        Held(array(items={"$ref": "#/$defs/d"}, **{"$defs": {"d": {"maxProperties": 1}}}), [[{"a": 1}, {}]],
             [[{"a": 1, "b": 2}]]),
    ),
})  # fmt: skip

HELD: Mapping[str, Sequence[Held]] = MappingProxyType({**VALUES, **PARTS})
"""By what they turn on: a keyword, mostly."""
