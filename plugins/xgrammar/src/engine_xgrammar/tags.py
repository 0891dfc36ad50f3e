"""Structural tags in their older form."""

from __future__ import annotations

from typing import Any


def with_format(tag: dict[str, Any]) -> dict[str, Any]:
    """A structural tag in XGrammar's present form, {"type": "structural_tag", "format": ...}.

    The older form, which vLLM's users know, names `structures` (begin, schema, end) and `triggers`: free text, and from
    each trigger on one of the structures.
    """
    if "structures" not in tag:
        return tag
    tags = [
        {
            "type": "tag",
            "begin": structure.get("begin", ""),
            "content": {"type": "json_schema", "json_schema": structure.get("schema", {})},
            "end": structure.get("end", ""),
        }
        for structure in tag["structures"]
    ]
    return {
        "type": "structural_tag",
        "format": {"type": "triggered_tags", "triggers": tag.get("triggers", []), "tags": tags},
    }


def with_whitespace(tag: Any, most: int) -> Any:
    """The tag, in JSON parts that do not say otherwise at most so many spaces and line breaks in a row: without a limit
    a model may write them for ever. (XGrammar's structural tags know no JSON without any; one is then the most.)"""
    if isinstance(tag, list):
        return [with_whitespace(part, most) for part in tag]
    if not isinstance(tag, dict):
        return tag
    inner = {key: value if key == "json_schema" else with_whitespace(value, most) for key, value in tag.items()}
    return {"max_whitespace_cnt": max(most, 1), **inner} if tag.get("type") == "json_schema" else inner
