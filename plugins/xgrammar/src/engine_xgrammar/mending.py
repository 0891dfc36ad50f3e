"""What XGrammar makes of a JSON schema, with what it gets wrong put right.

It turns schemas into a grammar, which can be read and written as text. There a few rules, the same for every schema,
let through what no reader of JSON takes for what the schema says:

- half a surrogate pair, as an escape in a text, and in bytes that are no UTF-8;
- an exponent of any number of digits;
- the name of a property, with a character written as an escape, as the name of an additional one;
- what many a `pattern` does not match (see `patterns`). Schemas have marks instead, which stand for rules of ours.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_ESCAPE = re.compile(
    r'^(basic_escape\w* ::= ).*"u" \[A-Fa-f0-9\] \[A-Fa-f0-9\] \[A-Fa-f0-9\] \[A-Fa-f0-9\].*$', re.MULTILINE
)
_WHOLE_ESCAPE = (
    r'(([\"\\/bfnrt]) | ("u" (([0-9A-Ca-cE-Fe-f] [0-9A-Fa-f] [0-9A-Fa-f] [0-9A-Fa-f])'
    r" | ([Dd] [0-7] [0-9A-Fa-f] [0-9A-Fa-f])"
    r' | ([Dd] [89ABab] [0-9A-Fa-f] [0-9A-Fa-f] "\\u" [Dd] [C-Fc-f] [0-9A-Fa-f] [0-9A-Fa-f]))))'
)
_EXPONENT = re.compile(r'^(basic_number\w* ::= \("" \| \(\[eE\] basic_number\w* basic_number_digits\w*)\{1, -1\}', re.M)
_NAME = re.compile(r"^\w+_addl_key\w* ::= .*$", re.MULTILINE)
_ESCAPE_IN_NAME = re.compile(r' \| \("\\\\" basic_escape\w* basic_string_sub\w*\)')
EXPONENT_DIGITS = 2
"""The most digits of an exponent: what is within them every reader takes for a number."""
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|\[(?:[^\]\\]|\\.)*\]')
_MARK = re.compile(r'Regex\("\^of_rule_(\d+)\$", json_string=true\)')


def mark(rule: int) -> str:
    """What a schema has for a pattern. (In a grammar's text nothing that is quoted can look like it.)"""
    return f"^of_rule_{rule}$"


def without_surrogates(grammar: str) -> str:
    """A grammar's text whose classes of all but some characters leave out what is no character."""
    return _TOKEN.sub(lambda match: re.sub(r"^\[\^", r"[^\\ud800-\\udfff", match[0]), grammar)


def mended(grammar: str, rules: Sequence[str]) -> str:
    """A grammar's text, with those rules as they should be. Raises ValueError where they are not as they are known:
    another version of the library writes others.

    Args:
        rules: what stands for each mark.
    """
    found, escapes = _ESCAPE.subn(lambda match: match[1] + _WHOLE_ESCAPE, without_surrogates(grammar))
    found, exponents = _EXPONENT.subn(rf"\1{{1, {EXPONENT_DIGITS}}}", found)
    found = _NAME.sub(lambda match: _ESCAPE_IN_NAME.sub("", match[0]), found)
    found = _MARK.sub(lambda match: rules[int(match[1])], found)
    bare = _TOKEN.sub(lambda match: "" if match[0].startswith('"') else match[0], found)  # nothing that is quoted
    known = len(re.findall(r"^basic_escape\w* ::=", bare, re.MULTILINE)), bare.count("([eE]")
    left = "json_string=true" in bare or any("basic_escape" in match[0] for match in _NAME.finditer(bare))
    if (escapes, exponents) != known or left:
        raise ValueError("this version of XGrammar writes rules for JSON that are not known here")
    return found
