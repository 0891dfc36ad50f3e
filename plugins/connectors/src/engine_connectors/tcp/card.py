"""The card of connector `tcp`."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from engine.interfaces.kv_connector import KVConnectorCard, KVConnectorNeed


class TCPOptions(BaseModel):
    """Options of `tcp`.

    Attributes:
        role: what this engine does for others: "prefill" computes prompts for them, "decode" goes on from prompts that
            they computed, "both" does either.
        host, port: where other engines reach it; each rank listens at the next port. An address that other machines
            reach needs a key.
        advertise: the name or address by which others reach it; None: `host`.
        peers: names or addresses of other engines, with commas between, as they are advertised: requests can name
            these and this machine's own, and nobody else is connected to.
        key_file: a file with one secret key, which all engines share: 40 characters, as `zmq.curve_keypair()` makes
            them. All that travels is encrypted by it, and who does not have it is not let in.
        plain: listen at an address that other machines reach without a key: whoever reaches it can read prompts.
        lease_seconds: how long pages of a prompt wait for the engine that goes on.
        timeout: seconds without a frame after which what is missing is asked for again, and then computed.
        push_timeout: seconds in which a push has to begin, and to go on.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    role: Literal["prefill", "decode", "both"] = "both"
    host: str = Field(default="127.0.0.1", min_length=1)
    port: int = Field(default=14579, ge=1, le=65535)
    advertise: str | None = None
    peers: str = ""
    key_file: str | None = None
    plain: bool = False
    lease_seconds: float = Field(default=60.0, gt=0)
    timeout: float = Field(default=5.0, gt=0)
    push_timeout: float = Field(default=30.0, gt=0)

    @model_validator(mode="after")
    def _is_guarded(self) -> TCPOptions:
        if not (_is_loopback(self.host) or self.key_file or self.plain):
            raise ValueError(
                f"other machines reach {self.host}: name a key_file, or say plain where nobody else is in the network"
            )
        return self

    def knows(self, host: str) -> bool:
        """Whether a request may name an engine there."""
        own = (self.host, self.advertise)
        return host in own or host in map(str.strip, self.peers.split(",")) or all(map(_is_loopback, (self.host, host)))


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class TCPConnector(KVConnectorCard):
    """Takes keys and values of a prompt from the engine that computed it to the one that goes on, over the network."""

    priority = -20  # by name: it needs another engine
    framework = "torch"
    layerwise = True
    moves_marks = True
    Options = TCPOptions
    bodies: ClassVar[Mapping[str, str]] = {
        "core": "engine_connectors.tcp.scheduler_half:TCPScheduler",
        "worker": "engine_connectors.tcp.worker_half:TCPWorker",
    }

    @classmethod
    def unsupported(cls, need: KVConnectorNeed) -> list[str]:
        if need.device.partition(":")[0] != "cpu":
            return [f"it moves pages of host memory, and these are on {need.device}"]
        return []
