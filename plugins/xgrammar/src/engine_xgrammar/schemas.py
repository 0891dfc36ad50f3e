"""Which JSON schemas XGrammar enforces. Found by trying: the tests compare what it lets through with a validator."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from engine.interfaces.json_schema import Place, check
from engine_xgrammar.patterns import bounded, objection

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


def _rule(place: Place) -> None:
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


def _strings(place: Place) -> None:
    schema = place.schema
    if "pattern" in schema and with_lengths(schema) is None:
        for beside in ("minLength", "maxLength"):
            if beside in schema:
                raise place.refuse(beside, "it cannot be enforced beside 'pattern'")
    if "pattern" in schema and (why := objection(schema["pattern"], in_json=True)):
        raise place.refuse("pattern", why)
    for key in ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"):
        if schema.get(key, 0) > MAX_LENGTH:
            raise place.refuse(key, f"it is above {MAX_LENGTH}")


def with_lengths(schema: Mapping[str, Any]) -> dict[str, Any] | None:
    """A schema's `pattern` and bounds of length as a pattern alone; None where that cannot be written."""
    if not isinstance(schema.get("pattern"), str) or not {"minLength", "maxLength"} & schema.keys():
        return None
    pattern = bounded(schema["pattern"], schema.get("minLength", 0), schema.get("maxLength"))
    if pattern is None:
        return None
    return {**{key: schema[key] for key in schema if key not in ("minLength", "maxLength")}, "pattern": pattern}


def rewritten(schema: Any) -> Any:
    """A schema that was checked, in words that XGrammar understands."""
    if isinstance(schema, list):
        return [rewritten(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    found: dict[str, Any] = {}
    for key, part in (with_lengths(schema) or schema).items():
        if key in ("properties", "patternProperties", "$defs", "definitions") and isinstance(part, dict):
            found[key] = {name: rewritten(of_name) for name, of_name in part.items()}
        else:
            found[key] = part if key in ("enum", "const", "default", "examples") else rewritten(part)
    if "prefixItems" in found:  # where the library takes no `true`
        found["prefixItems"] = [{} if part is True else part for part in found["prefixItems"]]
    prefix = len(found.get("prefixItems", ()))
    if {"minItems", "maxItems"} & found.keys() and (not prefix or found.get("minItems", 0) > prefix):
        found.setdefault("items", {})  # without, the library lets none be written
    return found


def _numbers(place: Place) -> None:
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


def _objects(place: Place) -> None:
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
            raise place.refuse("properties", f"{name!r:.40} is forbidden, which cannot be enforced where others are free")
        if more is not False and (not name.isascii() or json.dumps(name) != f'"{name}"'):
            found = f"{name!r:.40} cannot be told from additional ones: it is not ASCII, or escaped in JSON"
            raise place.refuse("additionalProperties", f"the property {found}")
    if "minProperties" in schema and (more is not False or not properties):
        raise place.refuse("minProperties", "it cannot be enforced where names are free: they may repeat")
