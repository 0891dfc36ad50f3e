"""A constraint on an answer as a part of a structural tag, beside which calls of tools can stand."""

from __future__ import annotations

from typing import Any

from engine.types.structured_outputs import StructuredOutputsParams


def answer_format(constraint: StructuredOutputsParams) -> dict[str, Any] | None:
    """A verified constraint as a format of structural tags (the words are XGrammar's); None for a structural tag in its
    older form, which has none."""
    if constraint.json_object:
        return {"type": "json_schema", "json_schema": {"type": "object"}}
    if constraint.json is not None:
        return {"type": "json_schema", "json_schema": constraint.schema}
    if constraint.regex is not None:
        return {"type": "regex", "pattern": constraint.regex}
    if constraint.grammar is not None:
        return {"type": "grammar", "grammar": constraint.grammar}
    if constraint.choice is not None:
        texts = [{"type": "const_string", "value": text} for text in constraint.choice]
        return texts[0] if len(texts) == 1 else {"type": "or", "elements": texts}
    form = constraint.schema.get("format")
    return form if isinstance(form, dict) else None
