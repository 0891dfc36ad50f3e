"""JSON schemas, for cards of grammar drivers: which keywords one uses, and which of them a driver can enforce.

Libraries that compile schemas ignore a good part of the keywords, each another part. Here a card says which it
enforces, and in which company; every other keyword is refused by its name. Keywords that only describe are let be.

The words are those of JSON Schema, draft 2020-12.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from engine.types.errors import InvalidRequestError

DESCRIBING = frozenset(
    {
        "title", "description", "default", "examples", "example", "$comment", "$schema", "deprecated", "readOnly",
        "writeOnly", "contentMediaType", "contentEncoding", "discriminator", "$defs", "definitions",
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

Schema = Mapping[str, Any]


def refused(path: str, keyword: str, why: str) -> InvalidRequestError:
    """The error about a keyword of a schema. `path` is where its schema stands, as a JSON pointer."""
    return InvalidRequestError(
        f"structured_outputs.json={keyword!r} in the schema{f' at {path}' if path else ''}", why, ""
    )


@dataclass(frozen=True)
class Place:
    """A schema within a schema.

    Args:
        schema: it, not a bool.
        path: JSON pointer; "" for the whole.
        root: the whole.
        types: what `type` says; of a schema without, what its keywords are about.
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


def check(schema: Any, enforced: frozenset[str], rule: Callable[[Place], None]) -> None:
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
        _check_form(place)
        rule(place)


def places(schema: Any) -> Iterator[Place]:
    """Every schema in a schema that is not a bool, itself first. Raises InvalidRequestError for what is no schema."""
    pending: list[tuple[Any, str]] = [(schema, "")]
    names: set[str] = set()  # paths of schemas of names, which are texts
    while pending:
        node, path = pending.pop()
        if isinstance(node, bool):
            continue
        if not isinstance(node, Mapping):
            raise refused(path, path.rpartition("/")[2], f"{node!r:.40} is no schema")
        place = Place(node, path, schema, _types(node, path) or (("string",) if path in names else ()))
        yield place
        for key in ("items", "additionalProperties", "propertyNames", "contains", "not", "if", "then", "else"):
            if key in node:
                pending.append((node[key], f"{path}/{key}"))
        if "propertyNames" in node:
            names.add(f"{path}/propertyNames")
        for key in ("anyOf", "oneOf", "allOf", "prefixItems"):
            if key in node:
                if not isinstance(node[key], list) or not node[key]:
                    raise place.refuse(key, "it is not a list of schemas")
                pending += [(part, f"{path}/{key}/{i}") for i, part in enumerate(node[key])]
        for key in ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"):
            if key in node:
                if not isinstance(node[key], Mapping):
                    raise place.refuse(key, "it is not a mapping of names to schemas")
                pending += [(part, f"{path}/{key}/{escaped(name)}") for name, part in node[key].items()]


def escaped(name: str) -> str:
    """As a part of a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")


def resolve(place: Place) -> Any:
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


def disjoint(place: Place) -> bool:
    """Whether no instance fits two schemas of its `oneOf`, as far as is easily seen: they are of different types, or of
    objects that require a property with different constants."""
    parts = [
        resolve(Place(part, place.path, place.root, ())) if isinstance(part, Mapping) else part
        for part in place.schema["oneOf"]
    ]
    if not all(isinstance(part, Mapping) for part in parts):
        return False
    of_types = [kind for part in parts for kind in {"number" if t == "integer" else t for t in _stated_types(part)}]
    if all(_stated_types(part) for part in parts) and len(of_types) == len(set(of_types)):
        return True
    values = [
        part["enum"] if "enum" in part else [part["const"]] for part in parts if "enum" in part or "const" in part
    ]
    if len(values) == len(parts):
        return _all_differ(values)
    tags = [{name: _constants(part, name) for name in part.get("required", ())} for part in parts]
    if not all(part.get("type") == "object" for part in parts):
        return False
    return any(all(tag.get(name) for tag in tags) and _all_differ([tag[name] for tag in tags]) for name in tags[0])


def _constants(schema: Schema, name: str) -> list[Any]:
    of_name = schema.get("properties", {}).get(name)
    if not isinstance(of_name, Mapping):
        return []
    return [of_name["const"]] if "const" in of_name else list(of_name.get("enum", []))


def _all_differ(groups: list[list[Any]]) -> bool:
    flat = [repr(value) for group in groups for value in {repr(v): v for v in group}.values()]
    simple = all(isinstance(value, str) for group in groups for value in group)
    return simple and len(flat) == len(set(flat))


def _stated_types(schema: Schema) -> list[str]:
    kind = schema.get("type", [])
    return [kind] if isinstance(kind, str) else list(kind)


def _types(schema: Schema, path: str) -> tuple[str, ...]:
    stated = schema.get("type")
    if stated is None:
        about = [kind for kind, keys in KEYWORDS_OF.items() if kind in ("object", "array") and keys & schema.keys()]
        return tuple(about)
    types = [stated] if isinstance(stated, str) else stated
    if not isinstance(types, list) or not types:
        raise refused(path, "type", f"{stated!r:.40} is no type")
    for kind in types:
        if not isinstance(kind, str) or kind not in KEYWORDS_OF:
            raise refused(path, "type", f"{kind!r:.40} is no type: there are {', '.join(KEYWORDS_OF)}")
    return tuple(types)


def _check_form(place: Place) -> None:
    """That keywords have the type that they are about, and the values that they may have."""
    schema = place.schema
    if "enum" in schema and (not isinstance(schema["enum"], list) or not schema["enum"]):
        raise place.refuse("enum", "it is not a list of values")
    if "required" in schema:
        names = schema["required"]
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise place.refuse("required", "it is not a list of names")
    for key in ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"):
        if key in schema and (not isinstance(schema[key], int) or isinstance(schema[key], bool) or schema[key] < 0):
            raise place.refuse(key, f"{schema[key]!r:.40} is not a whole number from 0")
    for low, high in (("minLength", "maxLength"), ("minItems", "maxItems"), ("minProperties", "maxProperties")):
        if low in schema and high in schema and schema[low] > schema[high]:
            raise place.refuse(low, f"it is above {high!r}")
    for key in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"):
        if key in schema and (not isinstance(schema[key], (int, float)) or isinstance(schema[key], bool)):
            raise place.refuse(key, f"{schema[key]!r:.40} is no number")
    for key in ("pattern", "format"):
        if key in schema and not isinstance(schema[key], str):
            raise place.refuse(key, f"{schema[key]!r:.40} is no text")
    if "$ref" in schema:
        resolve(place)
    of_types = frozenset().union(*(KEYWORDS_OF[kind] for kind in place.types))
    for key in place.asking:
        if key not in of_types and any(key in keys for keys in KEYWORDS_OF.values()):
            about = " or ".join(repr(kind) for kind, keys in KEYWORDS_OF.items() if key in keys)
            raise place.refuse(key, f'it can only be enforced beside "type" {about}')
