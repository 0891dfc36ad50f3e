"""What a text of JSON makes is counted without making it."""

from __future__ import annotations

import json as plain
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine_server import bodies
from engine_server.bodies import Count, count

VALUES = st.recursive(
    st.none() | st.integers() | st.floats(allow_nan=False) | st.text(st.sampled_from('a"\\\\,[{}]:é😀\n')),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.sampled_from('a"\\,[')), inner),
)


@pytest.fixture(params=[1, 2, 7, bodies._PIECE], autouse=True)
def piece(request: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """However the text is cut into pieces."""
    monkeypatch.setattr(bodies, "_PIECE", request.param)


def everything(value: Any) -> Iterator[Any]:
    """A value, and all in it, names of fields too."""
    yield value
    if isinstance(value, list):
        for inner in value:
            yield from everything(inner)
    if isinstance(value, dict):
        yield from value
        for inner in value.values():
            yield from everything(inner)


@settings(max_examples=50)
@given(VALUES, st.booleans(), st.sampled_from([None, 2]))
@example('\\"', False, None)
@example(["\\\\", '"', {'\\","': []}], False, None)
def test_as_many_as_reading_makes(value: Any, ascii_: bool, indent: int | None) -> None:
    text = plain.dumps(value, ensure_ascii=ascii_, indent=indent).encode()
    made = list(everything(value))
    found = count(text)
    assert found.objects == sum(isinstance(one, (str, list, dict)) for one in made)
    names = sum(len(one) for one in made if isinstance(one, dict))
    empty = sum(isinstance(one, (list, dict)) and not one for one in made)
    assert found.values == len(made) - names - 1 + empty  # an empty one counts as if it held something


@settings(max_examples=50)
@given(VALUES, st.integers(0, 200), st.text(st.sampled_from('[{"\\,:1a ]}')))
def test_what_follows_takes_nothing_back(value: Any, end: int, more: str) -> None:
    """What is no JSON from somewhere on is read up to there."""
    begun = plain.dumps(value).encode()[:end]
    found, before = count(begun + more.encode()), count(begun)
    assert found.objects >= before.objects and found.values >= before.values


def test_of_nothing() -> None:
    assert count(b"") == Count(0, 0)
