"""Regular expressions in the dialect, against those of Python, and against what ECMA-262 says where the two differ."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_kit.schemas.formats import FORMATS
from engine_kit.schemas.pattern import PatternError, either, excluding, matches, of_length, plain, whole

TEXTS = ["".join(text) for size in range(4) for text in itertools.product("ab1", repeat=size)]
TEXTS += ["\n", "a\nb", "é", "-"]
atoms = st.sampled_from(["a", "b", "[ab]", "[^a]", "\\d", "\\w", ".", "[^\\d]", "\\x61", "\\-"])
patterns = st.recursive(
    atoms,
    lambda inner: st.one_of(
        st.builds("{}{}".format, inner, inner),
        st.builds("(?:{}|{})".format, inner, inner),
        st.builds("({}){}".format, inner, st.sampled_from(["*", "+", "?", "{2}", "{1,2}", "{0,1}", "{1,}", "*?"])),
    ),
    max_leaves=5,
)


@settings(max_examples=100, deadline=None)
@given(patterns, st.sampled_from(["", "^"]), st.sampled_from(["", "$"]))
def test_it_matches_what_it_matched(pattern: str, start: str, end: str) -> None:
    written = f"{start}{pattern}{end}"
    searched = re.compile(start + pattern + end.replace("$", r"\Z"), re.ASCII)
    found, matched = plain(written), whole(written)
    for text in TEXTS:
        assert (re.fullmatch(found, text) is not None) == (searched.search(text) is not None), (text, found)
        assert matches(written, text) == (searched.search(text) is not None), text
        assert (re.fullmatch(matched, text) is not None) == (searched.fullmatch(text) is not None), (text, matched)
    assert plain(found) == found == whole(found)


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("^a|b$", r"^(?:a[\s\S]*|[\s\S]*b)$"),
        ("", r"^[\s\S]*$"),
        ("^.$", "^[^\\x0a\\x0d\u2028\u2029]$"),
        ("^\\cA\\0\\u00e9\\ud83d\\ude00\\/$", "^\\x01\\x00é😀\\/$"),
        ("(^|,)x$", r"^(?:x|[\s\S]*,x)$"),
        ("^[\\w.-]+?$", r"^[\-.0-9A-Z_a-z]+$"),
        ("^[]a$", None),
        ("^[^]$", r"^[\s\S]$"),
        ("^\\p{L}$", r"^[\p{L}]$"),
        ("(?=a)", None), ("(?<n>a)", None), ("(?i)a", None), ("\\ba", None), ("(a)\\1", None), ("a^b", None),
        ("a{2,1}", None), ("a{,2}", None), ("a**", None), ("[b-a]", None), ("(", None), (")", None), ("\\ud800", None),
        ("\\A", None), ("*", None),
    ],
)  # fmt: skip
def test_how_it_is_written(pattern: str, found: str | None) -> None:
    if found is None:
        with pytest.raises(PatternError):
            plain(pattern)
    else:
        assert plain(pattern) == found


def test_made_patterns() -> None:
    but = excluding(["fo", "foo", "", 'é"'])
    for text in ("f", "o", "fooo", "é", "x", "fa", "\n"):
        assert re.fullmatch(but, text) and matches(but, text), text
    assert not any(re.fullmatch(but, text) for text in ("fo", "foo", "", 'é"'))
    assert either(["^a$", "^b*$"]) == "^(?:a|b*)$" and of_length(1, 3) == r"^[\s\S]{1,3}$"
    with pytest.raises(PatternError, match="too long"):
        matches("^((((a*)*)*)*)*b$", "a" * 50_000)


FITS = {
    "date": ("2024-02-29 2023-12-31 2000-02-29", "2023-02-29 1900-02-29 2023-04-31 2023-13-01 2023-1-01 ٢023-01-01"),
    "time": ("00:00:00Z 23:59:59.5+01:00", "12:00:00 24:00:00Z 1:00:00Z 12:00:60Z 12:0०:00Z"),
    "date-time": ("2024-02-29T10:00:00Z", "2024-02-30T10:00:00Z 2024-02-29T10:00:00 2024-02-29"),
    "duration": ("P1D P1Y2M3DT4H5M6S PT1S P2W", "P PT P1 1D P1DT P1Y2D"),
    "email": ("a@b.c a.b+c@d.example", "a a@ @b a@b@c a..b@c"),
    "hostname": ("a a-b.c a--b", "-a a- xn--X a_b a..b"),
    "ipv4": ("0.0.0.0 255.255.255.255", "256.0.0.0 1.2.3 01.2.3.4 1.2.3.4.5"),
    "ipv6": (":: ::1 1:2:3:4:5:6:7:8 1::8 ::ffff:1.2.3.4 1:2::7:8", "1 1:2 ::1::2 1:2:3:4:5:6:7:8:9 12345:: 1::2::"),
    "uuid": ("123e4567-e89b-12d3-a456-426614174000", "123e4567e89b12d3a456426614174000 x"),
    "uri": ("http://a/b?c#d mailto:a@b http://a:80/", "a /b http://a:b/ a http://a/%zz"),
    "uri-reference": ("a/b #c http://a/", "a%z"),
    "json-pointer": ("/a/b~0 /", "a /~2"),
    "relative-json-pointer": ("0 1/a 2#", "-1 01 /a"),
}


@pytest.mark.parametrize("name", FORMATS)
def test_formats(name: str) -> None:
    fits, others = FITS[name]
    pattern = plain(FORMATS[name])
    for text in fits.split():
        assert re.fullmatch(pattern, text), text
    for text in [text for text in others.split(" ") if text or name not in ("json-pointer", "uri-reference")]:
        assert not re.fullmatch(pattern, text), text
