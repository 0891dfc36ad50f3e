"""Pages of the KV cache between the device and the host: the pool as connectors know it.

Pages are gathered into an array of their own, whose copy to the host begins at once; who wants it waits for it when he
likes. What comes back is sent and scattered. Both go through functions of a few fixed sizes, so that nothing is
compiled in service, and little is under way at once.

On the host a page is [layers, KV heads, 2, page size, D], keys before values, in the cache's dtype: the same on any
mesh.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from engine_tpu.steps import Memory, Steps

STAGED = 64 << 20
"""Bytes of pages on their way to or from the device, at most: then a transfer waits for the first of them."""
_MOVED = (64, 16, 4, 1)
"""Pages that move together. A turn takes the most that there are."""
_MOST_BYTES = STAGED // 4
"""Of them, unless one page is larger."""


class Moving:
    """An array of the device's that the host is going to have.

    Args:
        array: which is being computed.
        num_bytes: what is under way with it.
        wanted: somebody is going to call; else it only tells that what was under way has arrived.
    """

    def __init__(self, array: jax.Array, num_bytes: int, wanted: bool) -> None:
        self.num_bytes = num_bytes
        self._wanted = wanted
        self._array: jax.Array | None = array
        self._lock = threading.Lock()
        self._host = np.empty(0)
        array.copy_to_host_async()

    def is_over(self) -> bool:
        """Whether the device's memory is free."""
        array = self._array
        return array is None or (not self._wanted and array.is_ready())

    def __call__(self) -> np.ndarray:
        """Wait for it; the device's memory is free afterwards. For any thread."""
        with self._lock:
            if self._array is not None:
                self._host = np.asarray(self._array)
                self._array = None
            return self._host


class DevicePages:
    """The pool. Implements `engine.interfaces.kv_connector.PagedPool`.

    Args:
        steps, memory: the compiled functions, and what they keep.
    """

    def __init__(self, steps: Steps, memory: Memory) -> None:
        self._steps = steps
        self._memory = memory
        self._under_way: deque[Moving] = deque()
        form = memory.pools[0]
        heads = steps.kv_heads
        self._copies = form.shape[1] // 2 // heads
        """Of each head: so many devices have it."""
        self._page = len(memory.pools), heads, 2, *form.shape[2:]
        self._pools = (steps.by_head(1),) * len(memory.pools)
        self._dtype = np.dtype(form.dtype)
        self.page_bytes = int(np.prod(self._page)) * self._dtype.itemsize
        self._moved_bytes = self.page_bytes * self._copies
        """Of a page on all devices."""
        self._sizes = [size for size in _MOVED if size == 1 or size * self._moved_bytes <= _MOST_BYTES]

    def warm_up(self) -> None:
        """Compile all sizes, and run them on the null page."""
        for size in self._sizes:
            pages = np.zeros(size, np.int32)
            self.write(pages, self.read(pages)())

    def read(self, pages: np.ndarray) -> Callable[[], np.ndarray]:
        """See there."""
        pieces = [self._take(pages[piece]) for piece in self._turns(len(pages))]

        def content() -> np.ndarray:
            found = [piece()[:, :, :: self._copies].reshape(-1).view(np.uint8) for piece in pieces]
            rows = found[0] if len(found) == 1 else np.concatenate([np.empty(0, np.uint8), *found])
            return rows.reshape(-1, self.page_bytes)

        return content

    def write(self, pages: np.ndarray, content: np.ndarray) -> None:
        """See there."""
        for piece in self._turns(len(pages)):
            some, steps, memory = pages[piece], self._steps, self._memory
            # A copy in any case, which is JAX's from now on.
            numbers = np.repeat(self._numbers(content[piece]), self._copies, axis=2)
            self._make_room(numbers.nbytes)
            arguments = memory.pools, steps.send(some.copy()), steps.send(numbers, steps.by_head(2))
            key = f"{len(some)} pages from the host"
            memory.pools, told = steps.compiled(key, self._jit_put, *arguments)
            self._under_way.append(Moving(told, numbers.nbytes, False))

    def _take(self, pages: np.ndarray) -> Moving:
        num_bytes = len(pages) * self._moved_bytes
        self._make_room(num_bytes)
        arguments = self._memory.pools, self._steps.send(pages.copy())
        found = self._steps.compiled(f"{len(pages)} pages to the host", self._jit_take, *arguments)
        moving = Moving(found, num_bytes, True)
        self._under_way.append(moving)
        return moving

    def _make_room(self, num_bytes: int) -> None:
        """Wait for the first where there is too much under way."""
        under_way = self._under_way
        while under_way and (under_way[0].is_over() or num_bytes + sum(one.num_bytes for one in under_way) > STAGED):
            first = under_way.popleft()
            if not first.is_over():
                first()

    def _turns(self, count: int) -> Iterator[slice]:
        first = 0
        for size in self._sizes:
            while count - first >= size:
                yield slice(first, first + size)
                first += size

    def _numbers(self, content: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(content).view(self._dtype).reshape(-1, *self._page)

    def _jit_take(self) -> Any:
        def function(pools: tuple[jax.Array, ...], pages: jax.Array) -> jax.Array:
            return jnp.stack([_by_head(pool[pages]) for pool in pools], axis=1)

        by_head = self._steps.by_head
        return self._steps.jit(function, (self._pools, by_head(None)), by_head(2))

    def _jit_put(self) -> Any:
        def function(
            pools: tuple[jax.Array, ...], pages: jax.Array, content: jax.Array
        ) -> tuple[tuple[jax.Array, ...], jax.Array]:
            written = [pool.at[pages].set(_by_kind(content[:, at])) for at, pool in enumerate(pools)]
            return tuple(written), pages.sum()  # which is there when all is

        by_head = self._steps.by_head
        specs = self._pools, by_head(None), by_head(2)
        return self._steps.jit(function, specs, (self._pools, by_head(None)), donate_argnums=0)


def _by_head(pages: jax.Array) -> jax.Array:
    """[n, 2 * H, page size, D] -> [n, H, 2, page size, D]."""
    return jnp.swapaxes(pages.reshape(len(pages), 2, -1, *pages.shape[2:]), 1, 2)


def _by_kind(pages: jax.Array) -> jax.Array:
    """[n, H, 2, page size, D] -> [n, 2 * H, page size, D]."""
    return jnp.swapaxes(pages, 1, 2).reshape(len(pages), -1, *pages.shape[3:])
