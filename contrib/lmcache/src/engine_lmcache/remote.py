"""A remote store of LMCache's as a store of pages. It imports the library, and with it torch, when it connects.

A page is one object, its frame and its bytes, named engine-kv.TP.PP and its key. How much is kept, and what goes first,
is the store's matter.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

import numpy as np

from engine.types.errors import ConfigError
from engine_connectors.pages import FRAME_BYTES, Place, frame, is_whole
from engine_lmcache.card import INSTALL

if TYPE_CHECKING:
    from engine_lmcache.card import LMCacheOptions
    from engine_lmcache.library import Connection, Name

logger = logging.getLogger(__name__)

Answers = Sequence[Any]
"""An exception in the place of one that failed."""
_PAUSE_SECONDS = 1.0
"""After a failure the store is left alone for so long, and then connected to anew."""
_LEAVING_SECONDS = 0.1
"""What is under way has so long to see that it was cancelled."""


def name_of(key: bytes, place: Place) -> Name:
    """What a page is called there."""
    return f"engine-kv.{place}", key


class _Line:
    """A connection in a thread, and an event loop, of its own. It is hung up by leaving all three: where the library
    closes its connection to Redis, it waits in the loop for what the loop is to do; its client of LMCache's server
    waits there for answers.
    """

    def __init__(self, make: Callable[[], Connection]) -> None:
        self._make = make
        self._connection: Connection | None = None
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._run, name="kv-lmcache", daemon=True).start()

    def ask(self, question: Callable[[Connection], Awaitable[Answers]], timeout: float) -> Answers:
        """Raises TimeoutError, and whatever the store's client raises."""

        async def asked() -> Answers:
            if self._connection is None:
                self._connection = self._make()
            return await question(self._connection)

        future = asyncio.run_coroutine_threadsafe(asked(), self._loop)
        try:
            return future.result(timeout)
        except TimeoutError:
            future.cancel()
            raise TimeoutError(f"no answer in {timeout:g} s") from None

    def hang_up(self) -> None:
        """Nothing is asked after this."""
        with suppress(RuntimeError):  # it is closed
            self._loop.call_soon_threadsafe(self._leave)

    def _leave(self) -> None:
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.call_later(_LEAVING_SECONDS, self._loop.stop)

    def _run(self) -> None:
        self._loop.run_forever()
        self._loop.close()


class Client:
    """Asks a store, by a connection that is made anew where it fails.

    Raises ConfigError where the library cannot be loaded, and where the store does not answer.

    Args:
        page_bytes: of each page.

    Attributes:
        unreachable: exchanges that failed.
    """

    def __init__(self, options: LMCacheOptions, page_bytes: int) -> None:
        self._url = options.url
        asked = f"keep pages in LMCache's store kv_connector.url={self._shown(options.url)}"
        os.environ.setdefault("LMCACHE_LOG_LEVEL", "WARNING")  # or it writes dozens of lines of INFO at each start
        try:
            from engine_lmcache.library import Connection  # what it imports need not be installed
        except ImportError as error:
            raise ConfigError(asked, f"the library does not load: {error}", INSTALL) from error
        self.unreachable = 0
        self._make = lambda: Connection(options.url, options.config, FRAME_BYTES + page_bytes)
        self._timeout = options.timeout
        self._lock = threading.Lock()
        self._paused_until = 0.0
        self._closed = False
        self._line = _Line(self._make)
        try:
            (answer,) = self._line.ask(lambda store: store.exists([name_of(b"\1", Place())]), self._timeout)
            if isinstance(answer, BaseException):
                raise answer
        except Exception as error:
            self.close()
            found = f"it does not answer: {self._shown(error)}"
            raise ConfigError(asked, found, "start it, or see kv_connector.url and kv_connector.config") from None

    def _shown(self, said: str | BaseException) -> str:
        """What is said of the store, by the library too, without who asks it and the password."""
        text, user = str(said) or type(said).__name__, urlsplit(self._url).netloc.rpartition("@")[0]
        password = user.partition(":")[2]
        text = text.replace(f"{user}@", "") if user else text
        for secret in filter(None, (password, unquote(password))):
            text = text.replace(secret, "(hidden)")
        return text

    def ask(self, question: Callable[[Connection], Awaitable[Answers]], count: int) -> list[Any]:
        """The answers to a question about so many pages; None where there is none."""
        if time.monotonic() < self._paused_until:
            return [None] * count
        line = self._line
        try:
            answers = line.ask(question, self._timeout)
        except Exception as error:  # whatever a store's client raises
            answers = [error] * count
        failures = [answer for answer in answers if isinstance(answer, BaseException)]
        if failures:
            self._failed(line, failures[0])
        return [None if isinstance(answer, BaseException) else answer for answer in answers]

    def _failed(self, line: _Line, error: BaseException) -> None:
        logger.warning("LMCache's store does not answer: %s", self._shown(error))
        with self._lock:
            self.unreachable += 1
            self._paused_until = time.monotonic() + _PAUSE_SECONDS
            if line is self._line and not self._closed:
                self._line = _Line(self._make)
        line.hang_up()

    def remove(self, name: Name) -> None:
        """Where the store can; else the page is written over when it has been computed."""

        async def removed(store: Connection) -> Answers:
            await store.remove(name)
            return [True]

        self.ask(removed, 1)

    def close(self) -> None:
        """Hang up, also on what is being asked. Idempotent."""
        with self._lock:
            self._closed = True
        self._line.hang_up()


class LMCacheDirectory:
    """See `engine_connectors.pages.Directory`.

    Args:
        places: of all ranks.
    """

    def __init__(self, client: Client, places: Sequence[Place]) -> None:
        self._client = client
        self._places = places

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        """All at once."""
        names = [name_of(key, place) for key in keys for place in self._places]
        answers = self._client.ask(lambda store: store.exists(names), len(names)) if names else []
        n = len(self._places)
        return [all(answers[first : first + n]) for first in range(0, len(names), n)]

    def close(self) -> None:
        """Hang up."""
        self._client.close()


class LMCacheStore:
    """See `engine_connectors.pages.Store`.

    Args:
        place: this rank's.
    """

    def __init__(self, client: Client, place: Place) -> None:
        self._client = client
        self._place = place
        self._lock = threading.Lock()
        self._counts = {"damaged": 0, "refused": 0}

    def get(self, keys: Sequence[bytes], pages: Sequence[np.ndarray]) -> list[bool]:
        """Copied into the pages, and checked there."""
        names = [name_of(key, self._place) for key in keys]
        objects = self._client.ask(lambda store: store.get(names), len(names))
        return [self._is_page(*one) for one in zip(keys, pages, objects, strict=True)]

    def put(self, keys: Sequence[bytes], pages: Sequence[np.ndarray]) -> list[bool]:
        """What is there already is written again: another page of that name would be a damaged one."""
        names = [name_of(key, self._place) for key in keys]
        frames = [frame(key, self._place, page) for key, page in zip(keys, pages, strict=True)]
        objects = [np.concatenate((np.frombuffer(of, np.uint8), page)) for of, page in zip(frames, pages, strict=True)]
        kept = [answer is True for answer in self._client.ask(lambda store: store.put(names, objects), len(names))]
        self._count("refused", kept.count(False))
        return kept

    def touch(self, keys: Sequence[bytes]) -> None:
        """There is nothing by which LMCache's remote stores could be told."""

    def counts(self) -> dict[str, int]:
        """damaged: objects that were not whole; refused: pages that the store did not take; unreachable: exchanges that
        failed."""
        with self._lock:
            return self._counts | {"unreachable": self._client.unreachable}

    def close(self) -> None:
        """Hang up."""
        self._client.close()

    def _is_page(self, key: bytes, page: np.ndarray, found: np.ndarray | None) -> bool:
        if found is None:
            return False
        page[:] = found[FRAME_BYTES:]
        if is_whole(found[:FRAME_BYTES].tobytes(), key, self._place, page):
            return True
        self._count("damaged", 1)
        logger.warning("%s of LMCache's store is not the page that its name says", key.hex())
        self._client.remove(name_of(key, self._place))
        return False

    def _count(self, name: str, more: int) -> None:
        with self._lock:
            self._counts[name] += more
