"""Values in errors: as Python writes them, as far as they are shown."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from engine.types.errors import shown

LEAVES = st.none() | st.integers() | st.floats() | st.text() | st.binary(max_size=9)
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner) | st.tuples(inner) | st.dictionaries(st.text(max_size=9), inner)
)


@given(VALUES, st.sampled_from([1, 40, 80]))
def test_the_beginning_of_what_python_writes(value: Any, most: int) -> None:
    written = repr(value)
    found = shown(value, most)
    assert len(found) == min(most, len(written))
    assert found.replace('"', "'") == written[:most].replace('"', "'")  # which quotes, depends on what is left out


def test_what_is_large_or_deep_is_not_written_out() -> None:
    class Unwritten(int):
        def __repr__(self) -> str:
            raise AssertionError("nobody sees it")

    assert shown([1] * 40 + [Unwritten()]) == repr([1] * 40)[:80]
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    assert shown(deep) == "[" * 80
    while deep:  # or its end would be one recursion
        deep = deep[0]
