"""The card of connector `redis`."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import ClassVar
from urllib.parse import urlsplit

from pydantic import BaseModel, ByteSize, ConfigDict, Field, field_validator

from engine.interfaces.kv_connector import KVConnectorCard, KVConnectorNeed


class RedisOptions(BaseModel):
    """Options of `redis`.

    Attributes:
        url: of the server: redis://HOST:PORT/DATABASE, rediss:// for TLS, unix:// for a socket.
        password_variable: the environment variable that holds the password, where there is one: what stands in `url`
            is shown in logs.
        ttl: seconds after which the server forgets a page; None: its own policy (`maxmemory-policy`) decides alone.
        timeout: seconds after which an answer is not waited for any more.
        lookup_seconds: after which a prompt does not wait any more to know what the server has, and is computed.
        threads: that read and write, on each rank.
        buffer: bytes of host memory, on each rank, for pages that wait to be sent; when it is full, pages are not kept.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    url: str = "redis://localhost:6379/0"
    password_variable: str | None = None
    ttl: int | None = Field(default=None, ge=1)
    timeout: float = Field(default=5.0, gt=0)
    lookup_seconds: float = Field(default=10.0, gt=0)
    threads: int = Field(default=4, ge=1, le=64)
    buffer: ByteSize = Field(default=ByteSize(256 << 20), ge=1)

    @field_validator("url")
    @classmethod
    def _names_a_database(cls, url: str) -> str:
        """The client takes database 0 for whatever is no number."""
        scheme, path = urlsplit(url).scheme, urlsplit(url).path.strip("/")
        if scheme in ("redis", "rediss") and path and not (path.isascii() and path.isdigit()):
            raise ValueError(f"{path!r} is the number of no database: write redis://HOST:PORT/0")
        return url


class RedisConnector(KVConnectorCard):
    """Keeps the pages of computed blocks in a Redis server, and brings them back into engines of the same identity."""

    priority = -10  # by name: it needs a server
    requires_minor = 4
    Options = RedisOptions
    bodies: ClassVar[Mapping[str, str]] = {
        "core": "engine_connectors.redis.scheduler_half:RedisScheduler",
        "worker": "engine_connectors.redis.worker_half:RedisWorker",
    }

    @classmethod
    def unsupported(cls, need: KVConnectorNeed) -> list[str]:
        there = find_spec("redis") is not None
        return [] if there else ["the client library is not installed: pip install 'engine-connectors[redis]'"]
