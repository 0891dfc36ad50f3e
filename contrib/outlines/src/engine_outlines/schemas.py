"""Which JSON schemas Outlines enforces. It writes a schema as one regular expression, so whatever cannot be said in one
is refused: bounds of numbers, recursion, objects of free names. Found by trying, as the tests do."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from engine_kit.schemas.pattern import characters, plain
from engine_kit.schemas.places import SchemaPlace, check, places, refused, resolve

ENFORCED = frozenset(
    {
        "type", "enum", "const", "$ref", "anyOf", "minLength", "maxLength", "pattern", "items", "minItems", "maxItems",
        "properties", "required", "additionalProperties",
    }
)  # fmt: skip
ESCAPED = ((0, 31), (34, 34), (92, 92), (127, 159))
"""Characters that Outlines does not write as they are."""
LONGEST = 1000
"""Of bounded strings and arrays: each place is a state or more."""


def check_schema(schema: Any) -> None:
    """Raises InvalidRequestError, which names the keyword that cannot be enforced."""
    if isinstance(schema, bool):
        raise refused("", "type", "exactly one has to stand in each schema")
    check(schema, ENFORCED, _rule)
    _check_recursion(schema)


def _rule(place: SchemaPlace) -> None:
    schema = place.schema
    for key in ("$ref", "anyOf"):
        if key in schema:
            place.alone(key)
    for key in ("enum", "const"):
        if key in schema:
            place.alone(key)
            values = schema["enum"] if key == "enum" else [schema["const"]]
            if not all(value is None or isinstance(value, (str, int, float)) for value in values):
                raise place.refuse(key, "arrays and objects cannot be enforced")
            return
    if not schema.keys() & {"$ref", "anyOf"} and (len(place.types) != 1 or "type" not in schema):
        raise place.refuse("type", "exactly one has to stand in each schema; for several write anyOf")
    for key in ("minLength", "maxLength", "minItems", "maxItems"):
        if schema.get(key, 0) > LONGEST:
            raise place.refuse(key, f"it is above {LONGEST}")
    if "pattern" in schema:
        if found := [key for key in ("minLength", "maxLength") if key in schema]:
            raise place.refuse(found[0], f"{' and '.join(map(repr, found))} cannot be enforced beside 'pattern'")
        _check_pattern(place)
    if "array" in place.types and "items" not in schema:
        raise place.refuse("type", "an array needs 'items' of some schema")
    if "items" in schema and isinstance(schema["items"], bool):
        raise place.refuse("items", "it has to be a schema")
    if "object" in place.types:
        _check_object(place)


def _check_pattern(place: SchemaPlace) -> None:
    pattern = place.schema["pattern"]
    if plain(pattern) != pattern:
        raise place.refuse("pattern", "it is not written as normalised schemas write theirs")
    for one in characters(pattern):
        if any(one.has(low, high) for low, high in ESCAPED):
            raise place.refuse("pattern", "it allows characters that are escaped in JSON, which cannot be enforced")


def _check_object(place: SchemaPlace) -> None:
    schema = place.schema
    properties = schema.get("properties")
    if not properties:
        raise place.refuse("type", "an object needs 'properties'")
    if schema.get("additionalProperties", False) is not False:
        raise place.refuse("additionalProperties", "only false can be enforced")
    for name, part in properties.items():
        if not isinstance(part, Mapping):
            raise place.refuse("properties", f"{name!r:.40} has to be a schema")
        if json.dumps(name, ensure_ascii=False) != f'"{name}"':
            raise place.refuse("properties", f"the name {name!r:.40} is written with escapes in JSON")
    for name in schema.get("required", ()):
        if name not in properties:
            raise place.refuse("required", f"it names {name!r:.40}, which is not among the 'properties'")


def _check_recursion(schema: Any) -> None:
    """A regular expression cannot contain itself. Raises InvalidRequestError."""
    of_path = {place.path: place for place in places(schema)}
    of_identity = {id(place.schema): path for path, place in of_path.items()}
    targets = {path: of_identity.get(id(resolve(place))) for path, place in of_path.items() if "$ref" in place.schema}
    edges: dict[str, list[str]] = {path: [] for path in of_path}
    for path in of_path:
        if path in targets and targets[path] is not None:
            edges[path].append(str(targets[path]))
        parent = path
        while parent:
            parent = parent.rpartition("/")[0]
            if parent in edges and "/$defs/" not in path[len(parent) :] and "/definitions/" not in path[len(parent) :]:
                edges[parent].append(path)
                break
    done: set[str] = set()
    for start in of_path:
        stack: list[tuple[str, bool]] = [(start, False)]
        under_way: set[str] = set()
        while stack:
            path, leaving = stack.pop()
            if leaving:
                under_way.discard(path)
                done.add(path)
            elif path in under_way:
                raise of_path[path].refuse("$ref", "recursion cannot be enforced")
            elif path not in done:
                under_way.add(path)
                stack.append((path, True))
                for target in edges[path]:
                    if target in under_way:
                        raise of_path[path].refuse("$ref", "recursion cannot be enforced")
                    stack.append((target, False))
