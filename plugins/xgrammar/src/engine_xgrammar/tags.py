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
