"""A cache that is bounded by bytes."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from engine_kit.bounded_cache import BoundedCache


def test_it_keeps_what_was_used_last() -> None:
    cache: BoundedCache[str, str] = BoundedCache(10)
    made: list[str] = []

    def get(key: str, size: int = 4) -> str:
        return cache.get(key, lambda: (made.append(key) or key.upper(), size))  # type: ignore[func-returns-value]

    assert [get("a"), get("b"), get("a"), get("c"), get("a"), get("b")] == ["A", "B", "A", "C", "A", "B"]
    assert made == ["a", "b", "c", "b"] and cache.size == 8
    assert get("large", 11) == "LARGE" and cache.size == 8, "what is larger than all is not kept"
    assert get("whole", 10) == "WHOLE" and cache.size == 10


def test_what_several_ask_for_is_made_once() -> None:
    cache: BoundedCache[str, int] = BoundedCache(10)
    go, made = threading.Event(), []

    def make() -> tuple[int, int]:
        made.append(1)
        go.wait(10)
        return 7, 1

    with ThreadPoolExecutor(4) as threads:
        answers = [threads.submit(cache.get, "a", make) for _ in range(4)]
        assert cache.get("b", lambda: (8, 1)) == 8, "others do not wait"
        go.set()
        assert [answer.result(10) for answer in answers] == [7] * 4
    assert len(made) == 1


def test_an_error_is_told_and_not_kept() -> None:
    cache: BoundedCache[str, int] = BoundedCache(10)

    def fail() -> tuple[int, int]:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        cache.get("a", fail)
    assert cache.get("a", lambda: (1, 1)) == 1
