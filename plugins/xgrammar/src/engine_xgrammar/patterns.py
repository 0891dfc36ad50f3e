"""Regular expressions as rules of XGrammar's grammars.

The library reads expressions by itself, too, but not those of JSON schemas rightly: `(?:a*b)?c` lets "ac" through, and
characters that JSON writes as escapes come out as they are. So they are written as rules here.
"""

from __future__ import annotations

from dataclasses import replace

from engine_kit.schemas.pattern import (
    LAST,
    Anchor,
    Chars,
    Concat,
    Either,
    Node,
    PatternError,
    Ranges,
    Repeat,
    complement,
    parsed,
    whole,
)

MAX_REPEATS = 4096
"""The most that counted repetitions within each other may multiply to: what they stand for is kept place by place."""
_ESCAPES = {34: '\\"', 92: "\\\\", 8: "b", 12: "f", 10: "n", 13: "r", 9: "t"}
"""How JSON writes characters behind a backslash, as they stand in a class of the library's."""
_NOT_RAW = ((0, 31), (34, 34), (92, 92))
_SURROGATES = ((0xD800, 0xDFFF),)


def objection(pattern: str, *, in_json: bool) -> str:
    """Why a pattern is refused; "" where nothing speaks against it.

    Args:
        in_json: it is a schema's, and describes the inside of a JSON string; else it is matched as a whole.
    """
    try:
        node = parsed(pattern if in_json else whole(pattern))
    except PatternError as error:
        return str(error)
    return _objection(node, in_json) or ("" if _repeats(node) <= MAX_REPEATS else _TOO_MANY)


_TOO_MANY = f"it repeats something more than {MAX_REPEATS} times, all repetitions multiplied"


def _objection(node: Node, in_json: bool) -> str:
    if isinstance(node, Chars):
        if node.named:
            return f"the class {node.named[0]!r}: Unicode properties cannot be enforced"
        written = any(low <= code <= high for low, high in node.ranges for code in _ESCAPES) and in_json
        if not (written or _without(node.ranges, _NOT_RAW if in_json else ((0, 0),))):
            kind = "control" if in_json else "null"
            return f"a {kind} character cannot be enforced"
        return ""
    parts = (node.part,) if isinstance(node, Repeat) else () if isinstance(node, Anchor) else node.parts
    return next((why for part in parts if (why := _objection(part, in_json))), "")


def _repeats(node: Node) -> int:
    """The most copies of one place within."""
    if isinstance(node, Repeat):
        return _repeats(node.part) * max(node.low, node.high or 0, 1)
    return max((_repeats(part) for part in node.parts), default=1) if isinstance(node, (Concat, Either)) else 1


def bounded(pattern: str, least: int, most: int | None) -> Node | None:
    """The pattern of a JSON schema and its bounds of length as one, where it repeats one class of characters, as
    "^[a-z]*$" does; None for other patterns, and where nothing is left."""
    node = parsed(pattern)
    if isinstance(node, Chars):
        node = Repeat(node, 1, 1)
    if not isinstance(node, Repeat) or not isinstance(node.part, Chars):
        return None
    high = min((bound for bound in (node.high, most) if bound is not None), default=None)
    found = replace(node, low=max(node.low, least), high=high)
    return None if high is not None and found.low > high else found


def rule(node: Node, *, in_json: bool) -> str:
    """What stands behind the `::=` of a rule.

    Args:
        in_json: it is the inside of a JSON string, with escapes where JSON wants them.
    """
    if isinstance(node, Chars):
        return _chars(node, in_json)
    if isinstance(node, Either):
        return "(" + " | ".join(rule(part, in_json=in_json) for part in node.parts) + ")"
    if isinstance(node, Repeat):
        return f"({rule(node.part, in_json=in_json)}){_counts(node)}"
    assert isinstance(node, Concat), "no anchor is left"
    return "(" + " ".join(rule(part, in_json=in_json) for part in node.parts) + ")" if node.parts else '""'


def _counts(node: Repeat) -> str:
    if node.high is None and node.low < 2:
        return "+" if node.low else "*"
    return f"{{{node.low},{'' if node.high is None else node.high}}}"


def _chars(node: Chars, in_json: bool) -> str:
    if not in_json:
        return _class(_without(node.ranges, ((0, 0),)))
    escaped = "".join(text for code, text in _ESCAPES.items() if node.has(code, code))
    raw = _without(node.ranges, _NOT_RAW)
    parts = ([_class(raw)] if raw else []) + ([f'("\\\\" [{escaped}])'] if escaped else [])
    return parts[0] if len(parts) == 1 else f"({' | '.join(parts)})"


def _class(ranges: Ranges) -> str:
    ranges = _without(ranges, _SURROGATES)  # the library writes them as if they were characters
    if ranges[-1][1] == LAST:
        return f"[^{_members(complement(ranges))}]"
    return f"[{_members(ranges)}]"


def _members(ranges: Ranges) -> str:
    return "".join(_member(low) if low == high else f"{_member(low)}-{_member(high)}" for low, high in ranges)


def _member(code: int) -> str:
    if code < 32 or 127 <= code < 160 or 0xD800 <= code <= 0xDFFF:
        return f"\\u{code:04x}"
    return f"\\{chr(code)}" if chr(code) in '\\]^-["' else chr(code)


def _without(ranges: Ranges, others: Ranges) -> Ranges:
    """Those that are not among others."""
    return tuple(
        (max(low, first), min(high, last))
        for low, high in ranges
        for first, last in complement(others)
        if max(low, first) <= min(high, last)
    )
