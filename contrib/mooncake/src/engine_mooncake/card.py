"""The card of connector `mooncake`."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import ClassVar, Literal

from pydantic import BaseModel, ByteSize, ConfigDict, Field

from engine.interfaces.kv_connector import KVConnectorCard, KVConnectorNeed


class MooncakeOptions(BaseModel):
    """Options of `mooncake`.

    Attributes:
        master: host:port of the store's master, `mooncake_master`.
        metadata: where the store's clients find each other: "P2PHANDSHAKE" (they ask each other), or the address of a
            metadata server: http://HOST:PORT/metadata, etcd://HOST:PORT.
        host: name or address by which the store's other clients reach this machine.
        protocol: how pages travel.
        devices: RDMA devices with commas between; "": the library chooses.
        segment_size: bytes of host memory, of each rank, that become part of the store; 0: this engine uses what others
            bring. They hold anybody's pages, and go with the engine.
        timeout: seconds in which the master has to answer at start.
        lookup_seconds: after which a prompt does not wait any more to know what the store has, and is computed.
        threads: that read and write, on each rank.
        buffer: bytes of host memory, on each rank, for pages that wait to be sent; when it is full, pages are not kept.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    master: str = Field(default="localhost:50051", pattern=r"^.+:\d+$")
    metadata: str = Field(default="P2PHANDSHAKE", min_length=1)
    host: str = Field(default="127.0.0.1", min_length=1)
    protocol: Literal["tcp", "rdma"] = "tcp"
    devices: str = ""
    segment_size: ByteSize = Field(default=ByteSize(1 << 30), ge=0)
    timeout: float = Field(default=5.0, gt=0)
    lookup_seconds: float = Field(default=10.0, gt=0)
    threads: int = Field(default=4, ge=1, le=64)
    buffer: ByteSize = Field(default=ByteSize(256 << 20), ge=1)


class MooncakeConnector(KVConnectorCard):
    """Keeps the pages of computed blocks in a Mooncake Store: the memory of all machines that take part in it."""

    priority = -10  # by name: it needs a master
    framework = "torch"
    Options = MooncakeOptions
    bodies: ClassVar[Mapping[str, str]] = {
        "core": "engine_mooncake.scheduler_half:MooncakeScheduler",
        "worker": "engine_mooncake.worker_half:MooncakeWorker",
    }

    @classmethod
    def unsupported(cls, need: KVConnectorNeed) -> list[str]:
        there = find_spec("mooncake") is not None
        return [] if there else ["the library is not installed: pip install 'engine-mooncake[cpu]' (or [cuda])"]
