"""Which JSON schemas LLGuidance enforces, and what it is told. Found by trying: the tests compare what it lets through
with a validator."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from engine_kit.schemas.pattern import characters
from engine_kit.schemas.places import SchemaPlace, check

ENFORCED = frozenset(
    {
        "type", "enum", "const", "$ref", "anyOf", "allOf", "minLength", "maxLength", "pattern", "minimum", "maximum",
        "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "items", "prefixItems", "minItems", "maxItems",
        "properties", "required", "additionalProperties", "patternProperties", "minProperties", "maxProperties",
    }
)  # fmt: skip
LARGEST_STEP = 10_000
"""Of `multipleOf`, in units of its last decimal: each remainder is a state, and nothing bounds how long they take."""
LARGEST = 2**63 - 1
"""Of numbers that bound others."""
UNWRITTEN = frozenset(((code, code),) for code in (*range(32), 127) if chr(code) not in "\b\f\n\r\t")
"""Characters that stand alone and are written by their number in JSON."""
REASONS = {"patternProperty": "patternProperties", "Schema intersection": "patternProperties", "oneOf": "oneOf"}
"""Words of the library's, and the keyword that they are about."""
ANY = "_any"
"""Under `$defs`, the schema of any value; no name of a normalised schema begins so."""


def check_schema(schema: Any) -> None:
    """Raises InvalidRequestError, which names the keyword that cannot be enforced."""
    check(schema, ENFORCED, _rule)


def _rule(place: SchemaPlace) -> None:
    schema = place.schema
    if "multipleOf" in schema:
        step = Fraction(str(schema["multipleOf"]))
        tenths = step
        while tenths.denominator != 1 and tenths <= LARGEST_STEP:
            tenths *= 10
        if tenths > LARGEST_STEP:
            raise place.refuse("multipleOf", f"more than {LARGEST_STEP} of its last decimal cannot be enforced")
    for key in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
        if abs(schema.get(key, 0)) > LARGEST:
            raise place.refuse(key, f"it is beyond {LARGEST}")
    _counted_properties(place)
    _writable(place)


def _writable(place: SchemaPlace) -> None:
    """Control characters that need an escape by number are left out by the library, which then writes the rest."""
    schema = place.schema
    for key in ("enum", "const"):
        values = schema.get("enum", ()) if key == "enum" else [schema.get("const")]
        for value in values:
            if isinstance(value, str) and any(((ord(char), ord(char)),) in UNWRITTEN for char in value):
                raise place.refuse(key, f"{value!r:.40} has a control character, which cannot be enforced")
    patterns_of = {"pattern": [schema.get("pattern", "")], "patternProperties": schema.get("patternProperties", ())}
    for key, patterns in patterns_of.items():
        for pattern in patterns:
            for one in characters(pattern):
                if one.ranges in UNWRITTEN:
                    raise place.refuse(key, f"{pattern!r:.40} has a control character, which cannot be enforced")


def _counted_properties(place: SchemaPlace) -> None:
    schema = place.schema
    required = schema.get("required", ())
    for key in ("minProperties", "maxProperties"):
        if key in schema and set(schema.get("properties", ())) - set(required):
            raise place.refuse(key, "it can only be enforced where all of the 'properties' are required")
    if schema.get("minProperties", 0) > len(required) + 1:
        raise place.refuse("minProperties", "it cannot be enforced where names are free: they may repeat")


def blamed(reason: str) -> str:
    """The keyword that a reason of the library's is about, where it is no reason of size; "" for others."""
    return next((keyword for words, keyword in REASONS.items() if words in reason), "")


def told(schema: Any, space: dict[str, Any]) -> dict[str, Any]:
    """A schema that was checked, as the library is told it. Numbers have no exponent, which might be of any size; and
    a character has one spelling, so that no name of a property is written in a way that hides it.

    Args:
        space: the library's options of white space.
    """
    found = _Told()
    root = found.schema(schema)
    defs = {**root.pop("$defs", {}), **found.defs}
    options = {**space, "json_allowed_escapes": 'nrbtf\\"'}
    return {**root, **({"$defs": defs} if defs else {}), "x-guidance": options}


class _Told:
    def __init__(self) -> None:
        self.defs: dict[str, Any] = {}

    def schema(self, schema: Any) -> dict[str, Any]:
        if isinstance(schema, bool):
            return self._any() if schema else {"not": {}}
        found = dict(schema)
        if not found.keys() - {"$defs"}:
            found |= self._any()
        if found.get("type") == "number":
            found = _plainly(found)
        elif found.get("type") == "array" and len(found.get("prefixItems", ())) < found.get("maxItems", LARGEST):
            found.setdefault("items", True)
        elif found.get("type") == "object":
            found.setdefault("additionalProperties", True)
        for key in ("items", "additionalProperties"):
            if key in found and found[key] is not False:
                found[key] = self.schema(found[key])
        for key in ("anyOf", "allOf", "prefixItems"):
            if key in found:
                found[key] = [self.schema(part) for part in found[key]]
        for key in ("properties", "patternProperties", "$defs"):
            if key in found:
                found[key] = {name: part if part is False else self.schema(part) for name, part in found[key].items()}
        return found

    def _any(self) -> dict[str, Any]:
        ref = {"$ref": f"#/$defs/{ANY}"}
        if ANY not in self.defs:
            kinds = [{"type": kind} for kind in ("null", "boolean", "string")]
            within = [{"type": "array", "items": ref}, {"type": "object", "additionalProperties": ref}]
            self.defs[ANY] = {"anyOf": [*kinds, *_plainly({"type": "number"})["anyOf"], *within]}
        return ref


def _plainly(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema of numbers without exponents: the library writes none where there is a bound."""
    bounds = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
    if bounds & schema.keys():
        return schema
    return {"anyOf": [{**schema, "minimum": 0}, {**schema, "exclusiveMaximum": 0}]}
