"""A validator for the JSON schemas of the suite's own cases: small, and independent of every driver."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_TYPES: Mapping[str, tuple[type, ...]] = {
    "object": (dict,), "array": (list,), "string": (str,), "boolean": (bool,), "null": (type(None),),
    "integer": (int,), "number": (int, float),
}  # fmt: skip
KEYWORDS = frozenset(
    {
        "type", "enum", "const", "anyOf", "$ref", "$defs", "properties", "required", "additionalProperties", "items",
        "minItems", "maxItems", "minimum", "maximum", "minLength", "maxLength", "pattern",
    }
)  # fmt: skip


def valid(value: Any, schema: Mapping[str, Any], root: Mapping[str, Any] | None = None) -> bool:
    """Whether a decoded instance is valid under a schema that uses `KEYWORDS` alone."""
    root = schema if root is None else root
    assert schema.keys() <= KEYWORDS, f"the validator does not know {schema.keys() - KEYWORDS}"
    if "$ref" in schema:
        return valid(value, root["$defs"][schema["$ref"].removeprefix("#/$defs/")], root)
    if "anyOf" in schema and not any(valid(value, option, root) for option in schema["anyOf"]):
        return False
    if "const" in schema and not _same(value, schema["const"]):
        return False
    if "enum" in schema and not any(_same(value, option) for option in schema["enum"]):
        return False
    if "type" in schema and not _typed(value, schema["type"]):
        return False
    return _in_bounds(value, schema) and _parts_valid(value, schema, root)


def _same(a: Any, b: Any) -> bool:
    return bool(a == b) and isinstance(a, bool) == isinstance(b, bool)


def _typed(value: Any, name: str) -> bool:
    return isinstance(value, _TYPES[name]) and (not isinstance(value, bool) or name == "boolean")


def _in_bounds(value: Any, schema: Mapping[str, Any]) -> bool:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return bool(schema.get("minimum", value) <= value <= schema.get("maximum", value))
    if isinstance(value, str):
        length = len(value)
        fits = schema.get("minLength", length) <= length <= schema.get("maxLength", length)
        return bool(fits and ("pattern" not in schema or re.search(schema["pattern"], value)))
    if isinstance(value, list):
        return bool(schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value)))
    return True


def _parts_valid(value: Any, schema: Mapping[str, Any], root: Mapping[str, Any]) -> bool:
    if isinstance(value, list):
        return all(valid(item, schema["items"], root) for item in value) if "items" in schema else True
    if not isinstance(value, dict):
        return True
    properties = schema.get("properties", {})
    if any(name not in value for name in schema.get("required", ())):
        return False
    if schema.get("additionalProperties", True) is False and value.keys() - properties.keys():
        return False
    return all(valid(part, properties[name], root) for name, part in value.items() if name in properties)
