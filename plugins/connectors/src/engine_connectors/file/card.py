"""The card of connector `file`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import BaseModel, ByteSize, ConfigDict, Field

from engine.interfaces.kv_connector import KVConnectorCard


class FileOptions(BaseModel):
    """Options of `file`.

    Attributes:
        path: the folder. Engines that share it find each other's pages where model, dtype, page formats and division
            over ranks are the same.
        size: bytes of all files in it, those of other engines too; what was not used for longest goes first.
        fsync: write a page to the disk itself before it can be found. Without, what a power failure cuts is found
            damaged later, and computed again.
        threads: that read and write, on each rank.
        buffer: bytes of host memory, on each rank, for pages that wait to be written; when it is full, pages are not
            kept.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: str = Field(default="~/.cache/engine", min_length=1)
    size: ByteSize = Field(default=ByteSize(10 << 30), ge=1 << 20)
    fsync: bool = False
    threads: int = Field(default=4, ge=1, le=64)
    buffer: ByteSize = Field(default=ByteSize(256 << 20), ge=1)


class FileConnector(KVConnectorCard):
    """Keeps the pages of computed blocks in a folder, and brings them back into any engine of the same identity."""

    priority = -10  # by name: it needs a folder
    requires_minor = 4
    Options = FileOptions
    bodies: ClassVar[Mapping[str, str]] = {
        "core": "engine_connectors.file.scheduler_half:FileScheduler",
        "worker": "engine_connectors.file.worker_half:FileWorker",
    }
