"""JSON schemas, for cards of grammar drivers: which keywords one uses, and which of them a driver can enforce.

Schemas are normalised first (`normal`): of the keywords that combine others only `anyOf` and
`$ref` are left, wherever that can be, each stands alone, and every other schema is of one type.

Libraries that compile schemas ignore a good part of the keywords, each another part. Here a card says which it
enforces, and in which company; every other keyword is refused by its name. Keywords that only describe are let be.

The words are those of JSON Schema, draft 2020-12.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from engine.types.errors import InvalidRequestError

DESCRIBING = frozenset(
    {
        "title", "description", "default", "examples", "example", "$comment", "$schema", "deprecated", "readOnly",
        "writeOnly", "contentMediaType", "contentEncoding", "contentSchema", "discriminator", "$defs", "definitions",
    }
)  # fmt: skip
"""Keywords that ask nothing of an instance. Where subschemas stand under `$defs` and `definitions` they are visited."""
KEYWORDS_OF: Mapping[str, frozenset[str]] = {
    "string": frozenset({"minLength", "maxLength", "pattern", "format"}),
    "number": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}),
    "integer": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}),
    "array": frozenset(
        {
            "items", "prefixItems", "minItems", "maxItems", "uniqueItems", "contains", "minContains", "maxContains",
            "unevaluatedItems",
        }
    ),
    "object": frozenset(
        {
            "properties", "required", "additionalProperties", "patternProperties", "propertyNames", "minProperties",
            "maxProperties", "unevaluatedProperties", "dependentRequired", "dependentSchemas",
        }
    ),
    "boolean": frozenset(),
    "null": frozenset(),
}  # fmt: skip
"""The keywords that say something of instances of one type."""

SCHEMAS = frozenset(
    {
        "items", "additionalProperties", "propertyNames", "contains", "not", "if", "then", "else", "unevaluatedItems",
        "unevaluatedProperties",
    }
)  # fmt: skip
"""The keywords whose value is a schema."""
SCHEMA_LISTS = frozenset({"anyOf", "oneOf", "allOf", "prefixItems"})
SCHEMA_MAPPINGS = frozenset(
    {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"}
)
Schema = Mapping[str, Any]


def refused(path: str, keyword: str, why: str) -> InvalidRequestError:
    """The error about a keyword of a schema. `path` is where its schema stands, as a JSON pointer."""
    return InvalidRequestError(
        f"structured_outputs.json={keyword!r} in the schema{f' at {path}' if path else ''}", why, ""
    )


@dataclass(frozen=True)
class SchemaPlace:
    """A schema within a schema.

    Args:
        schema: it, not a bool.
        path: JSON pointer; "" for the whole.
        root: the whole.
        types: what `type` says; () without one.
    """

    schema: Schema
    path: str
    root: Any
    types: tuple[str, ...]

    @property
    def asking(self) -> list[str]:
        """The keywords that ask something of an instance."""
        return [key for key in self.schema if key not in DESCRIBING and not key.startswith("x-")]

    def refuse(self, keyword: str, why: str) -> InvalidRequestError:
        """The error about one of its keywords."""
        return refused(self.path, keyword, why)

    def alone(self, keyword: str, *beside: str) -> None:
        """Raises InvalidRequestError where another keyword stands beside this one, but for those given."""
        for key in self.asking:
            if key != keyword and key not in beside:
                raise self.refuse(key, f"it cannot be enforced beside {keyword!r}")


def check(schema: Any, enforced: frozenset[str], rule: Callable[[SchemaPlace], None]) -> None:
    """Check every schema in a schema, itself among them.

    Args:
        schema: decoded JSON.
        enforced: keywords that the driver enforces where `rule` does not object.
        rule: asked for each schema that is not a bool; raises InvalidRequestError.

    Raises InvalidRequestError, which names the keyword: it is not enforced, it stands without the type that it is
    about, it has the wrong form, or what it refers to is not there.
    """
    for place in places(schema):
        if missing := [key for key in place.asking if key not in enforced]:
            raise place.refuse(missing[0], f"the grammar driver cannot enforce {' and '.join(map(repr, missing))}")
        check_form(place)
        if "$ref" in place.schema:
            resolve(place)
        of_types = frozenset().union(*(KEYWORDS_OF[kind] for kind in place.types))
        for key in place.asking:
            if key not in of_types and (about := about_types(key)):
                raise place.refuse(key, f'it can only be enforced beside "type" {" or ".join(map(repr, about))}')
        rule(place)


def about_types(keyword: str) -> list[str]:
    """The types of whose instances a keyword says something; none for one that says it of all."""
    return [kind for kind, keys in KEYWORDS_OF.items() if keyword in keys]


def places(schema: Any) -> Iterator[SchemaPlace]:
    """Every schema in a schema that is not a bool, itself first. Raises InvalidRequestError for what is no schema."""
    pending: list[tuple[Any, str]] = [(schema, "")]
    names: set[str] = set()  # paths of schemas of names, which are texts
    while pending:
        node, path = pending.pop()
        if isinstance(node, bool):
            continue
        if not isinstance(node, Mapping):
            raise refused(path, path.rpartition("/")[2], f"{node!r:.40} is no schema")
        place = SchemaPlace(node, path, schema, _types(node, path) or (("string",) if path in names else ()))
        yield place
        pending += [(part, f"{path}/{key}") for key, part in node.items() if key in SCHEMAS]
        if "propertyNames" in node:
            names.add(f"{path}/propertyNames")
        for key in [key for key in node if key in SCHEMA_LISTS]:
            if not isinstance(node[key], list) or not node[key]:
                raise place.refuse(key, "it is not a list of schemas")
            pending += [(part, f"{path}/{key}/{i}") for i, part in enumerate(node[key])]
        for key in [key for key in node if key in SCHEMA_MAPPINGS]:
            if not isinstance(node[key], Mapping):
                raise place.refuse(key, "it is not a mapping of names to schemas")
            pending += [
                (part, f"{path}/{key}/{escaped(name)}")
                for name, part in node[key].items()
                if not (key == "dependencies" and isinstance(part, list))
            ]


def escaped(name: str) -> str:
    """As a part of a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")


def resolve(place: SchemaPlace) -> Any:
    """What its `$ref` names, followed through further references. Raises InvalidRequestError for what is not in the
    schema, or goes round in a circle."""
    seen: set[str] = set()
    node: Any = place.schema
    while isinstance(node, Mapping) and "$ref" in node:
        ref = node["$ref"]
        if not isinstance(ref, str) or (ref != "#" and not ref.startswith("#/")):
            raise place.refuse("$ref", f"{ref!r:.80} is not in the schema itself: only '#' and '#/...' are followed")
        if ref in seen:
            raise place.refuse("$ref", f"{ref!r:.80} refers to itself")
        seen.add(ref)
        node = place.root
        for part in ref[1:].split("/")[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            try:
                node = node[int(name)] if isinstance(node, list) else node[name]
            except (KeyError, IndexError, ValueError, TypeError):
                raise place.refuse("$ref", f"{ref!r:.80} is not there") from None
    return node


def _types(schema: Schema, path: str) -> tuple[str, ...]:
    stated = schema.get("type")
    if stated is None:
        return ()
    types = [stated] if isinstance(stated, str) else stated
    if not isinstance(types, list) or not types:
        raise refused(path, "type", f"{stated!r:.40} is no type")
    for kind in types:
        if not isinstance(kind, str) or kind not in KEYWORDS_OF:
            raise refused(path, "type", f"{kind!r:.40} is no type: there are {', '.join(KEYWORDS_OF)}")
    return tuple(types)


def check_form(place: SchemaPlace) -> None:
    """That keywords have the values that they may have. Raises InvalidRequestError, which names the keyword."""
    schema = place.schema
    if "enum" in schema and (not isinstance(schema["enum"], list) or not schema["enum"]):
        raise place.refuse("enum", "it is not a list of values")
    if "required" in schema and not _names(schema["required"]):
        raise place.refuse("required", "it is not a list of names")
    for key in [key for key in schema if key in COUNTS]:
        if not _number(schema[key]) or schema[key] != int(schema[key]) or schema[key] < 0:
            raise place.refuse(key, f"{schema[key]!r:.40} is not a whole number from 0")
    for key in [key for key in schema if key in KEYWORDS_OF["number"]]:
        if not _number(schema[key]):
            raise place.refuse(key, f"{schema[key]!r:.40} is no number")
    if "multipleOf" in schema and schema["multipleOf"] <= 0:
        raise place.refuse("multipleOf", f"{schema['multipleOf']!r:.40} is not above 0")
    for key in [key for key in schema if key in TEXTS]:
        if not isinstance(schema[key], str):
            raise place.refuse(key, f"{schema[key]!r:.40} is no text")
    if not isinstance(schema.get("uniqueItems", False), bool):
        raise place.refuse("uniqueItems", "it is neither true nor false")
    for key in ("dependentRequired", "dependencies"):
        if key in schema and not isinstance(schema[key], Mapping):
            raise place.refuse(key, "it is not a mapping of names")
        for names in schema.get(key, {}).values():
            if not _names(names) and key == "dependentRequired":
                raise place.refuse(key, "it is not a mapping of names to lists of names")


COUNTS = frozenset(
    {
        "minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties", "minContains",
        "maxContains",
    }
)  # fmt: skip
TEXTS = frozenset({"pattern", "format", "$ref", "$dynamicRef", "$id", "$anchor", "$dynamicAnchor"})


def _names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
