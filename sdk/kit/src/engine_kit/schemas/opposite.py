"""The opposite of a JSON schema, as cases (`cases`): what `not`, `else` and `oneOf` come to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from engine_kit.schemas.cases import (
    FALSE,
    TRUE,
    TYPES,
    Case,
    Cases,
    bounds_above,
    bounds_below,
    everything,
    exact,
    impossible,
    out_of_bounds,
    stated_types,
    type_of,
)
from engine_kit.schemas.pattern import excluding
from engine_kit.schemas.places import escaped, refused

if TYPE_CHECKING:
    from engine_kit.schemas.reading import Reading


def opposite(reading: Reading, place: str, node: Mapping[str, Any]) -> Cases:
    """What fits whatever a schema does not allow: one of its keywords is not kept."""
    found: Cases = []
    if "type" in node:
        types = stated_types(node)
        found += [Case(type=t) for t in TYPES if t not in types and not (t == "number" and "integer" in types)]
        if "integer" in types and "number" not in types:
            found.append(Case(type="number", opposites=(reading.slice(place, {"type": "integer"}),)))
    for key in ("enum", "const"):
        if key in node:
            found += _but_values(reading, place, node["enum"] if key == "enum" else [node["const"]])
    against = {"number": _not_number, "string": _not_string, "array": _not_array, "object": _not_object}
    for kind, not_kept in against.items():
        if kind in stated_types(node) or (kind == "number" and "integer" in stated_types(node)):
            found += not_kept(reading, place, node)
    for key in ("unevaluatedProperties", "unevaluatedItems"):
        if key in node:
            raise refused(place, key, "the opposite of it cannot be enforced")
    for key in ("$ref", "$dynamicRef"):
        if key in node:
            found += reading.of(False, reading.references.target(reading.references.place(place), key))
    for i in range(len(node.get("allOf", ()))):
        found += reading.of(False, f"{place}/allOf/{i}")
    for key in ("anyOf", "oneOf"):
        if key in node:
            found += _none_of(reading, place, [f"{place}/{key}/{i}" for i in range(len(node[key]))])
    parts = [f"{place}/oneOf/{i}" for i in range(len(node.get("oneOf", ())))]
    for i, part in enumerate(parts):
        for other in parts[:i]:
            found += reading.together(place, reading.of(True, other), reading.of(True, part))
    if "not" in node:
        found += reading.of(True, f"{place}/not")
    if "if" in node:
        for positive, key in ((True, "then"), (False, "else")):
            if key in node:
                found += reading.together(
                    place, reading.of(positive, f"{place}/if"), reading.of(False, f"{place}/{key}")
                )
    for key in ("dependentRequired", "dependentSchemas", "dependencies"):
        for name, part in node.get(key, {}).items():
            there = [Case(type="object", required=(name,))]
            if isinstance(part, list):
                lacking = [Case(type="object", properties={other: FALSE}) for other in part]
            else:
                lacking = reading.of(False, f"{place}/{key}/{escaped(name)}")
            found += reading.together(place, there, lacking)
    return [case for case in found if not impossible(case)]


def _none_of(reading: Reading, place: str, parts: Sequence[str]) -> Cases:
    found = everything()
    for part in parts:
        found = reading.together(place, found, reading.of(False, part))
    return found


def _not_number(reading: Reading, place: str, node: Mapping[str, Any]) -> Cases:
    lows = [(bound, is_open) for bound, is_open in bounds_below(node) if bound is not None]
    highs = [(bound, is_open) for bound, is_open in bounds_above(node) if bound is not None]
    found = [Case(type="number", high=bound, high_open=not is_open) for bound, is_open in lows]
    found += [Case(type="number", low=bound, low_open=not is_open) for bound, is_open in highs]
    if "multipleOf" in node:
        found.append(Case(type="number", opposites=(reading.slice(place, node, "multipleOf"),)))
    return found


def _not_string(reading: Reading, place: str, node: Mapping[str, Any]) -> Cases:
    slices = [reading.slice(place, node, key) for key in ("pattern", "format") if key in node]
    return [*out_of_bounds("string", "Length", node), *(Case(type="string", opposites=(s,)) for s in slices)]


def _not_array(reading: Reading, place: str, node: Mapping[str, Any]) -> Cases:
    found = out_of_bounds("array", "Items", node)
    for i in range(len(node.get("prefixItems", ()))):
        prefix = (*(TRUE,) * i, frozenset({(False, f"{place}/prefixItems/{i}")}))
        found.append(Case(type="array", least=i + 1, prefix=prefix))
    if "items" in node and "prefixItems" not in node:
        other = reading.state(frozenset({(False, f"{place}/items")}))
        if other == TRUE:
            found.append(Case(type="array", least=1))
        elif other != FALSE:
            found.append(Case(type="array", contains=((other, 1, None),)))
    elif "items" in node:
        if node["items"] is False:
            found.append(Case(type="array", least=len(node["prefixItems"]) + 1))
        else:
            found.append(Case(type="array", opposites=(reading.slice(place, node, "prefixItems", "items"),)))
    if node.get("uniqueItems"):
        found.append(Case(type="array", opposites=(reading.slice(place, node, "uniqueItems"),)))
    if "contains" in node and node.get("minContains", 1) == 1 and "maxContains" not in node:
        found.append(Case(type="array", items=frozenset({(False, f"{place}/contains")})))
    elif "contains" in node and (node.get("minContains", 1) or "maxContains" in node):
        counted = reading.slice(place, node, "contains", "minContains", "maxContains")
        found.append(Case(type="array", opposites=(counted,)))
    return found


def _not_object(reading: Reading, place: str, node: Mapping[str, Any]) -> Cases:
    found = out_of_bounds("object", "Properties", node)
    found += [Case(type="object", properties={name: FALSE}) for name in node.get("required", ())]
    for name in node.get("properties", ()):
        other = frozenset({(False, f"{place}/properties/{escaped(name)}")})
        found.append(Case(type="object", required=(name,), properties={name: other}))
    if "patternProperties" in node or node.get("additionalProperties", True) is not True:
        names = reading.slice(place, node, "properties", "patternProperties", "additionalProperties")
        found.append(Case(type="object", opposites=(names,)))
    if "propertyNames" in node:
        found.append(Case(type="object", opposites=(reading.slice(place, node, "propertyNames"),)))
    return found


def _but_values(reading: Reading, place: str, values: Sequence[Any]) -> Cases:
    """Everything but some constants."""
    texts = [value for value in values if isinstance(value, str)]
    flags = {value for value in values if isinstance(value, bool)}
    found = [Case(type="null")] if None not in values else []
    other = {True, False} - flags
    found += [Case(type="enum", values=(flag,)) for flag in other] if flags else [Case(type="boolean")]
    points = sorted({exact(value) for value in values if type_of(value) == "number"})
    for low, high in zip([None, *points], [*points, None], strict=True):
        found.append(Case(type="number", low=low, low_open=low is not None, high=high, high_open=high is not None))
    found.append(Case(type="string", patterns=(excluding(texts),) if texts else ()))
    for kind, whole in (("array", list), ("object", dict)):
        of_kind = [value for value in values if isinstance(value, whole)]
        least = 1 if any(not value for value in of_kind) else 0
        opposites = tuple(reading.slice(place, {"const": value}) for value in of_kind if value)
        found.append(Case(type=kind, least=least, opposites=opposites))
    return found
