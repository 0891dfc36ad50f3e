"""A Mooncake Store as a store of pages. No torch.

A page is one object, its frame and its bytes, named engine-kv:KEY.TP.PP. The store is the memory that its clients
bring, and a master that knows which object lies where; what goes first when it is full, the master decides.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.types.errors import ConfigError
from engine_connectors.pages import FRAME_BYTES, Place, frame, is_whole

if TYPE_CHECKING:
    from engine_mooncake.card import MooncakeOptions

logger = logging.getLogger(__name__)

LOCAL_BUFFER_BYTES = 16 << 20
"""The library's own room, which pages that go without a copy do not need."""
_PAUSE_SECONDS = 1.0
"""After a failure the master is left alone for so long: the library tries for seconds before it gives up."""
_OTHER_SIZE = -600
_NO_TRANSFER = -800
_NO_ANSWER = -900
"""Of the library's error codes: INVALID_PARAMS, where an object is larger than its place; TRANSFER_FAIL, where it is
smaller, or the client that has it does not answer; RPC_FAIL and all below, where the master does not."""


def name_of(key: bytes, place: Place) -> str:
    """What a page is called there."""
    return f"engine-kv:{key.hex()}.{place}"


class Client:
    """This process's part in a store.

    Raises ConfigError where the library cannot be loaded, or the master does not answer.

    Args:
        segment_size: bytes of memory that it brings.

    Attributes:
        unreachable: exchanges that the master or another client did not answer.
    """

    def __init__(self, options: MooncakeOptions, segment_size: int) -> None:
        asked = f"take part in the Mooncake Store of kv_connector.master={options.master}"
        os.environ.setdefault("MC_LOG_LEVEL", "WARNING")  # or it writes twenty lines of INFO for each client
        try:
            from mooncake.store import MooncakeDistributedStore  # which need not be installed; the card says so
        except ImportError as error:
            remedy = "install what it names (on Debian: libibverbs1, libnuma1), or another build of the library"
            raise ConfigError(asked, f"the library does not load: {error}", remedy) from error
        _must_answer(options, asked)
        self._store = MooncakeDistributedStore()
        local = (options.host, options.metadata, segment_size, LOCAL_BUFFER_BYTES)
        code = self._store.setup(*local, options.protocol, options.devices, options.master)
        if code:
            found = f"the library's setup fails with code {code}; the log has its reason"
            remedy = "see kv_connector.host, metadata, protocol, devices, and segment_size"
            raise ConfigError(asked, found, remedy)
        self._lock = threading.Lock()
        self._paused_until = 0.0
        self._closed = False
        self.unreachable = 0

    def register(self, memory: np.ndarray) -> None:
        """Pages may lie in this memory, as long as the client lives. Raises ConfigError where that cannot be."""
        if memory.nbytes and (code := self._store.register_buffer(memory.ctypes.data, memory.nbytes)):
            asked = f"register {memory.nbytes:,} bytes of memory with Mooncake"
            raise ConfigError(asked, f"the library refuses with code {code}", "raise `ulimit -l`, or use protocol tcp")

    def ask(self, method: str, *args: Any) -> list[int] | None:
        """What a method of many keys says; None where there is no answer."""
        if time.monotonic() < self._paused_until:
            return None
        codes: list[int] = getattr(self._store, method)(*args)
        worst = min(codes, default=0)
        if worst <= _NO_TRANSFER:
            with self._lock:
                self.unreachable += 1
                if worst <= _NO_ANSWER:
                    self._paused_until = time.monotonic() + _PAUSE_SECONDS
            logger.warning("the Mooncake Store does not answer (%s, code %d)", method, worst)
        return codes

    def size(self, name: str) -> int:
        """Bytes of an object; negative where it is not there."""
        found: int = self._store.get_size(name)
        return found

    def close(self) -> None:
        """Leave; the memory that it brought goes. Idempotent."""
        if not self._closed:
            self._closed = True
            self._store.close()


def _must_answer(options: MooncakeOptions, asked: str) -> None:
    """The library would try for minutes."""
    host, _, port = options.master.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), options.timeout).close()
    except (OSError, OverflowError) as error:
        remedy = "start `mooncake_master`, or name its address: --kv-connector.master HOST:PORT"
        raise ConfigError(asked, f"the master does not answer: {error}", remedy) from error


class MooncakeDirectory:
    """See `engine_connectors.pages.Directory`.

    Args:
        places: of all ranks.
    """

    def __init__(self, client: Client, places: Sequence[Place]) -> None:
        self._client = client
        self._places = places

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        """One question. The master keeps what it finds for a few seconds (`default_kv_lease_ttl`)."""
        names = [name_of(key, place) for key in keys for place in self._places]
        codes = self._client.ask("batch_is_exist", names) if names else []
        there = np.array(codes or [0] * len(names)).reshape(len(keys), len(self._places)) == 1
        found: list[bool] = there.all(axis=1).tolist()
        return found

    def close(self) -> None:
        """Leave the store."""
        self._client.close()


class MooncakeStore:
    """See `engine_connectors.pages.Store`.

    Args:
        place: this rank's.
    """

    def __init__(self, client: Client, place: Place) -> None:
        self._client = client
        self._place = place
        self._lock = threading.Lock()
        self._own = threading.local()
        self._counts = {"damaged": 0, "refused": 0}

    def get(self, keys: Sequence[bytes], pages: Sequence[np.ndarray]) -> list[bool]:
        """Straight into the pages."""
        codes = self._exchange("batch_get_into_multi_buffers", keys, pages, self._frames(len(keys)))
        if codes is None:
            return [False] * len(keys)
        return [self._is_page(*one) for one in zip(keys, pages, self._frames(len(keys)), codes, strict=True)]

    def put(self, keys: Sequence[bytes], pages: Sequence[np.ndarray]) -> list[bool]:
        """What is there already is not written again."""
        frames = self._frames(len(keys))
        for key, page, its_frame in zip(keys, pages, frames, strict=True):
            its_frame[:] = np.frombuffer(frame(key, self._place, page), np.uint8)
        codes = self._exchange("batch_put_from_multi_buffers", keys, pages, frames)
        kept = [code == 0 for code in codes or [_NO_ANSWER] * len(keys)]
        self._count("refused", kept.count(False))
        return kept

    def touch(self, keys: Sequence[bytes]) -> None:
        """The master counts as use what it is asked for, the latest most."""
        self._client.ask("batch_is_exist", [name_of(key, self._place) for key in reversed(keys)])

    def counts(self) -> dict[str, int]:
        """damaged: objects that were not whole, and were removed; refused: pages that the store did not take;
        unreachable: exchanges without an answer."""
        with self._lock:
            return self._counts | {"unreachable": self._client.unreachable}

    def close(self) -> None:
        """Leave the store."""
        self._client.close()

    def _frames(self, count: int) -> np.ndarray:
        """Room for as many frames, uint8 [count, FRAME_BYTES], of this thread."""
        own = self._own
        if not hasattr(own, "frames") or len(own.frames) < count:
            own.frames = np.zeros((max(64, count), FRAME_BYTES), np.uint8)
            self._client.register(own.frames)
        found: np.ndarray = own.frames[:count]
        return found

    def _exchange(
        self, method: str, keys: Sequence[bytes], pages: Sequence[np.ndarray], frames: np.ndarray
    ) -> list[int] | None:
        names = [name_of(key, self._place) for key in keys]
        places = [[its_frame.ctypes.data, page.ctypes.data] for its_frame, page in zip(frames, pages, strict=True)]
        return self._client.ask(method, names, places, [[FRAME_BYTES, page.size] for page in pages])

    def _is_page(self, key: bytes, page: np.ndarray, its_frame: np.ndarray, code: int) -> bool:
        name, size = name_of(key, self._place), FRAME_BYTES + page.size
        if code == size and is_whole(its_frame.tobytes(), key, self._place, page):
            return True
        if code < 0 and (code not in (_OTHER_SIZE, _NO_TRANSFER) or not 0 <= self._client.size(name) != size):
            return False
        self._count("damaged", 1)
        logger.warning("%s is not the page that its name says: it is removed", name)
        self._client.ask("batch_remove", [name], True)
        return False

    def _count(self, name: str, more: int) -> None:
        with self._lock:
            self._counts[name] += more
