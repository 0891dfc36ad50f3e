"""Faults in the reading of JSON schemas, in the place of `plain_grammar`: each writes what fits, and something more."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Sequence
from typing import Any, ClassVar

from judge import table, valid
from plain_grammar import Plain

from engine.types.errors import InvalidRequestError
from engine_sdk.conformance.grammar.decoding import decoded
from engine_sdk.conformance.grammar.values import Held

BOUNDS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
SIZES = {"minItems", "maxItems", "minProperties", "maxProperties", "patternProperties", "propertyNames"}
KEY = re.compile(r'"((?:[^"\\]|\\.)*)"(?=\s*:)')


class MultipleOfWithoutRanges(Plain):
    """`multipleOf` is not enforced beside bounds"""

    def rule(self, schema: dict[str, Any], behind: tuple[str, ...]) -> dict[str, Any]:
        return {key: part for key, part in schema.items() if key != "multipleOf" or not BOUNDS & schema.keys()}


class Untyped(Plain):
    """The base of those that pass over keywords of schemas without `type`."""

    keywords: ClassVar[set[str]] = SIZES
    place: ClassVar[str] = ""

    def rule(self, schema: dict[str, Any], behind: tuple[str, ...]) -> dict[str, Any]:
        if "type" in schema or (self.place and self.place not in behind):
            return schema
        return {key: part for key, part in schema.items() if key not in self.keywords}


def without_type(keyword: str) -> type:
    """A driver that passes over one keyword of schemas without `type`."""
    words = {"__doc__": f"`{keyword}` is not enforced in a schema without `type`", "__module__": __name__}
    return type(f"Untyped{keyword[0].upper()}{keyword[1:]}", (Untyped,), {**words, "keywords": {keyword}})


def without_type_behind(place: str) -> type:
    """A driver that passes over the sizes of schemas without `type` behind a keyword."""
    named = {"$defs": "$ref"}.get(place, place)
    words = {"__doc__": f"sizes are not enforced in a schema without `type` behind `{named}`", "__module__": __name__}
    return type(
        f"UntypedBehind{named.strip('$')[0].upper()}{named.strip('$')[1:]}", (Untyped,), {**words, "place": place}
    )


class NamesTwice(Plain):
    """a property's name beyond ASCII, or with a quote, may come again as an additional property"""

    def judge(self, held: Held, text: str) -> bool:
        again: list[str] = []

        def read(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
            found: dict[str, Any] = {}
            for name, value in pairs:
                if name in found and (not name.isascii() or '"' in name):
                    again.append(name)
                    name += f" {len(again)}"
                found[name] = value
            return found

        if super().judge(held, text):
            return True
        try:
            decoded(text)
            value = json.loads(text, object_pairs_hook=read)
        except ValueError:
            return False
        return bool(again) and valid(held.schema, value)


class EscapedNames(Plain):
    """a property's name with an escape in it passes as an additional property"""

    def judge(self, held: Held, text: str) -> bool:
        if super().judge(held, text):
            return True
        try:
            other = decoded(KEY.sub(lambda key: key[0].replace("\\u", "\\\\u"), text))
            return other != decoded(text) and valid(held.schema, other)
        except ValueError:
            return False


class CountsRepeatedNames(Plain):
    """a name that stands twice counts twice for `minProperties`"""

    def judge(self, held: Held, text: str) -> bool:
        if super().judge(held, text):
            return True
        if not isinstance(held.schema, dict) or "minProperties" not in held.schema:
            return False
        counts: list[int] = []
        try:
            value = json.loads(text, object_pairs_hook=lambda pairs: counts.append(len(pairs)) or dict(pairs))
        except ValueError:
            return False
        rest = {key: part for key, part in held.schema.items() if key != "minProperties"}
        return isinstance(value, dict) and counts[-1] >= held.schema["minProperties"] and valid(rest, value)


class HalfPairs(Plain):
    """half of a surrogate pair may be written"""

    def judge(self, held: Held, text: str) -> bool:
        if super().judge(held, text):
            return True
        try:
            value = json.loads(text)
        except ValueError:
            return False
        return bool(re.search("[\ud800-\udfff]", json.dumps(value, ensure_ascii=False))) and valid(held.schema, value)


class EndlessNumbers(Plain):
    """exponents have no bound"""

    def judge(self, held: Held, text: str) -> bool:
        if super().judge(held, text):
            return True
        try:
            value = json.loads(text)
        except ValueError:
            return False
        endless = re.search(r"\d[eE]", text) and "Infinity" in json.dumps(value)
        return bool(endless) and valid(held.schema, value)


class MantissaAlone(Plain):
    """a number is read up to its exponent"""

    def judge(self, held: Held, text: str) -> bool:
        if super().judge(held, text):
            return True
        try:
            decoded(text)
        except ValueError:
            return False
        return super().judge(held, re.sub(r"(?<=\d)[eE][+-]?\d+", "", text))


class DotTakesAll(Plain):
    """`.` in a schema's `pattern` matches a line feed"""

    def rule(self, schema: dict[str, Any], behind: tuple[str, ...]) -> dict[str, Any]:
        pattern = schema.get("pattern", "")
        return {**schema, "pattern": pattern.replace(".", "(.|\n)")} if "." in pattern else schema


class DotTakesLineFeeds(Plain):
    """`.` in a regular expression matches a line feed"""

    dot = "b\néÉ日"


class BooleansAreNumbers(Plain):
    """`true` is taken for 1, and `false` for 0"""

    def judge(self, held: Held, text: str) -> bool:
        try:
            value = decoded(text)
        except ValueError:
            return False
        return super().judge(held, text) or (isinstance(value, bool) and super().judge(held, str(int(value))))


class CountsBytes(Plain):
    """lengths of texts are counted in bytes"""

    def judge(self, held: Held, text: str) -> bool:
        if not super().judge(held, text):
            return False
        value = decoded(text)
        most = held.schema.get("maxLength") if isinstance(held.schema, dict) else None
        return most is None or not isinstance(value, str) or len(value.encode()) <= most


class OfFormat(Plain):
    """The base of those that take more texts for a `format`."""

    formats: ClassVar[tuple[str, ...]] = ()

    def judge(self, held: Held, text: str) -> bool:
        if super().judge(held, text):
            return True
        try:
            value = decoded(text)
        except ValueError:
            return False
        schema = held.schema if isinstance(held.schema, dict) else {}
        return schema.get("format") in self.formats and isinstance(value, str) and self.of_format(held, value)

    def of_format(self, held: Held, value: str) -> bool:
        raise NotImplementedError


class EachMonthHas31Days(OfFormat):
    """`format` date takes each day up to 31"""

    formats = ("date",)

    def of_format(self, held: Held, value: str) -> bool:
        return bool(re.fullmatch(r"[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])", value))


class TimesWithoutZone(OfFormat):
    """`format` time and date-time take times without a zone"""

    formats = ("time", "date-time")

    def of_format(self, held: Held, value: str) -> bool:
        return f"{value}Z" in held.valid


class AnyDigits(OfFormat):
    """`format` date takes digits beyond ASCII"""

    formats = ("date",)

    def of_format(self, held: Held, value: str) -> bool:
        found = re.fullmatch(r"(\d{4})-(\d\d)-(\d\d)", value)
        try:
            return found is not None and bool(datetime.date(*map(int, found.groups())))
        except ValueError:
            return False


class RefusesNotWithoutName(Plain):
    """`not` is refused without a word of it"""

    def compile_normal(self, constraint: Any, end_token_ids: Sequence[int]) -> Any:
        if any('"not"' in json.dumps(held.schema) for held in table().get(json.dumps(constraint.schema), ())):
            raise InvalidRequestError(
                f"structured_outputs.json={constraint.json!r:.80}", "the library does not take it"
            )
        return super().compile_normal(constraint, end_token_ids)


SCHEMA_MUTANTS = [
    MultipleOfWithoutRanges, *map(without_type, sorted(SIZES)),
    *map(without_type_behind, ("anyOf", "allOf", "$defs", "properties", "items")),
    NamesTwice, EscapedNames, CountsRepeatedNames, HalfPairs, EndlessNumbers, MantissaAlone, DotTakesAll,
    DotTakesLineFeeds, BooleansAreNumbers, CountsBytes, EachMonthHas31Days, TimesWithoutZone, AnyDigits,
    RefusesNotWithoutName,
]  # fmt: skip
