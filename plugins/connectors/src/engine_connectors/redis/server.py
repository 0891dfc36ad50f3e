"""A Redis server as a store of pages. No torch.

A page is one string, its frame and its bytes, named engine-kv:KEY.TP.PP. How much is kept, and what goes first, is the
server's matter (`maxmemory`, `maxmemory-policy`).
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from engine.types.errors import ConfigError
from engine_connectors.pages import FRAME_BYTES, Place, frame, is_whole
from engine_connectors.redis.card import RedisOptions

logger = logging.getLogger(__name__)

_PAUSE_SECONDS = 1.0
"""After a failure the server is left alone for so long."""
_PIPELINE_BYTES = 16 << 20
"""Of pages that are asked for, or sent, in one exchange, at most."""


def name_of(key: bytes, place: Place) -> str:
    """What a page is called there."""
    return f"engine-kv:{key.hex()}.{place}"


class Server:
    """A connection, or several, made anew where one is lost. A server that does not answer is no error: its pages are
    not there.

    Raises ConfigError for an address that is none, and where the server refuses the password.
    """

    def __init__(self, options: RedisOptions) -> None:
        import redis  # which need not be installed; the card says so where it is not

        self._no_answer = (redis.RedisError, OSError)
        variable = options.password_variable
        password = {} if variable is None else {"password": os.environ.get(variable, "")}
        asked = f"kv_connector.url={options.url}"
        try:
            self._client = redis.Redis.from_url(
                options.url, socket_timeout=options.timeout, socket_connect_timeout=options.timeout, **password
            )
            self._client.ping()
        except (redis.AuthenticationError, redis.ResponseError) as error:
            remedy = "name the variable that holds the password: --kv-connector.password_variable NAME"
            raise ConfigError(asked, f"the server refuses: {error}", remedy) from error
        except redis.RedisError as error:
            logger.warning("the KV store %s does not answer (%s): nothing is kept until it does", options.url, error)
        except ValueError as error:
            raise ConfigError(asked, str(error), "give an address like redis://HOST:6379/0") from error
        self._lock = threading.Lock()
        self._paused_until = 0.0
        self.unreachable = 0

    def exchange(self, fill: Callable[[Any], None]) -> list[Any] | None:
        """The answers to the commands that `fill` puts into a pipeline, an exception for each that was refused; None
        where there is no answer."""
        if time.monotonic() < self._paused_until:
            return None
        try:
            with self._client.pipeline(transaction=False) as pipeline:
                fill(pipeline)
                answers: list[Any] = pipeline.execute(raise_on_error=False)
                return answers
        except self._no_answer as error:
            with self._lock:
                self.unreachable += 1
                self._paused_until = time.monotonic() + _PAUSE_SECONDS
            logger.warning("the KV store does not answer: %s", error)
            return None

    def close(self) -> None:
        """Idempotent."""
        self._client.close()


class RedisDirectory:
    """See `engine_connectors.pages.Directory`.

    Args:
        places: of all ranks.
    """

    def __init__(self, server: Server, places: Sequence[Place]) -> None:
        self._server = server
        self._places = places

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        """One exchange."""

        def fill(pipeline: Any) -> None:
            for key in keys:
                pipeline.exists(*(name_of(key, place) for place in self._places))

        answers = self._server.exchange(fill)
        return [answer == len(self._places) for answer in answers or [0] * len(keys)]

    def close(self) -> None:
        """Hang up."""
        self._server.close()


class RedisStore:
    """See `engine_connectors.pages.Store`.

    Args:
        place: this rank's.
        ttl: seconds for which a page is kept; None: as long as the server likes.
    """

    def __init__(self, server: Server, place: Place, ttl: int | None) -> None:
        self._server = server
        self._place = place
        self._ttl = ttl
        self._lock = threading.Lock()
        self._counts = {"damaged": 0, "refused": 0}

    def get(self, keys: Sequence[bytes], pages: Sequence[np.ndarray]) -> list[bool]:
        """In exchanges of 16 MiB."""
        filled: list[bool] = []
        for some in _parts(pages):
            names = [name_of(key, self._place) for key in keys[some]]

            def fill(pipeline: Any, names: list[str] = names) -> None:
                for name in names:
                    pipeline.get(name)

            answers = self._server.exchange(fill)
            if answers is None:
                return filled + [False] * (len(keys) - len(filled))
            filled += map(self._take, names, keys[some], pages[some], answers)
        return filled

    def put(self, keys: Sequence[bytes], pages: Sequence[np.ndarray]) -> list[bool]:
        """What is there already is written again: another page of that name would be a damaged one."""
        kept: list[bool] = []
        for some in _parts(pages):

            def fill(pipeline: Any, some: slice = some) -> None:
                for key, page in zip(keys[some], pages[some], strict=True):
                    value = b"".join((frame(key, self._place, page), page.data))
                    pipeline.set(name_of(key, self._place), value, ex=self._ttl)

            answers = self._server.exchange(fill)
            if answers is None:
                return kept + [False] * (len(keys) - len(kept))
            kept += [answer is True for answer in answers]
        self._count("refused", kept.count(False))
        return kept

    def touch(self, keys: Sequence[bytes]) -> None:
        """For servers that give up what was not used for longest."""
        names = [name_of(key, self._place) for key in keys]
        self._server.exchange(lambda pipeline: pipeline.touch(*reversed(names)))

    def counts(self) -> dict[str, int]:
        """damaged: values that were not whole, and were removed; refused: pages that the server would not take;
        unreachable: exchanges without an answer."""
        with self._lock:
            return self._counts | {"unreachable": self._server.unreachable}

    def close(self) -> None:
        """Hang up."""
        self._server.close()

    def _take(self, name: str, key: bytes, page: np.ndarray, value: Any) -> bool:
        if not isinstance(value, bytes):  # it is not there, or is no string
            return False
        content = np.frombuffer(value, np.uint8)[FRAME_BYTES:]
        if content.size == page.size and is_whole(value[:FRAME_BYTES], key, self._place, content):
            page[:] = content
            return True
        self._count("damaged", 1)
        logger.warning("%s is not the page that its name says: it is removed", name)
        self._server.exchange(lambda pipeline: pipeline.delete(name))
        return False

    def _count(self, name: str, more: int) -> None:
        with self._lock:
            self._counts[name] += more


def _parts(pages: Sequence[np.ndarray]) -> Iterator[slice]:
    """Pages that go in one exchange."""
    at_once = max(1, _PIPELINE_BYTES // max(1, pages[0].size)) if pages else 1
    for first in range(0, len(pages), at_once):
        yield slice(first, first + at_once)
