"""Constraints in LLGuidance's own notation, Lark with additions.

Every grammar is told `no_forcing`: by itself the library allows, where only one text can follow, nothing but its usual
tokens; the engine's masks allow every spelling.
"""

from __future__ import annotations

import json
from typing import Any

from llguidance.gbnf_to_lark import any_to_lark

from engine.types.structured_outputs import StructuredOutputsParams
from engine_llguidance.schemas import told

HEAD = '%llguidance {"no_forcing": true}\n'


def lark(constraint: StructuredOutputsParams, max_whitespace: int) -> str:
    """The grammar of a verified constraint. Raises ValueError for EBNF that cannot be read."""
    if constraint.choice is not None:
        return f"{HEAD}start: {' | '.join(map(_literal, dict.fromkeys(constraint.choice)))}"
    if constraint.regex is not None:
        return f"{HEAD}start: /{_slashed(_inner(constraint.regex))}/"
    if constraint.json is not None:
        return HEAD + "start: %json " + _schema(constraint.schema, max_whitespace)
    if constraint.json_object:
        return HEAD + "start: %json " + _schema({"type": "object"}, max_whitespace)
    text = constraint.grammar or ""
    if "::=" in text:
        text = any_to_lark(text)
    return text if "%llguidance" in text else HEAD + text


def _schema(schema: Any, max_whitespace: int) -> str:
    space = (
        {"whitespace_pattern": rf"[\x20\x0A]{{1,{max_whitespace}}}"}
        if max_whitespace
        else {"whitespace_flexible": False}
    )
    return json.dumps(told(schema, space))


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _inner(pattern: str) -> str:
    """Without the anchors around it: it is matched as a whole."""
    pattern = pattern.removeprefix("^")
    body = pattern[:-1]
    odd = (len(body) - len(body.rstrip("\\"))) % 2
    return body if pattern.endswith("$") and not odd else pattern


def _slashed(pattern: str) -> str:
    """As it stands between the slashes of Lark."""
    parts: list[str] = []
    escaped = False
    for char in pattern:
        if char == "\n":
            parts.append("n" if escaped else "\\n")
        else:
            parts.append("\\/" if char == "/" and not escaped else char)
        escaped = char == "\\" and not escaped
    return "".join(parts) or "(?:)"
