"""Constraints with texts that fit, texts that do not, and a check of any text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.types.structured_outputs import StructuredOutputsParams
from engine_sdk.conformance.grammar.decoding import decoded
from engine_sdk.conformance.grammar.schema import valid


@dataclass(frozen=True)
class GrammarCase:
    """One constraint.

    Args:
        name: for people.
        kind: the field of `StructuredOutputsParams`.
        value: of that field.
        keyword: what the case turns on; a driver may refuse it by this name.
        fits: for each, spellings of one text, of which a driver has to allow one at least.
        others: texts that must not be written.
        check: whether a text fits.
    """

    name: str
    kind: str
    value: Any
    keyword: str
    fits: Sequence[Sequence[str]]
    others: Sequence[str]
    check: Callable[[str], bool]

    @property
    def constraint(self) -> StructuredOutputsParams:
        """The constraint itself."""
        return StructuredOutputsParams(**{self.kind: self.value})


def _choice(name: str, texts: list[str], others: Sequence[str]) -> GrammarCase:
    return GrammarCase(
        f"choice-{name}", "choice", texts, "choice", [[t] for t in texts], others, lambda text: text in texts
    )


def _regex(name: str, pattern: str, fits: Sequence[str], others: Sequence[str]) -> GrammarCase:
    check = re.compile(pattern, re.ASCII)
    return GrammarCase(
        f"regex-{name}", "regex", pattern, "regex", [[t] for t in fits], others,
        lambda text: check.fullmatch(text) is not None,
    )  # fmt: skip


def _json(keyword: str, schema: Mapping[str, Any], fits: Sequence[Any], others: Sequence[Any]) -> GrammarCase:
    def check(text: str) -> bool:
        try:
            return valid(decoded(text), schema)
        except ValueError:
            return False

    assert all(valid(value, schema) for value in fits) and not any(valid(value, schema) for value in others)
    spelled = [[json.dumps(value, separators=(",", ":")), json.dumps(value)] for value in fits]
    broken = [json.dumps(value, separators=(",", ":")) for value in others]
    return GrammarCase(f"json-{keyword}", "json", dict(schema), keyword, spelled, broken, check)


def _object_check(text: str) -> bool:
    try:
        return isinstance(decoded(text), dict)
    except ValueError:
        return False


_LETTERS = {"type": "string", "pattern": "^[ab]*$"}
_OBJECT = {"type": "object", "additionalProperties": False}
CASES: tuple[GrammarCase, ...] = (
    _choice("two", ["yes", "no"], ["maybe", "ye", "yess", "Yes", "", "on"]),
    _choice("prefixes", ["a", "ab", "abcd", "b"], ["abc", "bb", "ba", "abcde", ""]),
    _choice("bytes", ["grün", "gré", "日本", "日曜"], ["gr", "grü", "日", "日本本"]),
    _choice("one", ["{}"], ["{", "{}}", ""]),
    _regex("counted", "[0-9]{2,4}", ["12", "007", "9999"], ["1", "12345", "1a", "", "a2"]),
    _regex("branches", "(yes|no)!", ["yes!", "no!"], ["yes", "!", "yesno!", "no!!"]),
    _regex("repeats", "a*b?c", ["c", "bc", "aac", "aaabc"], ["ab", "abbc", "cc", "", "ba"]),
    _regex("classes", "[a-c]{2}x", ["abx", "ccx"], ["adx", "abxx", "ax"]),
    _regex("bytes", "é{1,3}z?", ["é", "ééz"], ["z", "ez", "éé z"]),
    _regex("digits", "\\d{2}x?", ["12", "07x"], ["1", "1a", "١٢", "１２", "1٢x"]),
    _regex("dot", "a.{1,2}c", ["abc", "aéc", "a日bc"], ["a\nc", "ab\nc", "a\n\nc", "ac", "abbbc"]),
    GrammarCase(
        "json_object", "json_object", True, "json_object", [["{}"], ['{"a":1}', '{"a": 1}']],
        ["[]", "1", '{"a"}', "{", "", '{"a":1,}', '{"a":01}', '{"a":"\\ud800"}', '{"a":4e+78354047452}'], _object_check,
    ),
    _json("enum", {"enum": ["a", "bb", 3]}, ["a", "bb", 3], ["b", 4, "3"]),
    _json("const", {"const": "ab"}, ["ab"], ["a", "abc", 1]),
    _json("type", {"type": "boolean"}, [True, False], [1, "true", None]),
    _json("minimum", {"type": "integer", "minimum": 3, "maximum": 12}, [3, 9, 12], [2, 0, -5]),
    _json("maximum", {"type": "integer", "minimum": 3, "maximum": 12}, [3, 12], [13, 99, 120]),
    _json("minLength", {**_LETTERS, "minLength": 2, "maxLength": 3}, ["ab", "aba"], ["", "a"]),
    _json("maxLength", {**_LETTERS, "minLength": 1, "maxLength": 2}, ["ab", "b"], ["aba"]),
    _json("pattern", {"type": "string", "pattern": "^a[bc]{1,2}$"}, ["ab", "acb"], ["a", "bb", "abbb"]),
    _json(
        "required",
        {**_OBJECT, "properties": {"a": {"enum": [1, 2]}, "b": {"enum": [3]}}, "required": ["a"]},
        [{"a": 1}, {"a": 2, "b": 3}],
        [{}, {"b": 3}],
    ),
    _json(
        "additionalProperties",
        {**_OBJECT, "properties": {"a": {"enum": [1]}}, "required": ["a"]},
        [{"a": 1}],
        [{"a": 1, "b": 1}, {"b": 1}],
    ),
    _json(
        "properties",
        {**_OBJECT, "properties": {"a": {"type": "boolean"}, "c": {"enum": ["x", "y"]}}, "required": ["a", "c"]},
        [{"a": True, "c": "y"}],
        [{"a": 1, "c": "y"}, {"a": True, "c": "z"}],
    ),
    _json("items", {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 2}, [[], [1], [2, 1]], [[3], ["1"]]),
    _json("minItems", {"type": "array", "items": {"enum": [1, 2]}, "minItems": 1, "maxItems": 2}, [[1], [1, 2]], [[]]),
    _json("maxItems", {"type": "array", "items": {"enum": [1]}, "maxItems": 2}, [[], [1, 1]], [[1, 1, 1]]),
    _json("anyOf", {"anyOf": [{"enum": ["a"]}, {"type": "boolean"}]}, ["a", True], ["b", 1]),
    _json(
        "$ref",
        {**_OBJECT, "properties": {"p": {"$ref": "#/$defs/d"}}, "required": ["p"], "$defs": {"d": {"enum": [1, 2]}}},
        [{"p": 2}],
        [{"p": 3}],
    ),
)  # fmt: skip


def vocabulary() -> list[bytes | None]:
    """Every byte, two ids that stand for none, and pieces of several bytes, one of which has two ids."""
    pieces = ("ye", "yes", "no", "12", "00", '{"', '":', '"a', "true", "ab", "aa", "é", "日", "a", "}", ", ")
    return [*(bytes([byte]) for byte in range(256)), None, None, *(piece.encode() for piece in pieces)]


END = 256
"""The id that ends a sequence; 257 stands for no bytes either."""
VOCAB_SIZE = 300
"""Of the model's logits: more than the vocabulary has."""
