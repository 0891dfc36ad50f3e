"""Which JSON schemas XGrammar enforces. Found by trying: the tests compare what it lets through with a validator."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.interfaces.json_schema import Place, check, disjoint
from engine_xgrammar.patterns import bounded, objection

ENFORCED = frozenset(
    {
        "type", "enum", "const", "$ref", "anyOf", "oneOf", "allOf", "minLength", "maxLength", "pattern", "format",
        "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "items", "prefixItems", "minItems",
        "maxItems", "properties", "required", "additionalProperties", "patternProperties", "propertyNames",
        "minProperties", "maxProperties",
    }
)  # fmt: skip
FORMATS = (
    "date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uri-reference", "uuid",
)  # fmt: skip
MAX_PROPERTIES = 500
"""Of one object, where any may be left out: memory grows with their square."""
MAX_LENGTH = 100_000
LARGEST = 2**53
"""Of whole numbers that bound others."""


def check_schema(schema: Any) -> None:
    """Raises InvalidRequestError, which names the keyword that cannot be enforced."""
    check(schema, ENFORCED, _rule)


def _rule(place: Place) -> None:
    schema = place.schema
    for key in ("$ref", "anyOf", "oneOf", "allOf"):
        if key in schema:
            place.alone(key)
    if "allOf" in schema and len(schema["allOf"]) > 1:
        raise place.refuse("allOf", "several schemas at once cannot be enforced")
    if "oneOf" in schema and not disjoint(place):
        raise place.refuse(
            "oneOf",
            "an instance might fit several of them; use anyOf, or tell them apart by type or a constant property",
        )
    for key in ("enum", "const"):
        if key in schema:
            place.alone(key, "type")
            values = schema["enum"] if key == "enum" else [schema["const"]]
            if "type" in schema and not all(_is_of(value, place.types) for value in values):
                raise place.refuse(key, "it has a value that is not of the schema's 'type'")
            return
    _strings(place)
    _numbers(place)
    _arrays(place)
    _objects(place)


def _strings(place: Place) -> None:
    schema = place.schema
    for key in ("pattern", "format"):
        if key == "pattern" and "format" not in schema and with_lengths(schema) is not None:
            continue
        found = [beside for beside in ("minLength", "maxLength", "pattern") if beside in schema and beside != key]
        if key in schema and found:
            raise place.refuse(found[0], f"{' and '.join(map(repr, found))} cannot be enforced beside {key!r}")
    if "pattern" in schema and (why := objection(schema["pattern"], in_json=True)):
        raise place.refuse("pattern", why)
    if "format" in schema and schema["format"] not in FORMATS:
        raise place.refuse(
            "format", f"{schema['format']!r:.40} cannot be enforced, only {', '.join(FORMATS)}; leave it out"
        )
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
    return found


def _numbers(place: Place) -> None:
    schema = place.schema
    if "multipleOf" in schema:
        step = schema["multipleOf"]
        if "number" in place.types or step != int(step) or not 0 < step <= 1024:
            raise place.refuse("multipleOf", "it can only be enforced for integers, and from 1 to 1024")
    for key in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
        if key in schema and abs(schema[key]) > LARGEST:
            raise place.refuse(key, f"it is beyond {LARGEST}")
        if key in schema and "integer" in place.types and schema[key] != int(schema[key]):
            raise place.refuse(key, "it is no whole number, beside the type 'integer'")


def _arrays(place: Place) -> None:
    schema = place.schema
    if "maxItems" in schema and schema["maxItems"] < len(schema.get("prefixItems", ())):
        raise place.refuse("maxItems", "it is below the number of 'prefixItems'")


def _objects(place: Place) -> None:
    schema = place.schema
    properties = schema.get("properties", {})
    if len(properties) > MAX_PROPERTIES:
        raise place.refuse("properties", f"there are {len(properties)}; at most {MAX_PROPERTIES} are taken")
    for name in schema.get("required", ()):
        if name not in properties:
            raise place.refuse("required", f"it names {name!r:.40}, which is not among the 'properties'")
    more = schema.get("additionalProperties", False)
    for key in ("patternProperties", "propertyNames"):
        if key not in schema:
            continue
        for beside in ("properties", "patternProperties", "minProperties", "maxProperties"):
            if beside in schema and beside != key and schema[beside]:
                raise place.refuse(key, f"it cannot be enforced beside {beside!r}")
    if "patternProperties" in schema:
        if len(schema["patternProperties"]) > 1 or more is not False:
            raise place.refuse(
                "patternProperties",
                "only one can be enforced, and only without 'additionalProperties', or where it is false",
            )
        for pattern in schema["patternProperties"]:
            if why := objection(pattern, in_json=True):
                raise place.refuse("patternProperties", why)
    if "propertyNames" in schema:
        names = schema["propertyNames"]
        if not isinstance(names, dict) or set(names) != {"pattern"}:
            raise place.refuse("propertyNames", "only a 'pattern' can be enforced in it")
        if why := objection(names["pattern"], in_json=True):
            raise place.refuse("propertyNames", why)
    if "minProperties" in schema and (more is not False or not properties):
        raise place.refuse("minProperties", "it cannot be enforced where names are free: they may repeat")


def _is_of(value: Any, types: tuple[str, ...]) -> bool:
    if isinstance(value, bool):
        return "boolean" in types
    if isinstance(value, (int, float)):
        return "number" in types or ("integer" in types and value == int(value))
    of = {str: "string", list: "array", dict: "object", type(None): "null"}
    return of[type(value)] in types
