"""Schemas of values that have no parts, each with instances that are valid and instances that are not.

`HELD` is read by the suite, keyword by keyword. Instances are decoded; each is written in many spellings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True)
class Held:
    """One schema.

    Args:
        schema: decoded.
        valid: instances, of which each can be written. They hold what the schema names: a driver may be narrower than
            the schema in what that leaves open, as properties beyond `properties`, and in types that none of its
            keywords is about.
        invalid: instances, of which none can be written.
        broken: texts that must not be written either.
    """

    schema: Any
    valid: Sequence[Any]
    invalid: Sequence[Any]
    broken: Sequence[str] = ()


LONE = ('"\\ud800"', '"\\uDC00x"', '"a\\udbff"', '"\\ude00\\ud83d"', '"\\ud83d\\u0041"', '"\\ud83d\\ud83d\\ude00"')
"""Halves of surrogate pairs: JSON's grammar has them, Unicode has not, and readers differ."""
ENDLESS = ("4e+78354047452", "-1e400", "1E309", "17976931348623157e400", "0.1e999")
"""Numbers that no float of 64 bits holds: readers make infinities of them."""
NO_NUMBERS = (
    "01", "-01", "+1", ".5", "1.", "1e", "1e+", "-", "--1", "0x10", "1_000", "NaN", "Infinity", "-Infinity", "١",
)  # fmt: skip
NO_STRINGS = (
    '"', '"a', "'a'", '"a\nb"', '"a\tb"', '"\x00"', '"\\x41"', "\"\\'\"", '"\\u12"', '"\\u00g0"', '"a"b"', '"\\"',
    '"a""b"',
)  # fmt: skip
NO_JSON = (
    "", " ", "tru", "nulll", "True", "undefined", "1 2", "[1,]", "[,1]", "[1 2]", "[1", "1]", "{", "}", '{"a"}',
    '{"a":}', '{"a":1,}', "{,}", "{a:1}", "{'a':1}", '{"a" 1}', '{"a":1 "b":2}', "{1:2}", "[]// c", "/* c */[]",
    "\ufeff[]",
)  # fmt: skip


def text(**keywords: Any) -> dict[str, Any]:
    """A schema of strings."""
    return {"type": "string", **keywords}


def whole(**keywords: Any) -> dict[str, Any]:
    """A schema of integers."""
    return {"type": "integer", **keywords}


def real(**keywords: Any) -> dict[str, Any]:
    """A schema of numbers."""
    return {"type": "number", **keywords}


def _format(name: str, valid: Sequence[str], invalid: Sequence[str]) -> Held:
    return Held(text(format=name), valid, [*invalid, 1, None])


VALUES: Mapping[str, Sequence[Held]] = MappingProxyType({
    "type": (
        Held(text(), ["", "a", "é日😀", 'q"\\/\b\f\n\r\t'], [1, True, None, [], {}, ["a"]], [*LONE, *NO_STRINGS]),
        Held(whole(), [0, 7, -12, 100], ["1", 1.5, True, None, [1]], [*NO_NUMBERS, *ENDLESS]),
        Held(real(), [0, -1.5, 12, 1e20, 2.5e-7], ["1", False, None, {}], [*NO_NUMBERS, *ENDLESS]),
        Held({"type": "boolean"}, [True, False], [0, 1, "true", None, []], ["True", "TRUE", "tru"]),
        Held({"type": "null"}, [None], [0, "", False, "null", {}], ["None", "nul"]),
        Held({"type": "array"}, [[], [1, "a", None, {}, [True]]], [{}, "[]", 1, None], ["[1,]", "[", "[[]"]),
        Held({"type": "object"}, [{}, {"a": 1, "b": [{}]}], [[], "{}", 1, None], ['{"a":1,}', "{a:1}", "{"]),
        Held({"type": ["string", "null"]}, ["a", None], [1, True, [], {}]),
        Held({"type": ["integer", "boolean"]}, [3, True], ["3", None, 3.5, []]),
        Held({"type": ["array", "object"]}, [[1], {"a": 1}], ["a", 1, None]),
        Held({"type": ["integer", "string"], "minimum": 5, "maxLength": 2}, [5, "ab", "5"], [4, "abc", True, None]),
    ),
    "any JSON": (
        Held({}, [1, "a", None, True, [], {}, {"a": [1, {"b": "é"}]}], [], [*NO_JSON, *LONE, *NO_STRINGS, *ENDLESS]),
        Held(True, [1, "a", None, [], {"a": 1}], [], ['{"a":4e+78354047452}', '["\\ud800"]', '{"\\udfff":1}',
            "[1e999]"]),
        Held({"type": "object"}, [{"😀": "\U0010ffff"}], [], ['{"\\ud800":1}', '{"a":"\\udc00"}', '{"a":[1e400]}']),
        Held(False, [], [1, "a", None, True, [], {}]),
        Held({"title": "t", "description": "d", "default": 1, "examples": [2]}, ["a", {"b": None}], [], NO_JSON),
    ),
    "enum": (
        Held({"enum": ["a", 1, None, True, 2.5]}, ["a", 1, None, True, 2.5], ["b", 2, False, "1", "null", 25, [], {}]),
        Held({"enum": [1, 0]}, [1, 0], [True, False, "1", 10, 11, 0.1]),
        Held({"enum": [True]}, [True], [1, "true", False]),
        Held({"enum": ['a"b', "c\\d", "e\nf", "é/日"]}, ['a"b', "c\\d", "e\nf", "é/日"], ["a", "b", "c", "e f", "é"]),
        Held({"enum": [[1, [2]], {"a": {"b": "c"}}]}, [[1, [2]], {"a": {"b": "c"}}], [[1], [1, 2], {"a": {}},
            {"a": 1}, {}]),
        Held(text(enum=["a", "ab"]), ["a", "ab"], ["abb", "b", ""]),
        Held(text(enum=["a", 1]), ["a"], [1, "1", "b"]),
        Held({"enum": ["a", "abc"], "minLength": 2}, ["abc"], ["a", "ab"]),
        Held(whole(enum=[1, 5, 9], minimum=4), [5, 9], [1, 4, 6]),
    ),
    "const": (
        Held({"const": "x"}, ["x"], ["y", "", "xx", ["x"], None]),
        Held({"const": 0}, [0], [False, "0", 1, None, 10]),
        Held({"const": False}, [False], [0, True, None, "false"]),
        Held({"const": None}, [None], [0, False, "null", "", []]),
        Held({"const": {"a": [1, None], "b": "é"}}, [{"a": [1, None], "b": "é"}], [{"a": [1, None]}, {"a": [1],
            "b": "é"}, {}]),
        Held({"const": []}, [[]], [[[]], [None], {}, ""]),
        Held({"const": -2.5}, [-2.5], [2.5, -2, -25, "-2.5"]),
        Held({"const": "ab", "maxLength": 1, "type": "string"}, [], ["ab", "a"]),
    ),
    "minimum": (
        Held(whole(minimum=3), [3, 10, 300], [2, 0, -3, -30]),
        Held(whole(minimum=-12), [-12, -1, 0, 5], [-13, -20, -120]),
        Held(whole(minimum=95, maximum=112), [95, 100, 112], [94, 9, 10, 11, 113, 950]),
        Held(real(minimum=2.5), [2.5, 3, 25.0, 2.75], [2.4, 2, 2.49, 0.25, -2.5]),
        Held(real(minimum=-1.5, maximum=0.25), [-1.5, 0, 0.25, -0.1], [-1.6, 0.26, 1, -15]),
        Held({"minimum": 3}, [3, 4.5], [2, 2.9, -1]),
        Held(whole(minimum=2.5), [3], [2, 1, -3]),
    ),
    "maximum": (
        Held(whole(maximum=12), [12, 0, -400], [13, 20, 100]),
        Held(real(maximum=-0.5), [-0.5, -1, -100.25], [-0.4, 0, 0.5, 1]),
        Held({"maximum": 3}, [3, -4.5], [4, 3.1, 30]),
        Held(whole(maximum=0), [0, -1], [1, 10]),
    ),
    "exclusiveMinimum": (
        Held(whole(exclusiveMinimum=3), [4, 30], [3, 0, -4]),
        Held(real(exclusiveMinimum=0, maximum=1), [0.5, 1, 0.001], [0, -0.0, -0.5, 1.1], ["1e-400", "0e5", "-0"]),
        Held(whole(exclusiveMinimum=3, minimum=2), [4], [3, 2]),
        Held({"exclusiveMinimum": 3}, [3.5], [3, 2]),
    ),
    "exclusiveMaximum": (
        Held(whole(exclusiveMaximum=10), [9, -1], [10, 11, 99]),
        Held(real(exclusiveMaximum=2.5, minimum=2), [2, 2.25, 2.49], [2.5, 3, 1.9, 2.51]),
        Held(whole(exclusiveMinimum=1, exclusiveMaximum=3), [2], [1, 3, 0, 22]),
        Held({"exclusiveMaximum": 3}, [2.5], [3, 3.5]),
    ),
    "multipleOf": (
        Held(whole(multipleOf=7), [0, 7, 21, -14], [1, 6, 8, 22, -13]),
        Held(whole(multipleOf=7, minimum=10), [14, 21, 70], [7, 10, 13, 15, 0]),
        Held(whole(multipleOf=5, maximum=30), [30, 5, 0, -5], [35, 31, 29, 3]),
        Held(whole(multipleOf=4, minimum=3, maximum=13), [4, 8, 12], [3, 5, 6, 10, 13, 16, 0]),
        Held(whole(multipleOf=3, exclusiveMinimum=3, exclusiveMaximum=9), [6], [3, 9, 4, 7, 0, 12]),
        Held(real(multipleOf=0.5), [0, 1.5, 2, -0.5], [0.25, 1.3, 0.1]),
        Held(real(multipleOf=0.01, minimum=0), [0.07, 1, 2.25], [0.005, 1.001, -0.01]),
        Held(real(multipleOf=2), [4, -2, 0], [3, 1.5, 0.2]),
        Held({"multipleOf": 3}, [3, -6], [4, 1.5]),
        Held({"multipleOf": 3, "minimum": 5}, [6], [3, 7, 5]),
        Held(whole(multipleOf=1.5), [3, 0, 6], [1, 2, 4]),
    ),
    "minLength": (
        Held(text(minLength=2), ["ab", "abc", "日本", "😀é"], ["", "a", "é", "😀", "\n"]),
        Held(text(minLength=1, maxLength=2), ["a", "ab", "é😀"], ["", "abc", '"""']),
        Held({"minLength": 2}, ["ab"], ["a", ""]),
        Held(text(minLength=3, pattern="^[a-c]*$"), ["abc", "aaaa"], ["ab", "abd", "abcd"]),
        Held(text(minLength=3, pattern="^(ab|c)+$"), ["abc", "ccc"], ["ab", "cc", "abd"]),
    ),
    "maxLength": (
        Held(text(maxLength=2), ["", "ab", "日本", "😀😀"], ["abc", "😀😀😀", "日本語"]),
        Held(text(maxLength=0), [""], ["a", "é"]),
        Held({"maxLength": 2}, ["ab", ""], ["abc"]),
        Held(text(maxLength=3, pattern="a+"), ["a", "xax"], ["aaaa", "xx", ""]),
        Held(text(maxLength=4, pattern="^(ab)*$"), ["abab", ""], ["ababab", "aba"]),
    ),
    "pattern": (
        Held(text(pattern="^a[bc]{1,2}$"), ["ab", "acb"], ["a", "bb", "abbb", "xab"]),
        Held(text(pattern="b+"), ["b", "abba", "xbx"], ["", "aca", "B"]),
        Held(text(pattern="^b"), ["b", "bad"], ["ab", ""]),
        Held(text(pattern="b$"), ["b", "ab"], ["ba", "", "b\n"]),
        Held(text(pattern="^(yes|no)$"), ["yes", "no"], ["yesno", "y", "xno"]),
        Held(text(pattern="^yes|no$"), ["yes", "yesno", "yesxx", "ano"], ["nox", "xyes", ""]),
        Held(text(pattern="^a.c$"), ["abc", "aéc", "a😀c"], ["a\nc", "ac", "abbc"]),
        Held(text(pattern="^[^a]$"), ["b", "é", "😀"], ["a", "", "bb"]),
        Held(text(pattern="^\\d{2}$"), ["42"], ["4", "٤٢", "４２", "4a"]),
        Held(text(pattern="^\\w+$"), ["a_1"], ["é", "日", "a b", ""]),
        Held(text(pattern="^a\\sb$"), ["a b"], ["ab", "a_b", "a\u200bb"]),
        Held(text(pattern="^\\S$"), ["a"], [" ", "\u00a0", "\u2003", "\u2029", "\ufeff"]),
        Held(text(pattern='^"a\\\\$'), ['"a\\'], ["a", '"a', '"a\\\\']),
        Held(text(pattern="^é+日$"), ["é日", "éé日"], ["e日", "é", "日"]),
        Held(text(pattern="^😀{2}$"), ["😀😀"], ["😀", "😀😀😀"]),
        Held(text(pattern="^\\u00e9\\x41$"), ["éA"], ["eA", "é"]),
        Held(text(pattern="^(?=ab)a.$"), ["ab"], ["ac", "a"]),
        Held(text(pattern="^(a)\\1$"), ["aa"], ["a", "ab"]),
        Held(text(pattern="^\\p{Lu}$"), ["A", "É"], ["a", "1"]),
        Held(text(pattern="^a\\bb|c$"), ["c"], ["ab", "cx"]),
        Held({"pattern": "^a+$"}, ["aa"], ["b", "", "ab"]),
        Held(text(pattern=""), ["", "abc"], [1]),
    ),
    "format": (
        _format(
            "date",
            ["2024-02-29", "1999-12-31", "2000-02-29"],
            ["2024-02-30", "2023-02-29", "1900-02-29", "2024-04-31", "2024-13-01", "2024-00-10", "2024-01-00",
             "2024-1-1",
             "24-01-01", "2024-01-32", "20240101", "２０２４-01-01", "2024-0१-01", "2024-01-01T00:00:00Z", ""],
        ),
        _format(
            "time",
            ["12:30:45Z", "00:00:00+01:00", "23:59:59.5-05:30"],
            ["12:30:45", "12:30Z", "24:00:00Z", "12:60:00Z", "12:00:61Z", "22:59:60Z", "12:00:00+24:00", "12:00:00+01",
             "1:00:00Z", "१२:00:00Z", "12:00:00.Z", "12:00:00 Z", ""],
        ),
        _format(
            "date-time",
            ["2024-02-29T12:30:45Z", "1985-04-12T23:20:50.52Z", "1996-12-19T16:39:57-08:00"],
            ["2024-02-30T12:30:45Z", "2023-02-29T00:00:00Z", "2024-01-01T12:30:45", "2024-01-01",
             "2024-01-01 12:30:45Z",
             "2024-01-01T25:00:00Z", "2024-01-01T22:58:60Z", "２024-01-01T00:00:00Z", "2024-01-01T00:00:00Ẑ", ""],
        ),
        _format(
            "duration",
            ["P1D", "PT1H30M", "P1Y2M3DT4H5M6S", "P2W"],
            ["P", "PT", "1D", "P1S", "P1DT", "P2D1Y", "P1Y2W", "PT1D", "P١Y", "", "-P1D"],
        ),
        _format(
            "uuid",
            ["2eb8aa08-aa98-11ea-b4aa-73b441d16380"],
            ["2eb8aa08aa9811eab4aa73b441d16380", "2eb8aa08-aa98-11ea-b4aa-73b441d1638",
             "2eb8aa08-aa98-11ea-b4aa-73b441d1638g",
             "２eb8aa08-aa98-11ea-b4aa-73b441d16380", "{2eb8aa08-aa98-11ea-b4aa-73b441d16380}", ""],
        ),
        _format(
            "ipv4",
            ["127.0.0.1", "255.255.255.255", "0.0.0.0"],
            ["256.0.0.1", "1.2.3", "1.2.3.4.5", "01.2.3.4", "1.2.3.04", "1.2.3.٤", "0x7f.0.0.1", "1.2.3.4/8", "",
             "1.2.3.4\n"],
        ),
        _format(
            "ipv6",
            ["::", "::1", "2001:db8::8a2e:370:7334", "1:2:3:4:5:6:7:8"],
            ["12345::", ":::", "1::2::3", "1:2:3:4:5:6:7", "1:2:3:4:5:6:7:8:9", "fe80::1%eth0", "::g", "1.2.3.4",
             "::1.2.3",
             "::1.2.3.04", "::１", ""],
        ),
        _format(
            "email",
            ["joe@example.com", "joe.bloggs+tag@mail.example.com"],
            ["joe", "joe@", "@example.com", "joe bloggs@example.com", "joe@exa mple.com", ".joe@example.com",
             "a..b@example.com",
             "joe.@example.com", "jöe@example.com", "joe@@example.com", ""],
        ),
        _format(
            "hostname",
            ["example.com", "a-1.b", "localhost", "1host"],
            ["-a.com", "a-.com", "a..b", "a_b.com", "é.com", ".com", "a b", "x" * 64 + ".com", "xn--X",
             "a.xn--07jceefgh4c", ""],
        ),
        _format(
            "uri",
            ["https://example.com/a?b=c#d", "urn:isbn:0451450523", "mailto:joe@example.com"],
            ["//example.com", "/a", "a", "http://a b", "http://é.com/", "http://a/\\", "http://a/<b>", ":a",
             "1http://a", "", "http://a:b/",
             "http://a/%2g"],
        ),
        Held({"format": "date"}, ["2024-02-29"], ["2024-02-30", "x"]),
        Held(text(format="ipv4", minLength=9), ["127.0.0.1"], ["1.2.3.4", "999.0.0.1"]),
        Held(text(format="date", pattern="^2024"), ["2024-02-29"], ["2023-01-01", "2024"]),
    ),
})  # fmt: skip
