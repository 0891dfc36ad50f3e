"""A cache that is bounded by the bytes of what it holds."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class BoundedCache(Generic[K, V]):
    """Keeps what was used last. Thread-safe; what several threads ask for at once is made once.

    Args:
        limit: bytes. What is larger alone is made, given and not kept.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._size = 0
        self._lock = threading.Lock()
        self._values: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self._making: dict[K, Future[V]] = {}

    @property
    def size(self) -> int:
        """Bytes held."""
        return self._size

    def get(self, key: K, make: Callable[[], tuple[V, int]]) -> V:
        """The value of a key; where there is none, `make` gives it and its bytes. Its error is not kept."""
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
                return self._values[key][0]
            making = self._making.get(key)
            mine = making is None
            if making is None:
                making = self._making[key] = Future()
        if not mine:
            return making.result()
        try:
            value, size = make()
        except BaseException as error:
            with self._lock:
                del self._making[key]
            making.set_exception(error)
            raise
        with self._lock:
            del self._making[key]
            if size <= self._limit:
                self._values[key] = value, size
                self._size += size
                while self._size > self._limit:
                    _, (_, dropped) = self._values.popitem(last=False)
                    self._size -= dropped
        making.set_result(value)
        return value
