"""The card of connector `lmcache`."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar

from pydantic import BaseModel, ByteSize, ConfigDict, Field, field_validator

from engine.interfaces.kv_connector import KVConnectorCard, KVConnectorNeed

INSTALL = "pip install --no-deps lmcache cachetools numba llvmlite py-cpuinfo aiofile caio aiofiles"


class LMCacheOptions(BaseModel):
    """Options of `lmcache`.

    Attributes:
        url: of the store, as LMCache's `remote_url`: lm://HOST:PORT, fs://HOST:0/FOLDER, redis://HOST:PORT, s3://...
        config: LMCache's own configuration file, for what its store needs beside that; without one, the variables of
            the environment that LMCache reads count.
        timeout: seconds after which an answer is not waited for any more.
        lookup_seconds: after which a prompt does not wait any more to know what the store has, and is computed.
        threads: that read and write, on each rank.
        buffer: bytes of host memory, on each rank, for pages that wait to be sent; when it is full, pages are not kept.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    url: str = Field(default="lm://localhost:65432", pattern=r"^[a-z0-9-]+://")
    config: Path | None = None
    timeout: float = Field(default=5.0, gt=0)
    lookup_seconds: float = Field(default=10.0, gt=0)
    threads: int = Field(default=4, ge=1, le=64)
    buffer: ByteSize = Field(default=ByteSize(256 << 20), ge=1)

    @field_validator("url")
    @classmethod
    def _answers_for_what_is_not_there(cls, url: str) -> str:
        """LMCache's client of it waits for ever for an object that is gone, and for all that come after it."""
        if url.startswith("resp://"):
            raise ValueError("LMCache's client for resp:// hangs where an object is not there: write redis://")
        return url


class LMCacheConnector(KVConnectorCard):
    """Keeps the pages of computed blocks in a remote store of LMCache's: its server, Redis, a folder, S3, ..."""

    priority = -10  # by name: it needs a store
    framework = "torch"
    Options = LMCacheOptions
    bodies: ClassVar[Mapping[str, str]] = {
        "core": "engine_lmcache.scheduler_half:LMCacheScheduler",
        "worker": "engine_lmcache.worker_half:LMCacheWorker",
    }

    @classmethod
    def unsupported(cls, need: KVConnectorNeed) -> list[str]:
        return [] if find_spec("lmcache") is not None else [f"the library is not installed: {INSTALL}"]
