"""What is refused before anything is compiled."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from engine.types.errors import InvalidRequestError
from engine.types.structured_outputs import StructuredOutputsParams
from engine_xgrammar.patterns import objection
from engine_xgrammar.schemas import check_schema


def check(constraint: StructuredOutputsParams) -> None:
    """Raises InvalidRequestError for what XGrammar would not enforce, named."""
    if constraint.regex is not None and (why := objection(constraint.regex, in_json=False)):
        raise InvalidRequestError(constraint.asked, why, "write the regular expression without it")
    if constraint.json is not None:
        check_schema(constraint.schema)
    for text in constraint.choice or ():
        if "\x00" in text:
            raise InvalidRequestError(constraint.asked, "a null character cannot be enforced")
    if constraint.structural_tag is not None:
        for key, value in _parts(constraint.schema):
            if key in ("json_schema", "schema"):
                check_schema(value)
            elif key == "pattern" and isinstance(value, str) and (why := objection(value, in_json=False)):
                raise InvalidRequestError(constraint.asked, f"its pattern {value!r:.40}: {why}")


def _parts(tag: Any) -> Iterator[tuple[str, Any]]:
    """The entries of a structural tag that hold constraints, wherever they stand."""
    pending = [tag]
    while pending:
        node = pending.pop()
        if isinstance(node, list):
            pending += node
        elif isinstance(node, dict):
            for key, value in node.items():
                if key in ("json_schema", "schema", "pattern"):
                    yield key, value
                else:
                    pending.append(value)
