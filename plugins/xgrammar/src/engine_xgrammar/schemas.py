"""Which JSON schemas XGrammar enforces. Found by trying: the tests compare what it lets through with a validator."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from engine_kit.schemas.pattern import Node, parsed, whole
from engine_kit.schemas.places import SchemaPlace, check
from engine_xgrammar.mending import mark
from engine_xgrammar.patterns import bounded, objection, rule

ENFORCED = frozenset(
    {
        "type", "enum", "const", "$ref", "anyOf", "minLength", "maxLength", "pattern", "minimum", "maximum",
        "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "items", "prefixItems", "minItems", "maxItems",
        "properties", "required", "additionalProperties", "patternProperties", "minProperties", "maxProperties",
    }
)  # fmt: skip
MAX_PROPERTIES = 500
"""Of one object, where any may be left out: memory grows with their square."""
MAX_LENGTH = 100_000
LARGEST = 2**53
"""Of whole numbers that bound others."""
WIDEST = 1000
"""Of the range of numbers that have to be multiples: wider ones, and open ones, the library passes over."""


def check_schema(schema: Any) -> None:
    """Raises InvalidRequestError, which names the keyword that cannot be enforced."""
    check(schema, ENFORCED, _rule)


def _rule(place: SchemaPlace) -> None:
    schema = place.schema
    for key in ("$ref", "anyOf"):
        if key in schema:
            place.alone(key)
    for key in ("enum", "const"):
        if key in schema:
            place.alone(key)
    _strings(place)
    _numbers(place)
    _objects(place)


def _strings(place: SchemaPlace) -> None:
    schema = place.schema
    if "pattern" in schema:
        if why := objection(schema["pattern"], in_json=True):
            raise place.refuse("pattern", why)
        if pattern_of(schema) is None:
            found = [key for key in ("minLength", "maxLength") if key in schema]
            raise place.refuse(found[0], f"{' and '.join(map(repr, found))} cannot be enforced beside this 'pattern'")
    for key in ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"):
        if schema.get(key, 0) > MAX_LENGTH:
            raise place.refuse(key, f"it is above {MAX_LENGTH}")


def pattern_of(schema: Mapping[str, Any]) -> Node | None:
    """A schema's `pattern` with its bounds of length; None where that is no one pattern."""
    if not {"minLength", "maxLength"} & schema.keys():
        return parsed(schema["pattern"])
    return bounded(schema["pattern"], schema.get("minLength", 0), schema.get("maxLength"))


class Rewriting:
    """Schemas that were checked, in words that XGrammar understands.

    Attributes:
        rules: what stands for each pattern, `mark(i)` in the schema for the i-th.
    """

    def __init__(self) -> None:
        self.rules: list[str] = []

    def tag(self, tag: Any) -> Any:
        """A structural tag, its schemas rewritten, and its regular expressions as grammars."""
        if isinstance(tag, list):
            return [self.tag(part) for part in tag]
        if not isinstance(tag, dict):
            return tag
        if tag.get("type") == "regex" and isinstance(tag.get("pattern"), str):
            return {"type": "grammar", "grammar": f"root ::= {rule(parsed(whole(tag['pattern'])), in_json=False)}"}
        return {key: self.schema(part) if key == "json_schema" else self.tag(part) for key, part in tag.items()}

    def schema(self, schema: Any) -> Any:
        """A schema."""
        if not isinstance(schema, dict):
            return schema
        found = dict(schema)
        for key in ("items", "additionalProperties"):
            if key in found:
                found[key] = self.schema(found[key])
        for key in ("anyOf", "prefixItems"):
            if key in found:
                found[key] = [self.schema(part) for part in found[key]]
        for key in ("properties", "patternProperties", "$defs"):
            if key in found:
                found[key] = {name: self.schema(part) for name, part in found[key].items()}
        if "patternProperties" in found:
            found["patternProperties"] = {
                self._mark(parsed(pattern)): part for pattern, part in found["patternProperties"].items()
            }
        if "pattern" in found and (node := pattern_of(found)) is not None:
            found["pattern"] = self._mark(node)
            found = {key: part for key, part in found.items() if key not in ("minLength", "maxLength")}
        _opened(found)
        return found

    def _mark(self, node: Node) -> str:
        written = rule(node, in_json=True)
        if written not in self.rules:
            self.rules.append(written)
        return mark(self.rules.index(written))


def _opened(schema: dict[str, Any]) -> None:
    """With what the library allows only where it is said."""
    if "prefixItems" in schema:  # where it takes no `true`
        schema["prefixItems"] = [{} if part is True else part for part in schema["prefixItems"]]
    prefix = len(schema.get("prefixItems", ()))
    if {"minItems", "maxItems"} & schema.keys() and (not prefix or schema.get("minItems", 0) > prefix):
        schema.setdefault("items", {})
    if "maxProperties" in schema and not schema.get("properties"):
        schema.setdefault("additionalProperties", {})


def _numbers(place: SchemaPlace) -> None:
    schema = place.schema
    for key in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
        if key in schema and abs(schema[key]) > LARGEST:
            raise place.refuse(key, f"it is beyond {LARGEST}")
    if "multipleOf" not in schema:
        return
    step = schema["multipleOf"]
    if "number" in place.types or step != int(step) or not 0 < step <= 1024:
        raise place.refuse("multipleOf", "it can only be enforced for integers, and from 1 to 1024")
    bounded = "minimum" in schema and "maximum" in schema and schema["maximum"] - schema["minimum"] <= WIDEST
    if {"minimum", "maximum"} & schema.keys() and not bounded:
        raise place.refuse("multipleOf", f"beside bounds it can only be enforced in a range of at most {WIDEST}")


def _objects(place: SchemaPlace) -> None:
    schema = place.schema
    properties = schema.get("properties", {})
    if len(properties) > MAX_PROPERTIES:
        raise place.refuse("properties", f"there are {len(properties)}; at most {MAX_PROPERTIES} are taken")
    for name in schema.get("required", ()):
        if name not in properties:
            raise place.refuse("required", f"it names {name!r:.40}, which is not among the 'properties'")
    more = schema.get("additionalProperties", False)
    if "patternProperties" in schema:
        for beside in ("properties", "minProperties", "maxProperties"):
            if beside in schema:
                raise place.refuse("patternProperties", f"it cannot be enforced beside {beside!r}")
        if len(schema["patternProperties"]) > 1 or more is not False:
            raise place.refuse(
                "patternProperties",
                "only one can be enforced, and only without 'additionalProperties', or where it is false",
            )
        for pattern in schema["patternProperties"]:
            if why := objection(pattern, in_json=True):
                raise place.refuse("patternProperties", why)
    for name, part in properties.items():
        if part is False:
            raise place.refuse(
                "properties", f"{name!r:.40} is forbidden, which cannot be enforced where others are free"
            )
        if more is not False and (not name.isascii() or json.dumps(name) != f'"{name}"'):
            found = f"{name!r:.40} cannot be told from additional ones: it is not ASCII, or escaped in JSON"
            raise place.refuse("additionalProperties", f"the property {found}")
    if "minProperties" in schema and (more is not False or not properties):
        raise place.refuse("minProperties", "it cannot be enforced where names are free: they may repeat")
