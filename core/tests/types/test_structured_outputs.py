"""Constraints that are refused before anybody looks at what they mean."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.types.errors import InvalidRequestError
from engine.types.structured_outputs import MAX_CHARACTERS, MAX_DEPTH, StructuredOutputsParams


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"json": {"enum": ["x" * 10_000_000]}}, "json=.*1000.... characters"),
        ({"json": '"' + "x" * 10_000_000}, "json=.*characters"),
        ({"regex": "a" * (MAX_CHARACTERS + 1)}, "regex='aaa.*262145 characters"),
        ({"grammar": "a" * (MAX_CHARACTERS + 1)}, "grammar="),
        ({"structural_tag": "[" * 200_000}, "structural_tag=.*no JSON"),
        ({"json": '{"a":' * 30_000}, "json=.*no JSON"),
        ({"json": nested(MAX_DEPTH + 1)}, "nested more than 100 deep.*[$]defs"),
        ({"json": json.dumps(nested(MAX_DEPTH + 1))}, "nested more than 100 deep"),
        ({"json": "[]"}, "not a JSON schema"),
        ({"regex": "a", "start_after": []}, "start_after=.*1 to 64"),
        ({"regex": "a", "start_after": [-1]}, "start_after="),
        ({"regex": "a", "start_after": [True]}, "start_after="),
        ({"regex": "a", "start_after": [1] * 65}, "start_after="),
        ({"structural_tag": "true"}, "not a JSON object"),
        ({"regex": "\ud800"}, "no valid Unicode"),
        ({"json": {"enum": [{1, 2}, object()]}}, "does not travel"),
    ],
)
def test_too_much(value: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message) as found:
        StructuredOutputsParams(**value).verify()
    assert len(str(found.value)) < 400


def test_too_deep_for_anything() -> None:
    deep = nested(50_000)
    with pytest.raises(InvalidRequestError, match="structured_outputs.json={.items.: {"):
        StructuredOutputsParams(json=deep).verify()
    while deep:  # or its end would be one recursion
        deep = deep["items"]


def test_just_enough() -> None:
    StructuredOutputsParams(json=nested(MAX_DEPTH)).verify()
    StructuredOutputsParams(json="true").verify()
    constraint = StructuredOutputsParams(json='{"type": "boolean"}')
    constraint.verify()
    assert constraint.schema == {"type": "boolean"} and constraint.asked.startswith("structured_outputs.json=")
